"""Run another program: build.py runs `python -m testbed.vm.step PROGRAM ARGUMENT...`.

If the builder dies, the program and all its descendants end: a killed make leaves its compilers running, and these
their own children.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

from testbed.process import die_with_parent, shell_status


def _end_group(number: int, frame: FrameType | None) -> None:
    os.killpg(0, signal.SIGKILL)  # `start_program` put us into our own group


def main() -> None:
    """Run the program and end with its exit status."""
    signal.signal(signal.SIGTERM, _end_group)
    die_with_parent(os.getppid(), signal.SIGTERM)
    sys.exit(shell_status(subprocess.call(sys.argv[1:])))


if __name__ == "__main__":
    main()
