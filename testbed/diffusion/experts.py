"""Expert parallelism: images stay at their workers, tokens go to the workers of their experts and come back.

Each layer dispatches tokens, all to all, and combines what their experts made of them; the shared expert is at every
worker. DICE (arXiv 2411.16786) lets a layer use what the experts made of tokens of an earlier denoising step:

synchronous  of this step
displaced    of the step two before: dispatched tokens are used in the next step, and combined ones in the next again
interweaved  of the step before: a layer's experts compute in the next layer's slot

with some layers synchronous all the same, and with one of a token's two expert outputs sent in every second step only.
Expert e is at worker e mod W. What the system does besides (buffers, streams) is not here; after its released code, as
others describe it.

Images are computed in blocks of `BLOCK`, and an expert's rows of a block are padded to the most there can be: whatever
the number of workers, every matrix product has the same rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from testbed.codecs.contract import Codec, Context, MessageKey
from testbed.codecs.make import make
from testbed.diffusion.dit import TOP, Block, Dit, Routing, by_heads, to_images
from testbed.diffusion.programs import LABELS, divide
from testbed.errors import SpecError
from testbed.pipeline.frame import HEADER_BYTES
from testbed.play.trace import RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace

BLOCK: Final = 16
"""Images."""
_INDEX_BYTES = 1
"""Of a dispatched token: which expert it is for. Where it belongs is known to its sender."""
Deferred = Literal["dispatch", "combine"]


class Schedule(NamedTuple):
    """Which outputs of experts a layer uses, and which are sent."""

    lag: int
    """Steps: 0 synchronous, 1 interweaved, 2 displaced."""
    synchronous: Literal["none", "deep", "shallow", "staggered"] = "none"
    """Half of the layers that wait all the same."""
    skip: Literal["none", "low", "high"] = "none"
    """In every second step tokens are not sent to the expert with the lower, or the higher, of their two scores, and
    what is used is its output of the step before."""
    scores: Literal["fresh", "stale"] = "fresh"
    """Of which step's routing outputs are weighted by."""
    warmup: int = 1
    """Synchronous steps at the beginning."""

    def lag_of(self, layer: int, layers: int, step: int) -> int:
        """Return by how many steps a layer's outputs may be late in a step."""
        waits = {
            "none": False,
            "deep": layer >= layers - layers // 2,
            "shallow": layer < layers // 2,
            "staggered": layer % 2 == 1,
        }[self.synchronous]
        return 0 if waits or step < self.warmup else self.lag

    def slots(self, layer: int, layers: int, step: int) -> tuple[int, ...]:
        """Return which of a token's experts it is sent to in a step: 0 is that of the higher score."""
        if self.skip == "none" or not self.lag_of(layer, layers, step) or step % 2 == 0:
            return tuple(range(TOP))
        return (0,) if self.skip == "low" else (1,)


class Crossing(NamedTuple):
    """One message of the all-to-all."""

    what: Deferred
    step: int
    layer: int
    sender: int
    receiver: int


class ExpertSampled(NamedTuple):
    """What came of a request."""

    images: Tensor
    """(B, 64), -1 to 1."""
    frame_bytes: dict[Crossing, int]


class _Used(NamedTuple):
    """What experts made of a block's tokens in one step."""

    outputs: Tensor
    """(rows, TOP, d)"""
    routing: Routing


class _Crossings:
    """What is sent in one layer and step, with real payloads."""

    def __init__(self, codec: Codec, step: int, layer: int, frame_bytes: dict[Crossing, int]) -> None:
        self._codec, self._step, self._layer, self._bytes = codec, step, layer, frame_bytes

    def cross(self, what: Deferred, rows: Tensor, sender: int, receiver: int) -> Tensor:
        """Return what the receiver has of rows (n, d)."""
        if sender == receiver or not len(rows):
            return rows
        key = MessageKey("evaluation", self._step, self._layer, ())
        payload = self._codec.encode(rows, key)
        more = HEADER_BYTES + (_INDEX_BYTES * len(rows) if what == "dispatch" else 0)
        place = Crossing(what, self._step, self._layer, sender, receiver)
        self._bytes[place] = self._bytes.get(place, 0) + memoryview(payload).nbytes + more
        return self._codec.decode(payload, key)


@torch.no_grad()
def sample_experts(
    model: Dit, noise: Tensor, labels: Tensor, steps: int, schedule: Schedule, *, workers: int = 1, codec: str = "fp32"
) -> ExpertSampled:
    """Sample images from noise (T, B, 4), whole blocks of them. `codec`: of all tokens that cross, one without memory.

    SpecError where images are no whole blocks, one at least for each worker, or there are more workers than experts.
    """
    images, size = len(labels), model.size
    blocks = images // BLOCK
    if images % BLOCK or not 1 <= workers <= min(blocks, size.experts):
        raise SpecError(
            f"{images} images for {workers} workers and {size.experts} experts: images come in blocks of {BLOCK}, and "
            "each worker has a block and an expert at least"
        )
    home = {block: worker for worker, of in enumerate(divide(blocks, workers)) for block in range(*of)}
    made = make(codec, Context(0, 0, "forward"))
    pixels = list(torch.split(noise, BLOCK, dim=1))
    frame_bytes: dict[Crossing, int] = {}
    past = defaultdict[int, list[list[_Used]]](list)
    for step in range(steps):
        conditions = [model.condition(torch.full((BLOCK,), step / steps), part) for part in torch.split(labels, BLOCK)]
        hidden = [model.begin(part, slice(None)) for part in pixels]
        for number in range(size.layers):
            block = model.block(number)
            modulations = [block.modulations(condition) for condition in conditions]
            hidden = [_attended(block, x, m) for x, m in zip(hidden, modulations, strict=True)]
            inputs = [block.feed_input(x, m) for x, m in zip(hidden, modulations, strict=True)]
            routings = [block.route(x.flatten(0, 1)) for x in inputs]
            slots = schedule.slots(number, size.layers, step)
            sent = _Crossings(made, step, number, frame_bytes)
            fresh = _through_experts(block, inputs, routings, slots, home, workers, sent)
            if len(slots) < TOP:
                (left,) = set(range(TOP)) - set(slots)
                for now, before in zip(fresh, past[number][-1], strict=True):
                    now.outputs[:, left] = before.outputs[:, left]
            past[number] = [*past[number][-2:], fresh]
            lag = min(schedule.lag_of(number, size.layers, step), len(past[number]) - 1)
            for place, used in enumerate(past[number][-1 - lag]):
                scores = routings[place].scores if schedule.scores == "fresh" else used.routing.scores
                mixed = (used.outputs * scores[..., None]).sum(1).view(inputs[place].shape)
                shared = block.feed(inputs[place])
                hidden[place] = hidden[place] + modulations[place][5] * (shared + mixed)
        pixels = [
            z + model.velocity(x, condition) / steps for z, x, condition in zip(pixels, hidden, conditions, strict=True)
        ]
    return ExpertSampled(to_images(torch.cat(pixels, dim=1)), frame_bytes)


def _attended(block: Block, x: Tensor, modulations: Sequence[Tensor]) -> Tensor:
    q, k, v = block.project(x, modulations)
    return block.attend(x, q, by_heads(k, block.heads), by_heads(v, block.heads), modulations)


def _through_experts(
    block: Block,
    inputs: Sequence[Tensor],
    routings: Sequence[Routing],
    slots: Sequence[int],
    home: dict[int, int],
    workers: int,
    sent: _Crossings,
) -> list[_Used]:
    """Dispatch all tokens, compute, and combine; slots that are not sent stay zero."""
    rows = [x.flatten(0, 1) for x in inputs]
    used = [_Used(torch.zeros(len(x), TOP, x.shape[1]), routing) for x, routing in zip(rows, routings, strict=True)]
    for sender in range(workers):
        own = [place for place in range(len(rows)) if home[place] == sender]
        for receiver in range(workers):
            chosen = [
                (place, expert, *_chosen(routings[place], expert, slots))
                for place in own
                for expert in range(receiver, len(block.experts), workers)
            ]
            given = torch.cat([rows[place][at] for place, _, at, _ in chosen])
            taken = torch.split(sent.cross("dispatch", given, sender, receiver), [len(at) for _, _, at, _ in chosen])
            outputs = []
            for (place, expert, _, _), tokens in zip(chosen, taken, strict=True):
                padded = torch.zeros_like(rows[place])
                padded[: len(tokens)] = tokens
                outputs.append(block.experts[expert](padded)[: len(tokens)])
            combined = sent.cross("combine", torch.cat(outputs), receiver, sender)
            back = torch.split(combined, [len(x) for x in outputs])
            for (place, _, at, slot), output in zip(chosen, back, strict=True):
                used[place].outputs[at, slot] = output
    return used


def _chosen(routing: Routing, expert: int, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the rows that go to an expert, and in which slot each has it."""
    wanted = torch.zeros_like(routing.experts, dtype=torch.bool)
    wanted[:, list(slots)] = routing.experts[:, list(slots)] == expert
    at, slot = wanted.nonzero(as_tuple=True)
    return at, slot


# ---------------------------------------------------------------------- traces
class ExpertCosts(NamedTuple):
    """How long a worker computes in one layer and step, and how large messages are."""

    own_ns: int
    """Attention, router and shared expert of its images."""
    experts_ns: int
    """Its experts, for all images; half where only one slot is sent."""
    frame_bytes: dict[Crossing, int]
    """Of messages without rows there is none."""


def expert_trace(
    schedule: Schedule, costs: ExpertCosts, *, layers: int, steps: int, workers: int, requests: int = 1
) -> Trace:
    """Return the trace of requests, one a step, as `programs.trace_of` does."""
    lanes = []
    for worker in range(workers):
        lane = Lane(worker, "worker")
        for request in range(requests):
            for operation in _operations(schedule, costs, layers, steps, workers, worker):
                if isinstance(operation, int):
                    lane.add(WORK, label=LABELS.index("compute"), value=operation)
                    continue
                what, crossing = operation
                number = (crossing.step * layers + crossing.layer) * 2 + (crossing.what == "combine")
                peer = crossing.receiver if what == SEND else crossing.sender
                size = costs.frame_bytes[crossing] if what == SEND else 0
                lane.add(what, label=LABELS.index("message"), peer=peer, tag=request << 24 | number, value=size)
            lane.add(SIGNAL, label=LABELS.index("end"), tag=request)
            lane.add(WAIT, label=LABELS.index("end"), tag=request, value=workers)
            lane.end_step()
        lanes.append(lane)
    return Trace(tuple(f"worker {w}" for w in range(workers)), LABELS, tuple(lanes), {"maker": "diffusion"})


def _operations(
    schedule: Schedule, costs: ExpertCosts, layers: int, steps: int, workers: int, worker: int
) -> Iterator[int | tuple[int, Crossing]]:
    """Yield what a worker does: nanoseconds of work, or a message that it sends or receives."""
    others = [other for other in range(workers) if other != worker]
    late = [layer for layer in range(layers) if schedule.lag_of(layer, layers, schedule.warmup)]

    def message(kind: int, what: Deferred, step: int, layer: int) -> Iterator[tuple[int, Crossing]]:
        for other in others:
            pair = (worker, other) if kind == SEND else (other, worker)
            if (crossing := Crossing(what, step, layer, *pair)) in costs.frame_bytes:
                yield kind, crossing

    def experts(step: int, layer: int) -> int:
        return round(costs.experts_ns * len(schedule.slots(layer, layers, step)) / TOP)

    for step in range(steps):
        for layer in range(layers):
            yield costs.own_ns
            lag = schedule.lag_of(layer, layers, step)
            yield from message(SEND, "dispatch", step, layer)
            if lag == 0:
                yield from message(RECEIVE, "dispatch", step, layer)
                yield experts(step, layer)
                yield from message(SEND, "combine", step, layer)
                yield from message(RECEIVE, "combine", step, layer)
                continue
            # What was begun before: of the step before where displaced, of the layer before where interweaved.
            before = (step - 1, layer) if lag == 2 else _earlier(late, step, layer)
            if before[0] >= schedule.warmup:
                yield from message(RECEIVE, "dispatch", *before)
                yield experts(*before)
                yield from message(SEND, "combine", *before)
            if step - lag >= schedule.warmup:
                yield from message(RECEIVE, "combine", step - lag, layer)
    # What is still under way is used by nobody, and belongs to the request all the same.
    for step in range(max(schedule.warmup, steps - 2), steps):
        for layer in late:
            lag = schedule.lag
            done = step < steps - 1 if lag == 2 else (step, layer) != (steps - 1, late[-1])
            if not done:
                yield from message(RECEIVE, "dispatch", step, layer)
                yield experts(step, layer)
                yield from message(SEND, "combine", step, layer)
    for step in range(max(schedule.warmup, steps - schedule.lag), steps):
        for layer in late:
            yield from message(RECEIVE, "combine", step, layer)


def _earlier(late: Sequence[int], step: int, layer: int) -> tuple[int, int]:
    """Return the step and layer whose experts compute in a layer's slot: of the layers that are late, the one
    before.
    """
    place = late.index(layer)
    return (step, late[place - 1]) if place else (step - 1, late[-1])
