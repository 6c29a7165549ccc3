"""Checks of unusual tensors: odd shapes and strides, zeros, denormals, NaN, infinity, wrong types."""

from __future__ import annotations

import math

import torch

from testbed.codecs.check.subject import Subject
from testbed.codecs.check.tensors import LARGEST, fitting, hidden, key_at, normal, odd
from testbed.codecs.check.verdicts import Broken, require, same
from testbed.errors import CodecError

_NOTHING = 1e-30


def odd_tensors(subject: Subject) -> str:
    """Every finite tensor keeps its shape and stays finite, zeros stay zeros; or the error names the message key."""
    refused = []
    for name, x in odd().items():
        key = fitting(x, step=17)
        sender, receiver = subject.fresh(), subject.fresh()
        try:
            payload = bytes(sender.encode(x, key))
        except CodecError as error:
            extreme = bool(x.numel()) and float(x.detach().abs().max()) > 1e4
            if not extreme:
                raise Broken(f"{name}: refused: {error}") from None
            require("17" in str(error), f"{name}: refused, but the error does not name the message key: {error}")
            refused.append(name)
            continue
        except Broken as broken:
            raise Broken(f"{name}: {broken}") from None
        decoded = receiver.decode(payload, key)
        require(decoded.shape == x.shape, f"{name}: decoded shape {tuple(decoded.shape)}, expected {tuple(x.shape)}")
        plain = x.detach().float().contiguous().clone()
        alike = subject.fresh().decode(bytes(subject.fresh().encode(plain, key)), key)
        require(same(decoded, alike), f"{name}: it decodes to another tensor than the same values in contiguous fp32")
        rounds_over = (
            bool(x.numel()) and float(x.detach().abs().max()) > 0.99 * LARGEST
        )  # to infinity, in a narrower type
        require(rounds_over or bool(torch.isfinite(decoded).all()), f"{name}: finite values became NaN or infinity")
        if not x.count_nonzero():
            # a grid without zero has a minimum step instead
            small = not decoded.numel() or float(decoded.abs().max()) < _NOTHING
            require(small, f"{name}: zeros did not stay zeros")
    return f"{len(odd())} tensors" + (f"; refused by name: {', '.join(refused)}" if refused else "")


def large_tensor(subject: Subject) -> str:
    """A tensor of more than 4 million values is encoded and decoded as well as one of 0.8 million."""
    errors = []
    for shape in ((4, 256, 768), (4, 1024, 1024)):
        x, key = hidden(*shape), key_at(0, batch=4)
        decoded = subject.fresh().decode(subject.fresh().encode(x, key), key)
        require(decoded.shape == x.shape, f"{shape}: decoded shape {tuple(decoded.shape)}")
        errors.append(float((decoded - x).norm() / x.norm()))
    require(
        errors[1] <= 1.5 * errors[0] + _NOTHING,
        f"{math.prod(shape)} values: a relative error of {errors[1]:.2g}; of 786432 values it is {errors[0]:.2g}",
    )
    return f"{math.prod(shape)} values: a relative error of {errors[1]:.2g}"


def not_finite(subject: Subject) -> str:
    """NaN and infinity are preserved in place, or refused by an error that names the message key.

    They never become other values.
    """
    passed = 0
    for bad in (float("nan"), float("inf"), float("-inf")):
        key, x = key_at(17), normal(2, 8, 64)
        x[1, 4, 5] = bad
        sender, receiver = subject.fresh(), subject.fresh()
        for earlier in (11, 14):  # of the same examples, so that stateful codecs send differences
            receiver.decode(bytes(sender.encode(normal(2, 8, 64, seed=earlier), key_at(earlier))), key_at(earlier))
        try:
            payload = bytes(sender.encode(x, key))
        except CodecError as error:
            require("17" in str(error), f"{bad} is refused, but the error does not name the message key: {error}")
            continue
        decoded = receiver.decode(payload, key)
        kept = torch.equal(torch.isnan(decoded), torch.isnan(x)) and torch.equal(torch.isinf(decoded), torch.isinf(x))
        require(
            kept and (bad != bad or float(decoded[1, 4, 5]) == bad),
            f"{bad} became {float(decoded[1, 4, 5])}, or spread",
        )
        passed += 1
    return f"{passed} of 3 pass, {3 - passed} are refused by name"


def unfit_tensors(subject: Subject) -> str:
    """Types and shapes outside the contract are refused."""
    for what, x in {
        "float64": torch.ones(2, 4, dtype=torch.float64),
        "int32": torch.ones(2, 4, dtype=torch.int32),
        "on another device": torch.empty(2, 4, device="meta"),
    }.items():
        try:
            subject.fresh().encode(x, fitting(x))
        except CodecError:
            continue
        raise Broken(f"a tensor {what} was encoded; a codec takes float32 or bfloat16 on the CPU")
    return "float64, int32, another device"
