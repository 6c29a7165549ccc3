from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Command, outside


@pytest.fixture
def command(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Command]:
    engine = "netem" if request.node.get_closest_marker("netem") else "relay"
    before = outside()
    command = Command(tmp_path, engine)
    yield command
    for pid in command.left():  # of a test that failed: the next one must not suffer
        os.kill(pid, signal.SIGKILL)
    assert outside() == before
