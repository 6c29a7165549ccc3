"""Run another program: build.py runs `python -m testbed.vm.step PROGRAM ARGUMENT...`.

When whoever builds is gone, the program ends, and so do all that it has started: a make that is killed leaves its
compilers running, and they the next ones.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

from testbed.process import die_with_parent


def _end_group(number: int, frame: FrameType | None) -> None:
    os.killpg(0, signal.SIGKILL)  # `start_program` gave us a group of our own


def main() -> None:
    """Run the program and end with its exit status."""
    signal.signal(signal.SIGTERM, _end_group)
    die_with_parent(os.getppid(), signal.SIGTERM)
    status = subprocess.call(sys.argv[1:])
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
