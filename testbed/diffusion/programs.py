"""Programs of workers that sample images: pure functions to lists of computing, sending and waiting.

Model weights are at every worker (patches), or each worker has some layers (pipelines). Images are divided by rows of
tokens, as evenly as these allow.

ring        synchronous sequence parallelism: keys and values of every layer travel round a ring, each hop forwards the
            payload unchanged (Ring Attention; CompactFusion, arXiv 2507.17511)
gather      the same, but every worker sends its own to every other worker
displaced   as gather, but after `warmup` synchronous steps a layer uses the others' messages of the previous step, and
            its own current ones (DistriFusion, Li et al., CVPR 2024)
pipefusion  layers in stages, tokens in patches that pass through them in turn; a stage keeps keys and values of all
            tokens, those of later patches from the previous step (PipeFusion, arXiv 2405.14430)
asyncdiff   layers in components that all compute at once, each from the previous component's output of the previous
            step (AsyncDiff, Chen et al., NeurIPS 2024)

A worker's own keys and values are never coded. Attention starts when all keys and values have arrived: an online
softmax would sum blocks in another order at every worker, and so round differently. At the end worker 0 has all pixels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

from testbed.errors import SpecError
from testbed.jobs import actions as jobs
from testbed.jobs.sampling import Action, Actions, Compute, ReceivePart, SamplingJob, SendPart
from testbed.trace.format import Trace
from testbed.trace.tracing import Colocation, TracedJob

ProgramName = Literal["ring", "gather", "displaced", "pipefusion", "asyncdiff"]
Kind = Literal["keys and values", "hidden", "velocity", "pixels"]
Deferred = Literal["dispatch", "combine"]
Tokens = tuple[int, int]
"""The first token, and one past the last."""


class Part(NamedTuple):
    """The content of one message, encoded once, however often it is sent."""

    kind: Kind
    step: int
    """The denoising step in which it was computed."""
    layer: int
    """Layer of keys and values; for hidden states the layer that they enter; otherwise 0."""
    tokens: Tokens


class Crossing(NamedTuple):
    """The content of one message of an all-to-all between experts."""

    what: Deferred
    """dispatch: tokens for experts; combine: the experts' outputs."""
    step: int
    layer: int
    sender: int
    receiver: int


class Program(NamedTuple):
    """How images are sampled."""

    name: ProgramName
    workers: int
    layers: int
    steps: int
    """Denoising steps."""
    tokens: int
    """Tokens of an image."""
    rows: int
    """Rows of an image: the number of equal parts into which it can be split."""
    warmup: int = 1
    """Initial synchronous steps of programs that use messages of an earlier step."""
    patches: int = 1
    """Patches of pipefusion; 1: synchronous, each stage waits for the previous one."""

    @property
    def shards(self) -> list[Tokens]:
        """The tokens of each worker, or of each patch of pipefusion."""
        row = self.tokens // self.rows
        parts = divide(self.rows, self.patches if self.name == "pipefusion" else self.workers)
        return [(first * row, end * row) for first, end in parts]

    def actions(self) -> list[Actions]:
        """Return the actions of each worker. SpecError for too many workers or patches."""
        most = self.rows if self.name in ("ring", "gather", "displaced") else self.layers
        if not (1 <= self.workers <= most and 1 <= self.patches <= self.rows and self.warmup >= 1 and self.steps):
            raise SpecError(
                f"{self}: use at most {most} workers, at most {self.rows} patches, at least one step, and at least "
                "one synchronous step"
            )
        make = _stage if self.name in ("pipefusion", "asyncdiff") else _patch
        return [make(self, worker) for worker in range(self.workers)]


def as_published(
    name: ProgramName, workers: int, layers: int, steps: int, tokens: int, rows: int, warmup: int = 1
) -> Program:
    """Return a program whose PipeFusion has as many patches as workers."""
    patches = workers if name == "pipefusion" else 1
    return Program(name, workers, layers, steps, tokens, rows, warmup, patches)


def divide(count: int, parts: int) -> list[tuple[int, int]]:
    """Split `count` items into runs of nearly equal length, the longer ones first."""
    ends = [-(-count * part // parts) for part in range(parts + 1)]
    return list(itertools.pairwise(ends))


# ---------------------------------------------------------------------- patches
def _patch(program: Program, worker: int) -> Actions:
    mine, count, last = program.shards[worker], program.workers, program.steps - 1
    others = [(worker + further) % count for further in range(1, count)]
    actions: list[Action] = []
    for step in range(program.steps):
        actions.append(Compute("begin", step, 0, mine))
        for layer in range(program.layers):
            actions.append(Compute("project", step, layer, mine))
            own = Part("keys and values", step, layer, mine)
            if program.name == "ring":
                actions += _round(program, worker, step, layer)
            elif program.name == "gather" or step < program.warmup:
                actions += [SendPart(own, peer) for peer in others]
                actions += [ReceivePart(own._replace(tokens=program.shards[peer]), peer) for peer in others]
            else:
                if step > program.warmup:
                    due = own._replace(step=step - 1)
                    actions += [ReceivePart(due._replace(tokens=program.shards[peer]), peer) for peer in others]
                if step < last:
                    actions += [SendPart(own, peer) for peer in others]
            actions.append(Compute("attend", step, layer, mine))
        actions += [Compute("velocity", step, 0, mine), Compute("update", step, 0, mine)]
    if worker:
        return [*actions, SendPart(Part("pixels", last, 0, mine), 0)]
    return actions + [ReceivePart(Part("pixels", last, 0, program.shards[peer]), peer) for peer in others]


def _round(program: Program, worker: int, step: int, layer: int) -> list[Action]:
    """Return a worker's hops of a ring: it sends its own part to the next worker, then forwards each received part
    unchanged.
    """
    count = program.workers
    after, before = (worker + 1) % count, (worker - 1) % count
    owned = [Part("keys and values", step, layer, program.shards[(worker - hop) % count]) for hop in range(count)]
    actions: list[Action] = []
    for given, taken in itertools.pairwise(owned):
        actions += [SendPart(given, after), ReceivePart(taken, before)]
    return actions


# ---------------------------------------------------------------------- pipelines
def _stage(program: Program, stage: int) -> Actions:
    """Return the actions of a stage. A component of asyncdiff is a stage that, after the synchronous steps, computes
    all tokens at once from outputs of the previous step.
    """
    ends, last_stage, last = divide(program.layers, program.workers), program.workers - 1, program.steps - 1
    apart = program.name == "asyncdiff"

    def parts(step: int) -> list[Tokens]:
        return [(0, program.tokens)] if apart or step < program.warmup else program.shards

    actions: list[Action] = []
    for step in range(program.steps):
        late = apart and step >= program.warmup
        for tokens in parts(step):
            if stage == 0:
                if step:
                    actions += _updates(program, step - 1, tokens, step - 1 < program.warmup)
                actions.append(Compute("begin", step, 0, tokens))
            elif not late or step > program.warmup:  # reuse the input of the last synchronous step
                actions.append(ReceivePart(Part("hidden", step - late, ends[stage][0], tokens), stage - 1))
            for layer in range(*ends[stage]):
                actions += [Compute("project", step, layer, tokens), Compute("attend", step, layer, tokens)]
            if stage == last_stage:
                actions.append(Compute("velocity", step, 0, tokens))
                if stage:
                    actions.append(SendPart(Part("velocity", step, 0, tokens), 0))
            elif not late or step < last:
                actions.append(SendPart(Part("hidden", step, ends[stage + 1][0], tokens), stage + 1))
    if stage == 0:
        for tokens in parts(last):
            actions += _updates(program, last, tokens, last < program.warmup)
    return actions


def _updates(program: Program, step: int, tokens: Tokens, whole: bool) -> list[Action]:
    """Return the update of tokens at the first stage, where their velocity comes from the last one: of a synchronous
    step all at once, with its first tokens.
    """
    if whole and tokens[0]:
        return []
    tokens = (0, program.tokens) if whole else tokens
    update: list[Action] = [Compute("update", step, 0, tokens)]
    if program.workers == 1:
        return update
    return [ReceivePart(Part("velocity", step, 0, tokens), program.workers - 1), *update]


# ---------------------------------------------------------------------- traces
LABELS: Final = ("encode", "decode")


class Costs(NamedTuple):
    """Costs of a program's actions."""

    work_ns: Callable[[Compute], int]
    frame_bytes: Callable[[Any], int]
    """Frame size of a message, a `Part` or a `Crossing`."""
    codec_ns: Callable[[Any], tuple[int, int]] = lambda part: (0, 0)
    """Durations of encoding and decoding. A forwarded part is decoded while in flight to the next worker."""


def trace_of(workers: Sequence[Actions], costs: Costs, *, requests: int = 3) -> Trace:
    """Return the trace of `requests` requests. TCP's windows open during the first."""
    job = SamplingJob(workers, requests)
    parts = list(job.numbers)

    def cost(place: int, action: jobs.Action) -> int | None:
        match action:
            case jobs.Work(_, key):
                computed = workers[place][key.part]
                assert isinstance(computed, Compute)
                return costs.work_ns(computed)
            case jobs.Encode(key):
                return costs.codec_ns(parts[key.part])[0] or None
            case jobs.Decode(messages):
                return sum(costs.codec_ns(parts[message.key.part])[1] for message in messages) or None
        return None

    nodes = [jobs.Sizes(lambda key: costs.frame_bytes(parts[key.part]))] * len(workers)
    sites = Colocation.apart(job.places, ["worker"] * len(workers))
    return TracedJob(job, nodes, cost, LABELS, {"maker": "diffusion"}, sites).trace()
