"""Which layout trains a model fastest on given devices and links? Predicts those that fit, and ranks them.

A layout is a pipeline; data parallel workers, whose ring sums fp32 gradients, or weight changes after local steps; or
several pipelines that exchange them. It has micro-batches, a depth and a codec per direction. The three loops of
`policies.cycle` sort all; the best are simulated from their shapes over links that keep the order of packets
(`in_order`), for a few micro-batches: every further one takes the same time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
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
_SEQUENCES, _DEPTHS, _LOCAL_STEPS = (1, 2, 4, 8), (1, 2, 4), (1, 8, 32)
"""Sequences per micro-batch, micro-batches in flight per stage, and batches between two exchanges. [chosen]"""
_SIMULATED, _PER_GROUP = 14, 3
"""Number of layouts to simulate, in all and of those with the same stages, replicas and local steps. [chosen]"""
_PLAYED_PACKETS = 12_000
"""Packets per step to play: messages of a large job are divided until no more are left, or as few as possible."""
_EFFECTS = ("loss", "jitter", "reorder", "duplicate", "queue", "slot")


class Setting(NamedTuple):
    """A question, with what it names."""

    model: str
    size: ModelSize
    device: ComputeDevice
    nodes: int
    profile: str
    link: LinkProfile
    """Of every node."""
    batch: int
    """Sequences per batch, over all nodes."""
    tokens: int
    """Per sequence."""
    local_steps: int
    """Maximum number of batches between two exchanges."""

    @property
    def precision(self) -> Precision:
        return "fp32" if self.device.half is None else "bf16"

    @property
    def effects(self) -> list[str]:
        """What the link does besides its rate, delay and buffer; the prediction ignores it."""
        pipes = [pipe.model_dump() | {"jitter": pipe.jitter_ns or pipe.jitter_reorders} for pipe in self.link.pipes]
        return [effect for effect in _EFFECTS if any(pipe.get(effect) for pipe in pipes)]

    @property
    def playable(self) -> str:
        """The link as it can be played with divided rates: nothing is lost, and buffers hold all that waits."""
        text, added = self.profile.strip(), ", ".join(["buffer=8GB", *(f"{effect}=none" for effect in self.effects)])
        return f"{text[:-1]}, {added})" if is_link_text(text) else f"{text}, {added}"


class Layout(NamedTuple):
    """A way to train on these nodes."""

    replicas: int
    stages: int
    local_steps: int
    microbatches: int
    """Per batch of a replica."""
    job: Mapping[str, Any]
    """Its fields in a cells.toml."""
    memory_bytes: float
    """Of the device that needs most."""
    rough_s: float = 0.0
    """Seconds per batch, before it is simulated."""

    @property
    def kind(self) -> str:
        return "data parallel" if self.stages == 1 else "hybrid" if self.replicas > 1 else "pipeline"

    @property
    def group(self) -> tuple[int, int, int]:
        """What remains of it without its codecs and micro-batches."""
        return self[:3]

    @property
    def codecs(self) -> tuple[str, ...]:
        """Codec forward and backward; empty without."""
        return tuple(part.partition("=")[2] for part in self.job["codec"].split(", ")) if self.stages > 1 else ()

    def shape(self, **changes: object) -> HybridShape | DataParallelShape:
        """Return its shape, with changed fields."""
        return (resolve_hybrid if self.stages > 1 else resolve_data_parallel)({**self.job, **changes}, "a layout")


class Predicted(NamedTuple):
    """A layout and its simulated time per batch."""

    layout: Layout
    batch_s: float


class Advice(NamedTuple):
    """The answer."""

    chosen: list[Predicted]
    """The fastest of each kind; fastest first, like all simulated."""
    simulated: list[Predicted]
    fitting: int
    """Number of layouts that fit."""


def look_up(
    model: str, device: str, nodes: int, profile: str, batch: int, tokens: int | None = None, local_steps: int = 8
) -> Setting:
    """Check a question. SpecError or UnknownNameError for what cannot be advised."""
    size, machine, link = named_size(model), load_device(device), load_profile(profile)
    tokens, constant = min(_LONGEST, size.context) if tokens is None else tokens, "state one like link(80Mbit, 10ms)"
    for bad, what in (
        (not 2 <= nodes <= _MOST_NODES, f"--nodes is {nodes}; state 2 to {_MOST_NODES}, because one has no link"),
        (batch < 1 or batch % max(1, nodes), f"--batch is {batch}; state a multiple of {nodes}, for equal shares"),
        (not 1 <= tokens <= size.context, f"--sequence-length is {tokens}; {model} has a context of {size.context}"),
        (local_steps < 1, f"--local-steps is {local_steps}; state at least 1"),
        (not machine.memory_bytes, f"device {device} has no memory, which says what fits; add it to its file"),
        (not machine.fp32, f"device {device} has no speed in fp32, which codecs' cost needs; add [fp32] to its file"),
        (len(link.pipes) < 2, f"profile {profile} has an unshaped direction; {constant}"),
        (link.varies or link.background, f"profile {profile} varies or has background flows; {constant}"),
    ):
        if bad:
            raise SpecError(f"cannot advise: {what}")
    return Setting(model, size, machine, nodes, profile, link, batch, tokens, local_steps)


def advise(setting: Setting, codecs: Sequence[str]) -> Advice:
    """Answer a question; `codecs` may be used. SpecError if no layout fits."""
    fitting = sorted(_layouts(setting, codecs), key=lambda layout: layout.rough_s)
    if not fitting:
        raise SpecError(
            f"cannot advise: no layout of {setting.model} on {setting.nodes} nodes needs at most {_USABLE:.0%} of the "
            f"memory of {setting.device.name}; use more nodes, a device with more, a smaller model or shorter sequences"
        )
    groups = defaultdict[object, list[Layout]](list)
    for layout in fitting:
        groups[layout.group].append(layout)
    best = sorted((each for part in groups.values() for each in part[:_PER_GROUP]), key=lambda each: each.rough_s)
    taken = {id(each): each for each in best[:_SIMULATED]}
    taken |= {id(each): each for each in {each.kind: each for each in reversed(fitting)}.values()}
    simulated = [Predicted(each, batch_s(each, setting)) for each in taken.values()]
    simulated.sort(key=lambda each: each.batch_s)
    chosen = {each.layout.kind: each for each in reversed(simulated)}.values()
    return Advice(sorted(chosen, key=lambda each: each.batch_s), simulated, len(fitting))


# ------------------------------------------------------------------ layouts
def _layouts(setting: Setting, codecs: Sequence[str]) -> Iterator[Layout]:
    """Yield the layouts that fit."""
    nodes, room, allowed = setting.nodes, _USABLE * (setting.device.memory_bytes or 0), setting.local_steps
    model = {"model": setting.model, "precision": setting.precision, "sequence_length": setting.tokens, "bits": _BITS}
    job: dict[str, Any] = model | {"parallelism": "data", "device": setting.device.name, "workers": nodes}
    job |= {"exchange": "all-reduce", "sequences": setting.batch // nodes}
    for steps in (steps for steps in _LOCAL_STEPS if steps <= allowed):
        if (memory := _stage_bytes(setting, range(setting.size.layers), 1, 1, steps)) <= room:
            yield Layout(nodes, 1, steps, 1, {**job, "local_iterations": steps}, memory)
    counts = [count for count in range(2, min(nodes, setting.size.layers) + 1) if nodes % count == 0]
    for stages, sequences in itertools.product(counts, _SEQUENCES):
        for replicas in {1, nodes // stages}:
            whole, odd = divmod(setting.batch, replicas * sequences)
            ahead = {min(whole, stages * times) for times in _DEPTHS} | {whole} if whole and not odd else ()
            job = {**model, **_split(setting, replicas, stages), "sequences": sequences, "microbatches": whole}
            shapes = dict[object, HybridShape]()
            for steps, many in itertools.product(_LOCAL_STEPS, sorted(ahead)):
                if steps <= (allowed if replicas > 1 else 1):
                    schedule = "1f1b" if many < whole else "gpipe"
                    own = {**job, "in_flight": many, "schedule": schedule, "local_steps": steps}
                    yield from _coded(setting, Layout(replicas, stages, steps, whole, own, 0.0), codecs, shapes)


def _coded(
    setting: Setting, layout: Layout, codecs: Sequence[str], shapes: dict[object, HybridShape]
) -> Iterator[Layout]:
    """Yield a layout that fits with every pair of codecs; with recomputation if it fits no other way. `shapes`: known
    ones that differ in the schedule.
    """
    stages, job, exchanged = layout.stages, layout.job, layout.local_steps * (layout.replicas > 1)
    numbers = {name: job[name] for name in ("microbatches", "in_flight")}
    held = [depth(job["schedule"], stage=at, stages=stages, **numbers) for at in range(stages)]
    for again in (False, True):
        parts = zip(split_layers(setting.size.layers, stages), held, strict=True)
        memory = max(
            _stage_bytes(setting, own, job["sequences"], there, exchanged, again=again) for own, there in parts
        )
        if memory <= _USABLE * (setting.device.memory_bytes or 0):
            for pair in itertools.product(codecs, repeat=2):
                coded = layout._replace(
                    job={**job, "recompute": again, "codec": "fwd={}, bwd={}".format(*pair)}, memory_bytes=memory
                )
                if (again, pair) not in shapes:
                    shapes[again, pair] = resolve_hybrid({**coded.job, "microbatches": 1, "local_steps": 1}, "a layout")
                yield coded._replace(rough_s=_rough_s(setting, coded, shapes[again, pair]))
            return


def _split(setting: Setting, replicas: int, stages: int) -> dict[str, Any]:
    """Return the fields of pipelines with every stage at a site of its own."""
    sites = {"count": replicas * stages, "device": setting.device.name, "link": setting.playable}
    scenario = {"summary": "equal nodes", "source": "[chosen]", "server": setting.playable, "sites": [sites]}
    pipelines = {"parallelism": "hybrid", "replicas": [stages] * replicas, "exchange": "all-to-all"}
    return {**pipelines, "scenario": scenario, "codec_cost": "device"}


def _stage_bytes(
    setting: Setting, own: range, sequences: int, held: int, exchanged: int, *, again: bool = False
) -> float:
    """Return a device's memory, counted as in `training.memory_need`.

    `held`: micro-batches between forward and backward; `again`: whether it recomputes activations; `exchanged`: local
    steps, which need a message, and from two on also the last weights and a momentum; 0: no exchange.
    """
    values = held * 2 * setting.size.width + (1 if again else held) * kept_values(setting.size, own)
    state = _STATE_BYTES[setting.precision] + 4 * (exchanged > 0) + 8 * (exchanged > 1)
    kept = _VALUE_BYTES[setting.precision] * sequences * setting.tokens * values
    return state * parameters(setting.size, own) + kept


def _rough_s(setting: Setting, layout: Layout, shape: HybridShape) -> float:
    """Return a rough estimate of the seconds per batch: the longest of three loops, a round trip, and the exchange."""
    (up, down), stages = setting.link.pipes, layout.stages
    rate, delays_s = min(up.rate_bps, down.rate_bps), (up.delay_ns + down.delay_ns) / 1e9
    there, back = (wire_bytes(size, setting.link) * 8 / rate for size in shape.crossing_bytes)
    passes = [(f + b) / 1e9 for f, b in zip(shape.forward_ns[:stages], shape.backward_ns, strict=False)]
    one_way = stages == 2 and layout.job["schedule"] == "1f1b"
    round_s = sum(passes) + (stages - 1) * (there + back + 2 * delays_s)
    cycle_s = steady_cycle_s(
        max(passes), max(there, back) if one_way else there + back, round_s - max(passes), layout.job["in_flight"] - 1
    )
    exchange = sum(size for sender, _, size in shape.exchanged if sender == stages - 1) * 8 / rate
    return layout.microbatches * cycle_s + round_s + (exchange + max(shape.update_ns) / 1e9) / layout.local_steps


# ------------------------------------------------------------------ prediction
def batch_s(layout: Layout, setting: Setting, wire: str = "links", **changes: object) -> float:
    """Predict the seconds per batch. `wire`: "links", "undelayed" or "none"; `changes`: of the job's fields."""
    (up, down), whole, steps = setting.link.pipes, layout.microbatches, layout.local_steps

    def step_s(**more: object) -> float:
        links = None if wire == "none" else InOrderStar(setting.link, up, down, delayed=wire == "links")
        return ideal_step_ns(layout.shape(**changes, **more).trace(2), links, 2) / 1e9

    if layout.stages == 1:
        return step_s() / steps
    deep = 2 * layout.stages if layout.job["schedule"] == "gpipe" else layout.job["in_flight"]
    few, many = 2 * deep, 4 * deep
    one_s = step_s(microbatches=min(whole, many), local_steps=1)
    more_s = 0.0
    if whole > many:
        more_s = (one_s - step_s(microbatches=few, local_steps=1)) / (many - few) * (whole - many)
    further_s = step_s(microbatches=min(whole, many), local_steps=2) - one_s + more_s if steps > 1 else 0.0
    return (one_s + more_s + (steps - 1) * further_s) / steps


def limits(predicted: Predicted, setting: Setting) -> dict[str, float]:
    """Return the shares of a batch's time that go with all messages and codecs, with codecs' time, with transmission,
    including the wait of messages that meet, and with delays.
    """
    layout, total_s = predicted
    free = {"codec_cost": "zero"} if layout.stages > 1 else {}
    parts = (batch_s(layout, setting, "none", **free), batch_s(layout, setting, "none"))
    ends = list(itertools.accumulate([0.0, *parts, batch_s(layout, setting, "undelayed"), total_s], max))
    return {name: (end - begin) / ends[-1] for name, (begin, end) in zip(LIMITS, itertools.pairwise(ends), strict=True)}


def experiment(setting: Setting, layouts: Sequence[Layout]) -> str:
    """Return the text of a cells.toml with a grid for each layout."""
    about = (
        f"Is the advice for {setting.model} on {setting.nodes} {setting.device.name} behind {setting.profile} right?"
    )
    text = f"question = {toml_value(about)}\n"
    for number, layout in enumerate(layouts, 1):
        shape, least = layout.shape(), 4 if layout.kind == "pipeline" else 1
        packets = max(least, _PLAYED_PACKETS * min(shape.message_bytes) // shape.payload_bytes)
        fields = {**layout.job, "packets": min(256, packets), "steps": 4 if layout.stages == 1 else 3}
        fields |= {"links": setting.playable, "topology": "star"} if layout.stages == 1 else {}
        text += f"\n[grid.choice-{number}.cell]\n"
        text += "".join(f"{name} = {toml_value(value)}\n" for name, value in fields.items())
    return text
