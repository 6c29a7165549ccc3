"""The kit's server of forks: one for all tests here, which ends with their process."""

from __future__ import annotations

import os

import pytest

from testbed.codecs.check.apart import elsewhere
from testbed.codecs.check.exchange import converse


@pytest.fixture(autouse=True, scope="session")
def _server_of_forks() -> None:
    """Started here, so that no single test seems to have left it behind."""
    assert elsewhere(converse, "fp32", "forward", 1, seconds=60)
    assert elsewhere(os.getpid, seconds=60) != os.getpid()
