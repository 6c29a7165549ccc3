"""The checks of a GPU run to their end, in their small form and on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.clock_kernel]


def test_all_checks_pass_on_the_cpu() -> None:
    command = [sys.executable, "-m", "tests.gpu_checks", "--device", "cpu", "--quick"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        "tests marked gpu  not run",
        "gpt2-nano",
        "topk(0.1)     3             0.00e+00",
        "copied",
        "on the CPU",
    ):
        assert said in done.stdout
    assert "0 checks failed" in done.stdout
