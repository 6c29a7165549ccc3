"""Programs of several ranks on this machine's loopback device."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from tests.forked import Program

ROOT = Path(__file__).parents[2]


def run_ranks(script: str, ranks: int, folder: Path, environment: Mapping[str, str] = {}) -> list[str]:
    """Run `SCRIPT RANK RANKS FOLDER` of this folder for each rank; return what each has said."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **environment}
    program = str(Path(__file__).with_name(script))
    started = [Program([program, str(rank), str(ranks), str(folder)], env=own) for rank in range(ranks)]
    try:
        deadline = time.monotonic() + 120
        while any(process.poll() is None for process in started) and time.monotonic() < deadline:
            if any(process.poll() for process in started):
                break  # the others wait for it for ever
            time.sleep(0.02)
        for process in sorted(started, key=lambda process: not process.poll()):
            if process.poll() is None:
                process.kill()
            _, errors = process.communicate()
            assert process.returncode == 0, errors
        return [process.communicate()[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
