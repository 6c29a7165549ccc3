"""Checks of the exchange: nothing but the payload crosses, the same again gives the same, what is handed over is the
caller's.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from testbed.codecs.check.apart import elsewhere
from testbed.codecs.check.subject import Subject, TrialEnd, subject_of
from testbed.codecs.check.tensors import fitting, hidden, key_at, messages, normal
from testbed.codecs.check.verdicts import Broken, difference, require, same
from testbed.codecs.contract import MessageKey, ObservesLink
from testbed.codecs.wrap import capability
from testbed.errors import CodecError
from testbed.message_key import Direction

STEPS = 40

Sent = tuple[MessageKey, bytes, npt.NDArray[np.float32]]


def observed(encoder: TrialEnd, number: int) -> None:
    """Before message `number`, tell an encoder that adapts to its link of one that is fast for eight messages, then
    slow for eight.
    """
    if (observer := capability(encoder.codec, ObservesLink)) is not None:
        observer.observe(100_000, 1e-4 if number // 8 % 2 == 0 else 10.0)


def converse(text: str, direction: Direction, steps: int) -> list[Sent]:
    """Send messages between two instances and return them. Broken where what the ends share comes to differ."""
    subject = subject_of(text, direction)
    sender, receiver = subject.fresh(), subject.fresh()
    sent = []
    for number, (key, tensor) in enumerate(messages(steps)):
        observed(sender, number)
        payload = bytes(sender.encode(tensor, key))
        decoded = receiver.decode(payload, key)
        ours, theirs = sender.shared(), receiver.shared()
        require(same(ours, theirs), f"after {key} the ends hold different numbers: {difference(ours, theirs)}")
        sent.append((key, payload, decoded.numpy().copy()))
    return sent


def two_instances(subject: Subject) -> str:
    """An encoder in another process, a fresh decoder here: all that it needs is in the bytes, and both ends hold the
    same.
    """
    sent: list[Sent] = elsewhere(converse, subject.text, subject.direction, STEPS, seconds=120)
    receiver = subject.fresh()
    for key, payload, expected in sent:
        subject.shapes[key] = expected.shape
        decoded = receiver.decode(payload, key)
        require(
            same(decoded.numpy(), expected),
            f"{key}: decoded from the bytes alone, in a process of its own, the tensor is another one: "
            "the decoder took something that was not in the payload",
        )
    if receiver.memory is not None and not receiver.shared():
        _needs_nothing(subject, sent)
    return f"{len(sent)} messages in {STEPS} steps"


def _needs_nothing(subject: Subject, sent: list[Sent]) -> None:
    """Where a codec says that its ends share nothing, a decoder that has seen none of the earlier messages must do."""
    for key, payload, expected in sent[-4:]:
        subject.shapes[key] = expected.shape
        try:
            alike = same(subject.fresh().decode(payload, key).numpy(), expected)
        except CodecError:
            alike = False
        if not alike:
            raise Broken(
                f"{key}: a decoder that has seen no earlier message makes another tensor of it, so it goes by what it "
                "remembers; but `shared` holds nothing that both ends could be compared by"
            )


def fresh_tensor(subject: Subject) -> str:
    """What is decoded is a new contiguous fp32 tensor of the shape that was encoded."""
    for shape in ((2, 8, 16), (3, 67), (130,)):
        x = hidden(*shape)
        sender, receiver, key = subject.fresh(), subject.fresh(), fitting(x)
        decoded = receiver.decode(sender.encode(x, key), key)
        require(decoded.shape == x.shape, f"shape {tuple(decoded.shape)} came of {tuple(x.shape)}")
        require(decoded.dtype == torch.float32, f"{decoded.dtype} came out, not float32")
        require(
            decoded.is_contiguous() and not decoded.requires_grad,
            "what came out is not a contiguous tensor without a graph",
        )
    return "contiguous, float32, the shape that went in"


def deterministic(subject: Subject) -> str:
    """The same seed and message keys give the same bytes, whatever the global generators hold; and those are left
    alone.
    """

    def run(seed: int) -> list[bytes]:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = _generators()
        sender = subject.fresh(5)
        payloads = [bytes(sender.encode(tensor, key)) for key, tensor in messages(12)]
        require(same(_generators(), before), "a global random generator was drawn from")
        return payloads

    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        first, again = run(1), run(2)
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])
    differing = sum(a != b for a, b in zip(first, again, strict=True))
    require(
        differing == 0,
        f"{differing} of {len(first)} payloads differ the second time, with the same seed and message keys",
    )
    return f"{len(first)} payloads twice"


def _generators() -> Any:
    name, keys, *rest = np.random.get_state()
    return [torch.get_rng_state(), name, np.asarray(keys), rest, random.getstate()]


def untouched(subject: Subject) -> str:
    """The tensor is left as it is; payload and decoded tensor belong to the caller from then on."""
    sender, receiver = subject.fresh(), subject.fresh()
    reference = subject.fresh()
    for step in range(4):
        key, x = key_at(step), hidden(2, 8, 16, seed=step)
        before = x.clone()
        payload = sender.encode(x, key)
        require(same(x, before), "encode changed the tensor that it was given")
        require(memoryview(payload).contiguous, "the payload is not one contiguous buffer")
        kept = bytes(payload)
        x.fill_(9.0)  # the stage uses its memory again while the payload is being sent
        sender.encode(hidden(2, 8, 16, seed=90), key_at(step, 0, "evaluation"))
        require(
            bytes(payload) == kept,
            "a later encode, or the tensor's new contents, changed a payload that was handed over",
        )
        buffer = bytearray(kept)
        decoded = receiver.decode(memoryview(buffer), key)
        copy = decoded.clone()
        buffer[:] = bytes(len(buffer))  # a receive buffer is used again
        require(same(decoded, copy), "the decoded tensor lies in the receive buffer")
        decoded.fill_(3.0)
        require(
            same(reference.decode(kept, key), copy),
            "writing into a decoded tensor changed what the codec decodes afterwards",
        )
    _stay(subject)
    return "input, payload and output"


def _stay(subject: Subject) -> None:
    """Require that what was handed over stays as it was through all later messages."""
    sender, receiver = subject.fresh(), subject.fresh()
    payloads, tensors = [], []
    for key, x in messages(8):
        payload = sender.encode(x, key)
        payloads.append((payload, bytes(payload)))
        decoded = receiver.decode(payloads[-1][1], key)
        tensors.append((decoded, decoded.clone()))
    require(
        all(bytes(payload) == kept for payload, kept in payloads),
        "a later encode changed a payload that was handed over",
    )
    require(all(same(tensor, kept) for tensor, kept in tensors), "a later decode changed a tensor that was handed over")


def any_address(subject: Subject) -> str:
    """Payloads are decoded wherever they lie in memory, and whichever type of buffer they come in."""
    x = normal(3, 5)
    key = fitting(x)
    payload = bytes(subject.fresh().encode(x, key))
    expected = subject.fresh().decode(payload, key)
    for shift in range(8):
        shifted = memoryview(bytearray(shift) + payload)[shift:]
        require(
            same(subject.fresh().decode(shifted, key), expected),
            f"{shift} bytes further on it decodes to another tensor",
        )
    require(
        same(subject.fresh().decode(bytearray(payload), key), expected), "as a bytearray it decodes to another tensor"
    )
    return "8 offsets; bytes, bytearray, memoryview"
