"""Checks of what a codec remembers: saved and loaded, healed after a lost frame, evaluation apart from training."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

from testbed.codecs.check.exchange import observed
from testbed.codecs.check.subject import Subject, TrialEnd
from testbed.codecs.check.tensors import TrialMessage, messages
from testbed.codecs.check.verdicts import Broken, NothingToAsk, difference, require, same
from testbed.codecs.contract import MessageKey, Payload
from testbed.errors import CodecError

_BEFORE = 8
"""Steps before something happens."""


def _conversation(steps: int = 2 * _BEFORE) -> list[TrialMessage]:
    return list(messages(steps))


def history(subject: Subject) -> str:
    """Without `shared`, `state`, `load`, `reset` a codec remembers nothing: each message is what a fresh instance
    makes of it.
    """
    if subject.stateful:
        raise NothingToAsk("it has the methods of a codec that remembers")
    sender, receiver = subject.fresh(), subject.fresh()
    for key, tensor in _conversation():
        payload = bytes(sender.encode(tensor, key))
        hint = "it remembers, and lacks the methods for it: shared, state, load, reset"
        require(
            bytes(subject.fresh().encode(tensor, key)) == payload,
            f"{key}: a fresh instance encodes other bytes; {hint}",
        )
        decoded, anew = receiver.decode(payload, key), subject.fresh().decode(payload, key)
        require(same(decoded, anew), f"{key}: a fresh instance decodes another tensor; {hint}")
    return "fresh instances agree at every message"


def saved(subject: Subject) -> str:
    """Both ends go on bit for bit in instances that loaded their states, and a saved state stays as it was saved."""
    if not subject.stateful:
        raise NothingToAsk("it remembers nothing")
    talk = _conversation()
    half = len(talk) // 2
    sender, receiver = subject.fresh(), subject.fresh()
    for key, tensor in talk[:half]:
        receiver.decode(bytes(sender.encode(tensor, key)), key)
    taken = sender.state, receiver.state
    kept, sizes = zip(*map(_through_file, taken), strict=True)
    sender_again, receiver_again = subject.fresh(), subject.fresh()
    sender_again.load(kept[0])
    receiver_again.load(kept[1])
    for number, (key, tensor) in enumerate(talk[half:]):
        for end in (sender, sender_again):
            observed(end, number)
        payload = bytes(sender.encode(tensor, key))
        require(
            bytes(sender_again.encode(tensor, key)) == payload,
            f"{key}: with its state loaded the encoder writes other bytes",
        )
        decoded = receiver.decode(payload, key)
        require(same(receiver_again.decode(payload, key), decoded), f"{key}: with its state loaded the decoder differs")
    for state, file in zip(taken, kept, strict=True):
        require(same(state, file), f"a state that was taken changed with later messages: {difference(state, file)}")
    for end in (sender, receiver):
        _refuses_others_states(end)
    return f"{sum(sizes) / 2 / 1024:.0f} KiB an end here, as torch.save writes it"


def _refuses_others_states(end: TrialEnd) -> None:
    """A state that is not one must be a CodecError, and change nothing."""
    before = end.state
    if not before:
        return
    for wrong in ({}, {"no codec's": 1}, {**before, "no codec's": 1}):
        try:
            end.load(wrong)
        except CodecError:
            require(same(end.state, before), f"refusing a state of {sorted(map(str, wrong))} changed what it holds")
        else:
            raise Broken(f"it loaded a state of {sorted(map(str, wrong))}, which none of its own is")


def _through_file(state: Any) -> tuple[Any, int]:
    """Return a state as a file holds it, and the file's size."""
    file = io.BytesIO()
    torch.save(state, file)
    size = file.tell()
    file.seek(0)
    # nothing but tensors and plain values: a file from elsewhere runs no code
    return torch.load(file, weights_only=True), size


def lost_frame(subject: Subject) -> str:
    """After a lost frame the decoder says so or is right; after `reset` of the encoder any decoder follows and the
    ends agree.
    """
    if not subject.stateful:
        raise NothingToAsk("it remembers nothing")
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
        f"after a reset the encoder and a fresh decoder hold different numbers: {difference(ours, anew)}",
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
        raise Broken(f"{key}: after a lost frame it decodes, without a word, to something else")
    return False


def repeated_frame(subject: Subject) -> str:
    """A message that comes twice is refused, or decoded to the same tensor and forgotten."""
    if not subject.stateful:
        raise NothingToAsk("it remembers nothing")
    sender, receiver, other = subject.fresh(), subject.fresh(), subject.fresh()
    refused = 0
    for key, tensor in _conversation(3 * _BEFORE):
        payload = bytes(sender.encode(tensor, key))
        decoded = receiver.decode(payload, key)
        require(same(other.decode(payload, key), decoded), f"{key}: a message that came twice changed what followed")
        refused += _says_or_is_right(other, payload, key, decoded)
    return f"{refused} refused"


def evaluation_apart(subject: Subject) -> str:
    """Training's bytes are the same whether or not there are evaluations in between."""

    def train(evaluations: bool) -> list[bytes]:
        sender = subject.fresh()
        sent = [
            (key, bytes(sender.encode(tensor, key))) for key, tensor in messages(2 * _BEFORE, evaluations=evaluations)
        ]
        return [payload for key, payload in sent if key.phase == "train"]

    require(train(True) == train(False), "messages of an evaluation changed the training messages that came after")
    return f"{2 * _BEFORE} steps with and without"


def unchanged_by_errors(subject: Subject) -> str:
    """A tensor that is refused leaves the encoder as it was."""
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
                    # a codec that lets NaN pass has made a message of it; start both again
                    sender, other = subject.fresh(), subject.fresh()
        require(
            bytes(sender.encode(tensor, key)) == bytes(other.encode(tensor, key)),
            f"{key}: after a tensor was refused the encoder writes other bytes",
        )
    return "float64 and NaN, between messages"
