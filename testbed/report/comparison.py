"""Compares each codec with both baselines, with intervals: speed-up, and time to the same loss."""

from __future__ import annotations

from typing import NamedTuple

from testbed.metrics import CodecComparison, TimeToLoss, default_target, time_to_loss
from testbed.report.collect import BASELINE, SECOND_BASELINE, Group
from testbed.report.entry import Entry
from testbed.report.numbers import MISSING, interval, seconds, three


class Shown(NamedTuple):
    """A number with its uncertainty, shown small below it."""

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
    """A group's comparisons, and their statistical rules."""

    sections: dict[str, list[ComparisonRow]]
    """Network -> its rows."""
    target: float | None
    """Target of the time to loss: the worst of fp32's last validation losses, which all its runs reach."""
    rules: tuple[str, ...]
    """Descriptions of how observations and intervals were computed, without duplicates."""


def _ratio(comparison: CodecComparison | None) -> Shown:
    if comparison is None or comparison.speed_up is None:
        return _UNKNOWN
    ends = interval(comparison.speed_up.interval, "{:.2f}".format)
    sure = ends if comparison.separable else f"{ends} not separable".lstrip()
    return Shown(f"{comparison.speed_up.value:.2f}x", sure)


def _difference(comparison: CodecComparison | None) -> Shown:
    if comparison is None or comparison.loss_difference is None:
        return _UNKNOWN
    ends = interval(comparison.loss_difference.interval, "{:+.4f}".format)
    alone, doubt = comparison.loss_difference.interval is None, "" if comparison.loss_separable else "not separable"
    return Shown(f"{comparison.loss_difference.value:+.4f}", "one seed" if alone else f"{ends} {doubt}".strip())


def _time(reached: TimeToLoss | None) -> Shown:
    if reached is None:
        return _UNKNOWN
    if reached.seconds is None:
        return Shown(MISSING, reached.words)
    value, ends = reached.seconds.value, reached.seconds.interval
    return Shown(f"{'at most ' * reached.at_latest}{three(value)} s", interval(ends, three))


def _step(entry: Entry) -> Shown:
    summary, ends = entry.measured, entry.measured.step_interval_s
    if summary.step_s is None:
        return _UNKNOWN
    sure = interval(ends and (ends[0] * 1e3, ends[1] * 1e3), "{:.1f}".format)
    return Shown(seconds(summary.step_s), f"{sure} ms" if sure else "")


def target(group: Group) -> float | None:
    """Return the default target of a group: the worst over all networks, which should all be equal."""
    bases = [base for network in group.networks if (base := group.baseline(network)) is not None]
    targets = [value for base in bases if (value := default_target(base.steps)) is not None]
    return max(targets, default=None)


def comparison_table(group: Group) -> ComparisonTable:
    """Compare every finished entry of a group."""
    goal, rules, sections = target(group), dict[str, None](), dict[str, list[ComparisonRow]]()
    for network in group.networks:
        sections[network] = []
        for entry in group.finished(network):
            first, second = (
                None if entry.cell.codec == base else group.compared(network, entry, base)
                for base in (BASELINE, SECOND_BASELINE)
            )
            reached = None if goal is None else time_to_loss(entry.steps, goal)
            estimates = [base.speed_up for base in (first, second) if base is not None]
            estimates += [first.loss_difference] if first is not None else []
            rules |= dict.fromkeys(estimate.rule for estimate in estimates if estimate is not None)
            sections[network].append(
                ComparisonRow(entry, _step(entry), _ratio(first), _ratio(second), _difference(first), _time(reached))
            )
    return ComparisonTable(sections, goal, tuple(rules))
