"""Parts of cells and recipes, of which a test states what it is about."""

from __future__ import annotations

from typing import Any

from testbed.spec import TextSpec
from testbed.workloads import models


def text_spec(model: str = "gpt2-nano", **changes: Any) -> TextSpec:
    """A workload on the bundled text, of a named size or a checkpoint."""
    known = models.SIZES.get(model)
    stated = {
        "family": known.family if known is not None else "llama" if "llama" in model else "gpt2",
        "text": "bundled",
        "sequence_length": 64,
        "batch_size": 4,
        "validation_batches": 1,
    }
    return TextSpec.model_validate({**stated, "model": model, **changes})
