"""Processor time of encode and decode, which the check of cost and the benchmark share."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from testbed.codecs.check.subject import prepare
from testbed.codecs.check.tensors import key_at
from testbed.codecs.contract import Codec

LEAST_ROUNDS, LEAST_S = 5, 0.4


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """As many as torch had again afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Cost(NamedTuple):
    """Medians of processor time, and the size."""

    encode_s: float
    decode_s: float
    payload_bytes: int


def measure(
    encoder: Codec, decoder: Codec, tensors: list[Tensor], *, seconds: float = LEAST_S, warm_up: int = 2
) -> Cost:
    """Messages of one micro-batch message key, the tensors in turn, for so many seconds. `process_time`: others' load does not count,
    and threads of its own do.
    """
    encode: list[float] = []
    decode: list[float] = []
    sizes: list[int] = []
    with one_thread():
        end = time.monotonic() + seconds
        number = 0
        while number < warm_up + LEAST_ROUNDS or (time.monotonic() < end and number < 2000):
            key, x = key_at(3 * number, batch=tensors[0].shape[0]), tensors[number % len(tensors)]
            prepare(encoder, key, tuple(x.shape))
            prepare(decoder, key, tuple(x.shape))
            begin = time.process_time()
            payload = encoder.encode(x, key)
            middle = time.process_time()
            decoder.decode(payload, key)
            after = time.process_time()
            if number >= warm_up:
                encode.append(middle - begin)
                decode.append(after - middle)
                sizes.append(memoryview(payload).nbytes)
            number += 1
    return Cost(statistics.median(encode), statistics.median(decode), round(statistics.mean(sizes)))
