"""Framed TCP between two places of a job: one duplex connection, a thread that sends and a thread that receives.

The receiving thread reads data as soon as it arrives, so the link never waits for the maths; it blocks inside the
kernel (MSG_WAITALL) without the interpreter lock. A failed connection stays failed: all current and later waits raise
TransportError at once. Every sent or received frame is noted with its times, and `step_log` turns the notes into
records after the step.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

from testbed.errors import TransportError
from testbed.jobs.actions import Key
from testbed.runtime.carried import Carried
from testbed.runtime.frame import (
    HEADER_BYTES,
    LARGEST_NOTE_BYTES,
    NAME,
    FrameHeader,
    pack_frame_header,
    parse_frame_header,
    say,
)
from testbed.runtime.pacing import wait_until

Payload = bytes | bytearray | memoryview
_EXACT_S = 0.005
"""The send thread switches to sleeping this long before a frame may leave; a sleep is more precise than waiting for a
condition."""


class Arrival(NamedTuple):
    """A received frame."""

    key: Key
    payload: memoryview
    note: bytes
    first_byte_ns: int
    last_byte_ns: int
    value: Any
    """What the place decodes: see `Copies.arrived`."""


class SentFrame(NamedTuple):
    """The note of a sent frame."""

    key: Key
    payload_bytes: int
    """Size including its note."""
    queued_ns: int
    first_byte_ns: int
    last_byte_ns: int


class _Queued(NamedTuple):
    """A frame queued for the send thread."""

    key: Key
    payload: memoryview
    note: bytes
    queued_ns: int
    ready: Callable[[], None]
    """Waits until the payload holds its bytes."""


class Copies:
    """How payloads get from a node to the send thread, and from the receive thread to the node: on the CPU, as they
    are.
    """

    def leave(self, payload: Any) -> tuple[Payload, Callable[[], None]]:
        """Return a payload's memory, and what waits until its bytes are there."""
        return payload, self.computed

    def room(self, size_bytes: int) -> memoryview:
        """Return memory for a payload that arrives."""
        return memoryview(bytearray(size_bytes))  # allocated each time: cheaper than copying out of a shared buffer

    def arrived(self, payload: memoryview) -> Any:
        """Return what a node decodes, once it is where the node computes."""
        return payload

    def computed(self) -> None:
        """Wait until all that the calling thread computes is computed."""


class Connection:
    """Frames to and from one peer. End it with `close` on success, with `abort` on failure."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        name: str,
        token: bytes,
        names: Sequence[str] = (),
        max_payload_bytes: int,
        max_frames: int,
    ) -> None:
        """Own a connected blocking socket. `name` names both ends in error messages. `names` are the names of the job's
        messages, the same at both ends; any other name is sent ahead of the first message that uses it.

        `max_frames` bounds both the unsent and the unread frames: beyond it `send` blocks, and the receiving thread
        stops reading, so that TCP throttles the sender. It must hold a step's frames: its micro-batches, or more.
        """
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.heard: Callable[[], None] = lambda: None
        """Called from another thread on each arrival, and when no more can follow."""
        self.spoiled: Callable[[int], str | None] = lambda now_ns: None
        """Returns what becomes of a frame that leaves now: see `faults.NodeFault.frame`."""
        self.copies = Copies()
        self._name, self._token = name, token
        self._names, self._their_names = list(names), list(names)
        self._max_payload_bytes, self._max_frames = max_payload_bytes, max_frames
        self._changed = threading.Condition()
        self._outbox: SimpleQueue[_Queued | None] = SimpleQueue()
        self._unsent = 0
        self._sent: list[SentFrame] = []
        self._inbox: dict[Key, Arrival] = {}
        self.sent_count = 0
        """Number of messages given to `send`."""
        self._received_count = 0
        self._carried: Carried | None = None
        self._failure: TransportError | None = None
        self._ended = False
        self._threads = [
            threading.Thread(target=self._guard, args=(loop,), name=f"{name}: {loop.__name__}", daemon=True)
            for loop in (self._send_all, self._receive_all)
        ]
        for thread in self._threads:
            thread.start()

    # -------------------------------------------------------------- for the place
    def send(self, key: Key, payload: Any, *, note: bytes = b"", not_before_ns: int = 0) -> int:
        """Queue a note and a payload without copying it: it must stay unchanged until sent. Returns the time (ns) of
        queueing, or `not_before_ns` if later: this frame and all behind it are held until then.
        """
        memory, ready = self.copies.leave(payload)
        view = memoryview(memory)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        for what, size, most in (
            ("", view.nbytes, self._max_payload_bytes),
            ("note of the ", len(note), LARGEST_NOTE_BYTES),
        ):
            if size > most:
                raise TransportError(
                    f"{self._name}: the {what}{say(key)} has {size} bytes; this job accepts at most {most}"
                )
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._unsent < self._max_frames)
            self._raise_failure(f"cannot send the {say(key)}")
            self._unsent += 1
            self.sent_count += 1
        queued_ns = max(time.monotonic_ns(), not_before_ns)
        self._outbox.put(_Queued(key, view, note, queued_ns, ready))
        return queued_ns

    def take(self, key: Key, timeout_s: float) -> Arrival:
        """Wait for one frame. TransportError when the peer is lost or sends another frame, or after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(
                lambda: key in self._inbox or self._failure or self._ended or len(self._inbox) >= self._max_frames,
                timeout_s,
            )
            if key in self._inbox:
                arrival = self._inbox.pop(key)
                self._changed.notify_all()
                return arrival
            wanted = f"the {say(key)}"
            self._raise_failure(f"waiting for {wanted}")
            if self._ended:
                raise TransportError(f"{self._name}: the peer closed the connection before sending {wanted}")
            if self._inbox:
                raise TransportError(
                    f"{self._name}: waited for {wanted}, but the peer sent the {say(next(iter(self._inbox)))}"
                )
            raise TransportError(f"{self._name}: nothing arrived within {timeout_s:g} s of waiting for {wanted}")

    def arrived(self) -> dict[Key, int]:
        """Return the unread frames with their times, in order of arrival. TransportError if there are none and no more
        can arrive.
        """
        with self._changed:
            if not self._inbox:
                self._raise_failure("waiting for any message")
                if self._ended:
                    raise TransportError(f"{self._name}: the peer closed the connection")
            return {key: arrival.last_byte_ns for key, arrival in self._inbox.items()}

    def unread(self, count: int, timeout_s: float) -> list[Arrival]:
        """Wait until the peer's first `count` messages have arrived; returns those that nobody has taken, in order of
        arrival. TransportError when the peer is lost, or after `timeout_s`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._received_count >= count or self._failure or self._ended, timeout_s)
            if self._received_count < count:
                self._raise_failure("waiting for messages before a checkpoint")
                came = f"{self._received_count} of {count} messages of the peer arrived within {timeout_s:g} s"
                raise TransportError(f"{self._name}: {came}")
            return list(self._inbox.values())

    def put_back(self, key: Key, payload: Payload, note: bytes, now_ns: int) -> None:
        """Add a message that arrived before a checkpoint, as if it arrived now."""
        with self._changed:
            view = memoryview(payload)
            self._inbox[key] = Arrival(key, view, note, now_ns, now_ns, self.copies.arrived(view))

    def sent_frames(self, timeout_s: float) -> list[SentFrame]:
        """Wait until all frames are sent; returns those sent since the last call, in order. TransportError after
        `timeout_s`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._unsent == 0, timeout_s)
            self._raise_failure("waiting for the last frame to be sent")
            if self._unsent:
                raise TransportError(f"{self._name}: {self._unsent} frames were still unsent after {timeout_s:g} s")
            return self.sent_so_far()

    def sent_so_far(self) -> list[SentFrame]:
        """Return the frames sent since the last call, in order, without waiting for queued ones."""
        with self._changed:
            sent, self._sent = self._sent, []
        return sent

    def measure(self) -> Carried:
        """Start measuring how long the link is busy with frames. CapabilityError where the kernel cannot measure it."""
        self._carried = Carried(self.socket)
        return self._carried

    def close(self, timeout_s: float) -> None:
        """Send queued frames, shut down, wait for the peer's shutdown, then for the acknowledgement of the last byte.

        Both neighbours must call it. (Closing a socket with unread bytes would send a reset instead, which discards
        data in flight.) TransportError when the peer is lost or after `timeout_s`.
        """
        try:
            self._outbox.put(None)
            with self._changed:
                self._changed.wait_for(lambda: self._failure or (self._ended and self._unsent == 0), timeout_s)
                self._raise_failure("closing")
                if not self._ended:
                    raise TransportError(f"{self._name}: the peer did not close within {timeout_s:g} s")
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, math.ceil(timeout_s)))
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop the connection regardless of data in flight, and end both threads. Safe to call twice."""
        # First, so that the threads report this error.
        self._fail(TransportError(f"{self._name}: this end dropped the connection"))
        with contextlib.suppress(OSError):  # already disconnected: the threads are awake
            self.socket.shutdown(socket.SHUT_RDWR)
        self._outbox.put(None)
        for thread in self._threads:
            thread.join()
        self.socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    # -------------------------------------------------------------- the threads
    def _guard(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except TransportError as error:
            self._fail(TransportError(f"{self._name}: {error}"))
        except OSError as error:
            self._fail(TransportError(f"{self._name}: the connection was lost: {error.strerror}"))
        except BaseException as error:
            self._fail(TransportError(f"{self._name}: {type(error).__name__} in the transport: {error}"))
            raise

    def _fail(self, error: TransportError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
        self.heard()

    def _raise_failure(self, doing: str) -> None:
        if self._failure is not None:
            raise TransportError(f"{self._failure} ({doing})") from self._failure

    def _send_all(self) -> None:
        while (item := self._outbox.get()) is not None:
            key, payload, note, queued_ns, ready = item
            ready()
            crc = zlib.crc32(payload, zlib.crc32(note))
            first_byte_ns = self._hold(queued_ns)
            spoiled = self.spoiled(first_byte_ns)
            header = FrameHeader(key, len(note), payload.nbytes, first_byte_ns, crc ^ (spoiled == "damaged"))
            named = self._introduced(key.what)
            token = bytes(255 - each for each in self._token) if spoiled == "foreign" else self._token
            head = pack_frame_header(header, token, self._names) + note
            frame = [memoryview(named + head), payload] if spoiled != "missing" else []
            first = 0 if self._carried is None else self._carried.sending(HEADER_BYTES + header.size, first_byte_ns)
            if frame and (ahead := first - frame[0].nbytes) > 0:
                # MSG_EOR: the kernel appends nothing to its last packet.
                self._write([frame[0], payload[:ahead]], socket.MSG_EOR)
                frame = [payload[ahead:]]
            self._write([*frame, memoryview(head), payload] if spoiled == "repeated" else frame)
            sent = SentFrame(key, header.size, queued_ns, first_byte_ns, time.monotonic_ns())
            with self._changed:
                self._sent.append(sent)
                self._unsent -= 1
                self._changed.notify_all()
        self.socket.shutdown(socket.SHUT_WR)

    def _introduced(self, what: str) -> bytes:
        """Return the frame that introduces a new name, sent before the first frame of that name."""
        if what in self._names:
            return b""
        if not what or len(self._names) == NAME:
            raise TransportError(f"cannot name a message {what!r}: a job may use at most {NAME} names, none empty")
        name = what.encode()
        header = FrameHeader(Key("", 0), 0, len(name), 0, zlib.crc32(name))
        self._names.append(what)
        return pack_frame_header(header, self._token, self._names) + name

    def _write(self, rest: list[memoryview], flags: int = 0) -> None:
        """Write all bytes; even a blocking call may write only some."""
        while rest:
            written = self.socket.sendmsg(rest, [], flags)
            while rest and written >= rest[0].nbytes:
                written -= rest.pop(0).nbytes
            if rest:
                rest[0] = rest[0][written:]

    def _hold(self, moment_ns: int) -> int:
        """Wait until `moment_ns`, or until the connection fails. Returns the time."""
        if (coarse_s := (moment_ns - time.monotonic_ns()) * 1e-9 - _EXACT_S) > 0:
            with self._changed:
                if self._changed.wait_for(lambda: self._failure, coarse_s):
                    return time.monotonic_ns()
        return wait_until(moment_ns)

    def _receive_all(self) -> None:
        data, latest = bytearray(HEADER_BYTES), None
        while self._fill(memoryview(data), may_end=True):
            header = parse_frame_header(
                data, token=self._token, names=self._their_names, max_payload_bytes=self._max_payload_bytes
            )
            note, payload = bytearray(header.note_bytes), self.copies.room(header.payload_bytes)
            self._fill(memoryview(note), may_end=False)
            self._fill(payload, may_end=False)
            last_byte_ns = time.monotonic_ns()
            if zlib.crc32(payload, zlib.crc32(note)) != header.crc:
                raise TransportError(f"the payload of the {say(header.key)} is damaged: its CRC does not match")
            if not header.key.what:
                self._their_names.append(bytes(payload).decode())
                continue
            came = header.first_byte_ns, last_byte_ns, self.copies.arrived(payload)
            with self._changed:
                self._changed.wait_for(lambda: self._failure or len(self._inbox) < self._max_frames)
                if self._failure:
                    return
                if header.key in self._inbox or header.key == latest:
                    raise TransportError(f"the peer sent the {say(header.key)} twice")
                self._inbox[header.key] = Arrival(header.key, payload, bytes(note), *came)
                self._received_count, latest = self._received_count + 1, header.key
                self._changed.notify_all()
            self.heard()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self.heard()

    def _fill(self, buffer: memoryview, *, may_end: bool) -> bool:
        """Receive exactly `buffer`. False when the peer closed before its first byte, which only `may_end` allows."""
        done = 0
        while done < buffer.nbytes:
            count = self.socket.recv_into(buffer[done:], 0, socket.MSG_WAITALL)
            if count == 0:
                if may_end and done == 0:
                    return False
                raise TransportError(f"the peer closed the connection after {done} of {buffer.nbytes} bytes")
            done += count
        return True
