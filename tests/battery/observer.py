"""What a training computes, seen from outside: what its codecs are given and give, its records, its weights.

`N(codec)` in a recipe here is `Noting(codec)`, a stranger's codec around another one: whoever trains, trains with it,
so nothing of the trainers has to be known.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from testbed.codecs.contract import Codec, Context, MessageKey, Payload, Stateful
from testbed.codecs.wrap import capability
from testbed.training import stages  # noqa: F401 - what builds models is loaded before it is watched
from testbed.workloads import build_stage, images
from tests.battery.entries import Record, digest


class Noting:
    """A codec whose messages are noted."""

    def __init__(self, context: Context, inner: Codec) -> None:
        self.inner, self._of = inner, (context.boundary, context.direction)
        NOTES.ends.append((self._of, inner))

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        payload = self.inner.encode(tensor, key)
        NOTES.encoded[self._of].append((key.step, key.phase, key.microbatch, hash_of(bytes(payload))))
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        tensor = self.inner.decode(payload, key)
        NOTES.decoded[self._of].add((key.step, key.phase, key.microbatch, hash_of(tensor)))
        return tensor


class Notes:
    """What the codecs of one training said."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.encoded: defaultdict[Any, list[tuple[Any, ...]]] = defaultdict(list)
        """By boundary and direction, in order."""
        self.decoded: defaultdict[Any, set[tuple[Any, ...]]] = defaultdict(set)
        self.ends: list[tuple[Any, Codec]] = []

    def record(self) -> Record:
        """Return what was noted. Where several ends of a message lie in one process, a step's messages come in an order
        that has no meaning once it is over: only steps are put in order.
        """
        encoded = [(of, sorted(said, key=lambda each: each[0])) for of, said in sorted(self.encoded.items())]
        states = {
            (of, hash_of(able.state())) for of, codec in self.ends if (able := capability(codec, Stateful)) is not None
        }
        return {
            "payloads": digest(encoded),
            "decoded": digest([(of, sorted(said)) for of, said in sorted(self.decoded.items())]),
            "states": digest(sorted(states)),
        }


NOTES = Notes()


def noted(codec: str) -> str:
    """Return a codec's text with its notes taken. To a stranger a bare word is a word: brackets make it a codec."""
    inside = re.sub(r"N\(([\w-]+)\)", r"N(\1())", codec)
    return re.sub(r"\bN\(", f"{Noting.__module__}:{Noting.__name__}(", inside)


def hash_of(value: Any) -> str:
    """Return a hash of bytes, tensors, and what holds such."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()[:16]


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1)
        found.update(f"{value.dtype} {tuple(value.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            found.update(repr(key).encode())
            _feed(found, value[key])
    elif isinstance(value, (list, tuple)):
        found.update(f"{len(value)}".encode())
        for each in value:
            _feed(found, each)
    else:
        found.update(value if isinstance(value, bytes) else repr(value).encode())


@contextlib.contextmanager
def watching() -> Iterator[list[nn.Module]]:
    """Take notes anew; yields a list to which each model is added that is built meanwhile."""
    NOTES.clear()
    made: list[nn.Module] = []
    changed: list[tuple[Any, str, Any]] = []

    def watched(original: Any) -> Any:
        def building(*given: Any, **named: Any) -> Any:
            made.append(original(*given, **named))
            return made[-1]

        return building

    stand_ins = {original: watched(original) for original in (build_stage.build_stage, images.build_network)}
    for name, module in list(sys.modules.items()):
        for attribute, value in list(vars(module).items()) if name.startswith("testbed.") else ():
            for original, stand_in in stand_ins.items():
                if value is original:
                    changed.append((module, attribute, value))
                    setattr(module, attribute, stand_in)
    try:
        yield made
    finally:
        for module, attribute, value in changed:
            setattr(module, attribute, value)
        torch.use_deterministic_algorithms(False)


def weights_of(models: list[nn.Module]) -> str:
    """Return a hash of all models' weights, in whatever order they were built."""
    return digest(sorted(hash_of(dict(model.named_parameters())) for model in models))
