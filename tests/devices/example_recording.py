"""A recording whose numbers tell which field they belong to."""

from __future__ import annotations

from typing import Any

from testbed.devices.device import PartTimes, RecordedTimes


def recorded(**changes: Any) -> RecordedTimes:
    parts = {
        "embedding": PartTimes(forward_ns=1, backward_ns=2, update_ns=4),
        "layer": PartTimes(forward_ns=10, backward_ns=20, update_ns=40),
        "head": PartTimes(forward_ns=100, backward_ns=200, update_ns=400),
    }
    shape = {"model": "gpt2-mini", "sequence_length": 64, "sequences": 4, "precision": "fp32", "software": "torch"}
    return RecordedTimes.model_validate({**shape, **parts, **changes})
