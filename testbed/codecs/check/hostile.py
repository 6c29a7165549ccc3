"""Checks of invalid bytes: a prompt error, without allocating memory based on them, and without changing state."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from types import FrameType

from testbed.codecs.check.subject import Subject, TrialEnd
from testbed.codecs.check.tensors import fitting, hidden, key_at
from testbed.codecs.check.verdicts import Broken, require, same
from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.make import make
from testbed.errors import CodecError

MEMORY_BYTES = 256 * 2**20
"""Maximum memory for decoding a message of some kilobytes, including a decompressor's window."""
SLOWEST_S = 1.0
"""Maximum processor time for one message."""
_CLAIMS = (0xFFFFFFFF, 0x7FFFFFFF, 0x10000, 0)


def mutations(good: bytes, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield named payloads that are truncated, oversized, flipped, overwritten with huge sizes, or random."""
    draw = random.Random(seed)
    size = len(good)
    for cut in sorted({*range(min(size, 40)), size // 2, max(size - 1, 0)}):
        yield f"the first {cut} bytes", good[:cut]
    for more in (1, 4, 64, size, 4096):
        yield f"{more} bytes more", good + bytes(draw.randrange(256) for _ in range(more))
    for at in range(min(size, 32)):
        for bit in range(8):
            yield f"bit {bit} of byte {at} flipped", good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :]
    for _ in range(60):
        at, bit = draw.randrange(size), draw.randrange(8)
        yield f"bit {bit} of byte {at} flipped", good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :]
    for at in range(0, min(size - 3, 64), 2):
        for claim in _CLAIMS:
            yield f"0x{claim:X} at byte {at}", good[:at] + claim.to_bytes(4, "little") + good[at + 4 :]
    for begin in (0, 4, 16):
        for _ in range(15):
            yield (
                f"random from byte {begin}",
                good[:begin] + bytes(draw.randrange(256) for _ in range(max(size - begin, 1))),
            )
    yield "all ones", good[: min(16, size)] + b"\xff" * max(size - 16, 0)
    yield "other payload, reversed", good[::-1]


def hostile_bytes(subject: Subject) -> str:
    """Invalid bytes, in a process with a memory limit, give a CodecError or a tensor of plausible size, in time, and
    leave the decoder unchanged.
    """
    tried = refused = 0
    slowest = 0.0
    signal.signal(signal.SIGPROF, _too_slow)
    for seed, shape in enumerate(((2, 3, 64), (3, 5), (2, 0, 5))):
        sender, receiver = subject.fresh(), subject.fresh()
        for step in range(2):
            key = key_at(step)
            receiver.decode(bytes(sender.encode(hidden(*shape, seed=step), key)), key)
        key = key_at(9)  # three steps are an epoch: the first message's samples recur
        good = bytes(sender.encode(hidden(*shape, seed=2), key))
        before = receiver.state
        expected = subject.fresh()
        expected.load(before)
        right = expected.decode(good, key)
        for name, bad in mutations(good, seed):
            if bad == good:
                continue
            begin = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, SLOWEST_S)
            tried += 1
            refused += (error := _refusal(receiver, bad, key, name)) is not None
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            slowest = max(slowest, time.process_time() - begin)
            require(slowest < SLOWEST_S, f"{name}: {slowest:.1f} s of processor time over {len(bad)} bytes")
            # other values cannot be detected, but missing or extra bytes can
            require(error is not None or len(bad) == len(good), f"{name} of {len(good)}: decoded, without an error")
            if error is not None:
                require(same(receiver.state, before), f"{name}: the state changed despite {error!r}")
            else:
                receiver = subject.fresh()
                receiver.load(before)
        require(same(receiver.decode(good, key), right), "after invalid bytes, valid ones decode to another tensor")
    return f"{tried} tried, {refused} refused, the slowest {slowest * 1e3:.0f} ms; the others decode to other values"


def _too_slow(signum: int, frame: FrameType | None) -> None:
    raise Broken(f"{SLOWEST_S:.0f} s of processor time")


def _refusal(receiver: TrialEnd, bad: bytes, key: MessageKey, name: str) -> CodecError | None:
    try:
        decoded = receiver.decode(bad, key)
    except CodecError as error:
        return error
    except Broken as slow:
        raise Broken(f"{name}: {slow} over {len(bad)} bytes") from None
    except MemoryError:
        raise Broken(f"{name}: allocated more than {MEMORY_BYTES >> 20} MiB because of {len(bad)} bytes") from None
    except Exception as error:
        memory = "allocate" in str(error) or "bad_alloc" in str(error)
        short = "it allocated memory based on them" if memory else "not a CodecError"
        raise Broken(f"{name}: {short}: {type(error).__name__}: {str(error)[:160]}") from None
    # Even a codec of 1 bit per 1000 values cannot produce this much.
    require(decoded.numel() <= 100_000 + 8 * len(bad), f"{name}: {len(bad)} bytes became {decoded.numel()} numbers")
    return None


def foreign_payload(subject: Subject) -> str:
    """A message of another codec is refused, or at least does no harm."""
    x = hidden(2, 3, 64)
    key = fitting(x)
    refused = 0
    names = [name for name in ("fp32", "bf16", "int8", "delta-int8") if name != subject.spec.text]
    for name in names:
        payload = bytes(make(name, Context(0, 0, subject.direction)).encode(x, key))
        refused += _refusal(subject.fresh(), payload, key, f"a payload of {name}") is not None
    return f"{refused} of {len(names)} refused"
