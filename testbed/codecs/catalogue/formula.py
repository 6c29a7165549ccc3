"""The value of a row's formula for the size of a payload, in bits per element of the tensor.

A formula is one Python expression, evaluated only by `evaluate`, and printed unchanged:

    4 + (32 if asymmetric else 16)*groups(d, group or d)
    k*values + min(1, k*index_bits(d)) where k = kept(share, d)
    r*(inner(bn, r)/d + inner(d, r)/bn) where r = min(rank, d, bn)

It may use numbers, + - * / **, `or`, `A if B else C`, definitions behind `where` with `and` between them, these names:

    d            the width of the tensor, its last axis
    bn           the number of tokens in the message
    b            the number of samples in the message: of a tensor of fewer than three axes, one
    n            the number of values in the message
    a parameter  its number; a codec's bits per element, also where a word names the codec (fp32, bf16)
    a choice     whether the parameter that has this word among its choices is set to it

these functions:

    min, max, ceil, log2, round
    kept(share, w)      share of w values that a sparsifier keeps: rounded to whole values, at least one
    raised(share, w)    share of w, rounded up to a whole number
    groups(w, size)     groups of `size` among w values, the last perhaps short, over w
    index_bits(w)       bits of an index into w places: 8, 16 or 32
    finite(d, w)        d, or w where no tensor is given, and d is without end
    inner(bn, d)        bits per element of the codec of the parameter `inner` for a tensor of this shape

and for an infinitely large tensor the parts have their limits.

A row's counts (`counting.py`) also use:

    payload       bytes per value on the wire: the row's own formula for bits, over 8
    gradients     whether gradients are sent, not activations
    inner.encode  the same count of the codec that the parameter `inner` holds, for its encoder; and inner.decode
"""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def _whole(rounded: Callable[[float], int]) -> Callable[[float], float]:
    return lambda number: number if math.isinf(number) else rounded(number)


_ceil, _round = _whole(math.ceil), _whole(round)


def _kept(share: float, places: float) -> float:
    return share if math.isinf(places) else min(places, max(1, round(share * places))) / places


def _raised(share: float, places: float) -> float:
    # Like `tah`: a share such as 0.8 of 25 must not become 21 because 0.8 is inexact in binary.
    return share if math.isinf(places) else math.ceil(share * places - 1e-9) / places


def _groups(places: float, size: float) -> float:
    return 1 / size if math.isinf(places) else math.ceil(places / size) / places


def _index_bits(places: float) -> float:
    return 8 if places <= 1 << 8 else 16 if places <= 1 << 16 else 32


_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "ceil": _ceil,
    "finite": lambda places, otherwise: otherwise if math.isinf(places) else places,
    "groups": _groups,
    "index_bits": _index_bits,
    "kept": _kept,
    "log2": math.log2,
    "max": max,
    "min": min,
    "raised": _raised,
    "round": _round,
}

LARGE: Mapping[str, float] = {"d": math.inf, "bn": math.inf, "b": 1, "n": math.inf}
"""A tensor so large that costs shared by many values, such as scales and headers, vanish per value."""
TYPICAL: Mapping[str, float] = {"d": 768, "bn": 1024, "b": 4, "n": 768 * 1024}
"""The tensor for formulas whose terms all vanish for a large one."""


def sizes_of(shape: Sequence[float]) -> dict[str, float]:
    """Return the values of the names that describe a tensor of this shape."""
    return {
        "d": shape[-1] if shape else 1,
        "bn": math.prod(shape[:-1]),
        "b": shape[0] if len(shape) > 2 else 1,
        "n": math.prod(shape),
    }


def _no_codec(name: str, shape: Sequence[float]) -> float:
    raise KeyError(name)


@functools.lru_cache(maxsize=1024)
def _parsed(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


def evaluate(
    text: str,
    look_up: Callable[[str], float],
    bits_of: Callable[[str, Sequence[float]], float] = _no_codec,
) -> float:
    """Return the value of a formula. `look_up` returns the value of a name, `bits_of` the bits per element of a
    parameter's codec for a shape; either raises KeyError.

    ValueError for anything outside the module's list.
    """
    expression, _, rest = text.partition(" where ")
    definitions = dict(definition.split(" = ", 1) for definition in rest.split(" and ")) if rest else {}

    def value_of(name: str) -> float:
        return value(definitions[name]) if name in definitions else look_up(name)

    def value(expression: str) -> float:
        return float(_value(_parsed(expression), value_of, bits_of))

    try:
        return value(expression)
    except KeyError as error:
        known = f"d, bn, b, n, {', '.join(_FUNCTIONS)}, the codec's parameters and their choices"
        raise ValueError(f"formula {text!r} uses {error}, which is not one of {known}") from None
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"formula {text!r}: {error}") from None


def _value(node: ast.expr, look_up: Callable[[str], float], bits_of: Callable[[str, Sequence[float]], float]) -> float:
    def value(part: ast.expr) -> float:
        return _value(part, look_up, bits_of)

    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name):
            return look_up(name)
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            return look_up(f"{name}.{attribute}")
        case ast.BinOp(left=left, op=op, right=right):
            return float(_OPERATORS[type(op)](value(left), value(right)))
        case ast.BoolOp(op=ast.Or(), values=values):
            return next((each for each in map(value, values) if each), 0.0)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return value(body if value(test) else orelse)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            numbers = [value(each) for each in arguments]
            return float(_FUNCTIONS[name](*numbers) if name in _FUNCTIONS else bits_of(name, numbers))
        case _:
            raise TypeError(f"{ast.unparse(node)} is not allowed in a formula")
