"""warmup: exact in the first training steps, the inner codec's from then on, and in every evaluation."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.make import make


@given(st.integers(0, 4), st.integers(0, 6), st.sampled_from(["train", "evaluation", "uncompressed"]))
def test_only_the_first_steps_of_training_are_exact(steps: int, step: int, phase: str) -> None:
    whole, inner = (make(text, Context(0, 0, "forward")) for text in (f"warmup(int4, {steps})", "int4"))
    tensor, key = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)), MessageKey(phase, step, 0, ())  # type: ignore[arg-type]
    payload = bytes(whole.encode(tensor, key))
    if phase == "train" and step < steps:
        assert torch.equal(whole.decode(payload, key), tensor)
    else:
        assert payload == bytes(inner.encode(tensor, key))
