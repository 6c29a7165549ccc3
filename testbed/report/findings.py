"""What the runs show, in sentences that are computed from their numbers."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.codecs import selection
from testbed.errors import UserError
from testbed.report import tables
from testbed.report.collect import BASELINE, Group, codec_order
from testbed.report.entry import OVERRUNS, Entry

_NAMED = 4
"""So many codecs are named in a sentence; of more, the fastest and the slowest."""
_STEADY = 1.15
"""Compute times over one network that differ by more than this factor are worth a warning."""
_SAME_BYTES = 0.005
"""Payloads that differ by less than this share are called the same."""


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def same_maths(group: Group) -> bool:
    """Whether each codec's losses are bit for bit the same over every network and in every repeat, seed by seed."""
    return not _differing(group)


def _differing(group: Group) -> list[str]:
    """The codecs whose losses are not."""
    first: dict[tuple[str, int], list[list[tuple[int, float]]]] = {}
    found: dict[str, None] = {}
    for entry in group.entries:
        for run in entry.steps if entry.ok else ():
            losses = [[(point.step, point.loss) for point in points] for points in (run.train, run.validation)]
            if first.setdefault((entry.cell.codec, run.seed), losses) != losses:
                found[entry.cell.codec] = None
    return list(found)


def _measures(codec: str) -> bool:
    """Whether it goes by what it measures of its link; what cannot be read does not."""
    try:
        return selection.read(codec).measures
    except UserError:
        return False


def findings(group: Group) -> list[str]:
    """The sentences at the top of a report, the most important first."""
    found = [sentence for network in group.networks if (sentence := _time(group, network))]
    more = (_bytes, _twins, _loss, _ideal, _busy, _overruns, _unmeasured)
    return found + [sentence for make in more if (sentence := make(group))]


def _time(group: Group, network: str) -> str | None:
    base = group.baseline(network)
    others = [entry for entry in group.finished(network) if entry.cell.codec != BASELINE and entry.measured.step_s]
    if base is None or not base.measured.step_s or not others:
        return None
    others.sort(key=lambda entry: entry.measured.step_s or 0.0)
    more = "" if len(others) <= _NAMED else f" The table has {len(others) - _NAMED} more."
    if more:
        others = [*others[: _NAMED - 1], others[-1]]
    marked = any(entry.sound for entry in group.entries)
    faster, within, slower = [], [], []
    for entry in others:
        compared = group.compared(network, entry)
        if compared is None or compared.speed_up is None:
            continue
        codec, ratio = entry.cell.codec + _doubt(entry, marked), compared.speed_up.value
        ends = tables.interval(compared.speed_up.interval, "{:.2f}")
        if not compared.separable:
            within.append(f"{codec} ({ratio:.2f} {ends}".rstrip() + ")")
        elif ratio > 1:
            faster.append(f"{codec} is {ratio:.2f} {ends} times as fast ({tables.seconds(entry.measured.step_s)})")
        else:
            slower.append(f"{codec} ({1 / ratio:.2f} times as long)")
    return (
        f"Over {network} a step takes {tables.seconds(base.measured.step_s)} with fp32{_doubt(base, marked)}; "
        + (f"{_join(faster)}." if faster else "no codec makes it clearly faster.")
        + (f" Not separable from fp32: {_join(within)}." if within else "")
        + (f" Slower: {_join(slower)}." if slower else "")
        + more
    )


def _doubt(entry: Entry, marked: bool) -> str:
    """Where everything is doubtful, a sentence of its own says so."""
    return "" if entry.sound or not marked else " (overruns)" if entry.certified else " (not certified)"


def _payloads(group: Group) -> dict[str, float]:
    """Codec -> payload of a step over the first network that has it."""
    found: dict[str, float] = {}
    for entry in group.entries:
        if entry.ok and entry.measured.payload_bytes_per_step:
            found.setdefault(entry.cell.codec, entry.measured.payload_bytes_per_step)
    return found


def _bytes(group: Group) -> str | None:
    payloads = _payloads(group)
    base = payloads.pop(BASELINE, None)
    if not base or not payloads:
        return None
    parts = [f"{codec} {tables.three(base / payload)} times fewer" for codec, payload in payloads.items()]
    return f"Payload of a step: fp32 {tables.size(base)}; {_join(parts)}."


def _twins(group: Group) -> str | None:
    payloads = _payloads(group)
    pairs = []
    for codec, payload in payloads.items():
        kind = codec.removeprefix("delta-")
        if kind != codec and kind in payloads and abs(payload - payloads[kind]) <= _SAME_BYTES * payloads[kind]:
            pairs.append(
                f"{codec} moves as many bytes as {kind}: sending differences changes what is rounded, not how much is sent."
            )
    return " ".join(pairs) or None


def _loss(group: Group) -> str | None:
    finished: dict[str, tuple[str, Entry]] = {}
    for (network, codec), entry in group.cells.items():
        if entry.ok and entry.measured.validation_loss is not None:
            finished.setdefault(codec, (network, entry))
    sentences = []
    if BASELINE in finished and len(finished) > 1:
        network, base = finished[BASELINE]
        parts = []
        for codec, (over, entry) in sorted(finished.items(), key=lambda item: codec_order(item[0])):
            found = group.compared(over, entry)
            if codec != BASELINE and found is not None and found.loss_difference is not None:
                difference = found.loss_difference
                parts.append(
                    f"{codec} {round(difference.value, 4) + 0.0:+.4f} {tables.interval(difference.interval, '{:+.4f}')}".rstrip()
                )
        if parts:
            step = base.steps[0].validation[-1].step
            seeds = len({run.seed for run in base.steps})
            many = "one seed, so no difference can be told from chance" if seeds == 1 else f"{seeds} seeds"
            sentences.append(
                f"Validation loss after {step} steps: fp32 {base.measured.validation_loss:.4f}; {_join(parts)} ({many})."
            )
    if len(group.networks) > 1 and any(entry.ok for entry in group.entries):
        differing = _differing(group)
        if wrong := [codec for codec in differing if not _measures(codec)]:
            sentences.append(
                f"The losses of {_join(wrong)} differ between networks, which they must not: look at the runs before using them."
            )
        elif differing:
            sentences.append(
                f"The losses of {_join(differing)} differ between networks, as they may: it goes by what it measures of its link."
            )
        else:
            sentences.append(f"Each codec's losses are bit for bit the same over all {len(group.networks)} networks.")
    return " ".join(sentences) or None


def _ideal(group: Group) -> str | None:
    shaped = [
        (entry.measured.efficiency, entry)
        for entry in group.entries
        if entry.ok and entry.cell.shaped and entry.measured.efficiency
    ]
    if not shaped:
        return None
    worst, at = min(shaped, key=lambda pair: pair[0])
    return (
        f"Over shaped links the median step takes at most {1 / worst:.2f} times the ideal that its compute and bytes allow "
        f"({at.cell.codec}, {at.cell.network})."
    )


def _busy(group: Group) -> str | None:
    """Codecs compute the same, so compute times that differ over one network mean that the machine had other work to do."""
    worst = 1.0
    found = None
    for network in group.networks:
        times = {e.cell.codec: e.measured.split.compute_s for e in group.finished(network) if e.measured.split}
        slow, fast = max(times, key=times.__getitem__, default=""), min(times, key=times.__getitem__, default="")
        if times and times[fast] > 0 and times[slow] / times[fast] > max(worst, _STEADY):
            worst = times[slow] / times[fast]
            found = (
                f"The machine was not equally fast for all runs: over {network} the compute part of a step took "
                f"{tables.seconds(times[slow])} with {slow} and {tables.seconds(times[fast])} with {fast}, "
                "though codecs do not change it. Step times differ by as much for that reason alone."
            )
    return found


def _overruns(group: Group) -> str | None:
    late = [entry for entry in group.entries if entry.ok and entry.overruns > OVERRUNS]
    if not late:
        return None
    who = _join([f"{entry.cell.codec} over {entry.cell.network} ({entry.overruns:.1%})".replace("%", " %") for entry in late])
    invalid = " More than 5 % make a time invalid: state a larger dilation." if any(not e.sound for e in late) else ""
    return f"This machine was too slow for the emulated device in a share of the actions: {who}.{invalid}"


def _unmeasured(group: Group) -> str | None:
    finished = [e for e in group.entries if e.ok]
    doubtful = [f"{e.cell.codec} over {e.cell.network}" for e in finished if not e.certified]
    failed = [f"{e.cell.codec} over {e.cell.network}" for e in group.entries if not e.ok]
    sentences = []
    if doubtful and len(doubtful) == len(finished):
        sentences.append("No run has two passing certificates: all are drawn hollow, none is to be relied on.")
    elif doubtful:
        sentences.append(f"Without two passing certificates, so drawn hollow and not to be relied on: {_join(doubtful)}.")
    if failed:
        sentences.append(f"Without a finished run: {_join(failed)}.")
    return " ".join(sentences) or None
