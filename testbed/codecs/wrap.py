"""Helpers for codecs around other codecs: finding inner codecs, joint states, loops, and a payload's frame.

A closed loop decodes its own payload at the sender. A stateful inner codec would advance twice if one instance did
both, so the loop holds two: one encodes, the other (`twin`) decodes like the receiver's.
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
from testbed.codecs.wire.header import DevicePayload, cut_head
from testbed.errors import CodecError
from testbed.message_key import Side

Capability = TypeVar("Capability")
_OURS = f"{__package__}."


def parts_of(codec: object) -> Mapping[str, Codec]:
    """Return the codecs that a codec wraps, by name: its `parts` or its `inner`; empty if it wraps none."""
    parts = getattr(codec, "parts", None)
    if isinstance(parts, Mapping):
        return parts
    inner = getattr(codec, "inner", None)
    return {} if inner is None else {"inner": inner}


def walk(codec: object) -> Iterator[object]:
    """Yield a codec and all codecs inside it, outermost first."""
    yield codec
    for part in parts_of(codec).values():
        yield from walk(part)


def capability(codec: object, kind: type[Capability]) -> Capability | None:
    """Return an object that implements `kind`, an optional protocol of `contract`: the codec, or its parts; else None.

    A codec that implements it is responsible for its inner codecs; otherwise the parts that implement it are combined
    in a `Joint`. Call this once per instance: the search takes longer than some codecs need for a message.
    """
    if isinstance(codec, kind):
        return codec
    able = parts_with(parts_of(codec), kind)
    return Joint(able) if able else None  # type: ignore[return-value]  # with the methods that all of `able` have


def parts_with(parts: Mapping[str, Codec], kind: type[Capability]) -> dict[str, Capability]:
    """Return the `capability` of each part, by name, without the parts that have none."""
    return {name: able for name, part in parts.items() if (able := capability(part, kind)) is not None}


def works_on_devices(codec: object) -> bool:
    """Return whether a codec, with all inside it, takes and returns tensors on any device. Subclasses from elsewhere
    do not inherit it, because they may use numpy.
    """
    return all(getattr(part, "on_device", False) and type(part).__module__.startswith(_OURS) for part in walk(codec))


class States:
    """Combines the states of several codecs and memories, by name."""

    unshared: ClassVar[str] = ""
    """Name of the part that is not compared, because its counterpart at the other end has another name."""

    def __init__(self, parts: Mapping[str, Stateful], **memories: Stateful) -> None:
        self._parts = parts
        self._memories = {**parts, **memories}

    def shared(self) -> Mapping[str, Tensor]:
        """Return the shared tensors: a codec's prefixed with its name, a memory's under their own names."""
        return {
            f"{name}.{key}" if name in self._parts else key: value
            for name, memory in self._memories.items()
            if name != self.unshared
            for key, value in memory.shared().items()
        }

    def state(self) -> dict[str, Any]:
        """Return the state of each codec and memory, by name."""
        return {name: memory.state() for name, memory in self._memories.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state of each. If one raises CodecError for its state, all keep their previous states."""
        check_keys(state, self._memories)
        with _unchanged_on_error(self._memories.values()):
            for name, memory in self._memories.items():
                memory.load(state[name])

    def reset(self) -> None:
        """Reset each codec and memory."""
        for memory in self._memories.values():
            memory.reset()

    def parts_unchanged_on_error(self, *names: str) -> contextlib.AbstractContextManager[None]:
        """Restore the codecs' states (only those in `names`, if any are given) when the block raises.

        The states are copied first, which takes time in proportion to their size.
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
    """Combines the parts of a codec that implement one optional protocol into one object: see `capability`."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        super().__init__(parts)
        self._able: tuple[Any, ...] = tuple(parts.values())

    def pair(self, forward: Codec) -> None:
        """Pass the forward instance to all parts."""
        for part in self._able:
            part.pair(forward)

    def observe(self, sent_bytes: int, seconds: float) -> None:
        """Pass the measurement to all parts."""
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
    """A codec around other codecs. Its state consists of theirs and those of its `memories`."""

    def __init__(self, memories: Mapping[str, Stateful] | None = None, **parts: Codec) -> None:
        """An instance that is passed under several names counts once."""
        first = {id(part): name for name, part in reversed(parts.items())}
        self.parts: dict[str, Codec] = {name: part for name, part in parts.items() if first[id(part)] == name}
        super().__init__(parts_with(self.parts, Stateful), **memories or {})


class ClosedLoop(Wrapper):
    """A codec that also decodes its payloads at the sender, and remembers the results."""

    unshared = "inner"  # it encodes; the receiver only decodes, with the decoder

    def __init__(self, inner: Codec, **memories: Stateful) -> None:
        """`memories` are kept in addition to the inner codec's state."""
        self.inner, self._decoder = inner, twin(inner)
        super().__init__(memories, inner=inner, decoder=self._decoder)

    def state(self) -> dict[str, Any]:
        """Return the states of the parts under one name, and the state of each memory."""
        states = super().state()
        return {"parts": {name: states.pop(name) for name in self._parts}, **states}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned. If a part or a memory raises CodecError for its share, nothing changes."""
        check_keys(state, {"parts", *(self._memories.keys() - self._parts.keys())})
        check_keys(state["parts"], self._parts)
        super().load({**state["parts"], **{name: state[name] for name in state if name != "parts"}})


def twin(codec: Codec) -> Codec:
    """Return a second instance for the same context; the codec itself if it is stateless."""
    return codec if capability(codec, Stateful) is None else copy.deepcopy(codec)


_HEADER = struct.Struct("<BBBB")
HEADER_BYTES = _HEADER.size


def frame(code: int, *bodies: Payload, kind: int = 0, visit: int = 0) -> Payload:
    """Return a wrapper's payload: body code, its own kind, visit number and a zero byte, then the bodies, copied. The
    last may be on a device, where it stays.
    """
    last: Any = bodies[-1]
    heads = (_HEADER.pack(code, kind, visit, 0), *bodies[:-1])
    if isinstance(last, DevicePayload):
        framed: Any = DevicePayload(bytearray().join((*heads, last.head)), last.body)
        return framed  # type: ignore[no-any-return]
    return b"".join((*heads, last))


def open_frame(payload: Payload, code: int) -> tuple[int, int, Any]:
    """Return (kind, visit, the rest as a view). CodecError for bytes that `frame` does not write with this code."""
    view = memoryview(payload.head if isinstance(payload, DevicePayload) else payload)
    view = view.cast("B") if view.contiguous and view.nbytes else memoryview(b"")
    if len(view) < _HEADER.size:
        raise CodecError(f"cannot decode a payload of {len(view)} bytes: a wrapper's header has {_HEADER.size}")
    written, kind, visit, zero = _HEADER.unpack_from(view)
    if written != code or zero:
        raise CodecError(f"cannot decode a payload that begins {view[:4].hex(' ')}: expected body code {code}")
    return kind, visit, cut_head(payload if isinstance(payload, DevicePayload) else view, _HEADER.size)[1]


def decode_as(codec: Codec, payload: Payload, key: MessageKey, shape: torch.Size) -> Tensor:
    """Decode a payload. CodecError if the tensor does not have the expected shape."""
    value = codec.decode(payload, key)
    if value.shape != shape:
        raise CodecError(f"cannot decode {key}: expected a tensor of shape {tuple(shape)}, found {tuple(value.shape)}")
    return value


def bound_of(codec: object, tensor: Tensor) -> Tensor:
    """Return the codec's `bound` for a tensor of any type, which may be empty; infinity if the codec states none."""
    bound: Callable[[Tensor], Tensor] | None = getattr(codec, "bound", None)
    if bound is None or not tensor.numel():
        return torch.full(tensor.shape, torch.inf if tensor.numel() else 0.0)
    return bound(tensor.detach().to(torch.float32))


def law_of_bound(codec: object) -> Literal["bounded", "none"]:
    """Return the `row.Law` of a wrapper whose errors are bounded by those of this codec."""
    return "bounded" if bool(bound_of(codec, torch.ones(1)).isfinite().all()) else "none"


def size_of(codec: object) -> Callable[[tuple[int, ...]], int] | None:
    """Return the codec's `payload_bytes`; None if it has none, because its payloads' lengths depend on values."""
    return getattr(codec, "payload_bytes", None)


def check_keys(state: object, expected: Mapping[str, object] | set[str]) -> None:
    """Raise CodecError unless `state` is a mapping with exactly the expected keys."""
    if not isinstance(state, Mapping) or set(state) != set(expected):
        given = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise CodecError(f"cannot load a state of {given}: this codec's has {sorted(expected)}")
