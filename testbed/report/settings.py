"""Describes the conditions of runs, for the foot of every figure: engine, timing, compute, schedule, transport,
machine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from testbed import units
from testbed.frozen import Frozen, flatten
from testbed.report.collect import Group, Links
from testbed.report.numbers import MISSING, listed
from testbed.spec import Calibrated, Cell, DataParallelSpec, ImagesSpec, Measured, Parallelism, PipelineSpec, Stated

PLAYED = "timing played: trained once without a network, then frames of the recorded sizes over the links"
LIVE_VIRTUAL = "timing live: trained over the links in the guest, torch and TCP together"
CLOCKS = {
    "virtual": "virtual clock (user-mode Linux with time travel): exact times, independent of the machine's load",
    "real": "real clock (this machine's)",
}
CODEC_COSTS = {
    "host": "codecs take the time they take on this machine, timed alone",
    "device": "codecs take the time that {source} would need for their bytes and operations",
    "zero": "codecs cost nothing",
}
DILATION = (
    "the lab runs {factor} times slower, and times are divided by that; TCP's constants (200 ms minimum retransmission "
    "timeout, 40 ms delayed acknowledgement) and the kernel's clock tick do not scale"
)


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def settings_words(group: Group) -> str:
    """Describe a group in lines: pipeline and transport; compute and timing; tuned settings; the machine."""
    cell = group.entries[0].cell
    lines = [f"engine {cell.engine}; {pipeline_words(cell)}; {_transport(group)}"]
    lines += [f"compute {compute_words(cell)}"]
    if cell.timing == "played":
        lines += [f"{CLOCKS[cell.clock]}; {PLAYED}; {_codec_cost_words(cell)}"]
    elif cell.clock == "virtual":
        lines += [f"live on the {CLOCKS['virtual']}; {LIVE_VIRTUAL}; {_codec_cost_words(cell)}"]
    own = [
        f"{key} {', '.join(f'{codec} {value:g}' for codec, value in values.items())}"
        for key, values in group.own.items()
    ]
    lines += [f"per codec: {'; '.join(own)}"] if own else []
    where = "training.json of each recipe" if cell.timing == "played" else "stage-<n>.log of each run"
    lines += [f"trained on a GPU: {where} states which"] if cell.training.device != "cpu" else []
    environments = [result.run.environment for entry in group.entries for result in entry.results]
    machines = _distinct(filter(None, map(machine_words, environments)))
    return "\n".join([*lines, f"{'; '.join(machines) or 'the machine was not recorded'}; {_counts(group)}"])


def settings_line(group: Group) -> str:
    """Describe a group in a line, for the small print of a figure."""
    cell = group.entries[0].cell
    dilated = f", {cell.compute.dilation} times slower than reported" if cell.compute.dilation > 1 else ""
    varied = f", {cell.compute.varies_by}" if cell.compute.varied else ""
    how = f"compute {cell.compute.mode}{dilated}{varied}; {cell.timing} on the {cell.clock} clock"
    return f"{pipeline_words(cell)}; {how}; {_counts(group)}"


def _counts(group: Group) -> str:
    counts = _distinct(entry.count for entry in group.entries if entry.ok)
    return f"{listed(counts)} of each codec" if counts else "no run"


def _codec_cost_words(cell: Cell) -> str:
    rates = cell.codec_rates
    return CODEC_COSTS[cell.codec_cost].format(source=rates.source if rates else "")


def pipeline_words(cell: Cell) -> str:
    """Describe a cell's job: stages and schedule, workers and exchange, or the table of another kind."""
    return _words(cell.parallelism, cell)


@functools.singledispatch
def _words(job: Parallelism, cell: Cell) -> str:
    stated = job.model_dump(mode="json") if isinstance(job, Frozen) else {}
    fields = [f"{name} {value}" for name, value in stated.items() if name != "kind"]
    return ", ".join([f"{cell.topology} of {cell.nodes} nodes, {stated.get('kind')}", *fields])


@_words.register
def _pipeline_words(asked: PipelineSpec, cell: Cell) -> str:
    in_flight = asked.microbatches if asked.schedule == "gpipe" else asked.in_flight
    words = [f"{cell.topology} of {asked.stages} stages", asked.schedule]
    words += [f"{asked.microbatches} micro-batches per step", f"{in_flight} in flight"]
    words += [f"accumulated {asked.accumulation} times"] if asked.accumulation > 1 else []
    words += ["activations recomputed"] if asked.recompute else []
    words += ["bf16 autocast"] if cell.workload.precision == "bf16" else []
    return ", ".join(words)


@_words.register
def _data_words(data: DataParallelSpec, cell: Cell) -> str:
    def each(numbers: Sequence[int]) -> str:
        return "/".join(map(str, numbers))

    words = [f"{data.workers} workers, {data.exchange}", f"staleness {each(data.staleness)}"]
    words += [f"chosen by DeCo-SGD every {data.deco.every} steps"] if data.deco is not None else []
    words += ["gradients looked ahead for"] if data.look_ahead else []
    if data.arrivals is not None:
        applied = data.arrivals
        words += [f"applied every {applied.period_s:g} s" if applied.period_s else f"applied {applied.buffer} at once"]
        words += [f"or more within {applied.grace_s:g} s"] if applied.grace_s else []
    words += [f"answers in {data.answer}"] if data.answer is not None else []
    words += [f"batches shared {each(data.shares)}"] if data.shares is not None else []
    if data.outer is not None:
        outer, momentum = data.outer, "Nesterov momentum" if data.outer.nesterov else "momentum"
        words += [f"{each(data.local_steps)} local steps, outer rate {outer.learning_rate:g}"]
        words += [f"{momentum} {outer.momentum:g}"] if outer.momentum else []
    if data.low_rank is not None:
        words += [f"{data.low_rank.rank} vectors per basis, new every {data.low_rank.refresh} steps"]
    if data.streaming is not None:
        words += [f"{data.streaming.fragments} fragments in turn, {data.streaming.mixing:g} of a worker's own kept"]
    words += ["bf16 autocast"] if cell.workload.precision == "bf16" else []
    if isinstance(cell.workload, ImagesSpec):
        learned = cell.workload
        words += [f"{learned.model} learns {learned.images}"]
        words += ["classes mixed alike" if learned.alpha is None else f"classes skewed by alpha {learned.alpha:g}"]
    return ", ".join(words)


def transport_words(links: Links) -> str:
    """Describe TCP's settings and the MTU of one network."""
    restart = listed(_distinct("on" if link.slow_start_after_idle else "off" for link in links))
    control = "+".join(_distinct(link.congestion_control for link in links))
    mtu = "+".join(_distinct(str(link.mtu) for link in links))
    return f"{control}, slow start after idle {restart}, MTU {mtu}"


def _transport(group: Group) -> str:
    """Describe TCP's settings and the MTU: those of most networks, then the exceptions."""
    transports: dict[str, list[str]] = {}
    for name, links in group.networks.items():
        transports.setdefault(transport_words(links), []).append(name)
    usual = max(transports, key=lambda how: len(transports[how]))
    return f"TCP {usual}" + "".join(
        f"; over {listed(names)} {how}" for how, names in transports.items() if how != usual
    )


def _durations(values: Sequence[int]) -> str:
    return "/".join(units.format_time(value) for value in values)


def compute_words(cell: Cell) -> str:
    """Describe the source of compute durations, and how they vary."""
    return "; ".join(filter(None, (_source_words(cell), cell.compute.varies_by)))


def _source_words(cell: Cell) -> str:
    asked = cell.compute
    if isinstance(asked, Measured):
        return "measured, at this machine's speed during the run"
    if isinstance(asked, Calibrated):
        return "calibrated: each action takes as long as on this machine, timed alone"
    if isinstance(asked, Stated):
        works = ", ".join(f"{what} {units.format_time(ns)}" for what, ns in asked.work_ns.items())
        words = f"stated: {works} ({asked.source})"
    else:
        words = (
            f"paced: forward {_durations(asked.forward_ns)}, backward {_durations(asked.backward_ns)}, "
            f"update {units.format_time(asked.update_ns)} ({asked.source})"
        )
    return words if asked.dilation == 1 else f"{words}; {DILATION.format(factor=asked.dilation)}"


def machine_words(environment: Mapping[str, object]) -> str:
    """Describe the machine from `environment.json`; empty if that has no data."""
    words = [str(environment["cpu_model"])] if environment.get("cpu_model") else []
    if environment.get("cores"):
        words.append(f"{environment['cores']} core{'s' * (environment['cores'] != 1)}")
    memory = environment.get("memory_bytes")
    if isinstance(memory, int | float):
        words.append(f"{memory / 1e9:.0f} GB of memory")
    if environment.get("kernel"):
        words.append(f"Linux {environment['kernel']}")
    return ", ".join(words)


def flat(tables: Mapping[str, Any]) -> dict[str, str]:
    """Return dotted names -> values as text."""
    return {name: MISSING if value is None else str(value) for name, value in flatten(tables)}
