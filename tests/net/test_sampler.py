"""What a lab carries, ten times a second: nothing is lost, and what it costs is known."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import CapabilityError, LabError
from testbed.net.kernel import sock_diag
from testbed.net.kernel.namespace import Namespace
from testbed.net.lab import Lab, LabSpec
from testbed.net.sampler import Sampler
from testbed.profiles import load_profile
from testbed.records import Sample
from testbed.tcp_info import parse_tcp_info

PERIOD_S = 0.02
BYTES = 300_000
INFO_BYTES = 232
addresses = st.tuples(*[st.integers(0, 255)] * 4).map(lambda parts: ".".join(map(str, parts)))
ports = st.integers(0, 65535)


def _attribute(kind: int, content: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(content), kind) + content + bytes(-len(content) % 4)


@given(
    addresses,
    ports,
    addresses,
    ports,
    st.lists(st.tuples(st.integers(5, 60), st.binary(max_size=9)), max_size=4),
    st.data(),
)
def test_a_connection_is_read_among_attributes_that_are_not_known(
    local: str, local_port: int, remote: str, remote_port: int, others: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    info = data.draw(st.binary(min_size=INFO_BYTES, max_size=INFO_BYTES + 40))
    attributes = [*others, (2, info), (4, b"cubic\0")]
    data.draw(st.randoms(use_true_random=False)).shuffle(attributes)
    mapped = data.draw(st.booleans())  # the sockets of a server on [::]
    head = bytes([socket.AF_INET6 if mapped else socket.AF_INET, 0, 0, 0])
    head += struct.pack("!HH", local_port, remote_port)
    for address in map(socket.inet_aton, (local, remote)):
        head += bytes(10) + b"\xff\xff" + address if mapped else address + bytes(12)
    answer = head.ljust(72, b"\0") + b"".join(_attribute(*one) for one in attributes)
    found = sock_diag.parse_connection(answer)
    assert found == (f"{local}:{local_port}", f"{remote}:{remote_port}", "cubic", parse_tcp_info(info))
    assert sock_diag.parse_connection(head.ljust(72, b"\0") + _attribute(4, b"cubic\0")) is None
    other = bytes([socket.AF_INET6, *answer[1:8], 0xFE, 0x80, *answer[10:]])
    assert sock_diag.parse_connection(other) is None, "an address of IPv6 alone"


def test_a_kernel_that_tells_too_little_is_refused() -> None:
    with pytest.raises(CapabilityError, match=r"has 100 bytes.*4\.19"):
        parse_tcp_info(bytes(100))


def _connect(near: Namespace, address: str, far: Namespace) -> tuple[socket.socket, socket.socket]:
    with far.entered(), socket.create_server((address, 0)) as listener:
        with near.entered():
            sender = socket.create_connection(listener.getsockname(), timeout=60)
        return sender, listener.accept()[0]


def _carry(sender: socket.socket, receiver: socket.socket, size: int) -> None:
    sender.settimeout(60)
    receiver.settimeout(60)
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
    sender.sendall(bytes(size))
    left = size
    while left:
        left -= len(receiver.recv(min(left, 1 << 16)))


def _samples(path: Path) -> list[Sample]:
    return [Sample.model_validate_json(line) for line in path.read_text(encoding="utf8").splitlines()]


@pytest.fixture(params=["star", "line"])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    spec = LabSpec(
        topology=request.param, profiles=(load_profile("ftth"),), nodes=2, engine="relay", engine_reason="a test"
    )
    with Lab(spec) as lab:
        yield lab


@pytest.mark.root
def test_every_byte_is_in_the_samples_and_every_connection(lab: Lab, tmp_path: Path) -> None:
    first, second = lab.nodes
    path = tmp_path / "counters.jsonl"
    began = time.monotonic()
    with Sampler(lab, path, PERIOD_S) as sampler:
        sender, receiver = _connect(first.namespace, second.address, second.namespace)
        with sender, receiver:
            _carry(sender, receiver, BYTES)
            time.sleep(3 * PERIOD_S)
            held = [(first.name, sender), (second.name, receiver)]
            ends = {(name, "{}:{}".format(*s.getsockname()), "{}:{}".format(*s.getpeername())) for name, s in held}
            sampler.check()
        time.sleep(3 * PERIOD_S)
    took = time.monotonic() - began
    found = _samples(path)
    assert len(found) == sampler.samples
    assert 3 <= len(found) <= took / PERIOD_S + 3
    times = [sample.at_ns for sample in found]
    assert times == sorted(times)
    for link, pair in lab.counters().items():
        for way, last in pair.items():
            counts = [sample.links[link][way] for sample in found]
            assert [count.bytes for count in counts] == sorted(count.bytes for count in counts)
            assert counts[-1].bytes == last.bytes
            assert (counts[-1].dropped_buffer, counts[-1].dropped_loss) == (0, 0)
    up = found[-1].links[lab.links[0].name]["up"]
    assert BYTES * 1.03 < up.bytes < BYTES * 1.08  # 52 bytes of headers for 1448
    assert found[-1].sockets == ()  # TIME_WAIT carries nothing
    seen = {(one.node, one.local, one.remote): one for sample in found for one in sample.sockets}
    assert set(seen) == ends
    for counted in ("bytes_received", "bytes_acked"):  # the kernel counts SYN and FIN
        assert max(getattr(one, counted) for one in seen.values()) in range(BYTES, BYTES + 3)


@pytest.mark.root
def test_what_ends_badly_has_its_samples_and_its_own_error(lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "counters.jsonl"

    def interrupted() -> None:
        with Sampler(lab, path, PERIOD_S):
            time.sleep(5 * PERIOD_S)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(_samples(path)) >= 2
    assert path.read_bytes().endswith(b"\n")
    with pytest.raises(FileExistsError):
        Sampler(lab, path)


@pytest.mark.root
def test_a_relay_that_dies_is_noticed(lab: Lab, tmp_path: Path) -> None:
    relay = lab._relay

    def until_noticed() -> None:
        with Sampler(lab, tmp_path / "counters.jsonl", PERIOD_S) as sampler:
            os.kill(relay.pid, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                sampler.check()
                time.sleep(PERIOD_S)

    with pytest.raises(LabError, match=r"relay.*its process ended with status -9"):
        until_noticed()
