"""Expert parallelism: images stay at their workers, tokens go to the workers of their experts and back.

Each layer dispatches tokens, all to all, and combines the outputs of their experts; the shared expert is at every
worker. DICE (arXiv 2411.16786) lets a layer use expert outputs of an earlier denoising step:

synchronous  of this step
displaced    of the step two before: dispatched tokens are used in the next step, and combined ones in the next again
interweaved  of the step before: a layer's experts compute in the next layer's slot

with some layers still synchronous, and with one of a token's two expert outputs sent only in every second step. Expert
e is at worker e mod W. Other parts of the system (buffers, streams) are not modelled; based on descriptions of its
released code.

Images are computed in blocks of `BLOCK`, and an expert's rows of a block are padded to the maximum, so that every
matrix product has the same rows for any number of workers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey, Payload
from testbed.codecs.make import make
from testbed.diffusion.dit import TOKENS, TOP, Dit, Routing, to_images
from testbed.diffusion.node import Sampled, SamplingNode, run_together
from testbed.diffusion.programs import Costs, Crossing, Deferred, divide, trace_of
from testbed.errors import CodecError, SpecError
from testbed.jobs.sampling import Action, Actions, Compute, ReceivePart, SamplingJob, SendPart
from testbed.trace.format import Trace

BLOCK: Final = 16
"""Images per block."""
_LENGTH = struct.Struct("<I")
"""Length field of a dispatched payload. After the payload each token has a byte: its block at the sender, and its
expert at the receiver. Only the sender needs its position in the block."""
_PAIRS = 256
"""Pairs of block and expert that a byte can encode."""


class ExpertSchedule(NamedTuple):
    """The expert outputs that a layer uses, and those that are sent."""

    lag: int
    """Lag in steps: 0 synchronous, 1 interweaved, 2 displaced."""
    synchronous: Literal["none", "deep", "shallow", "staggered"] = "none"
    """The half of the layers that stays synchronous."""
    skip: Literal["none", "low", "high"] = "none"
    """In every second step tokens are not sent to the expert with the lower, or the higher, of their two scores; its
    output of the previous step is used."""
    scores: Literal["fresh", "stale"] = "fresh"
    """The step whose routing weights outputs."""
    warmup: int = 1
    """Initial synchronous steps."""


class ExpertProgram(NamedTuple):
    """Parameters of sampling."""

    schedule: ExpertSchedule
    workers: int
    layers: int
    steps: int
    """Denoising steps."""

    def actions(self) -> list[Actions]:
        """Return the actions of each worker."""
        return [list(_actions(self, worker)) for worker in range(self.workers)]

    def lag_of(self, layer: int, step: int) -> int:
        """Return the number of steps by which a layer's outputs may be late in a step."""
        waits = {
            "none": False,
            "deep": layer >= self.layers - self.layers // 2,
            "shallow": layer < self.layers // 2,
            "staggered": layer % 2 == 1,
        }[self.schedule.synchronous]
        return 0 if waits or step < self.schedule.warmup else self.schedule.lag

    def slots(self, layer: int, step: int) -> tuple[int, ...]:
        """Return the experts of a token to which it is sent in a step: 0 has the higher score."""
        if self.schedule.skip == "none" or not self.lag_of(layer, step) or step % 2 == 0:
            return tuple(range(TOP))
        return (0,) if self.schedule.skip == "low" else (1,)


class _AtExpert(NamedTuple):
    """Rows of a block for an expert."""

    place: int
    """Index of the block at its worker."""
    at: Tensor
    slot: Tensor


class _Used(NamedTuple):
    """Expert outputs for a worker's tokens in one step and layer, by block."""

    outputs: list[Tensor]
    """(rows, TOP, d) each; slots that were not sent stay zero until used."""
    routings: list[Routing]
    chosen: list[list[_AtExpert]]
    """By receiving worker; ordered by block, then expert."""


class ExpertWorker(SamplingNode):
    """A worker's state of a request: its images and its experts."""

    def __init__(self, job: SamplingJob, number: int, model: Dit, program: ExpertProgram, codec: str) -> None:
        """`codec`: a stateless codec for all tokens sent. SpecError for an invalid codec."""
        super().__init__(job, number)
        self._model, self._program, self._number = model, program, number
        self._codec = make(codec, Context(0, 0, "forward"))

    def begin(self, noise: Tensor, labels: Tensor) -> None:
        """Start with noise (T, B, 4) and labels (B,) of all workers' images. SpecError for images that are not whole
        blocks, at least one per worker, or for more workers than experts.
        """
        images, experts, workers = len(labels), self._model.size.experts, self._program.workers
        blocks = images // BLOCK
        if images % BLOCK or not 1 <= workers <= min(blocks, experts):
            raise SpecError(
                f"{images} images for {workers} workers and {experts} experts: use blocks of {BLOCK} images, and at "
                "least one block and one expert per worker"
            )
        if workers > 1 and -(-blocks // workers) * -(-experts // workers) > _PAIRS:
            raise SpecError(f"{images} images for {workers} workers and {experts} experts: use fewer images")
        mine = slice(*(BLOCK * end for end in divide(blocks, workers)[self._number]))
        self._pixels = list(torch.split(noise[:, mine], BLOCK, dim=1))
        self._labels = torch.split(labels[mine], BLOCK)
        self._used: dict[tuple[int, int], _Used] = {}
        """Expert outputs, by step and layer."""
        self._arrived: dict[tuple[int, int], dict[int, tuple[Tensor, Tensor]]] = {}
        """Each sender's tokens (n, d) with their bytes, by step and layer."""
        self._done: dict[Crossing, Tensor] = {}

    @property
    def images(self) -> Tensor:
        """This worker's images, (n, 64)."""
        return to_images(torch.cat(self._pixels, dim=1))

    # ------------------------------------------------------------------ computing
    def compute(self, action: Compute) -> None:
        does = {"own": self._own, "experts": self._experts, "mix": self._mix}
        does[action.task](action.step, action.layer)

    def _own(self, step: int, layer: int) -> None:
        model, program = self._model, self._program
        block = model.block(layer)
        if layer == 0:
            time = torch.full((BLOCK,), step / program.steps)
            self._conditions = [model.condition(time, labels) for labels in self._labels]
            self._hidden = [model.begin(pixels, slice(None)) for pixels in self._pixels]
        self._modulations = [block.modulations(condition) for condition in self._conditions]
        self._hidden = [block.attend_to_all(x, m) for x, m in zip(self._hidden, self._modulations, strict=True)]
        inputs = self._inputs = [block.feed_input(x, m) for x, m in zip(self._hidden, self._modulations, strict=True)]
        routings = [block.route(x.flatten(0, 1)) for x in inputs]
        slots = program.slots(layer, step)
        chosen = [
            [
                _AtExpert(place, *_chosen(routing, expert, slots))
                for place, routing in enumerate(routings)
                for expert in range(receiver, len(block.experts), program.workers)
            ]
            for receiver in range(program.workers)
        ]
        outputs = [torch.zeros(BLOCK * TOKENS, TOP, model.size.width) for _ in inputs]
        self._used[step, layer] = _Used(outputs, routings, chosen)
        self._arrived.setdefault((step, layer), {})[self._number] = self._given(step, layer, self._number)

    def _given(self, step: int, layer: int, receiver: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of the last computed layer for a worker, (n, d), and the byte of each."""
        chosen = self._used[step, layer].chosen[receiver]
        given = torch.cat([self._inputs[each.place].flatten(0, 1)[each.at] for each in chosen])
        return given, torch.arange(len(chosen)).repeat_interleave(torch.tensor([len(each.at) for each in chosen]))

    def _experts(self, step: int, layer: int) -> None:
        """Compute expert outputs for all received tokens, block by block."""
        block, workers = self._model.block(layer), self._program.workers
        here = [block.experts[expert] for expert in range(self._number, len(block.experts), workers)]
        for sender, (tokens, pairs) in self._arrived.pop((step, layer)).items():
            outputs = []
            for pair, taken in enumerate(torch.split(tokens, torch.bincount(pairs).tolist())):
                padded = torch.zeros(BLOCK * TOKENS, tokens.shape[1])
                padded[: len(taken)] = taken
                outputs.append(here[pair % len(here)](padded)[: len(taken)])
            made = torch.cat(outputs) if outputs else tokens
            if sender == self._number:
                self._combine(step, layer, sender, made)
            else:
                self._done[Crossing("combine", step, layer, self._number, sender)] = made

    def _combine(self, step: int, layer: int, worker: int, made: Tensor) -> None:
        """Scatter the outputs of a worker's experts."""
        used = self._used[step, layer]
        chosen = used.chosen[worker]
        if len(made) != sum(len(each.at) for each in chosen):
            raise CodecError(
                f"cannot use the outputs of worker {worker} in step {step}, layer {layer}: {len(made)} tokens"
            )
        for each, output in zip(chosen, torch.split(made, [len(each.at) for each in chosen]), strict=True):
            used.outputs[each.place][each.at, each.slot] = output

    def _mix(self, step: int, layer: int) -> None:
        program, block = self._program, self._model.block(layer)
        source = max(0, step - program.lag_of(layer, step))
        used, fresh = self._used[source, layer], self._used[step, layer].routings
        for left in set(range(TOP)) - set(program.slots(layer, source)):
            for now, before in zip(used.outputs, self._used[source - 1, layer].outputs, strict=True):
                now[:, left] = before[:, left]
        self._used.pop((source - 2, layer), None)
        for place, inputs in enumerate(self._inputs):
            scores = (fresh if program.schedule.scores == "fresh" else used.routings)[place].scores
            mixed = (used.outputs[place] * scores[..., None]).sum(1).view(inputs.shape)
            gate = self._modulations[place][5]
            self._hidden[place] = self._hidden[place] + gate * (block.feed(inputs) + mixed)
        if layer == program.layers - 1:
            done = zip(self._pixels, self._hidden, self._conditions, strict=True)
            self._pixels = [z + self._model.velocity(x, condition) / program.steps for z, x, condition in done]

    # ------------------------------------------------------------------ messages
    def payload(self, part: Crossing) -> bytes:
        key = MessageKey("evaluation", part.step, part.layer, ())
        if part.what == "combine":
            made = self._done.pop(part)
            return bytes(self._codec.encode(made, key)) if len(made) else b""
        tokens, pairs = self._given(part.step, part.layer, part.receiver)
        encoded = bytes(self._codec.encode(tokens, key)) if len(tokens) else b""
        return b"".join((_LENGTH.pack(len(encoded)), encoded, bytes(pairs.tolist())))

    def receive(self, part: Crossing, payload: Payload) -> None:
        key, width = MessageKey("evaluation", part.step, part.layer, ()), self._model.size.width
        view = memoryview(payload)
        if part.what == "combine":
            made = self._codec.decode(view, key) if len(view) else torch.zeros(0, width)
            self._combine(part.step, part.layer, part.sender, made)
            return
        end = _LENGTH.size + (_LENGTH.unpack_from(view)[0] if len(view) >= _LENGTH.size else 0)
        pairs = torch.tensor(list(view[end:]), dtype=torch.int64)
        tokens = self._codec.decode(view[_LENGTH.size : end], key) if end > _LENGTH.size else torch.zeros(0, width)
        if tokens.shape != (len(pairs), width):
            raise CodecError(f"cannot use {part}: {tuple(tokens.shape)} tokens for {len(pairs)} places")
        self._arrived.setdefault((part.step, part.layer), {})[part.sender] = tokens, pairs


@torch.no_grad()
def sample_experts(
    model: Dit,
    noise: Tensor,
    labels: Tensor,
    steps: int,
    schedule: ExpertSchedule,
    *,
    workers: int = 1,
    codec: str = "fp32",
) -> Sampled:
    """Sample images from noise (T, B, 4) with all workers in one process; see `ExpertWorker`, also for errors."""
    program = ExpertProgram(schedule, workers, model.size.layers, steps)
    job = SamplingJob(program.actions(), 1)
    team = [ExpertWorker(job, number, model, program, codec) for number in range(workers)]
    for worker in team:
        worker.begin(noise, labels)
    frame_bytes = run_together(job, team)
    return Sampled(torch.cat([worker.images for worker in team]), frame_bytes)


def _chosen(routing: Routing, expert: int, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the rows for an expert, and the slot of each."""
    wanted = torch.zeros_like(routing.experts, dtype=torch.bool)
    wanted[:, list(slots)] = routing.experts[:, list(slots)] == expert
    at, slot = wanted.nonzero(as_tuple=True)
    return at, slot


# ---------------------------------------------------------------------- actions, and traces
def expert_trace(
    program: ExpertProgram, own_ns: int, experts_ns: int, frame_bytes: dict[Any, int], *, requests: int = 1
) -> Trace:
    """Return the trace of requests, one per step, like `programs.trace_of`.

    Per layer and step, `own_ns` is the time of attention, router and shared expert for a worker's images; `experts_ns`
    that of its experts for all images, half if only one slot is sent. `frame_bytes`: size of each `Crossing`.
    """

    def work_ns(action: Compute) -> int:
        if action.task == "experts":
            return round(experts_ns * len(program.slots(action.layer, action.step)) / TOP)
        return own_ns if action.task == "own" else 0

    return trace_of(program.actions(), Costs(work_ns, frame_bytes.__getitem__), requests=requests)


def _actions(program: ExpertProgram, worker: int) -> Iterator[Action]:
    """Yield the actions of a worker."""
    schedule, layers, steps = program.schedule, program.layers, program.steps
    others = [other for other in range(program.workers) if other != worker]
    late = [layer for layer in range(layers) if program.lag_of(layer, schedule.warmup)]

    def work(task: str, step: int, layer: int) -> Compute:
        return Compute(task, step, layer, (0, TOKENS))

    def send(what: Deferred, step: int, layer: int) -> Iterator[SendPart]:
        return (SendPart(Crossing(what, step, layer, worker, other), other) for other in others)

    def receive(what: Deferred, step: int, layer: int) -> Iterator[ReceivePart]:
        return (ReceivePart(Crossing(what, step, layer, other, worker), other) for other in others)

    def experts(step: int, layer: int) -> Iterator[Action]:
        yield from receive("dispatch", step, layer)
        yield work("experts", step, layer)
        yield from send("combine", step, layer)

    for step in range(steps):
        for layer in range(layers):
            yield work("own", step, layer)
            lag = program.lag_of(layer, step)
            yield from send("dispatch", step, layer)
            if lag == 0:
                yield from experts(step, layer)
                yield from receive("combine", step, layer)
            else:
                # Work started earlier: in the previous step if displaced, in the previous layer if interweaved.
                before = (step - 1, layer) if lag == 2 else _earlier(late, step, layer)
                if before[0] >= schedule.warmup:
                    yield from experts(*before)
                if step - lag >= schedule.warmup:
                    yield from receive("combine", step - lag, layer)
            yield work("mix", step, layer)
    # Messages still in flight are never used, but belong to the request.
    for step in range(max(schedule.warmup, steps - 2), steps):
        for layer in late:
            done = step < steps - 1 if schedule.lag == 2 else (step, layer) != (steps - 1, late[-1])
            if not done:
                yield from experts(step, layer)
    for step in range(max(schedule.warmup, steps - schedule.lag), steps):
        for layer in late:
            yield from receive("combine", step, layer)


def _earlier(late: Sequence[int], step: int, layer: int) -> tuple[int, int]:
    """Return the step and layer whose experts compute in a layer's slot: the previous one among late layers."""
    place = late.index(layer)
    return (step, late[place - 1]) if place else (step - 1, late[-1])
