"""Summarises runs in sentences computed from their numbers."""

from __future__ import annotations

from testbed.report import numbers, remarks
from testbed.report.collect import BASELINE, Group, codec_order
from testbed.report.entry import OVERRUNS, Entry
from testbed.report.numbers import listed

_FASTER = 1.005
"""Smallest speed-up that is reported: a smaller one would read 1.00."""
_NAMED = 4
"""Maximum number of codecs named in a sentence; of more, the fastest and the slowest."""
_STEADY = 1.15
"""Ratio of compute times over one network above which a warning is printed."""
_SAME_BYTES = 0.005
"""Relative difference below which payloads count as equal."""


def same_maths(group: Group) -> bool:
    """Return whether each codec's losses are bit-identical over all networks and repeats, seed by seed."""
    return not _differing(group)


def _differing(group: Group) -> list[str]:
    """Return the codecs whose losses differ between networks or repeats."""
    first: dict[tuple[str, int], list[list[tuple[int, float]]]] = {}
    differing: dict[str, None] = {}
    for entry in group.entries:
        for run in entry.steps:
            losses = [[(point.step, point.loss) for point in points] for points in (run.train, run.validation)]
            if first.setdefault((entry.cell.codec, run.seed), losses) != losses:
                differing[entry.cell.codec] = None
    return list(differing)


def conclusions(group: Group) -> list[str]:
    """Return the sentences at the top of a report: the answer, then its details."""
    answer = [sentence for sentence in (_answer(group),) if sentence]
    times = [sentence for network in group.networks if (sentence := _time(group, network))]
    more = (_bytes, _twins, _loss, _without, _controls, _choices, _ideal, _busy, _overruns, _unmeasured)
    return answer + times + [sentence for make in more if (sentence := make(group))]


def fastest(group: Group) -> tuple[list[str], dict[str, tuple[float, str]]]:
    """Return the networks over which codecs were compared with fp32, and the largest speed-up with its codec for the
    networks where one is clearly faster.
    """
    best: dict[str, tuple[float, str]] = {}
    asked = [network for network in group.networks if group.baseline(network) and len(group.finished(network)) > 1]
    for network in asked:
        for entry in group.finished(network):
            compared = group.compared(network, entry)
            if compared is None or compared.speed_up is None or not compared.separable or not entry.sound:
                continue
            if (ratio := compared.speed_up.value) > best.get(network, (_FASTER, ""))[0]:
                best[network] = ratio, entry.cell.codec
    return asked, best


def _answer(group: Group) -> str | None:
    """Name the fastest codec over each network, or the number of networks where one is faster at all."""
    asked, best = fastest(group)
    if not asked:
        return None
    if len(asked) > _NAMED:
        if not best:
            return f"Over none of {len(asked)} networks does a codec make a step clearly faster than fp32's."
        network, (ratio, codec) = max(best.items(), key=lambda item: item[1][0])
        return (
            f"Over {len(best)} of {len(asked)} networks, a codec makes a step faster than fp32's, at most by a "
            f"factor of {ratio:.2f} ({codec} over {network})."
        )
    named = [f"over {network} {codec}, {ratio:.2f} times as fast as fp32" for network, (ratio, codec) in best.items()]
    rest = [network for network in asked if network not in best]
    parts = [listed(named)] if named else []
    parts += [f"over {listed(rest)} none is clearly faster than fp32"] if rest else []
    return f"Fastest codec: {'; '.join(parts)}."


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
        shown = f"{ratio:.2f} {numbers.interval(compared.speed_up.interval, '{:.2f}'.format)}".rstrip()
        if not compared.separable:
            within.append(f"{codec} ({shown})")
        elif ratio > 1:
            faster.append(f"{codec} is {shown} times as fast ({numbers.seconds(entry.measured.step_s)})")
        else:
            slower.append(f"{codec} ({1 / ratio:.2f} times as long)")
    return (
        f"Over {network} a step takes {numbers.seconds(base.measured.step_s)} with fp32{_doubt(base, marked)}; "
        + (f"{listed(faster)}." if faster else "no codec makes it clearly faster.")
        + (f" Not separable from fp32: {listed(within)}." if within else "")
        + (f" Slower: {listed(slower)}." if slower else "")
        + more
    )


def _doubt(entry: Entry, marked: bool) -> str:
    """Return a doubt in brackets; empty if everything is doubtful, which a separate sentence states."""
    return f" ({entry.doubt})" if entry.doubt and marked else ""


def payloads(group: Group) -> dict[str, float]:
    """Return codec -> payload per step, over the first network with data."""
    payloads: dict[str, float] = {}
    for entry in group.entries:
        if entry.ok and entry.measured.payload_bytes_per_step:
            payloads.setdefault(entry.cell.codec, entry.measured.payload_bytes_per_step)
    return payloads


def _bytes(group: Group) -> str | None:
    sent = payloads(group)
    base = sent.pop(BASELINE, None)
    if not base or not sent:
        return None
    parts = [f"{codec} {numbers.three(base / payload)} times fewer" for codec, payload in sent.items()]
    return f"Payload of a step: fp32 {numbers.size(base)}; {listed(parts)}."


def _twins(group: Group) -> str | None:
    """Name the codecs that send as many bytes as a codec that they wrap."""
    sent = payloads(group)
    twins: dict[str, list[str]] = {}
    for codec, payload in sent.items():
        for other in sorted(remarks.wrapped_codecs(codec) & sent.keys()):
            if abs(payload - sent[other]) <= _SAME_BYTES * sent[other]:
                twins.setdefault(other, []).append(codec)
    sentences = [
        f"{listed(codecs)} {'sends' if len(codecs) == 1 else 'send'} as many bytes as {other}: they differ in what is "
        "rounded, not in size."
        for other, codecs in twins.items()
    ]
    return " ".join(sentences) or None


def _controls(group: Group) -> str | None:
    controls = [codec for codec in group.codecs if remarks.remark(codec) == remarks.CONTROL]
    many = "Negative controls, here" if len(controls) > 1 else "A negative control, here"
    return f"{many} to show what goes wrong, not for use: {listed(controls)}." if controls else None


def _choices(group: Group) -> str | None:
    """List the choices of adaptive codecs."""
    sentences = []
    for entry in group.entries:
        if remarks.remark(entry.cell.codec) != remarks.MEASURES or not entry.choices:
            continue
        places: dict[str, list[str]] = {}
        for (boundary, direction), counted in entry.choices.items():
            shares = [
                f"{remarks.taken(entry.cell.codec, boundary, direction, name)} "
                f"{numbers.percent(count / counted.total(), '{:.0f}')}"
                for name, count in counted.most_common()
            ]
            places.setdefault(listed(shares), []).append(f"{boundary} {direction}")
        told = "; ".join(f"{shares} (boundary {listed(where)})" for shares, where in places.items())
        sentences.append(f"{entry.name} chose for its training messages: {told}.")
    return " ".join(sentences) or None


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
            compared = group.compared(over, entry)
            if codec != BASELINE and compared is not None and compared.loss_difference is not None:
                difference = compared.loss_difference
                ends = numbers.interval(difference.interval, "{:+.4f}".format)
                parts.append(f"{codec} {round(difference.value, 4) + 0.0:+.4f} {ends}".rstrip())
        if parts:
            step, seeds = base.steps[0].validation[-1].step, len({run.seed for run in base.steps})
            many = "one seed, so differences cannot be distinguished from chance" if seeds == 1 else f"{seeds} seeds"
            losses = f"fp32 {base.measured.validation_loss:.4f}; {listed(parts)}"
            sentences.append(f"Validation loss after {step} steps: {losses} ({many}).")
    if len(group.networks) > 1 and any(entry.ok for entry in group.entries):
        differing = _differing(group)
        if wrong := [codec for codec in differing if remarks.remark(codec) != remarks.MEASURES]:
            which = f"{listed(wrong)} differ between networks, which is an error: check the runs before using them"
            sentences.append(f"The losses of {which}.")
        elif differing:
            which = f"{listed(differing)} differ between networks, as expected of a codec that adapts to its link"
            sentences.append(f"The losses of {which}.")
        else:
            sentences.append(f"Each codec's losses are bit-identical over all {len(group.networks)} networks.")
    return " ".join(sentences) or None


def _without(group: Group) -> str | None:
    """Return the change of the last evaluation without the codec at the boundaries, if the runs made it."""
    changes: dict[str, float] = {}
    stays = False
    for (_, codec), entry in group.cells.items():
        if not entry.ok or codec == BASELINE:
            continue
        with_codec, without = entry.measured.validation_loss, entry.measured.uncompressed_loss
        if with_codec is not None and without is not None and codec not in changes:
            changes[codec] = without - with_codec
            stays |= remarks.in_model(codec)
    if not changes:
        return None
    parts = [f"{codec} {round(changes[codec], 4) + 0.0:+.4f}" for codec in sorted(changes, key=codec_order)]
    hint = " Changes that a codec made to the model remain." if stays else ""
    return f"Evaluated with fp32 instead of the codec, the loss changes by: {listed(parts)}.{hint}"


def _ideal(group: Group) -> str | None:
    shaped = [(share, entry) for share, entry in efficiencies(group) if entry.cell.shaped]
    if not shaped:
        return None
    worst, at = shaped[0]
    return (
        f"Over shaped links the median step takes at most {1 / worst:.2f} times the ideal that its compute and bytes "
        f"allow ({at.cell.codec}, {at.cell.network})."
    )


def efficiencies(group: Group) -> list[tuple[float, Entry]]:
    """Return the efficiency of each entry that has one, worst first."""
    known = [(entry.measured.efficiency, entry) for entry in group.entries if entry.ok and entry.measured.efficiency]
    return sorted(known, key=lambda pair: pair[0])


def _busy(group: Group) -> str | None:
    """Warn if compute times differ over one network: codecs do not change them, so the machine was busy."""
    worst = 1.0
    warning = None
    for network in group.networks:
        times = {e.cell.codec: e.measured.split.compute_s for e in group.finished(network) if e.measured.split}
        slow, fast = max(times, key=times.__getitem__, default=""), min(times, key=times.__getitem__, default="")
        if times and times[fast] > 0 and times[slow] / times[fast] > max(worst, _STEADY):
            worst = times[slow] / times[fast]
            warning = (
                f"The machine was not equally fast for all runs: over {network} the compute part of a step took "
                f"{numbers.seconds(times[slow])} with {slow} and {numbers.seconds(times[fast])} with {fast}, "
                "although codecs do not affect it. Step times differ by this amount for that reason alone."
            )
    return warning


def _overruns(group: Group) -> str | None:
    late = [entry for entry in group.entries if entry.ok and entry.overruns > OVERRUNS]
    if not late:
        return None
    who = listed([f"{entry.name} ({numbers.percent(entry.overruns)})" for entry in late])
    invalid = " More than 5 % make a time invalid: state a larger dilation." if any(not e.sound for e in late) else ""
    return f"This machine was too slow for the emulated device in some actions: {who}.{invalid}"


def _unmeasured(group: Group) -> str | None:
    finished = [entry for entry in group.entries if entry.ok]
    doubtful = [entry.name for entry in finished if not entry.certified]
    failed = [entry.name for entry in group.entries if not entry.ok]
    sentences = []
    if doubtful and len(doubtful) == len(finished):
        sentences.append("No run has two passing certificates: all are unreliable and drawn hollow.")
    elif doubtful:
        hollow = "Without two passing certificates, so unreliable and drawn hollow"
        sentences.append(f"{hollow}: {listed(doubtful)}.")
    if failed:
        sentences.append(f"Without a finished run: {listed(failed)}.")
    return " ".join(sentences) or None
