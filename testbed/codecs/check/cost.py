"""The check of cost: processor time of encode and decode for 1,024 tokens of width 768, beside the time on the wire."""

from __future__ import annotations

from testbed.codecs.check import in_model
from testbed.codecs.check.findings import require
from testbed.codecs.check.stages import changes_model
from testbed.codecs.check.subject import Subject
from testbed.codecs.check.tensors import hidden
from testbed.codecs.check.timing import LEAST_S, measure

SHAPE = (4, 256, 768)
BAR_MS = 15.7
"""A tenth of the time that the tensor takes as bf16 at 80 Mbit/s."""


def within_a_tenth_of_the_wire(subject: Subject) -> str:
    """Encode and decode of a tensor of 1,024 x 768 take at most a tenth of its bf16 wire time at 80 Mbit/s: 15.7 ms.

    What a codec's layers in the model take is said and not judged: that is training, and matters as their parameters do.
    """
    tensors = [hidden(*SHAPE, seed=seed) for seed in range(3)]
    if changes_model(subject.spec):
        inside = in_model.measure(subject.forward, subject.spec, tensors, seconds=LEAST_S)[subject.direction]
        split = f"bytes {1e3 * inside.bytes_s:.2f} ms, its layers in the model {1e3 * inside.layers_s:.2f} ms"
        require(1e3 * inside.bytes_s <= BAR_MS, f"{split}: making and reading bytes takes more than {BAR_MS} ms")
        return split
    found = measure(subject.fresh(), subject.fresh(), tensors)
    total = 1e3 * (found.encode_s + found.decode_s)
    split = f"encode {1e3 * found.encode_s:.2f} ms, decode {1e3 * found.decode_s:.2f} ms"
    require(total <= BAR_MS, f"{split}: {total:.1f} ms, more than {BAR_MS} ms")
    return split
