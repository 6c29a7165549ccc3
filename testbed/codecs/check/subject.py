"""The codec under test, in one direction: how to make an end of its boundary, and what it is held to."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from testbed.codecs.catalogue.codec_spec import CodecSpec
from testbed.codecs.catalogue.placement import parse_placement
from testbed.codecs.catalogue.row import CodecRow
from testbed.codecs.check.tensors import hidden
from testbed.codecs.contract import Codec, Context, MessageKey, Paired, Payload, Stateful
from testbed.codecs.make import build_codec
from testbed.codecs.wrap import capability
from testbed.message_key import Direction

Shapes = dict[MessageKey, tuple[int, ...]]


class TrialEnd:
    """One end of a boundary: a codec as its class made it, and the activations that pass there before its gradients
    do.
    """

    def __init__(self, codec: Codec, activations: Activations | None = None, shapes: Shapes | None = None) -> None:
        """`activations` is None for a codec that does not go by them. `shapes` is common to all ends of a subject."""
        self.codec = codec
        self.memory = capability(codec, Stateful)
        self._activations, self._shapes = activations, {} if shapes is None else shapes

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Let the message's activations pass, then encode it."""
        self._shapes[key] = tuple(tensor.shape)
        self.prepare(key, tuple(tensor.shape))
        return self.codec.encode(tensor, key)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Let the message's activations pass, then decode it."""
        if key in self._shapes:
            self.prepare(key, self._shapes[key])
        return self.codec.decode(payload, key)

    def prepare(self, key: MessageKey, shape: tuple[int, ...]) -> None:
        """Let the message's activations pass now, so that the time of `codec`'s own methods can be taken."""
        if self._activations is not None:
            self._activations.cross(key, shape)

    @property
    def state(self) -> dict[str, Any]:
        """What the codec remembers, as its own `state` tells it; empty where it has no such method."""
        return {} if self.memory is None else self.memory.state()

    def load(self, state: dict[str, Any]) -> None:
        """Let the codec go on from `state`, if it remembers anything."""
        if self.memory is not None:
            self.memory.load(state)

    def shared(self) -> Mapping[str, Tensor]:
        """Return what the codec says that both ends hold alike; empty where it remembers nothing."""
        return {} if self.memory is None else self.memory.shared()

    def reset(self) -> None:
        """Let the codec forget, if it remembers anything."""
        if self.memory is not None:
            self.memory.reset()


class Activations:
    """What crosses in the other direction before a gradient does, through the codec that the gradient's codec goes
    by.
    """

    def __init__(self, spec: CodecSpec, context: Context) -> None:
        """Make both ends' instances."""
        self._sender, self.receiver = build_codec(spec, context), build_codec(spec, context)
        self._last: object = None

    def cross(self, key: MessageKey, shape: tuple[int, ...]) -> None:
        """Send the activations of a message, unless they were the last to cross."""
        if self._last != (key, shape):
            self._last = (key, shape)
            x = hidden(*shape, seed=zlib.crc32(repr(tuple(key)).encode()))
            self.receiver.decode(bytes(self._sender.encode(x, key)), key)


@dataclass(frozen=True)
class Subject:
    """One codec in one direction."""

    spec: CodecSpec
    direction: Direction
    forward: CodecSpec
    """The codec of activations at the same boundary: some codecs of gradients go by what it knows."""
    shapes: Shapes = field(default_factory=dict, compare=False)
    """The shapes of messages, which both ends know from the activations: `TrialEnd.encode` writes them, and so does
    a check that decodes what another process has encoded."""

    @property
    def row(self) -> CodecRow:
        """The table's row of the outermost codec."""
        return self.spec.row

    def fresh(self, seed: int = 0) -> TrialEnd:
        """Make one end, with new instances."""
        codec = build_codec(self.spec, Context(seed, 0, self.direction))
        if self.direction == "forward" or (paired := capability(codec, Paired)) is None:
            return TrialEnd(codec)
        activations = Activations(self.forward, Context(seed, 0, "forward"))
        paired.pair(activations.receiver)
        return TrialEnd(codec, activations, self.shapes)

    @property
    def law(self) -> str:
        """The law that an instance names in an attribute `law`, which may depend on its settings or direction, in the
        words of `row.Law`; or else the table's.
        """
        law = getattr(self.fresh().codec, "law", None)
        return law if isinstance(law, str) else self.row.law

    @property
    def alone(self) -> Subject | None:
        """The codec inside, without the wrapper; in both directions, where the wrapper is the same."""
        inner = self.spec.inner
        return None if inner is None else Subject(inner, self.direction, self.forward.inner or inner)

    @property
    def stateful(self) -> bool:
        """Whether it has the four methods of a codec that remembers."""
        return self.fresh().memory is not None

    @property
    def text(self) -> str:
        """The text that `subject_of` reads as this subject."""
        if self.direction == "forward":
            return self.spec.text
        return f"fwd={self.forward.text}, bwd={self.spec.text}"


def subject_of(text: str, direction: Direction) -> Subject:
    """Return the subject that a codec's text names. SpecError or UnknownNameError where it names none."""
    placement = parse_placement(text)
    return Subject(placement.at(0, direction), direction, placement.at(0, "forward"))
