from __future__ import annotations

import dataclasses

import pytest
from test_stage import TOKENS

from testbed.workloads import models


@pytest.fixture
def tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of four layers of width 32, named gpt2-tiny and llama-tiny."""
    for family in ("gpt2", "llama"):
        nano = models.SIZES[f"{family}-nano"]
        tiny = dataclasses.replace(nano, layers=4, width=32, inner=128, vocabulary=TOKENS)
        monkeypatch.setitem(models.SIZES, f"{family}-tiny", tiny)
