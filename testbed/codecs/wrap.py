"""What codecs around other codecs need: finding what is inside, joint states, loops, and a payload's frame.

A loop decodes its own payload at the sender. An inner codec that remembers would move on twice if one instance
did both, so the loop holds two: one encodes, the other (`twin`) decodes as the receiver's does.
"""

from __future__ import annotations

import contextlib
import copy
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from testbed.codecs.contract import Codec, Hook, MessageKey, Payload, Stateful
from testbed.errors import CodecError
from testbed.message_key import Side

Capability = TypeVar("Capability")


def parts_of(codec: object) -> Mapping[str, Codec]:
    """Return what a codec wraps, by name: its `parts`, or its `inner`. Empty where it wraps nothing."""
    parts = getattr(codec, "parts", None)
    if isinstance(parts, Mapping):
        return parts
    inner = getattr(codec, "inner", None)
    return {} if inner is None else {"inner": inner}


def walk(codec: object) -> Iterator[object]:
    """Yield a codec and all that it wraps, the outermost first."""
    yield codec
    for part in parts_of(codec).values():
        yield from walk(part)


def capability(codec: object, kind: type[Capability]) -> Capability | None:
    """Find what has the methods of `kind`, an optional protocol of `contract`: the codec, what it wraps, or nothing.

    A codec that has them answers for all that it wraps; otherwise its parts that have them answer together, as `Joint`
    says. Ask once, when an instance is made: the search takes longer than some codecs need for a message.
    """
    if isinstance(codec, kind):
        return codec
    able = parts_with(parts_of(codec), kind)
    return Joint(able) if able else None  # type: ignore[return-value]  # with the methods that all of `able` have


def parts_with(parts: Mapping[str, Codec], kind: type[Capability]) -> dict[str, Capability]:
    """Return what `capability` finds in each part, without the parts in which it finds nothing."""
    return {name: able for name, part in parts.items() if (able := capability(part, kind)) is not None}


class States:
    """The states of several codecs, and of memories beside them, as one, by their names."""

    unshared: ClassVar[str] = ""
    """The part whose counterpart at the other end has another name, so that it is not compared."""

    def __init__(self, parts: Mapping[str, Stateful], **memories: Stateful) -> None:
        self._parts = parts
        self._memories = {**parts, **memories}

    def shared(self) -> Mapping[str, Tensor]:
        """Return what the codecs share, by the codec's name and its own, and what the memories do by its own."""
        return {
            f"{name}.{key}" if name in self._parts else key: value
            for name, memory in self._memories.items()
            if name != self.unshared
            for key, value in memory.shared().items()
        }

    def state(self) -> dict[str, Any]:
        """Return each one's state, by its name."""
        return {name: memory.state() for name, memory in self._memories.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load each one's state. CodecError, and all as they were, where one refuses its own."""
        check_keys(state, self._memories)
        with _unchanged_on_error(self._memories.values()):
            for name, memory in self._memories.items():
                memory.load(state[name])

    def reset(self) -> None:
        """Let all forget."""
        for memory in self._memories.values():
            memory.reset()

    def parts_unchanged_on_error(self, *names: str) -> contextlib.AbstractContextManager[None]:
        """Put the codecs' states back when the block raises; only those of `names`, where any are named.

        The states are copied first, which costs their size in time.
        """
        return _unchanged_on_error([part for name, part in self._parts.items() if not names or name in names])


@contextlib.contextmanager
def _unchanged_on_error(memories: Iterable[Stateful]) -> Iterator[None]:
    before = [(memory, memory.state()) for memory in memories]
    try:
        yield
    except BaseException:
        for memory, state in before:
            memory.load(state)
        raise


class Joint(States):
    """Parts of a codec that have the methods of one optional protocol, as one that has them: see `capability`."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        super().__init__(parts)
        self._able: tuple[Any, ...] = tuple(parts.values())

    def pair(self, forward: Codec) -> None:
        """Tell all parts."""
        for part in self._able:
            part.pair(forward)

    def observe(self, sent_bytes: int, seconds: float) -> None:
        """Tell all parts."""
        for part in self._able:
            part.observe(sent_bytes, seconds)

    @property
    def choice(self) -> str | None:
        """The choice of the first part that has one."""
        return next((choice for part in self._able if (choice := part.choice) is not None), None)

    def hook(self, model: Module, side: Side) -> Hook | None:
        """Return the hook of the first part that has one."""
        return next((hook for part in self._able if (hook := part.hook(model, side)) is not None), None)


class Wrapper(States):
    """A codec around others with a state: its parts' states, and those of `memories` beside them."""

    def __init__(self, memories: Mapping[str, Stateful] | None = None, **parts: Codec) -> None:
        """Parts that are one and the same instance count once."""
        self.parts: dict[str, Codec] = {}
        for name, part in parts.items():
            if all(part is not other for other in self.parts.values()):
                self.parts[name] = part
        super().__init__(parts_with(self.parts, Stateful), **memories or {})


class ClosedLoop(Wrapper):
    """A codec that decodes its payloads at the sender too, and remembers what came of them."""

    unshared = "inner"  # whose encoding half the receiver has no use for: it decodes with the other

    def __init__(self, inner: Codec, **memories: Stateful) -> None:
        """`memories` are held beside what the inner codec remembers."""
        self.inner, self._decoder = inner, twin(inner)
        super().__init__(memories, inner=inner, decoder=self._decoder)

    def state(self) -> dict[str, Any]:
        """Return the parts' states as one, and each memory's."""
        states = super().state()
        return {"parts": {name: states.pop(name) for name in self._parts}, **states}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned. CodecError, and all as it was, where a part or a memory refuses its share."""
        check_keys(state, {"parts", *(self._memories.keys() - self._parts.keys())})
        check_keys(state["parts"], self._parts)
        super().load({**state["parts"], **{name: state[name] for name in state if name != "parts"}})


def twin(codec: Codec) -> Codec:
    """Return a second instance for the same context; the same one where it remembers nothing."""
    return codec if capability(codec, Stateful) is None else copy.deepcopy(codec)


_HEADER = struct.Struct("<BBBB")
HEADER_BYTES = _HEADER.size


def frame(code: int, *bodies: Payload, kind: int = 0, visit: int = 0) -> Payload:
    """Return a wrapper's payload: body code, its own kind, visit number and a zero byte, then the bodies, copied."""
    return b"".join((_HEADER.pack(code, kind, visit, 0), *bodies))


def open_frame(payload: Payload, code: int) -> tuple[int, int, memoryview]:
    """Return (kind, visit, what follows, not copied). CodecError for what `frame` does not write with this code."""
    view = memoryview(payload)
    view = view.cast("B") if view.contiguous and view.nbytes else memoryview(b"")
    if len(view) < _HEADER.size:
        raise CodecError(f"cannot decode a payload of {len(view)} bytes: a wrapper's header has {_HEADER.size}")
    written, kind, visit, zero = _HEADER.unpack_from(view)
    if written != code or zero:
        raise CodecError(f"cannot decode a payload that begins {view[:4].hex(' ')}: expected body code {code}")
    return kind, visit, view[_HEADER.size :]


def decode_as(codec: Codec, payload: Payload, key: MessageKey, shape: torch.Size) -> Tensor:
    """Decode a payload, with a CodecError where the tensor has another shape than expected."""
    value = codec.decode(payload, key)
    if value.shape != shape:
        raise CodecError(
            f"cannot decode {key}: a tensor of shape {tuple(value.shape)} where {tuple(shape)} must follow"
        )
    return value


def bound_of(codec: object, tensor: Tensor) -> Tensor:
    """Return the codec's own `bound` of a tensor of any type, with no values too; infinity where it states none."""
    bound: Callable[[Tensor], Tensor] | None = getattr(codec, "bound", None)
    if bound is None or not tensor.numel():
        return torch.full(tensor.shape, torch.inf if tensor.numel() else 0.0)
    return bound(tensor.detach().to(torch.float32))


def law_of_bound(codec: object) -> Literal["bounded", "none"]:
    """Name the law, in the words of `row.Law`, of a wrapper whose errors are bounded by those of this codec."""
    return "bounded" if bool(bound_of(codec, torch.ones(1)).isfinite().all()) else "none"


def size_of(codec: object) -> Callable[[tuple[int, ...]], int] | None:
    """Return the codec's own `payload_bytes`; None where it has none, as its payloads' lengths depend on values."""
    return getattr(codec, "payload_bytes", None)


def check_keys(state: object, expected: Mapping[str, object] | set[str]) -> None:
    """Raise CodecError unless `state` is a mapping with exactly the expected keys."""
    if not isinstance(state, Mapping) or set(state) != set(expected):
        given = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise CodecError(f"cannot load a state of {given}: this codec's has {sorted(expected)}")
