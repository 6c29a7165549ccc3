"""Checks of a codec's state: saving and loading, recovery after a lost frame, separation of evaluation and training."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from testbed.codecs.check.exchange import observed
from testbed.codecs.check.subject import Subject, TrialEnd
from testbed.codecs.check.tensors import TrialMessage, hidden, key_at, messages, normal
from testbed.codecs.check.verdicts import Broken, NothingToAsk, difference, require, same
from testbed.codecs.contract import MessageKey, Payload
from testbed.errors import CodecError
from testbed.tagged import put_together, take_apart

_SETTLED, _FURTHER = 9, 18
"""Messages of three epochs, and those after them."""
_BEFORE = 8
"""Steps before the event under test."""


def _conversation(steps: int = 2 * _BEFORE) -> list[TrialMessage]:
    return list(messages(steps))


def history(subject: Subject) -> str:
    """Without `shared`, `state`, `load`, `reset` a codec is stateless: a fresh instance gives the same result for each
    message.
    """
    if subject.stateful:
        raise NothingToAsk("it has the methods of a stateful codec")
    sender, receiver = subject.fresh(), subject.fresh()
    for key, tensor in _conversation():
        payload = bytes(sender.encode(tensor, key))
        hint = "it is stateful but lacks the methods shared, state, load, reset"
        require(
            bytes(subject.fresh().encode(tensor, key)) == payload,
            f"{key}: a fresh instance encodes other bytes; {hint}",
        )
        decoded, anew = receiver.decode(payload, key), subject.fresh().decode(payload, key)
        require(same(decoded, anew), f"{key}: a fresh instance decodes another tensor; {hint}")
    return "fresh instances agree at every message"


def saved(subject: Subject) -> str:
    """Instances that load both ends' states continue bit for bit, and a saved state stays unchanged."""
    if not subject.stateful:
        raise NothingToAsk("it is stateless")
    talk = _conversation()
    half = len(talk) // 2
    sender, receiver = subject.fresh(), subject.fresh()
    for key, tensor in talk[:half]:
        receiver.decode(bytes(sender.encode(tensor, key)), key)
    taken = sender.state, receiver.state
    kept, sizes = zip(*map(through_file, taken), strict=True)
    sender_again, receiver_again = subject.fresh(), subject.fresh()
    sender_again.load(kept[0])
    receiver_again.load(kept[1])
    for number, (key, tensor) in enumerate(talk[half:]):
        for end in (sender, sender_again):
            observed(end, number)
        payload = bytes(sender.encode(tensor, key))
        require(
            bytes(sender_again.encode(tensor, key)) == payload,
            f"{key}: after loading its state the encoder writes other bytes",
        )
        decoded = receiver.decode(payload, key)
        require(
            same(receiver_again.decode(payload, key), decoded), f"{key}: after loading its state the decoder differs"
        )
    for state, file in zip(taken, kept, strict=True):
        require(same(state, file), f"a saved state changed with later messages: {difference(state, file)}")
    for end in (sender, receiver):
        _refuses_others_states(end)
    return f"{sum(sizes) / 2 / 1024:.0f} KiB per end here, as in a checkpoint"


def _refuses_others_states(end: TrialEnd) -> None:
    """An invalid state must raise CodecError, and change nothing."""
    before = end.state
    if not before:
        return
    for wrong in ({}, {"no codec's": 1}, {**before, "no codec's": 1}):
        try:
            end.load(wrong)
        except CodecError:
            require(same(end.state, before), f"refusing a state of {sorted(map(str, wrong))} changed its state")
        else:
            raise Broken(f"it loaded an invalid state of {sorted(map(str, wrong))}")


def through_file(state: Any) -> tuple[Any, int]:
    """Return a state after a round trip through the files of a checkpoint, and their size in bytes."""
    text, tensors = take_apart(state)
    content = save(tensors)
    return put_together(text, load(content)), len(text) + len(content)


class _Heap(ctypes.Structure):
    _fields_ = tuple((f"field{at}", ctypes.c_size_t) for at in range(10))  # field4: mapped; field7: used in arenas


def bounded_memory(subject: Subject) -> str:
    """After an epoch, further messages of the same examples take no more memory at either end."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        raise NothingToAsk("this C library does not tell how much memory is in use")
    libc.mallinfo2.restype = _Heap

    def used() -> int:
        gc.collect()
        heap = libc.mallinfo2()
        return int(heap.field4 + heap.field7)

    sender, receiver, x, before = subject.fresh(), subject.fresh(), hidden(2, 64, 1024), 0
    for step in range(_SETTLED + _FURTHER):
        if step == _SETTLED:
            before = used()
        key, tensor = key_at(step), x + 0.1 * normal(2, 64, 1024, seed=step)
        receiver.decode(bytes(sender.encode(tensor, key)), key)
    each = (used() - before) / _FURTHER / 1e6
    told = f"both ends keep {each:.2f} MB of memory for each message of {4 * x.numel() / 1e6:.2f} MB"
    require(each < x.numel() / 1e6, told)
    return f"at most {max(each, 0) * 1e3:.1f} kB more for each of {_FURTHER} messages"


def lost_frame(subject: Subject) -> str:
    """After a lost frame the decoder raises or is correct; after the encoder's `reset` any decoder follows and the ends
    agree.
    """
    if not subject.stateful:
        raise NothingToAsk("it is stateless")
    talk = _conversation(4 * _BEFORE)
    sender, receiver, whole = subject.fresh(), subject.fresh(), subject.fresh()
    lost = _BEFORE
    for key, tensor in talk[:lost]:
        payload = bytes(sender.encode(tensor, key))
        receiver.decode(payload, key)
        whole.decode(payload, key)
    key, tensor = talk[lost]
    whole.decode(bytes(sender.encode(tensor, key)), key)
    refused = 0
    for key, tensor in talk[lost + 1 : len(talk) // 2]:
        payload = bytes(sender.encode(tensor, key))
        expected = whole.decode(payload, key)
        refused += _says_or_is_right(receiver, payload, key, expected)
    sender.reset()
    fresh = subject.fresh()
    for key, tensor in talk[len(talk) // 2 :]:
        payload = bytes(sender.encode(tensor, key))
        decoded = receiver.decode(payload, key)
        require(
            same(fresh.decode(payload, key), decoded),
            f"{key}: after the encoder's reset a stale and a fresh decoder differ",
        )
    ours, anew, stale = (end.shared() for end in (sender, fresh, receiver))
    require(
        same(ours, anew),
        f"after a reset the states of the encoder and a fresh decoder differ: {difference(ours, anew)}",
    )
    wrong = {name: value for name, value in ours.items() if name not in stale or not same(stale[name], value)}
    require(
        not wrong, f"after a reset the encoder and the decoder that lost a frame differ: {', '.join(list(wrong)[:4])}"
    )
    return (
        f"{refused} messages refused until the reset" if refused else "the decoder does not depend on earlier messages"
    )


def _says_or_is_right(receiver: TrialEnd, payload: Payload, key: MessageKey, expected: Tensor) -> bool:
    before = receiver.state
    try:
        decoded = receiver.decode(payload, key)
    except CodecError:
        require(same(receiver.state, before), f"{key}: refusing a message changed the decoder's state")
        return True
    if not same(decoded, expected):
        raise Broken(f"{key}: after a lost frame it silently decodes to another tensor")
    return False


def repeated_frame(subject: Subject) -> str:
    """A repeated message is refused, or decodes to the same tensor without side effects."""
    if not subject.stateful:
        raise NothingToAsk("it is stateless")
    sender, receiver, other = subject.fresh(), subject.fresh(), subject.fresh()
    refused = 0
    for key, tensor in _conversation(3 * _BEFORE):
        payload = bytes(sender.encode(tensor, key))
        decoded = receiver.decode(payload, key)
        require(same(other.decode(payload, key), decoded), f"{key}: a repeated message changed later results")
        refused += _says_or_is_right(other, payload, key, decoded)
    return f"{refused} refused"


def evaluation_apart(subject: Subject) -> str:
    """Training messages are the same with or without evaluations in between."""

    def train(evaluations: bool) -> list[bytes]:
        sender = subject.fresh()
        sent = [
            (key, bytes(sender.encode(tensor, key))) for key, tensor in messages(2 * _BEFORE, evaluations=evaluations)
        ]
        return [payload for key, payload in sent if key.phase == "train"]

    require(train(True) == train(False), "messages of an evaluation changed later training messages")
    return f"{2 * _BEFORE} steps with and without"


def unchanged_by_errors(subject: Subject) -> str:
    """A refused tensor leaves the encoder unchanged."""
    sender, other = subject.fresh(), subject.fresh()
    talk = _conversation()
    for number, (key, tensor) in enumerate(talk):
        if number % 3 == 1:
            for unfit in (tensor.to(torch.float64), torch.where(tensor > 1, torch.nan, tensor)):
                before = sender.state
                try:
                    sender.encode(unfit, key)
                except CodecError:
                    require(same(sender.state, before), f"{key}: refusing a tensor changed the encoder's state")
                else:
                    # a codec that passes NaN has sent a message; restart both
                    sender, other = subject.fresh(), subject.fresh()
        require(
            bytes(sender.encode(tensor, key)) == bytes(other.encode(tensor, key)),
            f"{key}: after refusing a tensor the encoder writes other bytes",
        )
    return "float64 and NaN, between messages"
