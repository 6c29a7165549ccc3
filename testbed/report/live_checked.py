"""Describes the live checks of a sweep: differences between played and live steps on this machine."""

from __future__ import annotations

from pathlib import Path

from testbed import results
from testbed.metrics.fidelity import Fidelity, compare_timings
from testbed.report import numbers
from testbed.results import SweepRecord
from testbed.spec import Cell


def live_sentences(experiment: Path, sweep: SweepRecord) -> list[str]:
    """Return a sentence for each live check of the last sweep, or the reason why there were none."""
    said = [sweep.live_reason] if sweep.live_reason else []
    made = _made(experiment, sweep)
    lost = [f"The live check {name} has no successful run." for name in sweep.live_checks if name not in made]
    return [*said, *(_sentence(*pair) for pair in made.values()), *lost]


def different_losses(experiment: Path, sweep: SweepRecord) -> list[str]:
    """Return the ids of the live checks of the last sweep whose losses differ from the played ones."""
    return [live_id for live_id, (_, one) in _made(experiment, sweep).items() if not one.same_losses]


def _made(experiment: Path, sweep: SweepRecord) -> dict[str, tuple[Cell, Fidelity]]:
    """Compare the live checks of the last sweep that have runs, by the id of the live cell."""
    made = {}
    for live_id, played_id in sweep.live_checks.items():
        live, played = results.finished(experiment, live_id), results.finished(experiment, played_id)
        if live is not None and played is not None:
            cell = live.cell
            stages = [run.all_steps() for run in (live, played)]
            if (own := live.summary) is not None and (other := played.summary) is not None:
                made[live_id] = cell, compare_timings(own, stages[0], other, stages[1])
    return made


def _sentence(cell: Cell, one: Fidelity) -> str:
    what = f"Live check of {cell.codec} over {cell.network}:"
    if one.step_time is None:
        return f"{what} no step was measured."
    apart = f"{numbers.percent(abs(one.step_time))} {'shorter' if one.step_time < 0 else 'longer'}"
    maths = "the same losses bit for bit" if one.same_losses else "DIFFERENT LOSSES"
    doubt = "" if one.certified else "; not every link was certified, so this proves little"
    return (
        f"{what} a step takes {numbers.seconds(one.live_s)} live, on this machine's clock, and "
        f"{numbers.seconds(one.played_s)} played, which is {apart}, with {maths}{doubt}."
    )
