"""Find a run's worst step, if it is much longer than the median: its time, the links' state, and the recovery.

Medians and efficiencies hide it: a link that collapses for a few seconds makes one step many times as long as the
median, and the ideal includes the collapse, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from testbed import units
from testbed.directions import LINK_DIRECTIONS
from testbed.metrics.steps import PipelineStep, durations_s, measured
from testbed.metrics.traffic import traffic
from testbed.profiles.timeline import timeline
from testbed.records import CONTENDED, LabRecord, LinkTrouble, Sample, WorstStep
from testbed.spec import Cell

MUCH_WORSE: Final = 2.0
"""Multiple of the median above which a step is reported: it costs at least one whole step more than the median, so the
number of steps times the median is wrong by more than a step."""
_WORDS: Final[Mapping[str, tuple[str, Callable[[Any], str]]]] = {
    "rate_bps": ("rate down to", units.format_rate),
    "delay_ns": ("delay up to", units.format_time),
    "loss": ("loss up to", units.write_fraction),
    "dropped_packets": ("packets dropped:", str),
}


def worst_step(
    cell: Cell, lab: LabRecord | None, steps: Sequence[PipelineStep], samples: Iterable[Sample] = ()
) -> WorstStep | None:
    """Return the worst step after warm-up; None if it is at most `MUCH_WORSE` medians.

    It is searched before the steady state, too. `samples`: those of the links' counters, read only if needed. Where
    steps repeat in cycles, durations are means over a cycle.
    """
    chosen = measured(steps)
    seconds = np.array(durations_s(chosen, cell.cycle))
    if not chosen or (median := float(np.median(seconds))) <= 0 or seconds.max() <= MUCH_WORSE * median:
        return None
    first = int(seconds.argmax())
    slow = chosen[first : first + cell.cycle]
    # 'As before' allows what most steps take, and run-to-run noise.
    calm = seconds[first:] <= (1 + CONTENDED) * np.quantile(seconds, 0.75)
    after = chosen[first + int(calm.argmax())] if calm.any() else None
    begin_ns, end_ns, dilation = slow[0].begin_ns, slow[-1].end_ns, cell.compute.dilation
    since_ns = steps[0].begin_ns if lab is None or lab.played_at_ns is None else lab.played_at_ns
    again = traffic(slow).retransmitted
    return WorstStep(
        step=slow[0].number,
        at_s=(begin_ns - since_ns) / 1e9 / dilation,
        seconds=float(seconds[first]) / dilation,
        medians=float(seconds[first]) / median,
        retransmitted_bytes=None if again is None else round(again * len(slow)),
        links=tuple(_troubles(cell, since_ns, begin_ns, end_ns, samples)),
        recovered_s=None if after is None else (after.begin_ns - begin_ns) / 1e9 / dilation,
    )


def _troubles(
    cell: Cell, played_ns: int, begin_ns: int, end_ns: int, samples: Iterable[Sample]
) -> Iterator[LinkTrouble]:
    """Yield each link direction that was worse than its profile's constant values between two times."""
    around = [pair for pair in pairwise(samples) if pair[1].at_ns > begin_ns and pair[0].at_ns < end_ns]
    for name, profile in zip(cell.link_names, cell.links, strict=True):
        for way in LINK_DIRECTIONS:
            worse: dict[str, float] = {}
            if (pipe := profile.pipe(way)) is not None and pipe.varies:
                span_ns = max(0, begin_ns - played_ns), end_ns - played_ns
                states = [state for state, _ in timeline(pipe).between(*span_ns)]
                if (rate_bps := min(state.rate_bps for state in states)) < pipe.rate_bps:
                    worse["rate_bps"] = rate_bps * cell.compute.dilation
                if (delay_ns := max(state.delay_ns for state in states)) > pipe.delay_ns:
                    worse["delay_ns"] = delay_ns // cell.compute.dilation
                if (loss := max(state.loss.mean if state.loss else 0.0 for state in states)) > pipe.mean_loss:
                    worse["loss"] = loss
            if around and name in around[0][0].links:
                before, after = (sample.links[name][way] for sample in (around[0][0], around[-1][1]))
                lost = after.dropped_buffer - before.dropped_buffer
                if lost := lost + (after.dropped_loss or 0) - (before.dropped_loss or 0):
                    worse["dropped_packets"] = lost
            if worse:
                yield LinkTrouble.model_validate({"link": name, "direction": way, **worse})


def describe_worst_step(worst: WorstStep) -> str:
    """Describe the worst step, for a line of the terminal or a row of the report."""
    times = f"{worst.seconds:.3g} s, {worst.medians:.3g} times the median, from {worst.at_s:.3g} s on"
    parts = [f"step {worst.step} took {times}"]
    for trouble in worst.links:
        known = ((getattr(trouble, name), words, form) for name, (words, form) in _WORDS.items())
        said = ", ".join(f"{words} {form(value)}" for value, words, form in known if value is not None)
        parts.append(f"{trouble.link} {trouble.direction}: {said}")
    if worst.retransmitted_bytes:
        parts.append(f"{units.format_size(worst.retransmitted_bytes)} sent again")
    over = "no later step as before" if worst.recovered_s is None else f"as before after {worst.recovered_s:.3g} s"
    return "; ".join([*parts, over])
