"""Become another program: build.py runs `python -m testbed.vm.step PROGRAM ARGUMENT...`.

The program dies with whoever builds, because `testbed.process` has started this one so.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.execvp(sys.argv[1], sys.argv[1:])
