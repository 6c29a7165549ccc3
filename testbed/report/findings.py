"""What the runs show, in sentences that are computed from their numbers, and in one line what they were made with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from testbed.report import tables
from testbed.report.collect import BASELINE, Curves, Group, codec_order

_NAMED = 4
"""So many codecs are named in a sentence; of more, the fastest and the slowest."""
_STEADY = 1.15
"""Compute times over one network that differ by more than this factor are worth a warning."""
_SAME_BYTES = 0.005
"""Payloads that differ by less than this share are called the same."""


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def same_maths(curves: Mapping[tuple[str, str], Curves]) -> bool:
    """Whether each codec's losses are bit for bit the same over every network."""
    first: dict[str, tuple[list[tuple[int, float]], list[tuple[int, float]]]] = {}
    for (_, codec), curve in curves.items():
        train, validation = ([(point.step, point.loss) for point in points] for points in curve)
        if first.setdefault(codec, (train, validation)) != (train, validation):
            return False
    return True


def findings(group: Group, curves: Mapping[tuple[str, str], Curves]) -> list[str]:
    """The sentences at the top of a report, the most important first."""
    found = [sentence for network in group.networks if (sentence := _time(group, network))]
    return found + [
        s for s in (_bytes(group), _twins(group), _loss(group, curves), _ideal(group), _busy(group), _unmeasured(group)) if s
    ]


def _time(group: Group, network: str) -> str | None:
    base = group.baseline(network)
    others = [result for result in group.finished(network) if result.cell.codec != BASELINE and result.measured.step_s]
    if base is None or not base.step_s or not others:
        return None
    others.sort(key=lambda result: result.measured.step_s or 0.0)
    more = "" if len(others) <= _NAMED else f" The table has {len(others) - _NAMED} more."
    if more:
        others = [*others[: _NAMED - 1], others[-1]]
    marked = any(result.certified for result in group.results)
    faster, within, slower = [], [], []
    for result in others:
        codec = result.cell.codec + (" (not certified)" if marked and not result.certified else "")
        step_s = result.measured.step_s or 0.0
        if not tables.apart(result.measured, base):
            within.append(f"{codec} ({step_s / base.step_s:.2f} times as long)")
        elif step_s < base.step_s:
            faster.append(f"{codec} is {base.step_s / step_s:.2f} times as fast ({tables.seconds(step_s)})")
        else:
            slower.append(f"{codec} ({step_s / base.step_s:.2f} times as long)")
    doubt = " (not certified)" if marked and base.certificate != "PASS" else ""
    return (
        f"Over {network} a step takes {tables.seconds(base.step_s)} with fp32{doubt}; "
        + (f"{_join(faster)}." if faster else "no codec makes it clearly faster.")
        + (f" Within the spread of the steps: {_join(within)}." if within else "")
        + (f" Slower: {_join(slower)}." if slower else "")
        + more
    )


def _payloads(group: Group) -> dict[str, float]:
    """Codec -> payload of a step over the first network that has it."""
    found: dict[str, float] = {}
    for result in group.results:
        if result.ok and result.measured.payload_bytes_per_step:
            found.setdefault(result.cell.codec, result.measured.payload_bytes_per_step)
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


def _loss(group: Group, curves: Mapping[tuple[str, str], Curves]) -> str | None:
    last: dict[str, tuple[int, float]] = {}
    for (_, codec), curve in curves.items():
        if curve.validation:
            last.setdefault(codec, (curve.validation[-1].step, curve.validation[-1].loss))
    sentences = []
    if BASELINE in last and len(last) > 1:
        step, base = last.pop(BASELINE)
        parts = [
            f"{codec} {round(loss - base, 4) + 0.0:+.4f}"
            for codec, (at, loss) in sorted(last.items(), key=lambda item: codec_order(item[0]))
            if at == step
        ]
        if parts:
            sentences.append(f"Validation loss after {step} steps: fp32 {base:.4f}; {_join(parts)}.")
    if len(group.networks) > 1 and curves:
        if same_maths(curves):
            sentences.append(f"Each codec's losses are bit for bit the same over all {len(group.networks)} networks.")
        else:
            sentences.append(
                "The losses of a codec differ between networks, which they must not: look at the runs before using them."
            )
    return " ".join(sentences) or None


def _ideal(group: Group) -> str | None:
    shaped = [
        (result.measured.efficiency, result)
        for result in group.results
        if result.ok and result.cell.shaped and result.measured.efficiency
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
        times = {r.cell.codec: r.measured.split.compute_s for r in group.finished(network) if r.measured.split}
        slow, fast = max(times, key=times.__getitem__, default=""), min(times, key=times.__getitem__, default="")
        if times and times[fast] > 0 and times[slow] / times[fast] > max(worst, _STEADY):
            worst = times[slow] / times[fast]
            found = (
                f"The machine was not equally fast for all runs: over {network} the compute part of a step took "
                f"{tables.seconds(times[slow])} with {slow} and {tables.seconds(times[fast])} with {fast}, "
                "though codecs do not change it. Step times differ by as much for that reason alone."
            )
    return found


def _unmeasured(group: Group) -> str | None:
    finished = [r for r in group.results if r.ok]
    doubtful = [f"{r.cell.codec} over {r.cell.network}" for r in finished if not r.certified]
    failed = [f"{r.cell.codec} over {r.cell.network}" for r in group.results if not r.ok]
    sentences = []
    if doubtful and len(doubtful) == len(finished):
        sentences.append("No run has two passing certificates: all are drawn hollow, none is to be relied on.")
    elif doubtful:
        sentences.append(f"Without two passing certificates, so drawn hollow and not to be relied on: {_join(doubtful)}.")
    if failed:
        sentences.append(f"Without a finished run: {_join(failed)}.")
    return " ".join(sentences) or None


def settings(group: Group) -> str:
    """Engine, schedule, transport and machine, for the foot of every figure; two lines."""
    cell = group.results[0].cell
    pipeline = cell.pipeline
    transports: dict[str, list[str]] = {}
    for name, links in group.networks.items():
        restart = "on" if links[0].slow_start_after_idle else "off"
        control = "+".join(_distinct(link.congestion_control for link in links))
        transports.setdefault(f"{control}, slow start after idle {restart}", []).append(name)
    usual = max(transports, key=lambda how: len(transports[how]))
    transport = f"TCP {usual}" + "".join(f"; over {_join(names)} {how}" for how, names in transports.items() if how != usual)
    in_flight = pipeline.microbatches if pipeline.schedule == "gpipe" else pipeline.in_flight
    stages = f"{cell.topology} of {pipeline.stages} stages"
    shape = f"{stages}, {pipeline.schedule}, {pipeline.microbatches} micro-batches a step, {in_flight} in flight"
    machines = _distinct(machine for result in group.results if (machine := _machine(result.environment)))
    return f"engine {cell.engine}; {shape}; {transport}\n{'; '.join(machines) or 'the machine was not recorded'}"


def _machine(environment: Mapping[str, object]) -> str:
    words = [str(environment[key]) for key in ("cpu_model",) if environment.get(key)]
    if environment.get("cores"):
        words.append(f"{environment['cores']} core{'s' * (environment['cores'] != 1)}")
    memory = environment.get("memory_bytes")
    if isinstance(memory, int | float):
        words.append(f"{memory / 1e9:.0f} GB of memory")
    if environment.get("kernel"):
        words.append(f"Linux {environment['kernel']}")
    return ", ".join(words)
