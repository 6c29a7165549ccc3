"""A soak, in small: nothing grows over rounds of random cells, and what would grow is told."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from testbed.process import ROOT
from tests.soak import Holdings, grown

MINUTES = 2
CALM = Holdings(200.0, 12, 3, 1, 30, 0, 0)


def test_what_grows_is_told_and_what_only_begins_is_not() -> None:
    warmed = [CALM._replace(memory_mib=120.0, processes=0), *[CALM] * 8]
    assert grown(warmed) == []
    assert grown([*warmed, CALM._replace(memory_mib=206.0)]) == []
    for name in Holdings._fields:
        more = [CALM._replace(**{name: getattr(CALM, name) * (1 + at / 10) + at}) for at in range(9)]
        (words,) = grown(more)
        assert words.startswith(f"{name}: ")
    assert grown([CALM, CALM]) == ["2 rounds are too few to judge"]


@pytest.mark.slow
@pytest.mark.clock_kernel
def test_nothing_grows_and_every_cell_is_right() -> None:
    command = [sys.executable, "-m", "tests.soak", "--minutes", str(MINUTES)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr[-4000:]}"
