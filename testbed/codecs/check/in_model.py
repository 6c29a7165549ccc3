"""What a codec that changes the model costs at a boundary: its layers there, forward and backward, and its bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from testbed.codecs.catalogue.codec_spec import CodecSpec
from testbed.codecs.check.stages import Size, Stage, ends_of, hook_of, is_exact
from testbed.codecs.check.tensors import key_at
from testbed.codecs.check.timing import LEAST_ROUNDS, one_thread
from testbed.message_key import Direction

_VOCABULARY = 4096
"""Of the bundled tokenizer."""
_WARM_UP = 2


class InModel(NamedTuple):
    """Of one direction: medians of processor time, for one message."""

    encode_s: float
    """Hidden states to bytes; backward, the gradient through `receive` and to bytes."""
    decode_s: float
    """Bytes to hidden states; backward, bytes to the gradient and through `send`."""
    bytes_s: float
    """What of both is making and reading bytes."""
    layers_s: float
    """The rest: the codec's part of the model."""
    payload_bytes: int
    relative_error: float | None
    """Of the hidden states that come back; None where that is the training's to find, and for gradients."""


class _Round(NamedTuple):
    layers_out_s: float
    encode_s: float
    decode_s: float
    layers_in_s: float
    payload_bytes: int
    error: float


def measure(
    forward: CodecSpec, backward: CodecSpec, gradients: list[Tensor], seconds: float
) -> dict[Direction, InModel]:
    """Messages of gradients' shape (b, n, d), for so many seconds. Hidden states are those of a first stage with random weights:
    a subspace takes no others.
    """
    rounds: dict[Direction, list[_Round]] = {"forward": [], "backward": []}
    with one_thread():
        end = time.monotonic() + seconds
        for number, (there, back) in enumerate(_messages(forward, backward, gradients)):
            if number >= _WARM_UP:
                rounds["forward"].append(there)
                rounds["backward"].append(back)
            if number >= _WARM_UP + LEAST_ROUNDS and time.monotonic() > end:
                break
    exact = is_exact(forward)
    return {direction: _medians(found, exact and direction == "forward") for direction, found in rounds.items()}


def _medians(rounds: list[_Round], exact: bool) -> InModel:
    def median(of: int, also: int) -> float:
        return statistics.median(float(one[of]) + float(one[also]) for one in rounds)

    return InModel(
        encode_s=median(0, 1),
        decode_s=median(2, 3),
        bytes_s=median(1, 2),
        layers_s=median(0, 3),
        payload_bytes=round(statistics.mean(one.payload_bytes for one in rounds)),
        relative_error=max(one.error for one in rounds) if exact else None,
    )


def _messages(forward: CodecSpec, backward: CodecSpec, gradients: list[Tensor]) -> Iterator[tuple[_Round, _Round]]:
    """A micro-batch a step, there and back. Nothing is learned between them, so that all are alike."""
    batch, tokens, width = gradients[0].shape
    sender, receiver, taker, giver = ends_of(forward, backward)
    size = Size(width, _VOCABULARY, tokens)
    upper, lower = Stage("first", size), Stage("last", size)
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
