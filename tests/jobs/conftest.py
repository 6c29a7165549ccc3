"""A text for jobs of a table `job`."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "tokens.npy"
    np.save(path, np.random.default_rng(1).integers(0, 4096, 40_000, dtype=np.uint16))
    return str(path)
