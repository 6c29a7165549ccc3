"""A node that encodes its messages with the cell's codec and has one method per kind of work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from testbed.codecs.contract import Codec, Context
from testbed.codecs.kept_state import load_into, state_of
from testbed.codecs.make import make
from testbed.errors import CodecError, SpecError
from testbed.jobs.actions import Encoded, Key, Message
from testbed.jobs.kind import Setting, kind_of
from testbed.message_key import Direction, MessageKey
from testbed.nodes.boundary import as_bytes
from testbed.nodes.bucket import at_alignment


class _Codecs:
    """Codecs that are made when they are first used, by end, name of the messages, boundary and direction."""

    def __init__(self, make: Callable[[str, str, int, Direction], Codec]) -> None:
        self._make, self._made = make, dict[tuple[str, str, int, Direction], Codec]()

    def at(self, end: str, what: str, boundary: int, direction: Direction) -> Codec:
        place = end, what, boundary, direction
        if place not in self._made:
            self._made[place] = self._make(*place)
        return self._made[place]

    def state(self) -> dict[tuple[str, str, int, Direction], Any]:
        return {place: state_of(codec) for place, codec in self._made.items()}

    def load(self, state: Mapping[tuple[str, str, int, Direction], Any]) -> None:
        for place, kept in state.items():
            load_into(self.at(*place), kept)


class CodedNode:
    """Each kind of work is a method of that name, `method(key, value)`.

    Floating-point tensors use the cell's codec for the boundary `key.origin` and the direction that `JobKind.named`
    gives; each end of a boundary has its own codec. Integers, such as token ids, are sent uncoded.

    A subclass names in `keeps` its attributes that outlive a step, for checkpoints (`codecs.kept_state`).
    """

    keeps: tuple[str, ...] = ("_codecs",)

    def __init__(self, setting: Setting) -> None:
        self._setting, self._kind = setting, kind_of(setting.recipe)
        self._codecs = _Codecs(self._made)

    def work(self, what: str, key: Key, value: Any) -> Any:
        """Compute. SpecError if there is no method of that name."""
        if (method := getattr(self, what, None)) is None:
            raise SpecError(
                f"{type(self).__qualname__} has no method {what!r}, which its program calls in step {key.step}; "
                "add it to the node, with arguments (key, value)"
            )
        return method(key, value)

    def encode(self, key: Key, value: Tensor | None) -> Encoded:
        """Return the payload of a tensor, or an empty one for None. Raises the codec's CodecError."""
        if value is None:
            return Encoded(b"")
        if not value.is_floating_point():
            return Encoded(value.to(torch.int64).numpy().tobytes(), value.numel() * 8)
        payload = self._codec("encode", key).encode(value.detach(), _message_key(key))
        return Encoded(as_bytes(payload), 4 * value.numel())

    def decode(self, messages: Sequence[Message]) -> Sequence[Tensor]:
        """Return the tensors of messages. Raises the codecs' CodecError."""
        return [self._decoded(message.key, message.payload) for message in messages]

    def integers(self, what: str) -> bool:
        """Return whether messages of this name hold integers."""
        return False

    def codec_of(self, what: str) -> str:
        """Return the cell's codec for messages of this name."""
        return self._setting.recipe.codec

    def _decoded(self, key: Key, payload: Any) -> Tensor:
        if self.integers(key.what):
            if len(payload) % 8:
                raise CodecError(f"a message of {key.what} has {len(payload)} bytes, not a multiple of 8")
            return torch.frombuffer(bytearray(payload), dtype=torch.int64)
        value = self._codec("decode", key).decode(payload, _message_key(key))
        return at_alignment(value)

    def _codec(self, end: str, key: Key) -> Codec:
        return self._codecs.at(end, key.what, key.origin, self._kind.named(key).direction)

    def _made(self, end: str, what: str, boundary: int, direction: Direction) -> Codec:
        return make(self.codec_of(what), Context(self._setting.recipe.training.seed, boundary, direction))


def _message_key(key: Key) -> MessageKey:
    return MessageKey(key.phase, key.step, key.part, ())
