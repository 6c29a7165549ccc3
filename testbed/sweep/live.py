"""The view of a running sweep on a terminal: its runs in a table, and the running one below it."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from testbed.sweep.progress import Turn, Watch, format_duration

_BELOW = 6
"""Lines that the running cell needs."""
_STYLES = {"running": "bold", "failed": "red", "interrupted": "red", "waiting": "dim", "left out": "dim"}


def view(console: Console, watch: Watch) -> Live:
    """Drawn anew four times a second until it is stopped; then it is gone, and the lines that were noted stay."""
    return Live(
        get_renderable=lambda: draw(watch, console.height), console=console, transient=True, refresh_per_second=4
    )


def draw(watch: Watch, height: int) -> RenderableType:
    """One picture, at most `height` lines."""
    rows = max(1, height - _BELOW - 2)
    first = max(0, min(watch.current - rows // 2, len(watch.turns) - rows))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in ("", "codec", "network", "state", "steps", "step", "loss", "certificate"):
        table.add_column(name, justify="right" if name in ("steps", "step", "loss") else "left", no_wrap=True)
    for number, turn in enumerate(watch.turns[first : first + rows], start=first + 1):
        table.add_row(*_cells(turn, number), style=_STYLES.get(turn.state, ""))
    if watch.current < 0:
        return table
    return Group(table, Text(_running(watch), overflow="ellipsis", no_wrap=True), *_links(watch.turns[watch.current]))


def _cells(turn: Turn, number: int) -> tuple[str, ...]:
    loss = turn.validation_loss if turn.state == "ok" else turn.loss
    steps = f"{turn.done}/{turn.cell.training.steps}" if turn.done else ""
    return (
        str(number),
        turn.cell.codec,
        turn.cell.network,
        turn.phase or turn.state,
        steps,
        "" if turn.step_s is None else f"{turn.step_s * 1e3:.0f} ms",
        "" if loss is None else f"{loss:.3f}",
        turn.certificate,
    )


def _running(watch: Watch) -> str:
    turn = watch.turns[watch.current]
    ended = sum(one.state not in ("waiting", "running") for one in watch.turns)
    parts = [
        f"{ended} of {len(watch.turns)} runs done",
        f"{turn.cell.codec} on {turn.cell.network}: {turn.phase or turn.state}",
    ]
    if turn.tokens_per_s is not None and turn.phase == "training":
        parts.append(f"{turn.tokens_per_s:,.0f} tokens/s")
    if (left := watch.left_s()) > 0:
        parts.append(f"about {format_duration(left)} left")
    return "\n" + ", ".join(parts)


def _links(turn: Turn) -> list[Text]:
    """Mbit/s of each link, up and down, in two lines at most."""
    rates = [f"{link} {up / 1e6:.1f}/{down / 1e6:.1f}" for link, (up, down) in turn.rates_bps.items()]
    if turn.phase != "training" or not rates:
        return []
    shown = [f"Mbit/s up/down: {'  '.join(rates[:4])}", f"                {'  '.join(rates[4:8])}"]
    if len(rates) > 8:
        shown[1] += f"  and {len(rates) - 8} more"
    return [Text(line, overflow="ellipsis", no_wrap=True) for line in shown if line.strip()]
