"""The kit's two processes: one pair for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testbed.codecs.catalogue.table import CODECS
from testbed.codecs.check.apart import Ends


@pytest.fixture(scope="session")
def ends() -> Iterator[Ends]:
    """Two processes that have imported all codecs of the table, and strangers'."""
    with Ends(["strangers:Good", "cheats:Exits", *(row.example_text for row in CODECS.values())], warm=False) as ends:
        yield ends
