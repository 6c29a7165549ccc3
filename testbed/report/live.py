"""How far played and live steps are apart on this machine, in sentences: the live checks of a sweep."""

from __future__ import annotations

from pathlib import Path

from testbed import results
from testbed.metrics.fidelity import Fidelity, compare_timings
from testbed.report import numbers
from testbed.results import SweepRecord
from testbed.spec import Cell


def live_sentences(experiment: Path, sweep: SweepRecord) -> list[str]:
    """Say what the live checks of the last sweep found, one sentence each, or why there were none."""
    said = [sweep.live_reason] if sweep.live_reason else []
    lost = []
    for live_id, played_id in sweep.live_checks.items():
        live, played = results.finished(experiment, live_id), results.finished(experiment, played_id)
        if live is None or played is None:
            lost.append(f"The live check {live_id} has no run that ended well.")
            continue
        cell = live.cell
        summaries = [run.summary for run in (live, played)]
        stages = [[run.steps(stage) for stage in range(cell.nodes)] for run in (live, played)]
        assert summaries[0] is not None
        assert summaries[1] is not None
        said.append(_sentence(cell, compare_timings(summaries[0], stages[0], summaries[1], stages[1])))
    return said + lost


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
