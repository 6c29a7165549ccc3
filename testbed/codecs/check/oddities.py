"""Checks of tensors that are easily forgotten: odd shapes and strides, zeros, denormals, NaN, infinity, wrong types."""

from __future__ import annotations

import torch

from testbed.codecs.check.subject import Subject
from testbed.codecs.check.tensors import LARGEST, fitting, key_at, normal, odd
from testbed.codecs.check.verdicts import Broken, require, same
from testbed.errors import CodecError

_NOTHING = 1e-30


def odd_tensors(subject: Subject) -> str:
    """Every tensor of finite numbers crosses in its shape and comes out finite, zeros as zeros; or the error names
    the message key.
    """
    refused = []
    for name, x in odd().items():
        key = fitting(x, step=17)
        kept = x.detach().clone()
        sender, receiver = subject.fresh(), subject.fresh()
        try:
            payload = bytes(sender.encode(x, key))
        except CodecError as error:
            extreme = bool(x.numel()) and float(x.detach().abs().max()) > 1e4
            if not extreme:
                raise Broken(f"{name}: refused: {error}") from None
            require("17" in str(error), f"{name}: refused, and the message does not name the message key: {error}")
            refused.append(name)
            continue
        decoded = receiver.decode(payload, key)
        require(decoded.shape == x.shape, f"{name}: shape {tuple(decoded.shape)} came of {tuple(x.shape)}")
        plain = x.detach().float().contiguous().clone()
        alike = subject.fresh().decode(bytes(subject.fresh().encode(plain, key)), key)
        require(
            same(decoded, alike),
            f"{name}: it decodes to another tensor than the same values in fp32, one after another",
        )
        require(same(x.detach(), kept), f"{name}: encode changed the tensor")
        rounds_over = (
            bool(x.numel()) and float(x.detach().abs().max()) > 0.99 * LARGEST
        )  # to infinity, in a narrower type
        require(rounds_over or bool(torch.isfinite(decoded).all()), f"{name}: NaN or infinity came of finite numbers")
        if not x.count_nonzero():
            # a grid without a zero has a smallest step instead
            small = not decoded.numel() or float(decoded.abs().max()) < _NOTHING
            require(small, f"{name}: zeros did not stay zeros")
    return f"{len(odd())} tensors" + (f"; refused by name: {', '.join(refused)}" if refused else "")


def not_finite(subject: Subject) -> str:
    """NaN and infinity pass, where they were, or are refused by an error that names the message key.

    They never become other numbers.
    """
    passed = 0
    for bad in (float("nan"), float("inf"), float("-inf")):
        key, x = key_at(17), normal(2, 8, 64)
        x[1, 4, 5] = bad
        sender, receiver = subject.fresh(), subject.fresh()
        for earlier in (11, 14):  # of the same examples, so that what remembers sends differences
            receiver.decode(bytes(sender.encode(normal(2, 8, 64, seed=earlier), key_at(earlier))), key_at(earlier))
        try:
            payload = bytes(sender.encode(x, key))
        except CodecError as error:
            require("17" in str(error), f"{bad} is refused, but the message does not name the message key: {error}")
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
