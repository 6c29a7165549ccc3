"""A recording with numbers that show where they come from."""

from __future__ import annotations

from typing import Any

from testbed.devices import Part, Recorded


def recorded(**changes: Any) -> Recorded:
    parts = {
        "embedding": Part(forward_ns=1, backward_ns=2, update_ns=4),
        "layer": Part(forward_ns=10, backward_ns=20, update_ns=40),
        "head": Part(forward_ns=100, backward_ns=200, update_ns=400),
    }
    shape = {"model": "gpt2-mini", "sequence_length": 64, "sequences": 4, "precision": "fp32", "software": "torch"}
    return Recorded.model_validate({**shape, **parts, **changes})
