"""Measure codecs on saved tensors: `python -m testbed.codecs.bench.measure FILE CODEC ...` prints one line of JSON
per result.

FILE is what `python -m testbed.workloads.real_tensors` writes. It is a separate program, so that the command line needs
no torch, and torch has one thread.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from testbed.codecs.bench import peers
from testbed.codecs.check.cost import CodecTime, measure_codec, measure_in_model
from testbed.codecs.check.subject import TrialEnd, subject_of
from testbed.codecs.check.tensors import key_at
from testbed.codecs.check.trial_model import changes_model
from testbed.errors import TestbedError
from testbed.message_key import Direction

_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def tensors_of(path: str) -> dict[Direction, list[Tensor]]:
    """Read the messages of each direction, (b, n, d) fp32."""
    with np.load(path) as file:
        return {direction: [torch.from_numpy(message) for message in file[direction]] for direction in _DIRECTIONS}


class CodecFidelity(NamedTuple):
    """A codec's errors and bits on messages."""

    relative_error: float
    """|decoded - x| / |x| over all messages."""
    token_error: float
    """Median over tokens of the relative error per token, as seen by a layer whose norm scales every token to the same
    size."""
    bits_per_value: float
    """On the wire, headers included."""


def fidelity(sender: TrialEnd, receiver: TrialEnd, tensors: list[Tensor]) -> CodecFidelity:
    """Send messages of consecutive steps of one micro-batch, (b, n, d) each, and measure errors and bits."""
    wrong, right, bits = [], [], 0
    for number, x in enumerate(tensors):
        key = key_at(3 * number, batch=x.shape[0])
        payload = sender.encode(x, key)
        decoded = receiver.decode(payload, key)
        wrong.append((decoded - x).double().square().sum(-1).flatten())
        right.append(x.double().square().sum(-1).flatten())
        bits += 8 * memoryview(payload).nbytes
    errors, squares = torch.cat(wrong), torch.cat(right)
    of_tokens = (errors[squares > 0] / squares[squares > 0]).sqrt()
    return CodecFidelity(
        float((errors.sum() / squares.sum()).sqrt()),
        float(of_tokens.median()),
        bits / sum(x.numel() for x in tensors),
    )


def codec_line(
    text: str, direction: Direction, tensors: list[Tensor], make: Callable[[], TrialEnd], package: str = ""
) -> dict[str, Any]:
    """Measure one codec in one direction, as the fields of `results.CodecCost`."""
    shown = fidelity(make(), make(), tensors)
    line = _line(text, direction, tensors, measure_codec(make(), make(), tensors, seconds=0.5))
    return {**line, "package": package, "bits_per_value": shown.bits_per_value, "relative_error": shown.relative_error}


def _line(text: str, direction: Direction, tensors: list[Tensor], taken: CodecTime) -> dict[str, Any]:
    values = tensors[0].numel()
    return {
        "codec": text,
        "direction": direction,
        "values": values,
        "encode_s": taken.encode_s,
        "decode_s": taken.decode_s,
        "payload_bytes": taken.payload_bytes,
        "bits_per_value": 8 * taken.payload_bytes / values,
        "relative_error": taken.relative_error,
    }


def main(arguments: list[str]) -> int:
    """Print each codec in both directions, then the peers that are installed.

    A failing codec becomes a line with `failed`.
    """
    path, *texts = arguments
    answer, sys.stdout = sys.stdout, sys.stderr  # codecs of the user's may print
    torch.set_num_threads(1)
    tensors = tensors_of(path)
    for text in texts:
        for line in _lines(text, tensors):
            print(json.dumps(line), flush=True, file=answer)
    for peer in peers.installed():
        for direction in _DIRECTIONS:
            make = functools.partial(_peer_end, peer)
            line = codec_line(peer.codec, direction, tensors[direction], make, package=peer.package)
            print(json.dumps(line), flush=True, file=answer)
    return 0


def _peer_end(peer: peers.PeerCodec) -> TrialEnd:
    return TrialEnd(peer.make())


def _lines(text: str, tensors: dict[Direction, list[Tensor]]) -> Iterator[dict[str, Any]]:
    try:
        forward = subject_of(text, "forward")
        if changes_model(forward.spec):
            gradients = tensors["backward"]
            measured = measure_in_model(forward.spec, subject_of(text, "backward").spec, gradients, seconds=1.0)
            for direction, taken in measured.items():
                yield {**_line(text, direction, gradients, taken), "layers_s": taken.layers_s}
            return
    except TestbedError as error:
        yield from ({"codec": text, "direction": direction, "failed": str(error)} for direction in _DIRECTIONS)
        return
    for direction in _DIRECTIONS:
        try:
            yield codec_line(text, direction, tensors[direction], subject_of(text, direction).fresh)
        except TestbedError as error:
            yield {"codec": text, "direction": direction, "failed": str(error)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
