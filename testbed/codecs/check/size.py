"""The check of bytes: a payload is as long as the formula says."""

from __future__ import annotations

import ast
import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from testbed.codecs.catalogue.recipe import Recipe
from testbed.codecs.check.claims import Sized
from testbed.codecs.check.findings import NothingToAsk, require
from testbed.codecs.check.subject import Subject
from testbed.codecs.check.tensors import fitting, hidden, key_at, normal
from testbed.codecs.wire.header import header_bytes

_SHAPES = ((4, 256, 768), (2, 64, 768), (1024, 256), (2, 3, 64))
_ODD_SHAPES: tuple[tuple[int, ...], ...] = ((), (3, 5), (2, 3, 67), (2, 0, 5), (130,))
"""For those that say their length themselves."""
_SLACK = 1.10
"""Over the nominal size, where there is no formula: sizes that depend on the values."""
_OWN_HEADER = 4
"""That a model codec may put before what it wraps."""
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_FUNCTIONS: Mapping[str, Callable[..., float]] = {"ceil": math.ceil, "min": min, "max": max, "log2": math.log2}


def formula(text: str, names: Mapping[str, float]) -> float | None:
    """The value of an arithmetic expression over names; None where the text is something else: words, or an unknown name."""
    try:
        return _value(ast.parse(text, mode="eval").body, names)
    except (SyntaxError, KeyError, TypeError, ZeroDivisionError):
        return None


def _value(node: ast.expr, names: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name):
            return names[name]
        case ast.BinOp(left=left, op=op, right=right):
            return float(_OPERATORS[type(op)](_value(left, names), _value(right, names)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return float(_FUNCTIONS[name](*(_value(one, names) for one in arguments)))
        case _:
            raise TypeError(node)


def names_of(recipe: Recipe, shape: tuple[int, ...]) -> dict[str, float]:
    """What a formula may speak of: d (the last axis), rows, bn (the same), n (values), the codec's own numbers, and the bits of a
    codec inside, under the name of the parameter.
    """
    count, d = math.prod(shape), shape[-1]
    found: dict[str, float] = {"d": d, "rows": count // d, "bn": count // d, "n": count}
    for name, value in recipe.arguments:
        if isinstance(value, Recipe):
            bits = formula(value.entry.bits_per_element, names_of(value, shape))
            if name and bits is not None:
                found[name] = bits
        elif name and isinstance(value, int | float):
            found[name] = value
    return found


def _on_the_wire(recipe: Recipe) -> Recipe:
    """What crosses of a model codec is a tensor of its own, a smaller one, which the codec inside puts on the wire."""
    if recipe.entry.hook and recipe.inner is not None:
        return _on_the_wire(recipe.inner)
    arguments = tuple(
        (name, _on_the_wire(value) if isinstance(value, Recipe) else value) for name, value in recipe.arguments
    )
    return dataclasses.replace(recipe, arguments=arguments)


def payload_length(subject: Subject) -> str:
    """As long as its formula says, to the byte; where the length depends on the values, at most a tenth over the nominal size."""
    told = []
    recipe = _on_the_wire(subject.recipe)
    formula_text = recipe.entry.bits_per_element
    for shape in _SHAPES:
        x = hidden(*shape, seed=len(shape))
        codec, header = subject.fresh(), header_bytes(len(shape))
        first = memoryview(codec.encode(x, key_at(0, batch=shape[0]))).nbytes
        # the second message of the same examples: the first of a codec that sends differences may be longer
        found = memoryview(codec.encode(x + 0.1 * normal(*shape), key_at(3, batch=shape[0]))).nbytes
        each = f"{8 * (found - header) / x.numel():.3g} bits a value"
        bits = formula(formula_text, names_of(recipe, shape))
        if isinstance(codec, Sized):
            wanted = codec.payload_bytes(shape)
            require(first == wanted, f"shape {shape}: {first} bytes, and payload_bytes says {wanted}")
            if subject.stateful and found != first:
                told.append(f"a first message to the byte as payload_bytes says; later ones {each}")
                continue
            require(
                found == wanted, f"shape {shape}: a second message of {found} bytes, and payload_bytes says {wanted}"
            )
            told.append(f"{each}, to the byte as payload_bytes says")
        elif bits is not None:
            wanted = header + math.ceil(bits * x.numel() / 8 - 1e-6)
            own = _OWN_HEADER if subject.entry.hook else 0
            require(
                found in (wanted, wanted + own),
                f"shape {shape}: {found} bytes; {formula_text} bits and the header: {wanted}",
            )
            told.append(f"{formula_text} bits a value and the header, to the byte")
        elif ":" in subject.recipe.name:
            raise NothingToAsk(f"{each}; it has no method payload_bytes to hold it to")
        elif min(shape) >= 64 or math.prod(shape) > 90_000:  # what a message of real size takes
            nominal = recipe.nominal_bits
            limit = nominal * x.numel() / 8 * _SLACK + header + 64
            require(found <= limit, f"shape {shape}: {found} bytes, {each}; nominal {nominal:.3g}")
            told.append(f"{each}, nominal {nominal:.3g}")
    for odd in _ODD_SHAPES:
        if isinstance(codec := subject.fresh(), Sized):
            x = torch.full(odd, 1.5)
            length, wanted = memoryview(codec.encode(x, fitting(x))).nbytes, codec.payload_bytes(odd)
            require(length == wanted, f"shape {odd}: {length} bytes, and payload_bytes says {wanted}")
    return told[0]
