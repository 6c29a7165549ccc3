"""Tensors captured from a training: real numbers of the sizes that benchmarks speak of."""

from __future__ import annotations

import json

import numpy as np
import pytest

from testbed.workloads import real_tensors


@pytest.mark.slow
def test_captured_tensors() -> None:
    found = real_tensors.capture(steps=1, kept=1)
    assert found["forward"].shape == found["backward"].shape == (1, 4, 256, 768)
    for tensors in (found["forward"], found["backward"]):
        assert tensors.dtype == np.float32
        assert np.isfinite(tensors).all()
        assert (tensors != 0).mean() > 0.99
    # the gradient of a mean over 1,024 tokens
    assert np.abs(found["backward"]).max() < np.abs(found["forward"]).max()
    about = json.loads(str(found["about"]))
    assert about["steps"] == 1
    assert 4 < about["loss"] < 12
