"""The check of sizes: a payload has the length that the codec and the table's formula state."""

from __future__ import annotations

import dataclasses
import math

import torch

from testbed.codecs.catalogue.codec_spec import FRAMING_BYTES, CodecSpec
from testbed.codecs.check.cost import measure_in_model
from testbed.codecs.check.subject import Subject
from testbed.codecs.check.tensors import fitting, hidden, key_at, normal
from testbed.codecs.check.verdicts import NothingToAsk, require
from testbed.codecs.wire.header import header_bytes
from testbed.message_key import Direction

_SHAPES = ((4, 256, 768), (2, 64, 768), (1024, 256), (1, 16, 256), (3, 40, 100), (5, 2048), (2, 3, 64))
"""Shapes of various widths and numbers of tokens, some not divisible into groups, tiles and bytes."""
_ODD_SHAPES: tuple[tuple[int, ...], ...] = ((), (3, 5), (2, 3, 67), (2, 0, 5), (130,))
"""Shapes for codecs that state their payloads' length themselves."""
_OWN_HEADER = 4
"""Bytes that a codec that changes the model may add before the inner payload."""


def _on_the_wire(spec: CodecSpec) -> CodecSpec:
    """Return the spec of the codec that sends the tensor: for a codec that changes the model, the inner one."""
    if spec.row.hook and spec.inner is not None:
        return _on_the_wire(spec.inner)
    arguments = tuple(
        (name, _on_the_wire(value) if isinstance(value, CodecSpec) else value) for name, value in spec.arguments
    )
    return dataclasses.replace(spec, arguments=arguments)


def _stated_bytes(subject: Subject, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the possible lengths of a payload of this shape, as stated by the codec's class or the inner one.

    Empty if neither states any.
    """
    end, row = subject.fresh(), subject.row
    if "payload_bytes" in end.claims:
        return (end.payload_bytes(shape),)
    if subject.alone is not None and row.hook:
        return tuple(length + own for length in _stated_bytes(subject.alone, shape) for own in (0, _OWN_HEADER))
    if subject.alone is not None and row.bits == "inner" and not row.size_note:
        return _stated_bytes(subject.alone, shape)
    return ()


def _hold_to_formula(spec: CodecSpec, direction: Direction, shape: tuple[int, ...], length: int) -> None:
    """Raise Broken unless a payload's length matches the formula; for upper bounds it may be shorter, and for codecs in
    the model that note additional data, longer.
    """
    expected, framing = spec.bits(direction, shape) * math.prod(shape) / 8, FRAMING_BYTES * len([*spec.parts()])
    least = -math.inf if any(part.row.at_most for part in spec.parts()) else expected - framing
    most = math.inf if spec.row.hook and spec.row.size_note else expected + framing
    require(
        least <= length <= most,
        f"shape {shape}: {length} bytes; the table's formula, {spec.row.size}: {expected:.0f}, give or take {framing}",
    )


def payload_length(subject: Subject) -> str:
    """A payload's length equals `payload_bytes` exactly, and the table's formula up to headers, or is at most that if
    the row says so.
    """
    told = []
    spec = _on_the_wire(subject.spec)
    has_formula = all(part.row.bits is not None for part in spec.parts())
    for shape in _SHAPES:
        x, end = hidden(*shape, seed=len(shape)), subject.fresh()
        first = memoryview(end.encode(x, key_at(0, batch=shape[0]))).nbytes
        # Use the second message of the same examples, because a codec's first one before differences may be longer.
        second = memoryview(end.encode(x + 0.1 * normal(*shape), key_at(3, batch=shape[0]))).nbytes
        each = f"{8 * (second - header_bytes(len(shape))) / x.numel():.3g} bits per value"
        stated = _stated_bytes(subject, shape)
        says = f"payload_bytes says {' or '.join(map(str, stated))}"
        if stated and subject.stateful and second != first:
            require(first in stated, f"shape {shape}: {first} bytes, but {says}")
            told.append(f"a first message exactly as payload_bytes states; later ones {each}")
        elif stated:
            require({first, second} <= {*stated}, f"shape {shape}: {first} and {second} bytes, but {says}")
            told.append(f"{each}, exactly as payload_bytes states")
        elif has_formula:
            told.append(f"{each}, as the table's formula states")
        else:
            raise NothingToAsk(f"{each}; it has no method payload_bytes to compare with")
        if has_formula:
            _hold_to_formula(spec, subject.direction, shape, second)
    if spec != subject.spec and has_formula:
        for width in (96, 256):
            gradients = [normal(2, 24, width)]
            crossed = measure_in_model(subject.forward, subject.spec, gradients, seconds=0)[subject.direction]
            _hold_to_formula(subject.spec, subject.direction, (2, 24, width), crossed.payload_bytes)
    for odd in _ODD_SHAPES:
        end, x = subject.fresh(), torch.full(odd, 1.5)
        if "payload_bytes" in end.claims:
            length, wanted = memoryview(end.encode(x, fitting(x))).nbytes, end.payload_bytes(odd)
            require(length == wanted, f"shape {odd}: {length} bytes, but payload_bytes states {wanted}")
    return told[0]
