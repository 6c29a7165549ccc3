"""Which layout trains a model fastest on given devices and links? Predicts those that fit, and ranks them.

A layout is a pipeline; data parallel workers, whose ring sums fp32 gradients, or weight changes after local steps; or
several pipelines that exchange them. It has micro-batches, a depth and a codec per direction. The three loops of
`policies.cycle` sort all; the best are simulated from their shapes over links that keep the order of packets
(`in_order`), for a few micro-batches: every further one takes the same time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from testbed.devices.device import ComputeDevice, Precision, load_device
from testbed.devices.flops import parameters
from testbed.errors import SpecError
from testbed.jobs.schedule import depth
from testbed.metrics.wires import wire_bytes
from testbed.policies.cycle import steady_cycle_s
from testbed.predict.data_parallel_shapes import DataParallelShape, resolve_data_parallel
from testbed.predict.hybrid_shapes import HybridShape, resolve_hybrid
from testbed.predict.in_order import InOrderStar
from testbed.predict.shapes import named_size
from testbed.profiles import LinkProfile, load_profile
from testbed.profiles.link_text import is_link_text
from testbed.profiles.profile_writing import toml_value
from testbed.trace.simulate import ideal_step_ns
from testbed.training.memory_need import kept_values
from testbed.workloads.models import ModelSize, split_layers

LIMITS: Final = ("compute", "codec", "rate", "latency")
_USABLE = 0.9
"""Share of a device's memory that a layout may take; the rest is the framework's. [chosen]"""
_STATE_BYTES, _VALUE_BYTES = {"fp32": 16, "bf16": 18}, {"fp32": 4, "bf16": 2}
"""Per parameter: weight, gradient and AdamW's two moments in fp32, in bf16 also a copy to compute with; and per value
that is kept for the backward pass."""
_LONGEST, _MOST_NODES, _BITS = 1024, 64, 32
_SEQUENCES, _DEPTHS, _LOCAL_STEPS = (1, 2, 4, 8), (1, 2, 4, 16), (1, 8, 32)
"""Sequences per micro-batch, micro-batches in flight per stage, and batches between two exchanges. [chosen]"""
_SIMULATED, _PER_GROUP = 14, 3
"""Number of layouts to simulate, in all and of those with the same stages, replicas and local steps. [chosen]"""
_LEAST_BPS = 16_000
"""Smallest rate of a link that is played with divided rates; profiles allow half of it."""
_AS_FAST = 1.01
"""Times as long as the fastest that a layout may take with codecs that keep more bits. [chosen]"""
_EFFECTS = ("loss", "jitter", "reorder", "duplicate", "queue", "slot")


class Question(NamedTuple):
    """A question, with what it names."""

    model: str
    size: ModelSize
    device: ComputeDevice
    nodes: int
    profile: str
    link: LinkProfile
    """The access link of every node."""
    batch: int
    """Sequences per batch, over all nodes."""
    tokens: int
    """Per sequence."""
    local_steps: int
    """Maximum number of batches between two exchanges."""
    room: float
    """Memory of a device that a layout may take."""
    precision: Precision
    effects: tuple[str, ...]
    """What the link does besides its rate, delay and buffer; the prediction ignores it."""
    playable: str
    """The link as it can be played with divided rates: nothing is lost, and buffers hold all that waits."""


class Layout(NamedTuple):
    """A way to train on these nodes."""

    kind: str
    replicas: int
    stages: int
    local_steps: int
    microbatches: int
    """Per batch of a replica."""
    job: Mapping[str, Any]
    """Its fields in a cells.toml."""
    memory_bytes: float
    """Need of the device that needs most."""
    codecs: tuple[str, ...] = ()
    """Forward and backward."""
    batch_s: float = 0.0
    """Predicted seconds per batch: a rough estimate, until it is simulated."""

    def shape(self, **changes: object) -> HybridShape | DataParallelShape:
        """Return its shape, with changed fields."""
        return (resolve_hybrid if self.stages > 1 else resolve_data_parallel)({**self.job, **changes}, "a layout")


def look_up(
    model: str, device: str, nodes: int, profile: str, batch: int, tokens: int | None = None, local_steps: int = 8
) -> Question:
    """Check a question. SpecError or UnknownNameError for what cannot be advised."""
    size, machine, link = named_size(model), load_device(device), load_profile(profile)
    tokens = min(_LONGEST, size.context) if tokens is None else tokens
    varies = link.varies or link.background or len(link.pipes) < 2
    for bad, what in (
        (not 2 <= nodes <= _MOST_NODES, f"--nodes is {nodes}; state 2 to {_MOST_NODES}, because one has no link"),
        (batch < 1 or batch % max(1, nodes), f"--batch is {batch}; state a multiple of {nodes}, for equal shares"),
        (not 1 <= tokens <= size.context, f"--sequence-length is {tokens}; {model} has a context of {size.context}"),
        (not machine.memory_bytes, f"device {device} has no memory, which says what fits; add it to its file"),
        (not machine.fp32, f"device {device} has no speed in fp32, which codecs' cost needs; add [fp32] to its file"),
        (varies, f"profile {profile} varies, has background flows or no rate; state one like link(80Mbit, 10ms)"),
    ):
        if bad:
            raise SpecError(f"cannot advise: {what}")
    pipes = [pipe.model_dump() | {"jitter": pipe.jitter_ns or pipe.jitter_reorders} for pipe in link.pipes]
    effects = tuple(effect for effect in _EFFECTS if any(pipe.get(effect) for pipe in pipes))
    text, added = profile.strip(), ", ".join(["buffer=8GB", *(f"{effect}=none" for effect in effects)])
    playable = f"{text[:-1]}, {added})" if is_link_text(text) else f"{text}, {added}"
    numbers = batch, tokens, local_steps, _USABLE * (machine.memory_bytes or 0)
    precision: Precision = "fp32" if machine.half is None else "bf16"
    return Question(model, size, machine, nodes, profile, link, *numbers, precision, effects, playable)


def advise(setting: Question, codecs: Sequence[str]) -> tuple[list[Layout], int]:
    """Return the best layouts by their simulated time, fastest first, with at least one of each kind that fits, and the
    number of those that fit. `codecs` may be used. SpecError if none fits.
    """
    fitting = sorted(_layouts(setting, codecs), key=lambda layout: layout.batch_s)
    if not fitting:
        raise SpecError(
            f"cannot advise: no layout of {setting.model} on {setting.nodes} nodes needs at most {_USABLE:.0%} of the "
            f"memory of {setting.device.name}; use more nodes, a device with more, a smaller model or shorter sequences"
        )
    seen, taken = Counter[tuple[object, ...]](), list[Layout]()
    for layout in fitting:
        seen[layout[:4]] += 1
        first = layout.kind not in {each.kind for each in taken}
        if first or (seen[layout[:4]] <= _PER_GROUP and len(taken) < _SIMULATED):
            taken.append(layout)
    simulated = [layout._replace(batch_s=batch_s(layout, setting)) for layout in taken]
    return sorted(simulated, key=lambda layout: layout.batch_s), len(fitting)


def with_most_bits(layout: Layout, setting: Question, codecs: Sequence[str]) -> Layout:
    """Return the layout with the codecs that send most among those with which it is as fast, because bits that save no
    time can only cost loss.
    """
    pairs = itertools.product(codecs, repeat=2) if layout.codecs else ()
    others = [layout._replace(codecs=p, job={**layout.job, "codec": "fwd={}, bwd={}".format(*p)}) for p in pairs]
    for other in sorted(others, key=lambda each: -each.shape().payload_bytes):
        if (taken_s := batch_s(other, setting)) <= _AS_FAST * layout.batch_s:
            return other._replace(batch_s=taken_s)
    return layout


# ------------------------------------------------------------------ layouts
def _layouts(setting: Question, codecs: Sequence[str]) -> Iterator[Layout]:
    """Yield the layouts that fit, with rough estimates of their times."""
    nodes, whole = setting.nodes, range(setting.size.layers)
    model = {"model": setting.model, "precision": setting.precision, "sequence_length": setting.tokens, "bits": _BITS}
    ring = {**model, "parallelism": "data", "device": setting.device.name, "workers": nodes, "exchange": "all-reduce"}
    allowed = [steps for steps in _LOCAL_STEPS if steps <= setting.local_steps]
    for steps in allowed:
        if (memory := _stage_bytes(setting, whole, 1, 1, steps)) <= setting.room:
            job = {**ring, "sequences": setting.batch // nodes, "local_iterations": steps}
            yield Layout("data parallel", nodes, 1, steps, 1, job, memory)
    counts = [count for count in range(2, min(nodes, len(whole)) + 1) if nodes % count == 0]
    for stages, replicas, sequences in ((s, r, q) for s in counts for r in {1, nodes // s} for q in _SEQUENCES):
        parts, odd = divmod(setting.batch, replicas * sequences)
        site = {"count": replicas * stages, "device": setting.device.name, "link": setting.playable}
        scenario = {"summary": "equal nodes", "source": "[chosen]", "server": setting.playable, "sites": [site]}
        job = {**model, "parallelism": "hybrid", "replicas": [stages] * replicas, "exchange": "all-to-all"}
        job |= {"scenario": scenario, "codec_cost": "device", "sequences": sequences, "microbatches": parts}
        for pair in itertools.product(codecs, repeat=2) if parts and not odd else ():
            job["codec"], kind = "fwd={}, bwd={}".format(*pair), "hybrid" if replicas > 1 else "pipeline"
            shape = resolve_hybrid(job, "a layout")
            for steps, ahead in itertools.product(allowed if replicas > 1 else [1], _DEPTHS):
                own = {**job, "local_steps": steps, "in_flight": min(parts, stages * ahead)}
                needs = _pipeline_bytes(setting, own, stages, steps * (replicas > 1))
                if min(needs) <= setting.room:
                    own["recompute"] = again = needs[0] > setting.room
                    layout = Layout(kind, replicas, stages, steps, parts, own, needs[again], pair)
                    yield layout._replace(batch_s=_rough_s(setting, layout, shape))


def _pipeline_bytes(setting: Question, job: Mapping[str, Any], stages: int, exchanged: int) -> list[float]:
    """Return the memory of the stage that needs most, without recomputation of activations and with it."""
    own = split_layers(setting.size.layers, stages)
    numbers = {name: job[name] for name in ("microbatches", "in_flight")}
    held = [job["sequences"] * depth("1f1b", stage=stage, stages=stages, **numbers) for stage in range(stages)]
    return [
        max(_stage_bytes(setting, *each, exchanged) for each in zip(own, held, full, strict=True))
        for full in (held, [job["sequences"]] * stages)
    ]


def _stage_bytes(setting: Question, own: range, held: int, full: int, exchanged: int) -> float:
    """Return a device's memory, counted as in `training.memory_need`.

    `held`: sequences between forward and backward, `full` of them with all activations; `exchanged`: local steps, which
    need a message, and from two on also the last weights and a momentum; 0: no exchange.
    """
    state = _STATE_BYTES[setting.precision] + 4 * (exchanged > 0) + 8 * (exchanged > 1)
    values = held * 2 * setting.size.width + full * kept_values(setting.size, own)
    return state * parameters(setting.size, own) + _VALUE_BYTES[setting.precision] * setting.tokens * values


def _rough_s(setting: Question, layout: Layout, shape: HybridShape) -> float:
    """Return a rough estimate of the seconds per batch: the longest of three loops, a round trip, and the exchange."""
    (up, down), stages = setting.link.pipes, layout.stages
    rate, delays_s = min(up.rate_bps, down.rate_bps), (up.delay_ns + down.delay_ns) / 1e9
    there, back = (wire_bytes(size, setting.link) * 8 / rate for size in shape.crossing_bytes)
    again, ahead = 1 + layout.job["recompute"], layout.job["in_flight"]
    passes = [(again * f + b) / 1e9 for f, b in zip(shape.forward_ns[:stages], shape.backward_ns, strict=False)]
    round_s = sum(passes) + (stages - 1) * (there + back + 2 * delays_s)
    busy_s = there + back if stages > 2 or ahead == layout.microbatches else max(there, back)
    cycle_s = steady_cycle_s(max(passes), busy_s, round_s - max(passes), ahead - 1)
    exchange = sum(size for sender, _, size in shape.exchanged if sender == stages - 1) * 8 / rate
    return float(layout.microbatches * cycle_s + round_s + exchange / layout.local_steps)


# ------------------------------------------------------------------ prediction
def batch_s(layout: Layout, setting: Question, wire: str = "links", **changes: object) -> float:
    """Predict the seconds per batch. `wire`: "links", "undelayed" or "none"; `changes`: of the job's fields."""
    whole, steps = layout.microbatches, layout.local_steps

    def step_s(**more: object) -> float:
        links = None if wire == "none" else InOrderStar(setting.link, delayed=wire == "links")
        return ideal_step_ns(layout.shape(**changes, **more).trace(2), links, 2) / 1e9

    if layout.stages == 1:
        return step_s() / steps
    few, many = 2 * layout.job["in_flight"], 4 * layout.job["in_flight"]
    one_s, more_s = step_s(microbatches=min(whole, many), local_steps=1), 0.0
    if whole > many:
        more_s = (one_s - step_s(microbatches=few, local_steps=1)) / (many - few) * (whole - many)
    further_s = step_s(microbatches=min(whole, many), local_steps=2) - one_s + more_s if steps > 1 else 0.0
    return (one_s + more_s + (steps - 1) * further_s) / steps


def limits(layout: Layout, setting: Question) -> dict[str, float]:
    """Return the shares of a batch's time that go with all messages and codecs, with codecs' time, with transmission,
    including the wait of messages that meet, and with delays.
    """
    free = {"codec_cost": "zero"} if layout.stages > 1 else {}
    parts = (batch_s(layout, setting, "none", **free), batch_s(layout, setting, "none"))
    ends = list(itertools.accumulate([0.0, *parts, batch_s(layout, setting, "undelayed"), layout.batch_s], max))
    return {name: (end - begin) / ends[-1] for name, (begin, end) in zip(LIMITS, itertools.pairwise(ends), strict=True)}


def experiment(setting: Question, layouts: Sequence[Layout], most: int = 12_000) -> str:
    """Return the text of a cells.toml with a grid for each layout. `most`: packets per step to play, unless messages
    would have too few: their sizes are divided.
    """
    text = f"question = {toml_value(f'Is the advice for {setting.model} behind {setting.profile} right?')}\n"
    for number, layout in enumerate(layouts, 1):
        shape, slowest = layout.shape(), min(pipe.rate_bps for pipe in setting.link.pipes)
        smallest = min(shape.message_bytes)
        least = max(4 if layout.kind == "pipeline" else 1, smallest * _LEAST_BPS // slowest // 1448 + 1)
        packets = max(least, min(256, most * smallest // shape.payload_bytes))
        fields = {**layout.job, "packets": packets, "steps": 4 if layout.stages == 1 else 3}
        fields |= {"links": setting.playable, "topology": "star"} if layout.stages == 1 else {}
        text += f"\n[grid.choice-{number}.cell]\n"
        text += "".join(f"{name} = {toml_value(value)}\n" for name, value in fields.items())
    return text
