"""A node whose messages are coded by the cell's codec: what it computes is a method for each kind of work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from testbed.codecs.contract import Codec, Context
from testbed.codecs.make import make
from testbed.errors import CodecError, SpecError
from testbed.jobs.actions import Encoded, Key, Message
from testbed.jobs.kind import Setting, kind_of
from testbed.message_key import MessageKey

_ALIGNMENT_BYTES = 64
"""Of what torch allocates: vectorised kernels round otherwise where a tensor begins elsewhere."""


class CodedNode:
    """Work of a kind is done by the method of that name, `method(key, value)`.

    Floating-point tensors are coded by the codec that the cell has for the boundary `key.origin` and the direction that
    `JobKind.named` gives; each end of a boundary has a codec of its own. Integers, as token ids are, go as they are.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting, self._kind = setting, kind_of(setting.recipe)
        self._codecs: dict[tuple[str, str, int], Codec] = {}

    def work(self, what: str, key: Key, value: Any) -> Any:
        """Compute. SpecError where there is no method of that name."""
        if (method := getattr(self, what, None)) is None:
            raise SpecError(
                f"{type(self).__qualname__} has no method {what!r}, which its program works on in step {key.step}; "
                "give the node one, called with (key, value)"
            )
        return method(key, value)

    def encode(self, key: Key, value: Tensor | None) -> Encoded:
        """Return the payload of a tensor, or of None, which is empty. CodecError as from the codec."""
        if value is None:
            return Encoded(b"")
        if not value.is_floating_point():
            return Encoded(value.to(torch.int64).numpy().tobytes(), value.numel() * 8)
        payload = self._codec("encode", key).encode(value.detach(), _message_key(key))
        return Encoded(payload, 4 * value.numel())

    def decode(self, messages: Sequence[Message]) -> Sequence[Tensor]:
        """Return the tensors of messages. CodecError as from the codecs."""
        return [self._decoded(message.key, message.payload) for message in messages]

    def integers(self, what: str) -> bool:
        """Say whether messages that are called so are of integers."""
        return False

    def codec_of(self, what: str) -> str:
        """Return the codec of messages that are called so: the cell's."""
        return self._setting.recipe.codec

    def _decoded(self, key: Key, payload: Any) -> Tensor:
        if self.integers(key.what):
            if len(payload) % 8:
                raise CodecError(f"a message of {key.what} has {len(payload)} bytes, which are no whole numbers")
            return torch.frombuffer(bytearray(payload), dtype=torch.int64)
        value = self._codec("decode", key).decode(payload, _message_key(key))
        return value.clone() if value.data_ptr() % _ALIGNMENT_BYTES else value

    def _codec(self, end: str, key: Key) -> Codec:
        direction, place = self._kind.named(key).direction, (end, key.what, key.origin)
        if place not in self._codecs:
            context = Context(self._setting.recipe.training.seed, key.origin, direction)
            self._codecs[place] = make(self.codec_of(key.what), context)
        return self._codecs[place]


def _message_key(key: Key) -> MessageKey:
    return MessageKey(key.phase, key.step, key.part, ())
