"""What a person sees while cells run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from testbed.records import Summary
from testbed.spec import Cell


def format_duration(seconds: float) -> str:
    """75 -> '1 min 15 s'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


class Watch:
    """Follows the cells of a sweep; a context manager. The controller calls it, it decides nothing."""

    def __init__(self, console: Console, cells: Sequence[Cell]) -> None:
        self._console = console
        self._waiting = list(cells)
        self._total = len(cells)
        self._seconds: dict[str, list[float]] = {}
        self._began = 0.0
        self._label = ""
        self._live: Progress | None = None
        if console.is_terminal:
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[state]}"),
                console=console,
                transient=True,
            )
            self._task = self._live.add_task("", total=None, state="", visible=False)

    def __enter__(self) -> Watch:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, cell: Cell) -> None:
        """A cell's turn has come."""
        self._waiting.remove(cell)
        self._began = time.monotonic()
        number = self._total - len(self._waiting)
        self._label = f"[{number}/{self._total}] {cell.codec} on {cell.network}"
        if self._live:
            self._live.update(
                self._task,
                description=self._label.replace("[", r"\["),
                total=cell.training.steps,
                completed=0,
                state="",
                visible=True,
            )

    def phase(self, text: str) -> None:
        """What the cell is doing now."""
        if self._live:
            self._live.update(self._task, state=text + self._left())

    def step(self, done: int, loss: float | None, seconds: float) -> None:
        """A training step has ended."""
        if self._live:
            shown = "" if loss is None else f"loss {loss:.3f}, "
            self._live.update(self._task, completed=done, state=f"{shown}{seconds:.3f} s/step{self._left()}")

    def end(self, cell: Cell, summary: Summary) -> None:
        """A cell has ended, well or not."""
        took = time.monotonic() - self._began
        if summary.status != "ok":
            return self.note(f"{self._label}: {summary.status}: {summary.error}")
        self._seconds.setdefault(cell.network, []).append(took)
        parts = [f"{took:.0f} s"]
        if summary.step_s is not None:
            parts.append(f"step {summary.step_s * 1e3:.0f} ms")
        if summary.validation_loss is not None:
            parts.append(f"validation loss {summary.validation_loss:.3f}")
        parts.append(f"certificate {summary.certificate or 'missing'}")
        return self.note(f"{self._label}: {', '.join(parts)}{self._left()}")

    def _left(self) -> str:
        """Time left: the mean of the finished cells over the same network, of all finished cells where there is none."""
        everything = [s for group in self._seconds.values() for s in group]
        if not self._waiting or not everything:
            return ""
        mean = sum(everything) / len(everything)
        left = sum(sum(group) / len(group) if (group := self._seconds.get(cell.network)) else mean for cell in self._waiting)
        return f"; about {format_duration(left)} left"
