"""Measures codecs on saved tensors: `python -m testbed.codecs.check.bench FILE CODEC ...`, one line of JSON a result.

FILE is what `python -m testbed.workloads.capture` writes. A program of its own, with one thread.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from testbed.codecs.base import Codec
from testbed.codecs.check import peers
from testbed.codecs.check.cost import measure
from testbed.codecs.check.subject import Subject, prepare, subject_of
from testbed.codecs.check.tensors import slot_at
from testbed.errors import TestbedError
from testbed.spec import Direction

_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def tensors_of(path: str) -> dict[Direction, list[Tensor]]:
    """The messages of each direction, (b, n, d) fp32."""
    with np.load(path) as file:
        return {direction: [torch.from_numpy(one) for one in file[direction]] for direction in _DIRECTIONS}


def fidelity(sender: Codec, receiver: Codec, tensors: list[Tensor]) -> tuple[float, float]:
    """Of messages of consecutive steps of one slot: |decoded - x| / |x| over all of them, and bits a value on the wire."""
    wrong = right = 0.0
    bits = count = 0
    for number, x in enumerate(tensors):
        slot = slot_at(3 * number, batch=x.shape[0])
        for end in (sender, receiver):
            prepare(end, slot, tuple(x.shape))
        payload = sender.encode(x, slot)
        decoded = receiver.decode(payload, slot)
        wrong += float((decoded - x).double().square().sum())
        right += float(x.double().square().sum())
        bits += 8 * memoryview(payload).nbytes
        count += x.numel()
    return float((wrong / right) ** 0.5), bits / count


def result(
    text: str, direction: Direction, tensors: list[Tensor], make: Callable[[], Codec], package: str = ""
) -> dict[str, Any]:
    """One line: what was measured of one codec in one direction."""
    error, bits = fidelity(make(), make(), tensors)
    found = measure(make(), make(), tensors, seconds=0.5)
    return {
        "codec": text,
        "package": package,
        "direction": direction,
        "values": tensors[0].numel(),
        "encode_s": found.encode_s,
        "decode_s": found.decode_s,
        "payload_bytes": found.payload_bytes,
        "bits_per_value": bits,
        "relative_error": error,
    }


def main(arguments: list[str]) -> int:
    """Each codec in both directions, then the peers that are installed. A codec that fails is a line with `failed`."""
    path, *texts = arguments
    torch.set_num_threads(1)
    tensors = tensors_of(path)
    for text in texts:
        for direction in _DIRECTIONS:
            try:
                subject: Subject = subject_of(text, direction)
                line = result(text, direction, tensors[direction], subject.fresh)
            except TestbedError as error:
                line = {"codec": text, "direction": direction, "failed": str(error)}
            print(json.dumps(line), flush=True)  # noqa: T201
    for peer in peers.installed():
        for direction in _DIRECTIONS:
            line = result(peer.codec, direction, tensors[direction], peer.make, package=peer.package)
            print(json.dumps(line), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
