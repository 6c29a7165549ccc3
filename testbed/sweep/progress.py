"""Displays the progress of the runs: a live view on a terminal, plain lines elsewhere.

`SweepProgress` tracks the runs; `draw_progress` renders their state.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Literal, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from testbed.closing import Closing
from testbed.directions import LinkDirection
from testbed.errors import TestbedError
from testbed.metrics.worst_step import describe_worst_step
from testbed.records import Sample, Summary
from testbed.runtime.control_plane import EvaluationDone, StepDone
from testbed.spec import Cell, ImagesSpec, Recipe
from testbed.units import format_duration

_RATES_OVER = 20
"""Number of samples, at ten per second, that a link's rate is averaged over."""
_PICTURES_PER_S = 4
_BELOW = 6
"""Lines for the running cell, below the table."""
_BAR = 30
"""Width of a bar of progress."""
_STYLES = {"running": "bold", "failed": "red", "interrupted": "red", "waiting": "dim", "left out": "dim"}
_ENDED = {"target": "target loss reached", "budget": "budget spent"}


@dataclass
class Turn:
    """One run of the sweep. Times and rates are those of the emulated world."""

    cell: Cell
    network: str
    expected_s: float | None = None
    state: Literal["waiting", "running", "ok", "failed", "interrupted", "left out"] = "waiting"
    phase: str = ""
    done: int = 0
    """Training steps."""
    loss: float | None = None
    validation_loss: float | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    certificate: str = ""
    took_s: float | None = None
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=_RATES_OVER))

    @property
    def rates_bps(self) -> dict[str, tuple[float, float]]:
        """The rate of each link over the last two seconds, up and down; empty until there are two samples."""
        if len(self.samples) < 2 or (seconds := (self.samples[-1].at_ns - self.samples[0].at_ns) / 1e9) <= 0:
            return {}
        first, last = self.samples[0].links, self.samples[-1].links

        def rate(link: str, way: LinkDirection) -> float:
            return (last[link][way].bytes - first[link][way].bytes) * 8 / seconds * self.cell.compute.dilation

        return {link: (rate(link, "up"), rate(link, "down")) for link in last if link in first}


class SweepProgress(Closing):
    """Tracks the runs of a sweep; a context manager. Called by the controller; decides nothing."""

    def __init__(self, console: Console, cells: Sequence[Cell], expected_s: Mapping[str, float] | None = None) -> None:
        """`cells`: in the order of their runs; `expected_s`: estimated duration of a run, by cell id."""
        expected = expected_s or {}
        self.turns = [Turn(cell, cell.network, expected.get(cell.id)) for cell in cells]
        self.current = -1
        """Index of the current or last turn."""
        self.tokenising: tuple[str, float] | None = None
        """The name of the text that is being tokenised, and the share that is done."""
        self._console = console
        self._began = 0.0
        self._live: Live | None = None
        if console.is_terminal:
            # redrawn until stopped; then it disappears, and the noted lines stay
            self._live = Live(
                get_renderable=lambda: draw_progress(self, console.height),
                console=console,
                transient=True,
                refresh_per_second=_PICTURES_PER_S,
            )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def close(self) -> None:
        """Stop drawing."""
        if self._live:
            self._live.stop()

    def note(self, text: str) -> None:
        """Print a permanent line."""
        self._console.print(text, highlight=False, soft_wrap=True)

    # ------------------------------------------------------------------ called by the controller
    def begin(self, cell: Cell, number: int | None = None) -> None:
        """Begin the next run, or the run with that number in the list."""
        self.current = self.current + 1 if number is None else number
        assert self._turn.cell.id == cell.id
        self._turn.state = "running"
        self._began = time.monotonic()

    def leave_out(self, reason: str) -> None:
        """Skip the run."""
        self._turn.state = "left out"
        self.note(f"{self.label}: skipped: {reason}")

    def trained(self, recipe: Recipe, error: TestbedError | None) -> None:
        """Note that a recipe was trained, or why its training failed."""
        self.note(f"trained {recipe.codec}, {recipe.training.steps} steps" if error is None else str(error))

    def tokenised(self, text: str, share: float) -> None:
        """Note which share of a text is tokenised."""
        self.tokenising = (text, share) if share < 1 else None

    def phase(self, text: str) -> None:
        """Set what the cell is doing now."""
        self._turn.phase = text

    def step(self, message: StepDone) -> None:
        """Note that a training step has ended."""
        turn, dilation = self._turn, self._turn.cell.compute.dilation
        turn.phase = "training"
        turn.done, turn.loss, turn.step_s = message.step + 1, message.loss, message.seconds / dilation
        turn.tokens_per_s = message.tokens / turn.step_s if turn.step_s else None

    def evaluated(self, message: EvaluationDone) -> None:
        """Note that an evaluation has ended."""
        if message.phase == "evaluation":
            self._turn.validation_loss = message.loss

    def carried(self, sample: Sample) -> None:
        """Note a sample of the links' counters; a repeated sample is ignored."""
        samples = self._turn.samples
        if not samples or samples[-1].at_ns < sample.at_ns:
            samples.append(sample)

    def end(self, cell: Cell, summary: Summary, took_s: float | None = None) -> None:
        """Note the end of a run, successful or not; `took_s`: its duration, if not the time since it began."""
        turn = self._turn
        turn.state, turn.phase = summary.status, ""
        turn.took_s = time.monotonic() - self._began if took_s is None else took_s
        if summary.status != "ok":
            return self.note(f"{self.label}: {summary.status}: {summary.error}")
        turn.step_s, turn.tokens_per_s = summary.step_s, summary.tokens_per_s
        turn.validation_loss, turn.certificate = summary.validation_loss, summary.certificate or "missing"
        parts = [f"{turn.took_s:.0f} s"]
        if summary.step_s is not None:
            parts.append(f"step {summary.step_s * 1e3:.0f} ms")
        if summary.validation_loss is not None:
            parts.append(f"validation loss {summary.validation_loss:.3f}")
        if summary.validation_accuracy is not None:
            parts.append(f"accuracy {summary.validation_accuracy:.3f}")
        if summary.ended in _ENDED:
            parts.append(f"{_ENDED[summary.ended]} after {summary.steps} steps")
        if summary.worst is not None:
            parts.append(f"worst: {describe_worst_step(summary.worst)}")
        parts.append(f"certificate {turn.certificate}")
        if (left := self.left_s()) > 0:
            parts[-1] += f"; about {format_duration(left)} left"
        return self.note(f"{self.label}: {', '.join(parts)}")

    # ------------------------------------------------------------------ what is shown
    @property
    def _turn(self) -> Turn:
        return self.turns[self.current]

    @property
    def label(self) -> str:
        """Label of the running cell."""
        cell = self._turn.cell
        mark = ", live" if cell.timing == "live" else ""
        return f"[{self.current + 1}/{len(self.turns)}] {cell.codec} on {self._turn.network}{mark}"

    def left_s(self) -> float:
        """Return the time left in seconds; 0 if unknown.

        A run takes the mean over the same network in this sweep, else as long as expected, else the mean of all runs.
        """
        took: dict[str, list[float]] = {}
        for turn in self.turns:
            if turn.state == "ok" and turn.took_s is not None:
                took.setdefault(turn.network, []).append(turn.took_s)
        alike = {network: fmean(each) for network, each in took.items()}
        other = fmean(chain.from_iterable(took.values())) if took else 0.0

        def takes_s(turn: Turn) -> float:
            return alike.get(turn.network, other if turn.expected_s is None else turn.expected_s)

        left = sum(takes_s(turn) for turn in self.turns if turn.state == "waiting")
        if self.current >= 0 and self._turn.state == "running":
            left += max(0.0, takes_s(self._turn) - (time.monotonic() - self._began))
        return left


# ---------------------------------------------------------------------- the live view
def draw_progress(progress: SweepProgress, height: int) -> RenderableType:
    """Render at most `height` lines: a table of the runs, with the current one below it."""
    rows = max(1, height - _BELOW - 2)
    first = max(0, min(progress.current - rows // 2, len(progress.turns) - rows))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in ("", "codec", "network", "state", "steps", "step", "loss", "certificate"):
        table.add_column(name, justify="right" if name in ("steps", "step", "loss") else "left", no_wrap=True)
    for number, turn in enumerate(progress.turns[first : first + rows], start=first + 1):
        table.add_row(*_cells(turn, number), style=_STYLES.get(turn.state, ""))
    lines = [] if progress.current < 0 else [_running(progress)]
    if progress.tokenising is not None:
        text, share = progress.tokenising
        lines.append(f"\ntokenising {text}: {'█' * round(share * _BAR):░<{_BAR}} {share:.0%}")
    links = _links(progress.turns[progress.current]) if progress.current >= 0 else []
    return Group(table, *(Text(line, overflow="ellipsis", no_wrap=True) for line in lines), *links)


def _cells(turn: Turn, number: int) -> tuple[str, ...]:
    loss = turn.validation_loss if turn.state == "ok" else turn.loss
    steps = f"{turn.done}/{turn.cell.training.steps}" if turn.done else ""
    step = "" if turn.step_s is None else f"{turn.step_s * 1e3:.0f} ms"
    about = str(number), turn.cell.codec, turn.network, turn.phase or turn.state
    return *about, steps, step, "" if loss is None else f"{loss:.3f}", turn.certificate


def _running(progress: SweepProgress) -> str:
    turn = progress.turns[progress.current]
    ended = sum(run.state not in ("waiting", "running") for run in progress.turns)
    parts = [
        f"{ended} of {len(progress.turns)} runs done",
        f"{turn.cell.codec} on {turn.network}: {turn.phase or turn.state}",
    ]
    if turn.tokens_per_s is not None and turn.phase == "training":
        learned = "images" if isinstance(turn.cell.workload, ImagesSpec) else "tokens"
        parts.append(f"{turn.tokens_per_s:,.0f} {learned}/s")
    if (left := progress.left_s()) > 0:
        parts.append(f"about {format_duration(left)} left")
    return "\n" + ", ".join(parts)


def _links(turn: Turn) -> list[Text]:
    """Render the rate of each link in Mbit/s, up and down, in at most two lines."""
    rates = [f"{link} {up / 1e6:.1f}/{down / 1e6:.1f}" for link, (up, down) in turn.rates_bps.items()]
    if turn.phase != "training" or not rates:
        return []
    shown = [f"Mbit/s up/down: {'  '.join(rates[:4])}", f"                {'  '.join(rates[4:8])}"]
    if len(rates) > 8:
        shown[1] += f"  and {len(rates) - 8} more"
    return [Text(line, overflow="ellipsis", no_wrap=True) for line in shown if line.strip()]
