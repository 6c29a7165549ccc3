"""The codec under test, in one direction: how to make an end of its boundary, and its claims."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from testbed.codecs.catalogue.codec_spec import CodecSpec
from testbed.codecs.catalogue.placement import parse_placement
from testbed.codecs.catalogue.row import CodecRow
from testbed.codecs.check.apart import Ends, Place
from testbed.codecs.check.row_claims import CLAIMS
from testbed.codecs.check.tensors import hidden
from testbed.codecs.check.verdicts import require, same
from testbed.codecs.contract import Codec, Context, MessageKey, ObservesLink, Paired, Payload, Stateful
from testbed.codecs.make import build_codec
from testbed.codecs.wrap import bound_of, capability
from testbed.message_key import Direction

Shapes = dict[MessageKey, tuple[int, ...]]


class TrialEnd:
    """One end of a boundary: a codec instance, and the activations that pass before its gradients."""

    def __init__(self, codec: Codec, activations: Activations | None = None, shapes: Shapes | None = None) -> None:
        """`activations` is None for a codec that does not depend on them. `shapes` is common to all ends of a
        subject.
        """
        self.codec = codec
        self.memory, self.stateful = (memory := capability(codec, Stateful)), memory is not None
        self.claims = [name for name in CLAIMS if hasattr(codec, name)]
        law = getattr(codec, "law", None)
        self.law = law if isinstance(law, str) else None
        self._activations, self._shapes = activations, {} if shapes is None else shapes

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Pass the message's activations, then encode it. Broken if that changes the tensor."""
        self._shapes[key] = tuple(tensor.shape)
        self.prepare(key, tuple(tensor.shape))
        before = tensor.detach().clone()
        payload = self.codec.encode(tensor, key)
        require(tensor.is_meta or same(tensor.detach(), before), "encode changed its input tensor")
        return payload

    def decode(self, payload: Payload, key: MessageKey, shape: tuple[int, ...] | None = None) -> Tensor:
        """Pass the message's activations, then decode it. `shape`: of the tensor, if it was encoded elsewhere."""
        if (known := self._shapes.get(key) if shape is None else shape) is not None:
            self.prepare(key, known)
        decoded = self.codec.decode(payload, key)
        plain = decoded.dtype == torch.float32 and decoded.is_contiguous() and not decoded.requires_grad
        told = "" if plain else f"{decoded.dtype}, strides {decoded.stride()}, requires_grad {decoded.requires_grad}"
        require(plain, f"it decoded another tensor than a contiguous one of float32 without a gradient: {told}")
        return decoded

    def prepare(self, key: MessageKey, shape: tuple[int, ...]) -> None:
        """Pass the message's activations now, so that `codec`'s own methods can be timed."""
        if self._activations is not None:
            self._activations.cross(key, shape)

    def bound(self, tensor: Tensor) -> Tensor:
        """Return the codec's bound on errors, or that of the codec that it wraps."""
        return bound_of(self.codec, tensor)

    def __getattr__(self, claim: str) -> Any:
        """Return another method of the codec that one of `CLAIMS` names."""
        return getattr(self.codec, claim)

    def observe(self, sent_bytes: int, seconds: float) -> None:
        """Show an adaptive encoder its link."""
        if (observer := capability(self.codec, ObservesLink)) is not None:
            observer.observe(sent_bytes, seconds)

    @property
    def state(self) -> dict[str, Any]:
        """The codec's own `state`; empty if it has no such method."""
        return {} if self.memory is None else self.memory.state()

    def load(self, state: dict[str, Any]) -> None:
        """Load `state` into the codec, if it is stateful."""
        if self.memory is not None:
            self.memory.load(state)

    def shared(self) -> Mapping[str, Tensor]:
        """Return the codec's `shared`; empty if it is stateless."""
        return {} if self.memory is None else self.memory.shared()

    def reset(self) -> None:
        """Reset the codec, if it is stateful."""
        if self.memory is not None:
            self.memory.reset()


class RemoteEnd:
    """A `TrialEnd` in the process of encoders or of decoders, whichever it is first used as."""

    def __init__(self, subject: Subject, ends: Ends, seed: int, place: Place | None) -> None:
        self._subject, self._ends, self._place = subject, ends, place
        self._number, self._make = next(ends.numbers), (subject.text, subject.direction, seed)

    def _ask(self, method: str, *arguments: Any) -> Any:
        self._place = self._place or ("decoder" if method == "decode" else "encoder")
        return self._ends.ask(self._place, "end", self._number, self._make, method, arguments)

    def __getattr__(self, method: str) -> Any:
        return partial(self._ask, method)

    def encode(self, tensor: Tensor, key: MessageKey) -> bytes:
        """Encode there. The other process learns the shape with the payload, as it does from activations."""
        self._subject.shapes[key] = tuple(tensor.shape)
        return cast("bytes", self._ask("encode", tensor, key))

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Decode there."""
        return cast("Tensor", self._ask("decode", payload, key, self._subject.shapes.get(key)))

    state = property(lambda self: self._ask("state"))
    stateful = property(lambda self: self._ask("stateful"))
    claims = property(lambda self: self._ask("claims"))
    law = property(lambda self: self._ask("law"))


class Activations:
    """The activations that are sent before a gradient, through the codec on which the gradient's codec depends."""

    def __init__(self, spec: CodecSpec, context: Context) -> None:
        """Make both ends' instances."""
        self._sender, self.receiver = build_codec(spec, context), build_codec(spec, context)
        self._last: object = None

    def cross(self, key: MessageKey, shape: tuple[int, ...]) -> None:
        """Send the activations of a message, unless they were the last ones sent."""
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
    """The codec of activations at the same boundary, on which some gradient codecs depend."""
    shapes: Shapes = field(default_factory=dict, compare=False)
    """The shapes of messages, known to both ends from the activations; written by `TrialEnd.encode`, and by a check
    that decodes messages of another process."""
    ends: Ends | None = field(default=None, compare=False)
    """The processes in which encoders and decoders live; None: in this one."""

    @property
    def row(self) -> CodecRow:
        """The table's row of the outermost codec."""
        return self.spec.row

    def fresh(self, seed: int = 0, place: Place | None = None) -> TrialEnd:
        """Make one end, with new instances; in another process where the subject has any. `place`: there,
        rather than where it is first used.
        """
        if self.ends is not None:
            return cast("TrialEnd", RemoteEnd(self, self.ends, seed, place))
        codec = build_codec(self.spec, Context(seed, 0, self.direction))
        if self.direction == "forward" or (paired := capability(codec, Paired)) is None:
            return TrialEnd(codec)
        activations = Activations(self.forward, Context(seed, 0, "forward"))
        paired.pair(activations.receiver)
        return TrialEnd(codec, activations, self.shapes)

    @property
    def law(self) -> str:
        """The law in an instance's attribute `law`, which may depend on its settings or direction, in the words of
        `row.Law`; or else the table's.
        """
        return self.fresh().law or self.row.law

    @property
    def alone(self) -> Subject | None:
        """The inner codec without the wrapper; in both directions, if the wrapper is the same."""
        inner = self.spec.inner
        return None if inner is None else Subject(inner, self.direction, self.forward.inner or inner, ends=self.ends)

    @property
    def stateful(self) -> bool:
        """Whether it has the four methods of a stateful codec."""
        return self.fresh().stateful

    @property
    def text(self) -> str:
        """The text from which `subject_of` makes this subject."""
        if self.direction == "forward":
            return self.spec.text
        return f"fwd={self.forward.text}, bwd={self.spec.text}"


def subject_of(text: str, direction: Direction, ends: Ends | None = None) -> Subject:
    """Return the subject that a codec's text names. SpecError or UnknownNameError for an invalid text."""
    placement = parse_placement(text)
    return Subject(placement.at(0, direction), direction, placement.at(0, "forward"), ends=ends)
