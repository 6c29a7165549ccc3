"""A codec as a compression of hivemind: what crosses, and two averagers that use it."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.make import make
from testbed.errors import CodecError, SpecError, UnknownNameError
from tests.torch_codecs.ranks import in_processes

pytestmark = pytest.mark.hivemind


@pytest.fixture
def compressions(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hivemind's table, which is as before afterwards."""
    from hivemind.compression import serialization

    table = dict(serialization._BASE_COMPRESSION_TYPES)
    monkeypatch.setattr(serialization, "_BASE_COMPRESSION_TYPES", table)
    return table


@pytest.mark.parametrize("text", ["fp32", "int8", "int4(group=64)", "topk(0.1)", "zstd(int8)", "randk(0.1)"])
def test_a_message_is_the_codecs_payload_behind_two_numbers(text: str, compressions: Any) -> None:
    from hivemind.compression import CompressionInfo, deserialize_torch_tensor, serialize_torch_tensor

    from testbed.torch.hivemind import compression

    made = compression(text, peer=7, seed=3)
    assert compressions["UNIFORM_8BIT"] is made
    codec, draw = make(text, Context(3, 0, "backward")), torch.Generator().manual_seed(1)
    for number, dtype in itertools.product(range(3), [torch.float32, torch.float16]):
        tensor = torch.randn(3000, generator=draw).to(dtype)
        info = CompressionInfo.from_tensor(tensor)
        message = made.compress(tensor, info) if number else serialize_torch_tensor(tensor, made.compression_type)
        assert message.buffer[:4] == b"\7\0\0\0"
        key = MessageKey("train", int.from_bytes(message.buffer[:8], "little"), 0, ())
        payload = bytes(codec.encode(tensor.float(), key))
        assert message.buffer[8:] == payload
        received = deserialize_torch_tensor(type(message).FromString(message.SerializeToString()))
        assert received.dtype == dtype
        assert torch.equal(received, codec.decode(payload, key).to(dtype))
        expected = 8 * len(payload) / 3000 / torch.finfo(dtype).bits
        assert made.estimate_compression_ratio(info) == pytest.approx(
            1.0 if text == "zstd(int8)" else expected, rel=0.1
        )
    assert int.from_bytes(message.buffer[4:8], "little") == 5


def test_integers_and_small_tensors_are_left_alone(compressions: Any) -> None:
    from hivemind.compression import CompressionInfo, deserialize_torch_tensor

    from testbed.torch.hivemind import compression

    made = compression("int2", peer=0)
    for tensor in (torch.arange(5000), torch.randn(100)):
        message = made.compress(tensor, CompressionInfo.from_tensor(tensor))
        assert torch.equal(deserialize_torch_tensor(message), tensor)


def test_what_cannot_be_used_is_refused(compressions: Any) -> None:
    from testbed.torch.hivemind import compression

    with pytest.raises(SpecError, match="remembers what it sent, and hivemind's peers change"):
        compression("ef(topk(0.1))", peer=0)
    with pytest.raises(UnknownNameError, match="did you mean 'UNIFORM_8BIT'"):
        compression("int8", peer=0, replaces="UNIFORM8")
    with pytest.raises(UnknownNameError, match="compression of hivemind"):
        compression("int8", peer=0, replaces="NONE")
    made = compression("int8", peer=0)
    tensor = torch.randn(2000)
    from hivemind.compression import CompressionInfo

    message = made.compress(tensor, CompressionInfo.from_tensor(tensor))
    message.buffer = message.buffer[:5]
    with pytest.raises(CodecError, match="a message of 5 bytes"):
        made.extract(message)


def two_averagers() -> list[torch.Tensor]:
    """Average over loopback, with hivemind's own DHT and daemon; returns what each peer has then."""
    import hivemind

    from testbed.torch.hivemind import compression

    multiprocessing.set_start_method("fork", force=True)  # which hivemind expects, and a fork of forked.py has not
    made, first = compression("int8(group=64)", peer=0), hivemind.DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    known = first.get_visible_maddrs()
    second = hivemind.DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=known, start=True)
    averagers = [
        hivemind.averaging.DecentralizedAverager(
            [value], dht, prefix="test", target_group_size=2, min_group_size=2, min_matchmaking_time=2,
            request_timeout=1, start=True, compression=made,
        )
        for value, dht in zip(averaged(), (first, second), strict=True)
    ]  # fmt: skip
    try:
        steps = [threading.Thread(target=averager.step, kwargs={"timeout": 60}) for averager in averagers]
        for step in steps:
            step.start()
        for step in steps:
            step.join()
        means = []
        for averager in averagers:
            with averager.get_tensors() as tensors:
                means.append(tensors[0].clone())
        return means
    finally:
        for each in (*averagers, second, first):
            each.shutdown()


def averaged() -> list[torch.Tensor]:
    return [torch.randn(20_000, generator=torch.Generator().manual_seed(peer)) for peer in range(2)]


@pytest.mark.slow
def test_two_averagers_agree_on_a_coded_mean(tmp_path: Path) -> None:
    one, other = averaged()
    for mean in in_processes(two_averagers, tmp_path / "ranks", ranks=1)[0]:
        error = (mean - (one + other) / 2).abs().max()
        assert 0 < error < 0.06  # a step of int8 is at most 4.5/127 here
