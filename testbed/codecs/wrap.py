"""What a codec around other codecs needs: what it passes inwards, a second instance for decoding, and undoing.

A closed loop decodes its own payload at the sender. An inner codec that remembers would move on twice if one instance did both,
so the loop holds two: one encodes, the other (`twin`) decodes as the receiver's does.
"""

from __future__ import annotations

import contextlib
import copy
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from testbed.codecs.contract import Choosing, Codec, Hook, Measured, MessageKey, ModelCodec, Paired, Payload, Stateful
from testbed.errors import CodecError
from testbed.message_key import Side


class Wrapper:
    """Whatever the parts have besides `encode` and `decode`, on behalf of all of them, by the parts' names."""

    def __init__(self, **parts: Codec) -> None:
        """Parts that are one and the same instance count once."""
        self._parts: dict[str, Codec] = {}
        for name, part in parts.items():
            if all(part is not other for other in self._parts.values()):
                self._parts[name] = part

    @property
    def _stateful(self) -> dict[str, Stateful]:
        return {name: part for name, part in self._parts.items() if isinstance(part, Stateful)}

    def shared(self) -> Mapping[str, Tensor]:
        """What the parts share."""
        return {f"{name}.{key}": value for name, part in self._stateful.items() for key, value in part.shared().items()}

    def state(self) -> dict[str, Any]:
        """By part."""
        return {name: part.state() for name, part in self._stateful.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """CodecError, and all parts as they were, where a part refuses its share."""
        parts = self._stateful
        check_keys(state, parts)
        with unchanged_on_error(*parts.values()):
            for name, part in parts.items():
                part.load(state[name])

    def reset(self) -> None:
        """All parts forget."""
        for part in self._stateful.values():
            part.reset()

    def hook(self, model: Module, side: Side) -> Hook | None:
        """The first part's that has one."""
        hooks = (part.hook(model, side) for part in self._parts.values() if isinstance(part, ModelCodec))
        return next((hook for hook in hooks if hook is not None), None)

    def pair(self, forward: Codec) -> None:
        """All parts are."""
        for part in self._parts.values():
            if isinstance(part, Paired):
                part.pair(forward)

    @property
    def choice(self) -> str | None:
        """See `base.Choosing`: that of the first part that has one."""
        choices = (part.choice for part in self._parts.values() if isinstance(part, Choosing))
        return next((choice for choice in choices if choice is not None), None)

    def observe(self, sent_bytes: int, seconds: float) -> None:
        """All parts are told."""
        for part in self._parts.values():
            if isinstance(part, Measured):
                part.observe(sent_bytes, seconds)


class ClosedLoop(Wrapper):
    """A codec that decodes its own payloads at the sender, and a memory of what was decoded that both ends have alike."""

    def __init__(self, inner: Codec, memory: Stateful) -> None:
        """`memory` is held beside what the inner codec remembers."""
        self.inner, self._decoder = inner, twin(inner)
        super().__init__(inner=inner, decoder=self._decoder)
        self._memory = memory

    def shared(self) -> Mapping[str, Tensor]:
        """The memory, and what the decoding halves of the inner codec share."""
        decoding = {key: value for key, value in super().shared().items() if not key.startswith("inner.")}
        return {**decoding, **self._memory.shared()}

    def state(self) -> dict[str, Any]:
        """The parts' and the memory's."""
        return {"parts": super().state(), "memory": self._memory.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """CodecError, and all as it was, where a part or the memory refuses its share."""
        check_keys(state, {"parts", "memory"})
        with unchanged_on_error(*self._stateful.values()):
            super().load(state["parts"])
            self._memory.load(state["memory"])

    def reset(self) -> None:
        """Parts and memory forget."""
        super().reset()
        self._memory.reset()


def parts_of(codec: object) -> tuple[Codec, ...]:
    """What a codec wraps; nothing where it is no wrapper."""
    if isinstance(codec, Wrapper):
        return tuple(codec._parts.values())
    inner = getattr(codec, "inner", None)
    return () if inner is None else (inner,)


def measures(codec: object) -> bool:
    """Whether it goes by what it is told of its link; a wrapper that only passes it on does not, if nothing inside does."""
    if isinstance(codec, Wrapper) and type(codec).observe is Wrapper.observe:
        return any(map(measures, parts_of(codec)))
    return isinstance(codec, Measured)


def twin(codec: Codec) -> Codec:
    """A second instance for the same context; the same one where it remembers nothing."""
    return copy.deepcopy(codec) if isinstance(codec, Stateful) else codec


@contextlib.contextmanager
def unchanged_on_error(*codecs: object) -> Iterator[None]:
    """Put the codecs' state back when the block raises. What they remember is copied first, which costs its size in time."""
    before = [(codec, codec.state()) for codec in codecs if isinstance(codec, Stateful)]
    try:
        yield
    except BaseException:
        for codec, state in before:
            codec.load(state)
        raise


_HEADER = struct.Struct("<BBBB")
HEADER_BYTES = _HEADER.size


def frame(code: int, *bodies: Payload, kind: int = 0, visit: int = 0) -> Payload:
    """A wrapper's payload: its body code, a kind of its own, a visit number and a zero byte, then the bodies, copied."""
    return b"".join((_HEADER.pack(code, kind, visit, 0), *bodies))


def open_frame(payload: Payload, code: int) -> tuple[int, int, memoryview]:
    """(kind, visit, what follows, not copied). CodecError for what `frame` does not write with this code."""
    view = memoryview(payload)
    view = view.cast("B") if view.contiguous and view.nbytes else memoryview(b"")
    if len(view) < _HEADER.size:
        raise CodecError(f"cannot decode a payload of {len(view)} bytes: a wrapper's header has {_HEADER.size}")
    found, kind, visit, zero = _HEADER.unpack_from(view)
    if found != code or zero:
        raise CodecError(f"cannot decode a payload that begins {view[:4].hex(' ')}: expected body code {code}")
    return kind, visit, view[_HEADER.size :]


def decode_as(codec: Codec, payload: Payload, key: MessageKey, shape: torch.Size) -> Tensor:
    """`codec.decode`, and a CodecError where what comes out has another shape than expected."""
    value = codec.decode(payload, key)
    if value.shape != shape:
        raise CodecError(
            f"cannot decode {key}: a tensor of shape {tuple(value.shape)} where {tuple(shape)} must follow"
        )
    return value


def bound_of(codec: object, tensor: Tensor) -> Tensor:
    """The codec's own `bound`; infinity where it states none."""
    bound = getattr(codec, "bound", None)
    found: Tensor = torch.tensor(torch.inf) if bound is None else bound(tensor)
    return found


def law_of_bound(codec: object) -> Literal["bounded", "none"]:
    """The law, in the words of `entry.Law`, of what bounds its errors by those of this codec."""
    return "bounded" if bool(bound_of(codec, torch.ones(1)).isfinite().all()) else "none"


def size_of(codec: object) -> Callable[[tuple[int, ...]], int] | None:
    """The codec's own `payload_bytes`; None where it has none, as its payloads' length depends on their values."""
    return getattr(codec, "payload_bytes", None)


def check_keys(state: object, expected: Mapping[str, object] | set[str]) -> None:
    """CodecError unless `state` is a mapping with exactly the expected keys."""
    if not isinstance(state, Mapping) or set(state) != set(expected):
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise CodecError(f"cannot load a state of {found}: this codec's has {sorted(expected)}")
