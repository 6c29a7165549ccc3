"""Make the checkpoint that topk_knee begins with, where it is not on this machine yet: `python
experiments/topk_knee/begin.py gpt2-mini-trained`. It takes 11 minutes of one core, once per machine.
"""

import sys

from testbed.errors import status_of
from testbed.workloads import checkpoints

if __name__ == "__main__":
    sys.exit(status_of(lambda: checkpoints.make(sys.argv[1])))
