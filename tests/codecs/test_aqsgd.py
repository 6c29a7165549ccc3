"""AQ-SGD: full first visits, small later ones, both ends bit-identical for ever, memory past a limit in a file."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from ends import FORWARD
from torch import Tensor

from testbed.codecs.check.tensors import normal
from testbed.codecs.contract import MessageKey
from testbed.codecs.make import make
from testbed.codecs.memory.aqsgd import AqSgd
from testbed.codecs.memory.examples import Examples
from testbed.errors import CodecError

SHAPE = (4, 6, 32)
UNIT_BYTES = 4 * 6 * 32


def ends(text: str = "aqsgd(int4)") -> tuple[AqSgd, AqSgd]:
    sender, receiver = make(text, FORWARD), make(text, FORWARD)
    assert isinstance(sender, AqSgd)
    assert isinstance(receiver, AqSgd)
    return sender, receiver


def alike(one: AqSgd, other: AqSgd) -> bool:
    ours, theirs = one.shared(), other.shared()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def held_bytes(store: Examples) -> tuple[int, int]:
    """What lies in memory, and how long the file is."""
    in_memory = sum(4 * held.value.numel() for held in store._held.values() if held.value is not None)
    return in_memory, 0 if store._file is None else os.fstat(store._file.fileno()).st_size


def activations(ids: tuple[int, ...], step: int) -> Tensor:
    """Of examples that change little from visit to visit."""
    return torch.stack([normal(6, 32, seed=one) + 1e-3 * step * normal(6, 32, seed=one + 1000) for one in ids])


def test_bytes_of_first_and_later_visits_and_of_both_at_once() -> None:
    sender, receiver = ends()

    def send(ids: tuple[int, ...], seed: int) -> int:
        key, x = MessageKey("train", seed, 0, ids), normal(len(ids), 6, 32, seed=seed)
        payload = sender.encode(x, key)
        value = receiver.decode(payload, key)
        assert torch.equal(receiver.examples.gather([("train", (one,)) for one in ids], (6, 32)), value)
        return len(payload)

    head, parts = 4 + 4 + 8, 4 + 4 * 3  # code and visits of up to four examples, length; each part's own header
    inner = len(make("int4", FORWARD).encode(normal(4, 6, 32), MessageKey("train", 0, 0, ()))) - parts
    assert send((1, 2, 3, 4), 0) == head + parts + 4 * UNIT_BYTES
    assert send((1, 2, 3, 4), 1) == head + parts + inner
    assert send((4, 9, 2, 8), 2) == head + 2 * parts + 2 * UNIT_BYTES + inner // 2
    assert alike(sender, receiver)


def test_the_second_visit_is_nearer_than_direct_quantisation_at_the_same_bits() -> None:
    sender, receiver = ends()
    direct, ids = make("int4", FORWARD), (1, 2, 3, 4)
    for step in range(3):
        key, x = MessageKey("train", step, 0, ids), activations(ids, step)
        decoded = receiver.decode(sender.encode(x, key), key)
    alone = direct.decode(direct.encode(x, key), key)
    assert (decoded - x).norm() < 0.05 * (alone - x).norm()


def test_the_direct_control_is_full_at_first_and_then_its_inner_codec_bit_for_bit() -> None:
    (sender, receiver), (other, _), plain = ends("aqsgd(int4, direct)"), ends(), make("int4", FORWARD)
    for step, ids in enumerate([(1, 2), (3, 4), (2, 3), (2, 3)]):
        key, x = MessageKey("train", step, 0, ids), activations(ids, step)
        payload = sender.encode(x, key)
        expected = x if step < 2 else plain.decode(plain.encode(x, key), key)
        assert torch.equal(receiver.decode(payload, key), expected)
        assert len(payload) == len(other.encode(x, key))  # what it costs is what AQ-SGD costs
    assert alike(sender, receiver)


def test_an_example_is_found_again_in_any_micro_batch_and_evaluation_has_its_own() -> None:
    sender, receiver = ends()
    for key in (
        MessageKey("train", 0, 0, (1, 2)),
        MessageKey("train", 1, 3, (2, 1)),
        MessageKey("evaluation", 1, 0, (1, 2)),
    ):
        receiver.decode(sender.encode(activations(key.samples, 0), key), key)
    visits = {key: value for key, value in sender.shared().items() if key.endswith("visit")}
    assert {key: int(value) for key, value in visits.items()} == {
        "train/1/visit": 1,
        "train/2/visit": 1,
        "evaluation/1/visit": 0,
        "evaluation/2/visit": 0,
    }
    assert alike(sender, receiver)


def test_past_the_limit_examples_lie_in_a_file_and_nothing_else_changes() -> None:
    small, large = ends(f"aqsgd(int4, memory_mb={2.5 * UNIT_BYTES / 1e6})"), ends()
    for step in range(6):
        for first in (0, 2, 4):
            ids = (first, first + 1)
            key, x = MessageKey("train", step, 0, ids), activations(ids, step)
            payloads = [bytes(sender.encode(x, key)) for sender in (small[0], large[0])]
            assert payloads[0] == payloads[1]
            assert torch.equal(small[1].decode(payloads[0], key), large[1].decode(payloads[1], key))
    for end in small:
        assert held_bytes(end.examples) == (2 * UNIT_BYTES, 4 * UNIT_BYTES)
        assert alike(end, large[0])
    other, _ = ends()
    other.load(small[0].state())
    assert alike(other, small[0])
    small[0].reset()
    assert held_bytes(small[0].examples) == (0, 0)


def test_a_full_disk_is_an_error_that_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, _ = ends("aqsgd(int4, memory_mb=0)")
    sender.encode(activations((1, 2), 0), MessageKey("train", 0, 0, (1, 2)))
    before = str(sender.state())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CodecError, match="TMPDIR"):
        sender.encode(activations((2, 3), 1), MessageKey("train", 1, 0, (2, 3)))
    assert str(sender.state()) == before
    sender.encode(activations((1, 2), 1), MessageKey("train", 1, 0, (1, 2)))


def test_an_example_of_another_shape_is_new() -> None:
    sender, receiver = ends("aqsgd(int4, memory_mb=0)")
    for step, width in enumerate((8, 8, 16, 16, 8)):
        key, x = MessageKey("train", step, 0, (5, 6)), normal(2, 3, width, seed=step)
        decoded = receiver.decode(sender.encode(x, key), key)
        assert (decoded - x).norm() < 0.2 * x.norm()
        assert torch.equal(sender.examples.gather([("train", (5,)), ("train", (6,))], (3, width)), decoded)
        assert int(sender.shared()["train/5/visit"]) == (1 if step in (1, 3) else 0)
        assert alike(sender, receiver)


def test_without_ids_a_message_is_compared_with_the_last_one_of_its_number() -> None:
    sender, receiver = ends()
    for step in range(3):
        for number in range(2):
            key = MessageKey("train", step, number, ())
            x = normal(8, 32, seed=number) * (1 + 1e-3 * step)
            error = (receiver.decode(sender.encode(x, key), key) - x).abs().amax()
            assert error < 1e-3, "of a difference of a thousandth, in four bits"
    assert alike(sender, receiver)
