"""Which layout trains a model fastest on given devices and links? Predicts all layouts that fit, and ranks them.

A layout is a pipeline, data parallel workers (a ring that sums fp32 gradients, or weight changes after local steps), or
pipelines within replicas, with its micro-batches, schedule and codecs. The three loops of `policies.cycle` sort them
all; the best of each are simulated from their shapes over links that keep the order of packets (`in_order`), for a few
micro-batches, after which every further one takes the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from testbed import units
from testbed.devices.codec_cost import rates_of
from testbed.devices.device import ComputeDevice, Precision, load_device
from testbed.devices.flops import parameters
from testbed.errors import SpecError
from testbed.jobs.schedule import depth
from testbed.metrics.wires import wire_bytes
from testbed.policies.cycle import steady_cycle_s
from testbed.predict import advice_cells
from testbed.predict.advice_cells import Kind
from testbed.predict.data_parallel_shapes import resolve_data_parallel
from testbed.predict.in_order import InOrderStar
from testbed.predict.shapes import Shape, named_size, resolve_shape
from testbed.profiles import LinkProfile, load_profile
from testbed.trace.simulate import ideal_steps_ns
from testbed.training.memory_need import kept_values
from testbed.workloads.models import ModelSize, split_layers

LIMITS: Final = ("compute", "codec", "rate", "latency")
_LEFT = 0.9
"""Share of a device's memory that a layout may take; the rest is for the framework. [chosen]"""
_STATE_BYTES = {"fp32": 16, "bf16": 18}
"""Per parameter: weight, gradient and AdamW's moments in fp32; in bf16 also the weight's copy to compute with."""
_VALUE_BYTES = {"fp32": 4, "bf16": 2}
_LONGEST = 1024
_MOST_NODES = 64
_SEQUENCES, _DEPTHS, _LOCAL_STEPS = (1, 2, 4, 8), (1, 2, 4), (1, 8, 32)
_BITS = 32
_SIMULATED, _PER_GROUP = 14, 3
"""Number of layouts that are simulated, and of those that differ only in codecs and micro-batches. [chosen]"""


class Asked(NamedTuple):
    """The question."""

    model: str
    device: str
    nodes: int
    profile: str
    batch: int
    """Sequences per batch, over all nodes."""
    sequence_length: int | None = None
    """None: the model's context, and at most 1,024."""
    local_steps: int = 8
    """Maximum number of batches between two exchanges."""


class Setting(NamedTuple):
    """A question with everything looked up."""

    asked: Asked
    size: ModelSize
    device: ComputeDevice
    precision: Precision
    link: LinkProfile
    tokens: int
    """Tokens per sequence."""

    def links(self, *, delayed: bool = True) -> InOrderStar:
        """Return fresh links for a simulation."""
        assert self.link.up is not None
        assert self.link.down is not None
        return InOrderStar(self.link, self.link.up, self.link.down, delayed=delayed)

    @property
    def parameters(self) -> int:
        return parameters(self.size, range(self.size.layers))

    def unknown(self, layout: Layout) -> list[str]:
        """Return what the prediction does not know."""
        kinds = ("loss", "jitter_ns", "reorder", "duplicate", "queue", "slot")
        there = [kind.removesuffix("_ns") for kind in kinds if any(getattr(pipe, kind) for pipe in self.link.pipes)]
        buffers = " and ".join(units.write_time(pipe.buffer_ns) for pipe in self.link.pipes)
        speed = self.device.speed(self.precision)
        assert speed is not None
        said = [f"what TCP loses at buffers of {buffers}" + "".join(f", and the link's {kind}" for kind in there)]
        said += [f"the loss at {self.parameters / 1e6:,.0f} M parameters"] * bool(layout.settings)
        said.append(f"the speed of {self.device.name} with this model: {speed.utilisation:.0%} of its peak is assumed")
        said += ["the time of the outer optimiser"] * (layout.local_steps > 1)
        return said


class Layout(NamedTuple):
    """A way to train on these nodes."""

    kind: Kind
    replicas: int
    stages: int
    local_steps: int
    microbatches: int
    """Per batch of a replica."""
    job: Mapping[str, Any]
    """Its fields in a cells.toml, without the links of a pipeline or of data parallel workers."""
    memory_bytes: float
    """Of the device that needs most."""
    rough_s: float
    """Seconds per batch, before it is simulated."""

    @property
    def group(self) -> tuple[Kind, int, int, int]:
        """What remains of it without its codecs and micro-batches."""
        return self.kind, self.replicas, self.stages, self.local_steps

    @property
    def settings(self) -> tuple[str, ...]:
        """What may cost loss: codecs, then local steps."""
        coded = self.job.get("codec", "").replace("fwd=", "").replace("bwd=", "").split(", ")
        return (*dict.fromkeys(filter(None, coded)), *([f"{self.local_steps} local steps"] * (self.local_steps > 1)))


class Predicted(NamedTuple):
    """A layout and its simulated time per batch."""

    layout: Layout
    batch_s: float


class Advice(NamedTuple):
    """The answer."""

    setting: Setting
    chosen: tuple[Predicted, ...]
    """The fastest of each kind, fastest first."""
    simulated: tuple[Predicted, ...]
    layouts: int
    """Number of layouts that fit."""
    alone_s: float | None
    """Seconds per batch of one node alone; None: it has too little memory."""


def advise(asked: Asked, codecs: Sequence[str]) -> Advice:
    """Answer a question; `codecs` are those whose evidence suffices. SpecError or UnknownNameError if that is
    impossible.
    """
    setting = look_up(asked)
    every = sorted(_layouts(setting, codecs), key=lambda layout: layout.rough_s)
    if not every:
        room = units.write_size(int(_LEFT * (setting.device.memory_bytes or 0)))
        raise SpecError(
            f"cannot lay {asked.model} out on {asked.nodes} {asked.device}: no pipeline, hybrid or data parallel "
            f"layout needs at most {room} per node, {_LEFT:.0%} of its memory; use more nodes, a device with more "
            "memory, a smaller model, or a shorter --sequence-length"
        )
    groups: dict[object, list[Layout]] = {}
    for layout in every:
        groups.setdefault(layout.group, []).append(layout)
    first = {layout.kind: layout for layout in reversed(every)}.values()
    taken = [layout for part in groups.values() for layout in part[:_PER_GROUP]]
    taken = sorted(taken, key=lambda layout: layout.rough_s)[:_SIMULATED]
    taken += [layout for layout in first if layout not in taken]
    simulated = sorted((Predicted(each, batch_s(each, setting)) for each in taken), key=lambda each: each.batch_s)
    chosen = {each.layout.kind: each for each in reversed(simulated)}.values()
    return Advice(
        setting,
        tuple(sorted(chosen, key=lambda each: each.batch_s)),
        tuple(simulated),
        len(every),
        _alone_s(setting),
    )


def look_up(asked: Asked) -> Setting:
    """Check a question, and look up what it names. SpecError or UnknownNameError for what cannot be advised."""
    size, device, link = named_size(asked.model), load_device(asked.device), load_profile(asked.profile)
    nodes, batch, longest = asked.nodes, asked.batch, size.context
    tokens = min(_LONGEST, longest) if asked.sequence_length is None else asked.sequence_length
    if not 2 <= nodes <= _MOST_NODES:
        raise SpecError(
            f"--nodes is {nodes}: there is advice for 2 to {_MOST_NODES} nodes; one has no link to choose for"
        )
    if batch < 1 or batch % nodes:
        near = max(nodes, batch - batch % nodes)
        raise SpecError(
            f"--batch is {batch}, which {nodes} nodes cannot share equally; use a multiple of {nodes}, such as {near} or "
            f"{near + nodes}"
        )
    if not 1 <= tokens <= longest:
        raise SpecError(
            f"--sequence-length is {tokens}, but {asked.model} has a context of {longest} tokens; set 1 to that"
        )
    if device.memory_bytes is None:
        raise SpecError(f"device {device.name} states no memory, so no layout can be checked; add memory to its file")
    if device.fp32 is None:
        raise SpecError(
            f"device {device.name} has no speed in fp32, which the cost of codecs needs; add [fp32] to its file"
        )
    rates_of(device)
    why = "its rate varies" if link.varies else "it has background flows" if link.background else None
    if len(link.pipes) < 2:
        why = "a direction is unshaped, so it has no rate"
    if why is not None:
        raise SpecError(
            f"cannot advise for profile {asked.profile}: {why}; state a constant one, such as link(80Mbit, 10ms), or play "
            "candidates over it with python -m testbed predict"
        )
    return Setting(asked, size, device, "bf16" if device.half is not None else "fp32", link, tokens)


# ------------------------------------------------------------------ layouts
def _layouts(setting: Setting, codecs: Sequence[str]) -> Iterator[Layout]:
    """Yield all layouts that fit into the devices' memory."""
    asked, room = setting.asked, _LEFT * (setting.device.memory_bytes or 0)
    allowed = [steps for steps in _LOCAL_STEPS if steps <= max(1, asked.local_steps)]
    whole = range(setting.size.layers)
    for steps in allowed:
        memory = _stage_bytes(setting, whole, setting.tokens, 1, extra=4 + 8 * (steps > 1))
        if memory <= room:
            job = _model(setting) | {
                "parallelism": "data",
                "device": asked.device,
                "sequences": asked.batch // asked.nodes,
                "workers": asked.nodes,
                "exchange": "all-reduce",
                "local_iterations": steps,
                "bits": _BITS,
            }
            yield Layout("data parallel", asked.nodes, 1, steps, 1, job, memory, 0.0)
    placements = [a if a == b else f"fwd={a}, bwd={b}" for a, b in itertools.product(codecs, repeat=2)]
    counts = [count for count in range(2, min(asked.nodes, setting.size.layers) + 1) if asked.nodes % count == 0]
    for stages, sequences, codec in itertools.product(counts, _SEQUENCES, placements):
        shape = None
        for replicas in {1, asked.nodes // stages}:
            microbatches, odd = divmod(asked.batch, replicas * sequences)
            for steps in allowed if not odd and microbatches else ():
                if replicas == 1 and steps > 1:
                    continue
                shape = shape or resolve_shape(_pipeline(setting, stages, sequences, codec), "a layout")
                yield from _split(setting, shape, codec, sequences, (replicas, stages, steps, microbatches), room)


def _split(
    setting: Setting, shape: Shape, codec: str, sequences: int, counts: tuple[int, int, int, int], room: float
) -> Iterator[Layout]:
    """Yield the layouts of pipelines of a shape that differ in micro-batches in flight."""
    replicas, stages, steps, microbatches = counts
    parts = split_layers(setting.size.layers, stages)
    extra, kind = (4 + 8 * (steps > 1), "hybrid") if replicas > 1 else (0, "pipeline")
    for in_flight in sorted({min(microbatches, stages * times) for times in _DEPTHS} | {microbatches}):
        schedule = "1f1b" if in_flight < microbatches else "gpipe"
        for recompute in (False, True) if replicas == 1 else (False,):
            memory = max(
                _stage_bytes(
                    setting,
                    own,
                    sequences * setting.tokens,
                    depth(schedule, stage=at, stages=stages, microbatches=microbatches, in_flight=in_flight),
                    extra=extra,
                    recompute=recompute,
                )
                for at, own in enumerate(parts)
            )
            if memory > room:
                continue
            job = _pipeline(setting, stages, sequences, codec) | {
                "microbatches": microbatches,
                "schedule": schedule,
                "in_flight": in_flight,
            }
            if kind == "hybrid":
                job = _as_replicas(setting, job, replicas, stages, steps)
            elif recompute:
                job |= {"recompute": True}
            rough = _rough_s(setting, shape, replicas, steps, microbatches, in_flight, recompute=recompute)
            yield Layout(kind, replicas, stages, steps, microbatches, job, memory, rough)
            break


def _model(setting: Setting) -> dict[str, Any]:
    return {"model": setting.asked.model, "precision": setting.precision, "sequence_length": setting.tokens}


def _pipeline(setting: Setting, stages: int, sequences: int, codec: str) -> dict[str, Any]:
    return _model(setting) | {
        "device": setting.asked.device,
        "sequences": sequences,
        "microbatches": 1,
        "stages": stages,
        "schedule": "1f1b",
        "codec": codec,
        "codec_cost": "device",
    }


def _as_replicas(
    setting: Setting, pipeline: Mapping[str, Any], replicas: int, stages: int, steps: int
) -> dict[str, Any]:
    """Return the job of several pipelines like this one, each stage at a site of its own."""
    link, count = advice_cells.playable(setting.asked.profile, setting.link), replicas * stages
    return {name: value for name, value in pipeline.items() if name not in ("device", "stages")} | {
        "parallelism": "hybrid",
        "scenario": {
            "summary": f"{count} nodes",
            "source": "[chosen]",
            "server": link,
            "sites": [{"count": count, "device": setting.asked.device, "link": link}],
        },
        "replicas": [stages] * replicas,
        "local_steps": steps,
        "exchange": "all-to-all",
        "bits": _BITS,
    }


def _stage_bytes(setting: Setting, own: range, tokens: int, held: int, *, extra: int, recompute: bool = False) -> float:
    """Return a device's memory, counted as in `training.memory_need`. `held`: micro-batches between forward and
    backward; `extra`: bytes per parameter for the exchange.
    """
    inputs = 2 * setting.size.width
    values = held * inputs + (1 if recompute else held) * kept_values(setting.size, own)
    state = (_STATE_BYTES[setting.precision] + extra) * parameters(setting.size, own)
    return state + _VALUE_BYTES[setting.precision] * tokens * values


def _rough_s(
    setting: Setting, shape: Shape, replicas: int, steps: int, microbatches: int, in_flight: int, *, recompute: bool
) -> float:
    """Return a rough estimate of the seconds per batch: the longest of three loops, and one round trip."""
    (up, down), stages = setting.link.pipes, shape.stages
    rate, delay_s = min(up.rate_bps, down.rate_bps), (up.delay_ns + down.delay_ns) / 1e9
    there, back = (wire_bytes(size, setting.link) * 8 / rate for size in shape.message_bytes)
    coding_s = (sum(shape.encode_ns) + sum(shape.decode_ns)) / 1e9
    passes = [(f * (1 + recompute) + b) / 1e9 for f, b in zip(shape.forward_ns, shape.backward_ns, strict=True)]
    works_s = max(passes) + coding_s
    busy_s = there + back if stages > 2 or in_flight == microbatches else max(there, back)  # gpipe: one way at a time
    round_s = sum(passes) + (stages - 1) * (there + back + coding_s + 2 * delay_s)
    cycle_s = steady_cycle_s(works_s, busy_s, round_s - works_s, in_flight - 1)
    share = max(parameters(setting.size, own) for own in split_layers(setting.size.layers, stages))
    exchange_s = (replicas - 1) * share * _BITS / rate / steps
    return microbatches * cycle_s + round_s + exchange_s + max(shape.update_ns) / 1e9


def _alone_s(setting: Setting) -> float | None:
    memory = _stage_bytes(setting, range(setting.size.layers), setting.tokens, 1, extra=0)
    if memory > _LEFT * (setting.device.memory_bytes or 0):
        return None
    job = {"parallelism": "data", "device": setting.asked.device, "workers": 2, "exchange": "all-reduce", "bits": 1}
    return resolve_data_parallel(_model(setting) | job | {"sequences": setting.asked.batch}, "one").compute_ns / 1e9


# ------------------------------------------------------------------ prediction
def batch_s(layout: Layout, setting: Setting, *, coded: bool = True, wire: str = "links") -> float:
    """Predict the seconds per batch. `coded`: whether codecs take time; `wire`: "links", "undelayed" or "none"."""
    job, hybrid = dict(layout.job), layout.kind == "hybrid"
    if "codec" in job and not coded:
        job["codec_cost"] = "zero"

    def steps_ns(steps: int, **changes: int) -> list[int]:
        links = None if wire == "none" else setting.links(delayed=wire == "links")
        return ideal_steps_ns(
            advice_cells.RESOLVE[layout.kind]({**job, **changes}, "a layout").trace(steps), links, steps
        )

    if layout.kind == "data parallel":
        shape = resolve_data_parallel(job, "a layout")
        return shape.steady_ns(steps_ns(shape.least_steps)) / 1e9 / layout.local_steps

    def step_s(microbatches: int, batches: int = 1) -> float:
        changes = {"microbatches": microbatches, "in_flight": min(microbatches, job["in_flight"])}
        return steps_ns(1 + hybrid, **changes, **({"local_steps": batches} if hybrid else {}))[-1] / 1e9

    deep = 2 * layout.stages if job["schedule"] == "gpipe" else job["in_flight"]
    few, many, whole = 2 * deep, 4 * deep, layout.microbatches
    one_s = step_s(min(whole, many))
    more_s = (one_s - step_s(few)) / (many - few) * (whole - many) if whole > many else 0.0
    if layout.local_steps == 1:
        return one_s + more_s
    further_s = step_s(min(whole, many), 2) - one_s + more_s
    return (one_s + more_s + (layout.local_steps - 1) * further_s) / layout.local_steps


def limits(predicted: Predicted, setting: Setting) -> dict[str, float]:
    """Return the shares of a batch's time by what they would go with: all messages and codecs, then codecs' time, then
    transmission, including the wait for messages that meet, then delays.
    """
    layout, total = predicted
    compute, coded = (batch_s(layout, setting, coded=coded, wire="none") for coded in (False, True))
    undelayed = batch_s(layout, setting, wire="undelayed")
    ends = [0.0, compute, max(compute, coded), max(compute, coded, undelayed), max(compute, coded, undelayed, total)]
    return {
        name: (after - before) / ends[-1]
        for name, (before, after) in zip(LIMITS, itertools.pairwise(ends), strict=True)
    }
