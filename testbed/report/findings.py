"""Titles of figures: the finding of each, in one short sentence computed from the numbers.

Without anything to compare, a title names the axes.
"""

from __future__ import annotations

from testbed.report import numbers, remarks
from testbed.report.canvas import shortened
from testbed.report.collect import BASELINE, Group
from testbed.report.conclusions import efficiencies, fastest, payloads
from testbed.report.entry import Entry

_NAMED = 3
_NETWORK = 24
"""Maximum length of a network's name in a title."""
_HARMLESS = 0.05
"""Payloads within this relative distance are named together."""


def _short(network: str) -> str:
    return shortened(network, _NETWORK)


def step_finding(group: Group) -> str:
    """Return the largest speed-up of a step, with its codec and network."""
    asked, best = fastest(group)
    if not asked:
        return "Where the time of a step goes"
    if not best:
        return f"No codec makes a step clearly faster than {BASELINE}'s"
    if len(asked) > _NAMED:
        network, (ratio, codec) = max(best.items(), key=lambda item: item[1][0])
        return (
            f"Over {len(best)} of {len(asked)} networks a codec makes a step faster: at most {ratio:.2f} times "
            f"({codec}, {_short(network)})"
        )
    ordered = sorted(best.items(), key=lambda item: -item[1][0])
    parts = [f"{ratio:.2f} times over {_short(network)} ({codec})" for network, (ratio, codec) in ordered]
    if len({codec for _, codec in best.values()}) == 1:
        (most, (ratio, codec)), *others = ordered
        parts = [f"{each:.2f} over {_short(network)}" for network, (each, _) in others]
        said = ", ".join([f"{codec}: {ratio:.2f} times as fast as {BASELINE} over {_short(most)}", *parts])
    else:
        said = f"Fastest against {BASELINE}: {', '.join(parts)}"
    rest = [_short(network) for network in asked if network not in best]
    return said + (f"; no gain over {', '.join(rest)}" if rest else "")


def _ends(entry: Entry) -> tuple[int, float] | None:
    """Return (steps, seconds) of a run's whole training; None without losses."""
    points = entry.typical.measured and entry.steps[0].train
    return (points[-1].step + 1, points[-1].seconds) if points else None


def time_finding(group: Group) -> str:
    """Return the training times of the baseline and of the fastest codec, over the network where they differ most."""
    said: dict[float, str] = {}
    for network in group.networks:
        base = group.baseline(network)
        whole = {entry.cell.codec: end for entry in group.finished(network) if entry.sound and (end := _ends(entry))}
        if base is None or BASELINE not in whole or len(whole) < 2:
            continue
        steps, slow = whole[BASELINE]
        same = {codec: seconds for codec, (count, seconds) in whole.items() if count == steps}
        codec = min(same, key=same.__getitem__)
        if same[codec] > 0 and codec != BASELINE:
            take = f"{numbers.seconds(slow)} with {BASELINE} and {numbers.seconds(same[codec])} with {codec}"
            said.setdefault(slow / same[codec], f"Over {_short(network)} {steps} steps take {take}")
    return said[max(said)] if said else "Loss against training time"


def loss_finding(group: Group) -> str:
    """Return the largest difference of a last validation loss from the baseline's, and whether it is significant."""
    differences: list[tuple[float, str, bool]] = []
    seeds = 1
    for (network, codec), entry in group.cells.items():
        compared = group.compared(network, entry) if entry.ok and codec != BASELINE else None
        if compared is None or compared.loss_difference is None or remarks.remark(codec) == remarks.CONTROL:
            continue
        seeds = max(seeds, len({run.seed for run in entry.steps}))
        differences.append((compared.loss_difference.value, codec, compared.loss_separable))
    if not differences:
        return "Loss against steps"
    value, codec, separable = max(differences, key=lambda each: abs(each[0]))
    sure = "one seed" if seeds == 1 else f"{seeds} seeds, {'separable' if separable else 'not separable'}"
    return f"{codec} ends furthest from {BASELINE}'s validation loss: {value:+.3f} nats ({sure})"


def bytes_finding(group: Group) -> str:
    """Name the codec that sends the fewest bytes."""
    sent = {codec: each for codec, each in payloads(group).items() if remarks.remark(codec) != remarks.CONTROL}
    base = sent.pop(BASELINE, None)
    if not base or not sent:
        return "Bytes moved in a step"
    least = min(sent.values())
    codecs = [codec for codec, each in sent.items() if each <= least * (1 + _HARMLESS)][:_NAMED]
    who = f"{codecs[0]} sends" if len(codecs) == 1 else f"{' and '.join(codecs)} send"
    return f"{who} {base / least:.3g} times fewer bytes than {BASELINE}"


def efficiency_finding(group: Group) -> str:
    """Return the largest ratio of a step to its ideal."""
    known = efficiencies(group)
    if not known:
        return "Efficiency: ideal step / measured step"
    worst, entry = known[0]
    where = f"{entry.cell.codec}, {_short(entry.cell.network)}"
    return f"A step takes at most {1 / worst:.3f} times what compute, bytes and links allow ({where})"
