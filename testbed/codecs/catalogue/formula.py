"""The value of a row's formula for the size of a payload, in bits per element of the tensor.

A formula is one Python expression, evaluated by `evaluate` and nothing else, and printed as it stands:

    4 + (32 if asymmetric else 16)/min(group or d, d)
    share*values + min(1, w*share) where w = 16 if token else 32

It may use numbers, + - * /, `or`, `A if B else C`, min, max, ceil and log2, and these names:

    d            the width of the tensor, its last axis
    bn           the number of tokens in the message
    n            the number of values in the message
    a parameter  its number; a codec's bits per element, also where a word names the codec (fp32, bf16)
    a choice     whether the parameter that has this word among its choices is set to it

A row's counts (`counting.py`) also use:

    payload       bytes per value on the wire: the row's own formula for bits, over 8
    gradients     whether gradients are sent, not activations
    inner.encode  the same count of the codec that the parameter `inner` holds, for its encoder; and inner.decode
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS: Mapping[str, Callable[..., float]] = {"ceil": math.ceil, "log2": math.log2, "max": max, "min": min}

LARGE: Mapping[str, float] = {"d": math.inf, "bn": math.inf, "n": math.inf}
"""A tensor so large that scales, headers and the like, which are shared by many values, take nothing of each."""
TYPICAL: Mapping[str, float] = {"d": 768, "bn": 1024, "n": 768 * 1024}
"""The tensor that a formula is evaluated for whose terms all vanish in a large one."""


def sizes_of(shape: tuple[int, ...]) -> dict[str, float]:
    """Return the names that describe a tensor of this shape; none of its axes may be 0."""
    n, d = math.prod(shape), shape[-1] if shape else 1
    return {"d": d, "bn": n // d, "n": n}


def evaluate(text: str, look_up: Callable[[str], float]) -> float:
    """Return the value of a formula. `look_up` gives the value of a name, or raises KeyError.

    ValueError for anything that is not in the module's list.
    """
    expression, _, definition = text.partition(" where ")
    name, _, meaning = definition.partition(" = ")

    def value_of(wanted: str) -> float:
        return evaluate(meaning, look_up) if name and wanted == name else look_up(wanted)

    try:
        return float(_value(ast.parse(expression, mode="eval").body, value_of))
    except KeyError as error:
        known = f"d, bn, n, {', '.join(_FUNCTIONS)}, the codec's parameters and their choices"
        raise ValueError(f"formula {text!r} uses {error}, which is none of {known}") from None
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"formula {text!r}: {error}") from None


def _value(node: ast.expr, look_up: Callable[[str], float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name):
            return look_up(name)
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            return look_up(f"{name}.{attribute}")
        case ast.BinOp(left=left, op=op, right=right):
            return float(_OPERATORS[type(op)](_value(left, look_up), _value(right, look_up)))
        case ast.BoolOp(op=ast.Or(), values=values):
            return next((value for value in (_value(each, look_up) for each in values) if value), 0.0)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, look_up) else orelse, look_up)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return float(_FUNCTIONS[name](*(_value(each, look_up) for each in arguments)))
        case _:
            raise TypeError(f"{ast.unparse(node)} has no place in a formula")
