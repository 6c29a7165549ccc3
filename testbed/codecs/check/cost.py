"""Processor time of encode and decode, with one thread: measured, and the check that it is small beside the time on
the wire.

`process_time` leaves out what other processes do, and counts a codec's own threads. What they do to caches, memory and
page faults is in it: that only ever makes a round longer, so the check goes by the fastest of many rounds.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from testbed.codecs.catalogue.codec_spec import CodecSpec
from testbed.codecs.check.subject import Subject, TrialEnd
from testbed.codecs.check.tensors import hidden, key_at
from testbed.codecs.check.trial_model import StageSize, TrialStage, changes_model, ends_of, hook_of, is_exact
from testbed.codecs.check.verdicts import require
from testbed.message_key import Direction

_SHAPE = (4, 256, 768)
_BAR_MS = 15.7
"""A tenth of the time that a tensor of this shape takes as bf16 at 80 Mbit/s."""
_WARM_UP, _LEAST_ROUNDS, _MOST_ROUNDS, _LEAST_S = 2, 5, 2000, 0.4
_TRIES = 5
"""How often a codec is measured that takes too long."""
_LONGEST = 10
"""A measurement lasts so many times as long as asked for at most, where other processes have the processor."""
_OVER = f"in the fastest round, more than {_BAR_MS} ms"
_VOCABULARY = 4096
"""The size of the bundled tokenizer's vocabulary."""


Taken = TypeVar("Taken")


class CodecTime(NamedTuple):
    """Medians of processor time for one message, and the mean of its size."""

    encode_s: float
    decode_s: float
    payload_bytes: int
    least_s: float
    """Of both together, in the fastest round."""


class InModelTime(NamedTuple):
    """Medians of processor time for one message of a codec that changes the model, in one direction."""

    encode_s: float
    """From hidden states to bytes; backward, from the gradient through `receive` to bytes."""
    decode_s: float
    """From bytes to hidden states; backward, from bytes to the gradient and through `send`."""
    bytes_s: float
    """The part of both that makes and reads bytes."""
    layers_s: float
    """The rest: the codec's part of the model."""
    payload_bytes: int
    least_bytes_s: float
    """Making and reading bytes in the fastest round."""
    relative_error: float | None
    """The error of the hidden states that come back; None for gradients, and where the training is to find what is
    lost."""


class _Round(NamedTuple):
    layers_out_s: float
    encode_s: float
    decode_s: float
    layers_in_s: float
    payload_bytes: int
    error: float


def within_a_tenth_of_the_wire(subject: Subject) -> str:
    """Encode and decode of a tensor of 1,024 x 768 take at most a tenth of its bf16 wire time at 80 Mbit/s: 15.7 ms.

    What a codec's layers in the model take is said and not judged: that is training, and matters as their parameters
    do.
    """
    tensors = [hidden(*_SHAPE, seed=seed) for seed in range(3)]
    if changes_model(subject.spec):
        inside = _fastest(
            lambda: measure_in_model(subject.forward, subject.spec, tensors)[subject.direction],
            lambda found: found.least_bytes_s,
        )
        split = f"bytes {1e3 * inside.bytes_s:.2f} ms, its layers in the model {1e3 * inside.layers_s:.2f} ms"
        least_ms = 1e3 * inside.least_bytes_s
        require(least_ms <= _BAR_MS, f"{split}: making and reading bytes takes {least_ms:.1f} ms or more, {_OVER}")
        return split
    taken = _fastest(lambda: measure_codec(subject.fresh(), subject.fresh(), tensors), lambda found: found.least_s)
    split = f"encode {1e3 * taken.encode_s:.2f} ms, decode {1e3 * taken.decode_s:.2f} ms"
    require(1e3 * taken.least_s <= _BAR_MS, f"{split}: {1e3 * taken.least_s:.1f} ms or more, {_OVER}")
    return split


def _fastest(measure: Callable[[], Taken], least_s: Callable[[Taken], float]) -> Taken:
    """Return what was measured, the fastest of several tries where a round never takes less than the bar."""
    found = measure()
    for _ in range(_TRIES - 1):
        if 1e3 * least_s(found) <= _BAR_MS:
            break
        found = min(found, measure(), key=least_s)
    return found


def measure_codec(
    sender: TrialEnd, receiver: TrialEnd, tensors: list[Tensor], *, seconds: float = _LEAST_S
) -> CodecTime:
    """Measure messages of one micro-batch, the tensors in turn, for at least `seconds` of processor time."""
    encode: list[float] = []
    decode: list[float] = []
    sizes: list[int] = []
    with _one_thread():
        more = _until(seconds)
        number = 0
        while number < _WARM_UP + _LEAST_ROUNDS or (more() and number < _MOST_ROUNDS):
            key, x = key_at(3 * number, batch=tensors[0].shape[0]), tensors[number % len(tensors)]
            sender.prepare(key, tuple(x.shape))
            receiver.prepare(key, tuple(x.shape))
            begin = time.process_time()
            payload = sender.codec.encode(x, key)
            middle = time.process_time()
            receiver.codec.decode(payload, key)
            after = time.process_time()
            if number >= _WARM_UP:
                encode.append(middle - begin)
                decode.append(after - middle)
                sizes.append(memoryview(payload).nbytes)
            number += 1
    least_s = min(map(float.__add__, encode, decode))
    return CodecTime(statistics.median(encode), statistics.median(decode), round(statistics.mean(sizes)), least_s)


def _until(seconds: float) -> Callable[[], bool]:
    """Return what says whether a measurement of so many seconds of processor time goes on."""
    end, latest = time.process_time() + seconds, time.monotonic() + _LONGEST * seconds
    return lambda: time.process_time() < end and time.monotonic() < latest


def measure_in_model(
    forward: CodecSpec, backward: CodecSpec, gradients: list[Tensor], *, seconds: float = _LEAST_S
) -> dict[Direction, InModelTime]:
    """Measure messages of the gradients' shape (b, n, d) for at least `seconds` of processor time.

    Hidden states are those of a first stage with random weights: a subspace takes no others.
    """
    rounds: dict[Direction, list[_Round]] = {"forward": [], "backward": []}
    with _one_thread():
        more = _until(seconds)
        for number, (there, back) in enumerate(_messages(forward, backward, gradients)):
            if number >= _WARM_UP:
                rounds["forward"].append(there)
                rounds["backward"].append(back)
            if number >= _WARM_UP + _LEAST_ROUNDS and not more():
                break
    exact = is_exact(forward)
    return {direction: _medians(measured, exact and direction == "forward") for direction, measured in rounds.items()}


def _medians(rounds: list[_Round], exact: bool) -> InModelTime:
    def median(of: int, also: int) -> float:
        return statistics.median(float(times[of]) + float(times[also]) for times in rounds)

    return InModelTime(
        encode_s=median(0, 1),
        decode_s=median(2, 3),
        bytes_s=median(1, 2),
        layers_s=median(0, 3),
        payload_bytes=round(statistics.mean(times.payload_bytes for times in rounds)),
        least_bytes_s=min(times.encode_s + times.decode_s for times in rounds),
        relative_error=max(times.error for times in rounds) if exact else None,
    )


def _messages(forward: CodecSpec, backward: CodecSpec, gradients: list[Tensor]) -> Iterator[tuple[_Round, _Round]]:
    """Send one micro-batch per step, there and back. Nothing is learned between them, so that all are alike."""
    batch, tokens, width = gradients[0].shape
    sender, receiver, taker, giver = ends_of(forward, backward)
    size = StageSize(width, _VOCABULARY, tokens)
    upper, lower = TrialStage("first", size), TrialStage("last", size)
    above, below = hook_of(sender, upper, "downstream"), hook_of(receiver, lower, "upstream")
    clock = time.process_time
    step = 0
    while True:
        key = key_at(step, batch=batch)
        ids = torch.randint(_VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(step))
        gradient = gradients[step % len(gradients)]
        with torch.no_grad():
            hidden = upper(ids)
        hidden.requires_grad_()
        for hook in (above, below):
            if hook is not None:
                hook.begin(step, 1)
        t0 = clock()
        coded = hidden * 1 if above is None else above.send(hidden, ids)
        t1 = clock()
        payload = sender.encode(coded.detach(), key)
        t2 = clock()
        crossed = receiver.decode(payload, key).requires_grad_()
        t3 = clock()
        restored = crossed * 1 if below is None else below.receive(crossed, ids)
        t4 = clock()
        restored.backward(gradient)  # type: ignore[no-untyped-call]
        t5 = clock()
        assert crossed.grad is not None
        back = giver.encode(crossed.grad, key)
        t6 = clock()
        decoded = taker.decode(back, key)
        t7 = clock()
        coded.backward(decoded)
        t8 = clock()
        error = float((restored - hidden).detach().norm() / hidden.detach().norm())
        yield (
            _Round(t1 - t0, t2 - t1, t3 - t2, t4 - t3, memoryview(payload).nbytes, error),
            _Round(t5 - t4, t6 - t5, t7 - t6, t8 - t7, memoryview(back).nbytes, 0.0),
        )
        step += 1


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
