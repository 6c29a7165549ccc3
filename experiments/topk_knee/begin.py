"""Make the checkpoint that topk_knee begins with, where it is not on this machine yet: `python
experiments/topk_knee/begin.py gpt2-mini-trained`. It takes 11 minutes of one core, once per machine.
"""

from __future__ import annotations

import sys

from testbed.errors import TestbedError
from testbed.workloads import checkpoints

if __name__ == "__main__":
    try:
        checkpoints.make(sys.argv[1])
    except TestbedError as error:
        sys.exit(f"testbed: error: {error}")
