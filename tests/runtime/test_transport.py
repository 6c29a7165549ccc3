"""Frames arrive whole and in any order asked; whatever goes wrong is a TransportError at once, never a hang."""

from __future__ import annotations

import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testbed.errors import TransportError
from testbed.jobs.actions import Key
from testbed.runtime.frame import HEADER_BYTES, LARGEST_NOTE_BYTES, FrameHeader, pack_frame_header
from testbed.runtime.place_job import Endpoint
from testbed.runtime.step_log import socket_record
from testbed.runtime.transport import Connection
from testbed.runtime.wiring import accept_earlier, connect_to_later, listen
from tests.over_loopback import tcp_pair, tcp_server

TOKEN = b"t" * 16
SOON_S = 60.0
LIMIT = 1 << 22
NAMES = ("tensor", "other")


def key(microbatch: int) -> Key:
    return Key("tensor", 0, microbatch)


def receiver(sock: socket.socket, frames: int = 64, name: str = "stage 1 <-> stage 0") -> Connection:
    return Connection(sock, name=name, token=TOKEN, names=NAMES, max_payload_bytes=LIMIT, max_frames=frames)


def sender(sock: socket.socket, frames: int = 64) -> Connection:
    return receiver(sock, frames, "stage 0 <-> stage 1")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pair(stack: ExitStack) -> tuple[Connection, Connection]:
    early, late = tcp_pair()
    return stack.enter_context(sender(early)), stack.enter_context(receiver(late))


@pytest.fixture
def wire(stack: ExitStack) -> tuple[socket.socket, Connection]:
    """A bare socket that can say anything, and a connection that listens to it."""
    early, late = tcp_pair()
    return stack.enter_context(early), stack.enter_context(receiver(late))


def frame(payload: bytes, microbatch: int = 0, *, token: bytes = TOKEN, names: tuple[str, ...] = NAMES) -> bytes:
    header = FrameHeader(key(microbatch), 0, len(payload), 1, zlib.crc32(payload))
    return pack_frame_header(header, token, names) + payload


def close_both(one: Connection, other: Connection) -> None:
    thread = threading.Thread(target=other.close, args=(SOON_S,))
    thread.start()
    one.close(SOON_S)
    thread.join()


# ------------------------------------------------------------------ what must work
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary(max_size=300_000), max_size=8), st.randoms(use_true_random=False))
def test_payloads_arrive_whole_whatever_the_order_of_asking(payloads: list[bytes], random: object) -> None:
    one, other = tcp_pair()
    with sender(one) as early, receiver(other) as late:
        for microbatch, payload in enumerate(payloads):
            early.send(key(microbatch), payload)
        order = list(range(len(payloads)))
        random.shuffle(order)  # type: ignore[attr-defined]
        for microbatch in order:
            assert late.take(key(microbatch), SOON_S).payload == payloads[microbatch]
        close_both(early, late)


def test_both_directions_at_once_past_the_kernel_s_buffers(pair: tuple[Connection, Connection]) -> None:
    early, late = pair
    big = bytes(LIMIT)
    for microbatch in range(8):
        early.send(key(microbatch), big)
        late.send(key(microbatch), big)
    for microbatch in range(8):
        assert late.take(key(microbatch), SOON_S).payload == big
        assert early.take(key(microbatch), SOON_S).payload == big


def test_names_that_nobody_has_stated_go_along(stack: ExitStack) -> None:
    one, other = tcp_pair()
    early, late = stack.enter_context(sender(one)), stack.enter_context(receiver(other))
    for back in (False, True):
        source, target = (late, early) if back else (early, late)
        for step, what in enumerate(("guess", "token", "guess", NAMES[0], "Zeichen \u00e4")):
            source.send(Key(what, step), what.encode())
            assert bytes(target.take(Key(what, step), SOON_S).payload) == what.encode()
    close_both(early, late)


def test_more_names_than_a_header_can_tell_are_refused(stack: ExitStack) -> None:
    one, other = tcp_pair()
    early, _ = stack.enter_context(sender(one, 300)), stack.enter_context(receiver(other, 300))
    for number in range(254):
        early.send(Key(f"name {number}", 0), b"")
    with pytest.raises(TransportError, match="at most 255 names"):
        early.sent_frames(SOON_S)


def test_views_of_any_shape_are_sent_as_their_bytes(pair: tuple[Connection, Connection]) -> None:
    early, late = pair
    for microbatch, view in enumerate(
        [memoryview(b"abcdefgh").cast("i"), memoryview(bytearray(b"ab")), memoryview(b"").cast("B")]
    ):
        early.send(key(microbatch), view)
        assert late.take(key(microbatch), SOON_S).payload == view.tobytes()


def test_times_and_sizes_are_recorded_in_order(pair: tuple[Connection, Connection]) -> None:
    early, late = pair
    before = time.monotonic_ns()
    queued = early.send(key(3), b"x" * 1000, note=b"a note")
    arrival = late.take(key(3), SOON_S)
    (departure,) = early.sent_frames(SOON_S)
    assert (departure.key, departure.payload_bytes) == (key(3), 1006)
    assert (arrival.key, arrival.note, arrival.payload) == (key(3), b"a note", b"x" * 1000)
    assert departure.queued_ns == queued
    assert arrival.first_byte_ns == departure.first_byte_ns
    assert before <= queued <= departure.first_byte_ns <= departure.last_byte_ns
    assert departure.first_byte_ns <= arrival.last_byte_ns <= time.monotonic_ns()
    assert early.sent_frames(SOON_S) == []


def test_the_kernel_s_count_of_bytes_agrees_with_ours(pair: tuple[Connection, Connection]) -> None:
    early, late = pair
    for microbatch in range(5):
        early.send(key(microbatch), bytes(10_000))
        late.take(key(microbatch), SOON_S)
    early.sent_frames(SOON_S)
    record = socket_record(early.socket, "downstream")
    assert record.bytes_sent - record.bytes_retransmitted == 5 * (10_000 + HEADER_BYTES)
    assert record.congestion_control.encode() in early.socket.getsockopt(6, socket.TCP_CONGESTION, 16)
    assert record.congestion_control
    assert record.peer == "downstream"
    assert record.segments_out > 0
    assert record.rtt_us > 0
    assert early.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_close_delivers_what_was_queued(pair: tuple[Connection, Connection]) -> None:
    early, late = pair
    for microbatch in range(4):
        early.send(key(microbatch), bytes(LIMIT))
    thread = threading.Thread(target=early.close, args=(SOON_S,))
    thread.start()
    for microbatch in range(4):
        assert late.take(key(microbatch), SOON_S).payload.nbytes == LIMIT
    late.close(SOON_S)
    thread.join()


def test_send_blocks_when_too_much_waits_and_goes_on_when_it_is_taken(stack: ExitStack) -> None:
    one, other = tcp_pair()
    early, late = stack.enter_context(sender(one, frames=2)), stack.enter_context(receiver(other, frames=2))
    count, big = 12, bytes(LIMIT)
    sent: list[int] = []
    thread = threading.Thread(target=lambda: sent.extend(early.send(key(m), big) for m in range(count)))
    thread.start()
    for microbatch in range(count):
        assert late.take(key(microbatch), SOON_S).payload.nbytes == LIMIT
    thread.join()
    assert len(sent) == count


# ------------------------------------------------------------------ what must be refused
@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"GET / HTTP/1.1\r\n" * 8, "expected a frame", id="not a frame"),
        pytest.param(frame(b"abc", token=b"x" * 16), "another run", id="wrong token"),
        pytest.param(frame(b"abc")[:-1] + b"d", "payload .* damaged", id="wrong payload"),
        pytest.param(frame(b"abc", names=("", "", "tensor")), "unknown kind or phase", id="no such message"),
        pytest.param(frame(b"abc", 1) * 2, "twice", id="same frame twice"),
        pytest.param(
            pack_frame_header(FrameHeader(key(0), 0, LIMIT + 1, 1, 0), TOKEN, NAMES),
            f"announces {LIMIT + 1} bytes; this job accepts at most {LIMIT}",
            id="hostile length",
        ),
    ],
)
def test_bytes_that_are_no_frame_of_this_run(wire: tuple[socket.socket, Connection], data: bytes, message: str) -> None:
    bare, late = wire
    bare.sendall(data)
    with pytest.raises(
        TransportError, match=rf"stage 1 <-> stage 0: .*{message}.*\(waiting for the tensor of train step 0"
    ):
        late.take(key(0), SOON_S)


def test_a_frame_is_kept_back_until_its_moment_and_others_behind_it(pair: tuple[Connection, Connection]) -> None:
    one, other = pair
    moment_ns = time.monotonic_ns() + 50_000_000
    assert one.send(key(0), b"early", not_before_ns=moment_ns) == moment_ns
    one.send(key(1), b"late")
    arrivals = [other.take(key(m), SOON_S) for m in (0, 1)]
    assert [bytes(arrival.payload) for arrival in arrivals] == [b"early", b"late"]
    assert moment_ns <= arrivals[0].first_byte_ns <= arrivals[0].last_byte_ns <= arrivals[1].last_byte_ns
    assert one.sent_frames(SOON_S)[0].queued_ns == moment_ns
    close_both(one, other)


def test_a_frame_that_is_kept_back_does_not_hold_up_the_end(pair: tuple[Connection, Connection]) -> None:
    one, _ = pair
    one.send(key(0), b"in an hour", not_before_ns=time.monotonic_ns() + 3600 * 10**9)
    began = time.monotonic()
    one.abort()
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize("cut", [1, HEADER_BYTES, HEADER_BYTES + 1])
def test_a_peer_that_dies_inside_a_frame(wire: tuple[socket.socket, Connection], cut: int) -> None:
    bare, late = wire
    bare.sendall(frame(b"abc")[:cut])
    bare.close()
    with pytest.raises(TransportError, match="closed the connection after"):
        late.take(key(0), SOON_S)


def test_a_peer_that_ends_between_frames(wire: tuple[socket.socket, Connection]) -> None:
    bare, late = wire
    bare.sendall(frame(b"abc"))
    bare.close()
    assert late.take(key(0), SOON_S).payload == b"abc"
    with pytest.raises(TransportError, match="closed the connection before sending the tensor"):
        late.take(key(1), SOON_S)


def test_a_peer_that_is_reset_wakes_a_waiting_taker(wire: tuple[socket.socket, Connection]) -> None:
    bare, late = wire
    bare.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    timer = threading.Timer(0.1, bare.close)
    timer.start()
    with pytest.raises(TransportError, match="the connection was lost"):
        late.take(key(0), SOON_S)
    timer.join()
    with pytest.raises(TransportError, match="cannot send"):
        late.send(key(0), b"x")


def test_a_silent_peer(wire: tuple[socket.socket, Connection]) -> None:
    with pytest.raises(TransportError, match=r"nothing arrived within 0.05 s of waiting for the tensor"):
        wire[1].take(key(0), 0.05)


def test_a_peer_that_sends_everything_but_what_is_asked(stack: ExitStack) -> None:
    one, other = tcp_pair()
    early, late = stack.enter_context(sender(one)), stack.enter_context(receiver(other, frames=3))
    for microbatch in range(1, 6):
        early.send(key(microbatch), b"x")
    with pytest.raises(TransportError, match="but the peer sent the tensor"):
        late.take(key(0), SOON_S)


def test_what_is_past_the_limit_is_not_sent(pair: tuple[Connection, Connection]) -> None:
    with pytest.raises(TransportError, match="this job accepts"):
        pair[0].send(key(0), bytes(LIMIT + 1))
    with pytest.raises(TransportError, match=f"the note of the tensor .* accepts at most {LARGEST_NOTE_BYTES}"):
        pair[0].send(key(0), b"", note=bytes(LARGEST_NOTE_BYTES + 1))


def test_what_has_arrived_is_known_with_its_times(wire: tuple[socket.socket, Connection]) -> None:
    bare, late = wire
    assert late.arrived() == {}
    heard = threading.Semaphore(0)
    late.heard = heard.release
    bare.sendall(frame(b"a", 2) + frame(b"b", 1))
    bare.close()
    for _ in range(3):  # two frames and the end
        assert heard.acquire(timeout=SOON_S)
    assert list(late.arrived()) == [key(2), key(1)]
    assert list(late.arrived().values()) == [late.take(key(number), SOON_S).last_byte_ns for number in (2, 1)]
    with pytest.raises(TransportError, match="the peer closed the connection"):
        late.arrived()


def test_closing_on_a_peer_that_does_not_close(pair: tuple[Connection, Connection]) -> None:
    with pytest.raises(TransportError, match="did not close within"):
        pair[0].close(0.05)


def test_abort_ends_threads_that_are_blocked(pair: tuple[Connection, Connection]) -> None:
    early, _ = pair
    for microbatch in range(16):
        early.send(key(microbatch), bytes(LIMIT))
    early.abort()
    early.abort()
    with pytest.raises(TransportError, match="this end dropped the connection"):
        early.take(key(0), SOON_S)


# ------------------------------------------------------------------ connecting
@pytest.fixture
def endpoint() -> Endpoint:
    """Where nobody listens."""
    with tcp_server() as probe:
        return Endpoint(address="127.0.0.1", port=probe.getsockname()[1])


def test_connecting_waits_for_the_listener(endpoint: Endpoint) -> None:
    found: list[socket.socket] = []
    thread = threading.Thread(target=lambda: found.append(connect_to_later(endpoint, "stage 0", SOON_S)))
    thread.start()
    time.sleep(0.1)
    with listen(endpoint, "stage 1") as listener:
        found.append(accept_earlier(listener, "stage 1", SOON_S))
    thread.join()
    assert found[0].getpeername() == found[1].getsockname()
    for sock in found:
        sock.close()


def test_nobody_listens_nobody_connects(endpoint: Endpoint) -> None:
    with pytest.raises(TransportError, match=rf"stage 0: .*did not listen on 127.0.0.1:{endpoint.port}"):
        connect_to_later(endpoint, "stage 0", 0.1)
    with (
        listen(endpoint, "stage 1") as listener,
        pytest.raises(TransportError, match="not all earlier places connected within"),
    ):
        accept_earlier(listener, "stage 1", 0.1)
