"""The codec under test, in one direction: how to make one, and what it is held to."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from testbed.codecs.catalogue import placement
from testbed.codecs.catalogue.codec_spec import CodecSpec
from testbed.codecs.catalogue.row import CodecRow
from testbed.codecs.check.claims import law_of
from testbed.codecs.check.tensors import hidden
from testbed.codecs.contract import Codec, Context, MessageKey, Paired, Payload, Stateful
from testbed.codecs.make import build
from testbed.codecs.wrap import capability
from testbed.message_key import Direction


@dataclass(frozen=True)
class Subject:
    """One codec in one direction."""

    spec: CodecSpec
    direction: Direction
    forward: CodecSpec
    """Of the same boundary: some codecs of gradients go by what the activations' codec knows."""
    shapes: dict[MessageKey, tuple[int, ...]] = field(default_factory=dict, compare=False)
    """Of the activations that came before a gradient; written by `encode`, or by a check that decodes what another made."""

    @property
    def row(self) -> CodecRow:
        """Of the outermost codec."""
        return self.spec.row

    def fresh(self, seed: int = 0) -> Codec:
        """A new instance, as one end gets it."""
        codec = build(self.spec, Context(seed, 0, self.direction))
        if self.direction == "backward" and (paired := capability(codec, Paired)) is not None:
            _go_with_activations(codec, paired, self, seed)
        return codec

    @property
    def law(self) -> str:
        """What an instance says of itself goes before the table: a law may depend on the settings, or on the direction."""
        return law_of(self.fresh()) or self.row.law

    @property
    def alone(self) -> Subject | None:
        """The codec inside, without the wrapper; in both directions, where the wrapper is the same."""
        inner = self.spec.inner
        return None if inner is None else Subject(inner, self.direction, self.forward.inner or inner)

    @property
    def stateful(self) -> bool:
        """Does it have the four methods of a codec that remembers?"""
        return capability(self.fresh(), Stateful) is not None


def text_of(subject: Subject) -> str:
    """What `subject_of` reads as this subject."""
    if subject.direction == "forward":
        return subject.spec.text
    return f"fwd={subject.forward.text}, bwd={subject.spec.text}"


def subject_of(text: str, direction: Direction) -> Subject:
    """The subject that a codec's text names. SpecError or UnknownNameError where it names none."""
    chosen = placement.parse_placement(text)
    return Subject(chosen.at(0, direction), direction, chosen.at(0, "forward"))


def prepare(codec: Codec, key: MessageKey, shape: tuple[int, ...]) -> None:
    """Let the activations of a gradient pass now, so that the time of the message itself can be taken."""
    ready: Any = getattr(codec, "_activations_pass", None)
    if ready is not None:
        ready(key, shape)


def _go_with_activations(codec: Any, paired: Paired, subject: Subject, seed: int) -> None:
    """Pair an instance with one for the activations, and let those of each message key pass before its gradient does.

    Its two methods are replaced on the instance, so that it stays of its class, with all else that it can do.
    """
    context = Context(seed, 0, "forward")
    sender, receiver = build(subject.forward, context), build(subject.forward, context)
    paired.pair(receiver)
    encode, decode = codec.encode, codec.decode
    last: list[object] = [None]

    def activations_pass(key: MessageKey, shape: tuple[int, ...]) -> None:
        if last[0] != (key, shape):
            last[0] = (key, shape)
            x = hidden(*shape, seed=zlib.crc32(repr(tuple(key)).encode()))
            receiver.decode(bytes(sender.encode(x, key)), key)

    def encode_after(tensor: Tensor, key: MessageKey) -> Payload:
        subject.shapes[key] = tuple(tensor.shape)
        activations_pass(key, tuple(tensor.shape))
        payload: Payload = encode(tensor, key)
        return payload

    def decode_after(payload: Payload, key: MessageKey) -> Tensor:
        if key in subject.shapes:
            activations_pass(key, subject.shapes[key])
        decoded: Tensor = decode(payload, key)
        return decoded

    codec.encode, codec.decode, codec._activations_pass = encode_after, decode_after, activations_pass
