"""Does what a program says, worker by worker in one process, with the codecs' real payloads.

Each worker has its own copy of what it received, and its own decoders. What is used when is decided by the program
alone: staleness is a message that the program receives late.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from testbed.codecs.contract import Codec, Context, MessageKey, Payload, Stateful
from testbed.codecs.make import make
from testbed.codecs.wrap import capability
from testbed.diffusion.dit import TOKEN_PIXELS, TOKENS, Dit, by_heads, rows_of_tokens, to_images
from testbed.diffusion.programs import Action, Compute, Kind, Part, Program, Send, Tokens
from testbed.errors import CodecError
from testbed.pipeline.frame import HEADER_BYTES

_LENGTH = struct.Struct("<I")
Stream = tuple[Kind, int, Tokens, int]
"""What one codec's memory is of: the kind of message, the layer, the tokens, and which of its tensors (0 keys, 1
values)."""
Modulations = Callable[[int, int], Sequence[Tensor]]
"""Of a step and layer: the same at every worker."""
Watch = Callable[[Part, Tensor, Tensor], None]
"""Is told of keys and values as they were, (2, n, B, d), and as a receiver decoded them."""


class Sampled(NamedTuple):
    """What came of a request."""

    images: Tensor
    """(B, 64), -1 to 1."""
    frame_bytes: Mapping[Part, int]
    """Of each message: its payloads, their lengths, and a frame's header."""


class _End:
    """One end of messages: the codecs of every stream that begins or ends here."""

    def __init__(self, codecs: Mapping[Kind, str], seed: int) -> None:
        self._texts, self._seed = codecs, seed
        self.codecs: dict[Stream, Codec] = {}

    def codec(self, stream: Stream) -> Codec:
        if stream not in self.codecs:
            kind, layer, tokens, which = stream
            boundary = (layer * TOKENS + tokens[0]) * 2 + which
            self.codecs[stream] = make(self._texts[kind], Context(self._seed, boundary, "forward"))
        return self.codecs[stream]

    def forget(self) -> None:
        for codec in self.codecs.values():
            if (memory := capability(codec, Stateful)) is not None:
                memory.reset()

    def encode(self, part: Part, tensors: Sequence[Tensor], *, anew: bool) -> bytes:
        pieces: list[Payload] = []
        for which, tensor in enumerate(tensors):
            codec = self.codec((part.kind, part.layer, part.tokens, which))
            if anew and (memory := capability(codec, Stateful)) is not None:
                memory.reset()
            payload = codec.encode(tensor, _key(part))
            pieces += [_LENGTH.pack(memoryview(payload).nbytes), payload]
        return b"".join(pieces)

    def decode(self, part: Part, payload: bytes) -> list[Tensor]:
        tensors: list[Tensor] = []
        at, view = 0, memoryview(payload)
        while at < len(view):
            (length,) = _LENGTH.unpack_from(view, at)
            at += _LENGTH.size
            codec = self.codec((part.kind, part.layer, part.tokens, len(tensors)))
            tensors.append(codec.decode(view[at : at + length], _key(part)))
            at += length
        return tensors


class _Worker:
    """What one worker holds of a request. All tensors have a place for every token, (T, B, ...)."""

    def __init__(self, model: Dit, codecs: Mapping[Kind, str], seed: int) -> None:
        self._model = model
        self.sender, self.receiver = _End(codecs, seed), _End(codecs, seed)

    def begin(self, noise: Tensor) -> None:
        size, images = self._model.size, noise.shape[1]
        self.pixels, self.velocity = noise.clone(), torch.zeros(TOKENS, images, TOKEN_PIXELS)
        self.hidden, self._queries = (torch.zeros(TOKENS, images, size.width) for _ in range(2))
        self.keys, self.values = (torch.zeros(size.layers, TOKENS, images, size.width) for _ in range(2))
        self.payloads: dict[Part, bytes] = {}
        """What was sent or received, to be sent on."""
        self.sender.forget()
        self.receiver.forget()

    def do(self, action: Compute, conditions: Sequence[Tensor], modulations: Modulations) -> None:
        model, block = self._model, self._model.block(action.layer)
        m = modulations(action.step, action.layer) if action.task in ("project", "attend") else ()
        if action.task == "attend":
            keys, values = (by_heads(x[action.layer], block.heads) for x in (self.keys, self.values))
        for at in rows_of_tokens(*action.tokens):
            match action.task:
                case "begin":
                    self.hidden[at] = model.begin(self.pixels[at], at)
                case "project":
                    projected = block.project(self.hidden[at], m)
                    self._queries[at], self.keys[action.layer, at], self.values[action.layer, at] = projected
                case "attend":
                    attended = block.attend(self.hidden[at], self._queries[at], keys, values, m)
                    self.hidden[at] = block.feed_forward(attended, m)
                case "velocity":
                    self.velocity[at] = model.velocity(self.hidden[at], conditions[action.step])
                case "update":
                    self.pixels[at] = self.pixels[at] + self.velocity[at] / len(conditions)

    def tensors(self, part: Part) -> list[Tensor]:
        """Return where a part lies, as views."""
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
    """The workers of a program, for one request after another."""

    def __init__(
        self,
        model: Dit,
        program: Program,
        codec: str = "fp32",
        *,
        boundary: str = "fp32",
        key_steps: int = 1,
        refresh_every: int = 0,
        decode_once: bool = False,
        seed: int = 0,
    ) -> None:
        """`codec`: of keys and values; `boundary`: of everything else, between stages. In the first `key_steps` steps,
        and every `refresh_every` steps (0: never), codecs that remember begin anew, with a first message.
        `decode_once`: what several workers receive is decoded by the first of them, which gives the others what they
        would have. SpecError for a program or a codec that cannot be.
        """
        codecs: dict[Kind, str] = dict.fromkeys(("hidden", "velocity", "pixels"), boundary)
        codecs["keys and values"] = codec
        self.model, self.program = model, program
        self._key_steps, self._refresh_every = key_steps, refresh_every
        self._decode_once = decode_once
        self._sent: dict[Part, Tensor] = {}
        self._decoded: dict[Part, list[Tensor]] = {}
        self._actions = program.actions()
        self.workers = [_Worker(model, codecs, seed) for _ in self._actions]
        if decode_once:  # whoever is the first: it needs what the others decoded before
            for worker in self.workers:
                worker.receiver = self.workers[0].receiver

    @torch.no_grad()
    def sample(self, noise: Tensor, labels: Tensor, watch: Watch | None = None) -> Sampled:
        """Sample images from noise (T, B, 4). CodecError as it comes."""
        steps = self.program.steps
        conditions = [self.model.condition(torch.full((len(labels),), s / steps), labels) for s in range(steps)]
        modulations = functools.cache(lambda step, layer: self.model.block(layer).modulations(conditions[step]))
        mail: dict[tuple[int, int, Part], bytes] = {}
        sizes: dict[Part, int] = {}
        for worker in self.workers:
            worker.begin(noise)
        self._decoded.clear()
        left = [list(reversed(actions)) for actions in self._actions]
        while any(left):
            moved = False
            for number, ahead in enumerate(left):
                while ahead and self._do(number, ahead[-1], conditions, modulations, mail, sizes, watch):
                    ahead.pop()
                    moved = True
            assert moved, f"workers wait for each other: {[ahead[-1] for ahead in left if ahead]}"
        assert not mail, f"{len(mail)} messages were never received"
        return Sampled(to_images(self.workers[0].pixels), sizes)

    def _do(
        self,
        number: int,
        action: Action,
        conditions: Sequence[Tensor],
        modulations: Modulations,
        mail: dict[tuple[int, int, Part], bytes],
        sizes: dict[Part, int],
        watch: Watch | None,
    ) -> bool:
        """Do a worker's next action; False where its message is not there yet."""
        worker = self.workers[number]
        if isinstance(action, Compute):
            worker.do(action, conditions, modulations)
            return True
        part = action.part
        if isinstance(action, Send):
            if part not in worker.payloads:
                tensors = worker.tensors(part)
                every = self._refresh_every
                anew = part.step < self._key_steps or (every > 0 and part.step % every == 0)
                worker.payloads[part] = worker.sender.encode(part, tensors, anew=anew)
                sizes[part] = len(worker.payloads[part]) + HEADER_BYTES
                if watch is not None and part.kind == "keys and values":
                    self._sent[part] = torch.stack(tensors)
            mail[number, action.peer, part] = worker.payloads[part]
            return True
        payload = mail.pop((action.peer, number, part), None)
        if payload is None:
            return False
        worker.payloads[part] = payload
        decoded = self._decoded.get(part) or worker.receiver.decode(part, payload)
        if self._decode_once:
            self._decoded[part] = decoded
        places = worker.tensors(part)
        if [value.shape for value in decoded] != [place.shape for place in places]:
            raise CodecError(f"cannot use {part}: its tensors have shapes {[tuple(d.shape) for d in decoded]}")
        if watch is not None and part.kind == "keys and values":
            watch(part, self._sent[part], torch.stack(decoded))
        for place, value in zip(places, decoded, strict=True):
            place.copy_(value)
        return True

    def shared(self, part: Part) -> list[Mapping[str, Tensor]]:
        """Return what the sender of a part and each of its receivers remember of its codecs' stream, the sender first:
        alike bit by bit where all have had its last message.
        """
        found: list[Mapping[str, Tensor]] = []
        for ends in ([w.sender for w in self.workers], [w.receiver for w in self.workers]):
            for end in ends:
                memories = {
                    stream[-1]: memory.shared()
                    for stream, codec in end.codecs.items()
                    if stream[:-1] == (part.kind, part.layer, part.tokens)
                    and (memory := capability(codec, Stateful)) is not None
                }
                if memories:
                    found.append({f"{which}/{key}": v for which, m in memories.items() for key, v in m.items()})
        return found


def _key(part: Part) -> MessageKey:
    return MessageKey("evaluation", part.step, 0, ())
