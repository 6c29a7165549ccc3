"""The computation of a program's worker, with real payloads of codecs as messages; and all workers in one process.

Each worker has its own copy of received data, and its own decoders. The program alone decides which data is used when:
staleness is a message that the program receives late.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from testbed.codecs.contract import Codec, Context, MessageKey, Payload, Stateful
from testbed.codecs.make import make
from testbed.codecs.wrap import capability
from testbed.diffusion.dit import TOKEN_PIXELS, TOKENS, Dit, by_heads, rows_of_tokens, to_images
from testbed.diffusion.node import Sampled, SamplingNode, run_together
from testbed.diffusion.programs import Kind, Part, Program, Tokens
from testbed.errors import CodecError
from testbed.jobs.sampling import Compute, SamplingJob

_LENGTH = struct.Struct("<I")
Stream = tuple[Kind, int, Tokens, int]
"""Identifies one codec's stream: the kind of message, the layer, the tokens, and the tensor (0 keys, 1 values)."""
CodecOf = Callable[[Stream, Context], Codec]
"""Returns the codec of a stream, if it differs by stream."""
Watch = Callable[[Part, Tensor, Tensor], None]
"""Receives keys and values in original form, (2, n, B, d), and as decoded by a receiver."""


class Codecs(NamedTuple):
    """The codecs of messages."""

    keys_and_values: str | CodecOf = "fp32"
    boundary: str = "fp32"
    """Codec of everything else, between stages."""
    key_steps: int = 1
    """In this many initial steps, and every `refresh_every` steps (0: never), stateful codecs restart with a first
    message."""
    refresh_every: int = 0

    def anew(self, step: int) -> bool:
        """Return whether codecs restart in a step."""
        return step < self.key_steps or (self.refresh_every > 0 and step % self.refresh_every == 0)

    def make(self, stream: Stream) -> Codec:
        """Make the codec of a stream. SpecError for an unknown codec."""
        kind, layer, tokens, which = stream
        context = Context(0, (layer * TOKENS + tokens[0]) * 2 + which, "forward")
        wanted = self.keys_and_values if kind == "keys and values" else self.boundary
        return make(wanted, context) if isinstance(wanted, str) else wanted(stream, context)


class _End:
    """One end of messages: the codecs of every stream that starts or ends here."""

    def __init__(self, codecs: Codecs, *, once: bool = False) -> None:
        """`once`: keep decoded tensors, and never decode them again."""
        self._codecs = codecs
        self._decoded: dict[Part, list[Tensor]] | None = {} if once else None
        self.codecs: dict[Stream, Codec] = {}

    def codec(self, stream: Stream) -> Codec:
        if stream not in self.codecs:
            self.codecs[stream] = self._codecs.make(stream)
        return self.codecs[stream]

    def forget(self) -> None:
        if self._decoded is not None:
            self._decoded.clear()
        for codec in self.codecs.values():
            if (memory := capability(codec, Stateful)) is not None:
                memory.reset()

    def encode(self, part: Part, tensors: Sequence[Tensor]) -> bytes:
        pieces: list[Payload] = []
        for which, tensor in enumerate(tensors):
            codec = self.codec((part.kind, part.layer, part.tokens, which))
            if self._codecs.anew(part.step) and (memory := capability(codec, Stateful)) is not None:
                memory.reset()
            payload = codec.encode(tensor, _key(part))
            pieces += [_LENGTH.pack(memoryview(payload).nbytes), payload]
        return b"".join(pieces)

    def decode(self, part: Part, payload: Payload) -> list[Tensor]:
        if self._decoded is not None and part in self._decoded:
            return self._decoded[part]
        tensors: list[Tensor] = []
        at, view = 0, memoryview(payload)
        while at < len(view):
            (length,) = _LENGTH.unpack_from(view, at)
            at += _LENGTH.size
            codec = self.codec((part.kind, part.layer, part.tokens, len(tensors)))
            tensors.append(codec.decode(view[at : at + length], _key(part)))
            at += length
        if self._decoded is not None:
            self._decoded[part] = tensors
        return tensors


class Conditions:
    """Conditioning of layers by times and labels, the same at every worker of a request."""

    def __init__(self, model: Dit, labels: Tensor, steps: int) -> None:
        self.by_step = [model.condition(torch.full((len(labels),), step / steps), labels) for step in range(steps)]
        self.modulations: Callable[[int, int], Sequence[Tensor]] = functools.cache(
            lambda step, layer: model.block(layer).modulations(self.by_step[step])
        )
        """Modulations of a step and layer."""


class TokenWorker(SamplingNode):
    """A worker's state of a request under a `Program`. All tensors have room for every token, (T, B, ...)."""

    watch: Watch | None = None
    sent: dict[Part, Tensor]
    """Original keys and values, if watched; shared by all workers."""

    def __init__(self, job: SamplingJob, place: int, model: Dit, steps: int, codecs: Codecs) -> None:
        super().__init__(job, place)
        self._model, self._steps = model, steps
        self.sender, self.receiver = _End(codecs), _End(codecs)

    def begin(self, noise: Tensor, conditions: Conditions) -> None:
        """Discard the last request, and start with noise (T, B, 4)."""
        size, (tokens, images, _) = self._model.size, noise.shape
        self._conditions = conditions
        self.pixels, self.velocity = noise.clone(), torch.zeros(tokens, images, TOKEN_PIXELS)
        self.hidden, self._queries, self._entered = (torch.zeros(tokens, images, size.width) for _ in range(3))
        self.keys, self.values = (torch.zeros(size.layers, tokens, images, size.width) for _ in range(2))
        self._first = -1
        """The layer that takes the hidden states that arrive; `_entered` keeps them: AsyncDiff's first late step starts
        from them again.
        """
        self.sender.forget()
        self.receiver.forget()

    @property
    def images(self) -> Tensor:
        """This worker's view of the images, (B, 64); complete at worker 0 at the end."""
        return to_images(self.pixels)

    def compute(self, action: Compute) -> None:
        model, block = self._model, self._model.block(action.layer)
        m = self._conditions.modulations(action.step, action.layer) if action.task in ("project", "attend") else ()
        if action.task == "attend":
            keys, values = (by_heads(x[action.layer], block.heads) for x in (self.keys, self.values))
        for at in rows_of_tokens(*action.tokens):
            match action.task:
                case "begin":
                    self.hidden[at] = model.begin(self.pixels[at], at)
                case "project":
                    if action.layer == self._first:
                        self.hidden[at] = self._entered[at]
                    projected = block.project(self.hidden[at], m)
                    self._queries[at], self.keys[action.layer, at], self.values[action.layer, at] = projected
                case "attend":
                    attended = block.attend(self.hidden[at], self._queries[at], keys, values, m)
                    self.hidden[at] = block.feed_forward(attended, m)
                case "velocity":
                    self.velocity[at] = model.velocity(self.hidden[at], self._conditions.by_step[action.step])
                case "update":
                    self.pixels[at] = self.pixels[at] + self.velocity[at] / self._steps

    def payload(self, part: Part) -> bytes:
        tensors = self._tensors(part)
        if self.watch is not None and part.kind == "keys and values":
            self.sent[part] = torch.stack(tensors)
        return self.sender.encode(part, tensors)

    def receive(self, part: Part, payload: Payload) -> None:
        decoded, places = self.receiver.decode(part, payload), self._tensors(part)
        if part.kind == "hidden":
            self._first, places = part.layer, [self._entered[slice(*part.tokens)]]
        if [value.shape for value in decoded] != [place.shape for place in places]:
            raise CodecError(f"cannot use {part}: its tensors have shapes {[tuple(d.shape) for d in decoded]}")
        if self.watch is not None and part.kind == "keys and values":
            self.watch(part, self.sent[part], torch.stack(decoded))
        for place, value in zip(places, decoded, strict=True):
            place.copy_(value)

    def _tensors(self, part: Part) -> list[Tensor]:
        """Return views of a part's tensors."""
        at = slice(*part.tokens)
        match part.kind:
            case "keys and values":
                return [self.keys[part.layer, at], self.values[part.layer, at]]
            case "hidden":
                return [self.hidden[at]]
            case "velocity":
                return [self.velocity[at]]
            case "pixels":
                return [self.pixels[at]]


class Workers:
    """The workers of a program in one process, for successive requests."""

    def __init__(self, model: Dit, program: Program, codecs: Codecs, *, decode_once: bool = False) -> None:
        """`decode_once`: a message's first receiver decodes it for all. SpecError for an invalid program or codec."""
        self._model, self._steps = model, program.steps
        self._job = SamplingJob(program.actions(), 1)
        places = range(program.workers)
        self.workers = [TokenWorker(self._job, place, model, program.steps, codecs) for place in places]
        if decode_once:  # the first receiver varies, and needs what others decoded before
            shared = _End(codecs, once=True)
            for worker in self.workers:
                worker.receiver = shared

    @torch.no_grad()
    def sample(self, noise: Tensor, labels: Tensor, watch: Watch | None = None) -> Sampled:
        """Sample images from noise (T, B, 4). Raises CodecError."""
        conditions, sent = Conditions(self._model, labels, self._steps), dict[Part, Tensor]()
        for worker in self.workers:
            worker.watch, worker.sent = watch, sent
            worker.begin(noise, conditions)
        frame_bytes = run_together(self._job, self.workers)
        return Sampled(self.workers[0].images, frame_bytes)


def _key(part: Part) -> MessageKey:
    return MessageKey("evaluation", part.step, 0, ())
