"""Checks of the exchange: only the payload is shared, results are reproducible, and the caller owns its results."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from testbed.codecs.check.subject import Subject, TrialEnd
from testbed.codecs.check.tensors import fitting, hidden, key_at, messages, normal
from testbed.codecs.check.verdicts import difference, require, same
from testbed.codecs.contract import MessageKey
from testbed.errors import CodecError

STEPS = 40
_ROUNDING = 1e-3
"""What threads may change, because sums in parts round differently."""

Sent = tuple[MessageKey, bytes, Tensor]


def observed(encoder: TrialEnd, number: int) -> None:
    """Before message `number`, show an adaptive encoder a link that is fast for eight messages, then slow for eight."""
    encoder.observe(100_000, 1e-4 if number // 8 % 2 == 0 else 10.0)


def two_instances(subject: Subject) -> str:
    """Between an encoder and a decoder in processes that share nothing, the bytes suffice: the decoder makes of them
    what one in the encoder's process does, and both ends' states agree.
    """
    sender, receiver = subject.fresh(), subject.fresh()
    beside = subject.fresh(place="encoder")
    sent: list[Sent] = []
    for number, (key, tensor) in enumerate(messages(STEPS)):
        observed(sender, number)
        payload = bytes(sender.encode(tensor, key))
        sent.append((key, payload, beside.decode(payload, key)))
        require(
            same(receiver.decode(payload, key), sent[-1][-1]),
            f"{key}: decoded from the bytes alone, in a separate process, the tensor differs: the decoder used data "
            "that was not in the payload",
        )
        ours, theirs = sender.shared(), receiver.shared()
        require(same(ours, theirs), f"after {key} the ends' states differ: {difference(ours, theirs)}")
    if receiver.stateful and not receiver.shared():
        _needs_nothing(subject, sent)
    return f"{len(sent)} messages in {STEPS} steps"


def _needs_nothing(subject: Subject, sent: list[Sent]) -> None:
    """If a codec claims that its ends share nothing, a decoder without earlier messages must suffice."""
    for key, payload, expected in sent[-4:]:
        try:
            alike = same(subject.fresh().decode(payload, key), expected)
        except CodecError:
            alike = False
        told = "a decoder without earlier messages decodes another tensor, so the codec is stateful, but its `shared`"
        require(alike, f"{key}: {told} is empty and cannot be compared")


def deterministic(subject: Subject) -> str:
    """The same seed and message keys give the same bytes, independent of global generators, which stay unchanged."""

    def run(seed: int) -> list[bytes]:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = _generators()
        sender = subject.fresh(5)
        payloads = [bytes(sender.encode(tensor, key)) for key, tensor in messages(12)]
        require(same(_generators(), before), "the codec drew from a global random generator")
        return payloads

    first, again = run(1), run(2)
    differing = sum(a != b for a, b in zip(first, again, strict=True))
    told = f"{differing} of {len(first)} payloads differ in a second run with the same seed and message keys"
    require(not differing, told)
    return f"{len(first)} payloads twice"


def two_processes(subject: Subject) -> str:
    """Two processes, started separately, make the same bytes of the same messages."""
    ends = subject.fresh(place="encoder"), subject.fresh(place="decoder")
    for step in range(12):
        ours, theirs = (bytes(end.encode(normal(2, 8, 16, seed=700 + step), key_at(step))) for end in ends)
        require(ours == theirs, f"step {step}: two runs of one program make different bytes: {_apart(ours, theirs)}")
    return "the same bytes in both"


def threads(subject: Subject) -> str:
    """The number of torch's threads changes values by rounding at most."""
    key, x = key_at(0, batch=4), hidden(4, 256, 768)

    def results(count: int) -> tuple[bytes, Tensor]:
        torch.set_num_threads(count)
        payload = bytes(subject.fresh().encode(x, key))
        return payload, subject.fresh().decode(payload, key)

    (other, again), (payload, decoded) = results(3), results(1)
    off = float((decoded - again).norm() / decoded.norm())
    told = f"with 3 threads {_apart(payload, other)} from those with 1, and values by {off:.1g} of their norm"
    require(off < _ROUNDING, told)
    return "the same with 1 and 3" if payload == other and same(decoded, again) else told


def _apart(ours: bytes, theirs: bytes) -> str:
    return f"{sum(a != b for a, b in zip(ours, theirs, strict=False))} of {len(ours)} bytes differ"


def _generators() -> Any:
    name, keys, *rest = np.random.get_state()
    return [torch.get_rng_state(), name, np.asarray(keys), rest, random.getstate()]


def untouched(subject: Subject) -> str:
    """The input tensor is unchanged; the caller owns the payload and the decoded tensor."""
    sender, receiver = subject.fresh(), subject.fresh()
    reference = subject.fresh()
    for step in range(4):
        key, x = key_at(step), hidden(2, 8, 16, seed=step)
        payload = sender.encode(x, key)
        require(memoryview(payload).contiguous, "the payload is not one contiguous buffer")
        kept = bytes(payload)
        x.fill_(9.0)  # the stage reuses its memory during sending
        sender.encode(hidden(2, 8, 16, seed=90), key_at(step, 0, "evaluation"))
        require(bytes(payload) == kept, "a later encode, or the tensor's new contents, changed a returned payload")
        buffer = bytearray(kept)
        decoded = receiver.decode(memoryview(buffer), key)
        copy = decoded.clone()
        buffer[:] = bytes(len(buffer))  # a receive buffer is reused
        require(same(decoded, copy), "the decoded tensor shares the receive buffer's memory")
        decoded.fill_(3.0)
        require(same(reference.decode(kept, key), copy), "writing into a decoded tensor changed later results")
    _stay(subject)
    return "input, payload and output"


def _stay(subject: Subject) -> None:
    """Require that returned payloads and tensors stay unchanged through all later messages."""
    sender, receiver = subject.fresh(), subject.fresh()
    payloads, tensors = [], []
    for key, x in messages(8):
        payload = sender.encode(x, key)
        payloads.append((payload, bytes(payload)))
        decoded = receiver.decode(payloads[-1][1], key)
        tensors.append((decoded, decoded.clone()))
    require(all(bytes(payload) == kept for payload, kept in payloads), "a later encode changed a returned payload")
    require(all(same(tensor, kept) for tensor, kept in tensors), "a later decode changed a returned tensor")


def any_address(subject: Subject) -> str:
    """Payloads decode at any memory address and from any type of buffer."""
    x = normal(3, 5)
    key = fitting(x)
    payload = bytes(subject.fresh().encode(x, key))
    expected = subject.fresh().decode(payload, key)
    for shift in range(8):
        shifted = memoryview(bytearray(shift) + payload)[shift:]
        require(
            same(subject.fresh().decode(shifted, key), expected),
            f"at an offset of {shift} bytes it decodes to another tensor",
        )
    require(
        same(subject.fresh().decode(bytearray(payload), key), expected), "as a bytearray it decodes to another tensor"
    )
    return "8 offsets; bytes, bytearray, memoryview"
