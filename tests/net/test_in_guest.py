"""What netem does, and what is decided by time: all tests of it in one guest with a virtual clock, on any machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {
    "tests/sweep/test_laws.py",  # live runs: torch in many processes takes minutes inside; .ci/run has a guest for them
    "tests/test_vagrant.py",  # its guest is the one that provisioning proves
}


@pytest.mark.slow
@pytest.mark.clock_kernel
@pytest.mark.timeout(1500)
def test_netem_on_the_virtual_clock() -> None:
    marked = re.compile(r"mark\.(netem|virtual_clock)\b|^@CASES$", re.MULTILINE)
    files = [str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py") if marked.search(p.read_text())]
    inside = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-q",
        "-m",
        "netem or virtual_clock",
        *sorted(set(files) - LEFT_OUT),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "testbed", "vm", "--virtual-clock", "--time-limit", "1400", "--", *inside],
        cwd=ROOT,
        env={**os.environ, "TESTBED_REQUIRE": "netem,root,virtual_clock"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
