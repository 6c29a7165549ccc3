"""AQ-SGD: sends the difference from the receiver's last tensor of the same training example, an epoch ago.

Both ends hold m(example), a tensor for every example seen. The sender sends its tensor a in full at the first visit,
and Q(a - m) at every later one; then m <- m + decoded Q at both ends, and the receiver continues with m. The difference
is from the decoded value, so it includes the error of the visit before. Gradients are quantised, without differences or
memory. AQ-SGD pays off if the same examples return before the weights have moved far; in a single epoch every visit is
a first one. Evaluation examples are separate from training examples. A message without ids of examples is compared with
the last one of its number in a step.

`direct` is the control for the effect of differences: it also sends first visits in full, but later ones as Q(a), the
paper's DirectQ. Its m is zero, so nothing else differs.

Source: Wang et al., "Fine-tuning Language Models over Slow Networks using Activation Compression with Guarantees",
NeurIPS 2022, algorithm 1. Their cache is a file in fp16; ours is in fp32 and in memory up to a limit. They quantise
gradients from the second epoch on, we from the start.
"""

from __future__ import annotations

import itertools
import struct
from typing import Any

import torch
from torch import Tensor

from testbed.codecs.contract import Codec, Context, MessageKey, Payload
from testbed.codecs.memory.delta import CASTS
from testbed.codecs.memory.examples import ExampleKey, Examples
from testbed.codecs.memory.history import check_follows, following
from testbed.codecs.wire import header
from testbed.codecs.wrap import ClosedLoop, bound_of, decode_as, frame, open_frame
from testbed.errors import CodecError

_EACH, _WHOLE = 0, 1
"""Kinds of payload: one example along the first axis for each id of the message key, or the whole tensor is one."""
_MB = 1e6


class AqSgd(ClosedLoop):
    """Sends new examples in full, and the others as differences.

    Wire: 4 bytes (code, kind, 0, 0), a visit number u8 for each example, zeros to a multiple of 4, u64 length of the
    first part, then two payloads: the new examples, and the differences; either may be missing.
    Law: the error is the inner codec's on the last difference; zero at a first visit in fp32.
    State: at each end, an fp32 tensor for each example seen, separately for training and evaluation. A lost message is
    detected when its examples return.
    """

    code = 62

    def __init__(
        self,
        context: Context,
        inner: Codec,
        first: str = "fp32",
        later: str = "difference",
        memory_mb: float = 1024.0,
        **_: Any,
    ) -> None:
        """`first` is the type of first visits, fp32 or bf16; `later` sends later ones as a difference or direct. Each
        end keeps up to `memory_mb` (10**6 bytes) in memory, the rest in a file.
        """
        self.examples = Examples(memory_mb * _MB)
        super().__init__(inner, memory=self.examples)
        self._first, self._direct = CASTS[first](context), later == "direct"

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Encode new examples in full, others as differences.

        CodecError names the message key when a value is not finite.
        """
        x = header.check_input(tensor).to(torch.float32)
        header.check_finite(x, key, "a difference")
        whole = x.ndim == 0 or not key.samples or x.shape[0] != len(key.samples)
        unit = tuple(x.shape) if whole else tuple(x.shape[1:])
        kind = _WHOLE if whole else _EACH
        examples = _examples_of(key, kind)
        known = [self.examples.shape(example) == unit for example in examples]
        visits = bytes(
            following(self.examples.visit(example) or 0) if old else 0
            for example, old in zip(examples, known, strict=True)
        )
        rows = x.unsqueeze(0) if whole else x
        full = differences = b""  # type: Payload
        with self.parts_unchanged_on_error():
            if not all(known):
                full = self._first.encode(_part(rows, [not old for old in known], whole), key)
            if any(known):
                held = self.examples.gather(list(itertools.compress(examples, known)), unit)
                held = held[0] if whole else held
                differences = self.inner.encode(torch.sub(_part(rows, known, whole), held, out=held), key)
            padding, length = bytes(-len(visits) % 4), struct.pack("<Q", len(full))
            payload = frame(self.code, visits, padding, length, full, differences, kind=kind)
            self._advance(payload, key)
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Return the new m of the message's examples; with `direct`, the decoded tensor.

        CodecError when an example's visit does not follow its last one.
        """
        with self.parts_unchanged_on_error("decoder"):
            return self._advance(payload, key)

    def bound(self, tensor: Tensor) -> Tensor:
        """Return the largest |decoded - x| of each value at a first visit."""
        return bound_of(self._first, tensor)

    def _advance(self, payload: Payload, key: MessageKey) -> Tensor:
        """Advance the state, at either end, from the bytes alone. Return the new m of the message's examples."""
        kind, zero, body = open_frame(payload, self.code)
        if kind not in (_EACH, _WHOLE) or zero or (kind == _EACH and not key.samples):
            raise CodecError(f"cannot decode {key}: a message of kind {kind}, which this encoder does not write")
        examples, whole = _examples_of(key, kind), kind == _WHOLE
        start = len(examples) + -len(examples) % 4
        if len(body) < start + 8 or any(body[len(examples) : start]):
            raise CodecError(
                f"cannot decode {key}: {len(body)} bytes do not hold the visits of {len(examples)} examples"
            )
        visits = list(body[: len(examples)])
        (full_bytes,) = struct.unpack_from("<Q", body, start)
        full, differences = body[start + 8 :][:full_bytes], body[start + 8 :][full_bytes:]
        known = [visit != 0 for visit in visits]
        old = list(itertools.compress(examples, known))
        for example, visit in zip(examples, visits, strict=True):
            if visit:
                check_follows(key, visit, self.examples.visit(example), f"example {example[1]}")
        if len(full) != full_bytes or bool(full_bytes) == all(known) or bool(len(differences)) != any(known):
            raise CodecError(
                f"cannot decode {key}: parts of {full_bytes} and {len(differences)} bytes do not match visits {visits}"
            )
        new = self._first.decode(full, key) if full_bytes else None
        if new is not None and not whole and (new.ndim == 0 or new.shape[0] != len(examples) - len(old)):
            raise CodecError(
                f"cannot decode {key}: shape {tuple(new.shape)} does not hold {len(examples) - len(old)} first visits"
            )
        shapes = {self.examples.shape(example) for example in old}
        if new is not None:
            shapes.add(tuple(new.shape) if whole else tuple(new.shape[1:]))
        unit = shapes.pop()
        if shapes or unit is None:
            raise CodecError(f"cannot decode {key}: its examples have different shapes, {unit} and {shapes}")
        value = torch.empty((len(examples), *unit)) if new is None or old else new.unsqueeze(0) if whole else new
        if old:
            held = self.examples.gather(old, unit)
            expected = torch.Size(unit) if whole else held.shape
            held.add_(decode_as(self._decoder, differences, key, expected))
            if new is None:
                value = held
            else:
                value[torch.tensor(known)] = held
                value[~torch.tensor(known)] = new
        header.check_finite(value, key, "a difference", doing="decode")
        self.examples.put(examples, visits, torch.zeros_like(value) if self._direct else value)
        return value[0] if whole else value


def _examples_of(key: MessageKey, kind: int) -> list[ExampleKey]:
    if kind == _EACH:
        return [(key.phase, (sample,)) for sample in key.samples]
    # Without ids, messages of one number follow each other; -1 is no id.
    return [(key.phase, key.samples or (-1, key.microbatch))]


def _part(rows: Tensor, chosen: list[bool], whole: bool) -> Tensor:
    """Return the chosen rows; without the row axis if the whole tensor is one example."""
    if whole:
        return rows[0]
    return rows if all(chosen) else rows[torch.tensor(chosen)]
