"""Each codec against both baselines, with intervals: what may be called faster, and how long it takes to the same loss."""

from __future__ import annotations

from typing import NamedTuple

from testbed.metrics import CodecComparison, TimeToLoss, default_target, time_to_loss
from testbed.report.collect import BASELINE, SECOND_BASELINE, Group
from testbed.report.entry import Entry
from testbed.report.numbers import MISSING, interval, seconds, three


class Shown(NamedTuple):
    """A number and, small below it, how sure it is."""

    value: str
    detail: str = ""


_UNKNOWN = Shown(MISSING)


class ComparisonRow(NamedTuple):
    """One entry as text."""

    entry: Entry
    step: Shown
    over_first: Shown
    over_second: Shown
    loss_difference: Shown
    to_loss: Shown


class ComparisonTable(NamedTuple):
    """A group's comparisons, and the rules behind them."""

    sections: dict[str, list[ComparisonRow]]
    """By network."""
    target: float | None
    """The loss to which time is counted: the worst of fp32's last validation losses, so that each of its runs reaches it."""
    rules: tuple[str, ...]
    """How observations and intervals were had, once each."""


def _ratio(found: CodecComparison | None) -> Shown:
    if found is None or found.speed_up is None:
        return _UNKNOWN
    ends = interval(found.speed_up.interval, "{:.2f}")
    return Shown(f"{found.speed_up.value:.2f}x", ends if found.separable else f"{ends} not separable".lstrip())


def _difference(found: CodecComparison | None) -> Shown:
    if found is None or found.loss_difference is None:
        return _UNKNOWN
    ends = interval(found.loss_difference.interval, "{:+.4f}")
    doubt = "one seed" if not ends else "" if found.loss_separable else " not separable"
    return Shown(f"{found.loss_difference.value:+.4f}", ends + doubt)


def _time(found: TimeToLoss | None) -> Shown:
    if found is None:
        return _UNKNOWN
    if found.seconds is None:
        return Shown(MISSING, found.words)
    ends = found.seconds.interval
    return Shown(f"{three(found.seconds.value)} s", "" if ends is None else f"[{three(ends.low)}, {three(ends.high)}]")


def _step(entry: Entry) -> Shown:
    summary, ends = entry.measured, entry.measured.step_interval_s
    if summary.step_s is None:
        return _UNKNOWN
    return Shown(
        seconds(summary.step_s), interval(ends and (ends[0] * 1e3, ends[1] * 1e3), "{:.1f}") + (" ms" if ends else "")
    )


def target(group: Group) -> float | None:
    """The default target of a group: of all networks the worst, as they should all be the same."""
    bases = [base for network in group.networks if (base := group.baseline(network)) is not None]
    found = [value for base in bases if (value := default_target(base.steps)) is not None]
    return max(found, default=None)


def comparison_table(group: Group) -> ComparisonTable:
    """Every finished entry of a group."""
    goal, rules, sections = target(group), dict[str, None](), dict[str, list[ComparisonRow]]()
    for network in group.networks:
        sections[network] = []
        for entry in group.finished(network):
            first, second = (
                None if entry.cell.codec == base else group.compared(network, entry, base)
                for base in (BASELINE, SECOND_BASELINE)
            )
            reached = None if goal is None else time_to_loss(entry.steps, goal)
            estimates = [one.speed_up for one in (first, second) if one is not None]
            estimates += [first.loss_difference] if first is not None else []
            rules |= dict.fromkeys(one.rule for one in estimates if one is not None)
            sections[network].append(
                ComparisonRow(entry, _step(entry), _ratio(first), _ratio(second), _difference(first), _time(reached))
            )
    return ComparisonTable(sections, goal, tuple(rules))
