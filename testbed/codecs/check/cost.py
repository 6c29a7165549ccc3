"""The check of cost: processor time of encode and decode for 1,024 tokens of width 768, beside the time on the wire."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor

from testbed.codecs.base import Codec
from testbed.codecs.check import in_model
from testbed.codecs.check.findings import require
from testbed.codecs.check.stages import changes_model
from testbed.codecs.check.subject import Subject, prepare
from testbed.codecs.check.tensors import hidden, slot_at

SHAPE = (4, 256, 768)
BAR_MS = 15.7
"""A tenth of the time that the tensor takes as bf16 at 80 Mbit/s."""
_LEAST_ROUNDS, _LEAST_S = 5, 0.4


class Cost(NamedTuple):
    """Medians of processor time, and the size."""

    encode_s: float
    decode_s: float
    payload_bytes: int


def measure(encoder: Codec, decoder: Codec, tensors: list[Tensor], *, seconds: float = _LEAST_S, warm_up: int = 2) -> Cost:
    """Messages of one micro-batch slot, the tensors in turn, for so many seconds. `process_time`: others' load does not count,
    and threads of its own do.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    encode: list[float] = []
    decode: list[float] = []
    sizes: list[int] = []
    try:
        end = time.monotonic() + seconds
        number = 0
        while number < warm_up + _LEAST_ROUNDS or (time.monotonic() < end and number < 2000):
            slot, x = slot_at(3 * number, batch=tensors[0].shape[0]), tensors[number % len(tensors)]
            prepare(encoder, slot, tuple(x.shape))
            prepare(decoder, slot, tuple(x.shape))
            begin = time.process_time()
            payload = encoder.encode(x, slot)
            middle = time.process_time()
            decoder.decode(payload, slot)
            after = time.process_time()
            if number >= warm_up:
                encode.append(middle - begin)
                decode.append(after - middle)
                sizes.append(memoryview(payload).nbytes)
            number += 1
    finally:
        torch.set_num_threads(threads)
    return Cost(statistics.median(encode), statistics.median(decode), round(statistics.mean(sizes)))


def within_a_tenth_of_the_wire(subject: Subject) -> str:
    """Encode and decode of a tensor of 1,024 x 768 take at most a tenth of its bf16 wire time at 80 Mbit/s: 15.7 ms.

    What a codec's layers in the model take is said and not judged: that is training, and matters as their parameters do.
    """
    tensors = [hidden(*SHAPE, seed=seed) for seed in range(3)]
    if changes_model(subject.recipe):
        inside = in_model.measure(subject.forward, subject.recipe, tensors, seconds=_LEAST_S)[subject.direction]
        split = f"bytes {1e3 * inside.bytes_s:.2f} ms, its layers in the model {1e3 * inside.layers_s:.2f} ms"
        require(1e3 * inside.bytes_s <= BAR_MS, f"{split}: making and reading bytes takes more than {BAR_MS} ms")
        return split
    found = measure(subject.fresh(), subject.fresh(), tensors)
    total = 1e3 * (found.encode_s + found.decode_s)
    split = f"encode {1e3 * found.encode_s:.2f} ms, decode {1e3 * found.decode_s:.2f} ms"
    require(total <= BAR_MS, f"{split}: {total:.1f} ms, more than {BAR_MS} ms")
    return split
