"""A program for test_executor.py: it does what it is asked to."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from testbed.errors import SpecError


def main() -> None:
    action, folder, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    (folder / f"{name}.began").write_text(str(os.getpid()))
    print(f"hello from {name}", flush=True)
    match action:
        case "meet":  # somebody else must run at the same time
            deadline = time.monotonic() + 30
            while len(list(folder.glob("*.began"))) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        case "refuse":
            raise SpecError("this cannot be")
        case "crash":
            raise RuntimeError("a bug")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleep":
            time.sleep(600)
    (folder / f"{name}.ended").write_text("")


if __name__ == "__main__":
    main()
