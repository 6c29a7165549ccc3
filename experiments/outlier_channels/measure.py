"""Measure outlier channels, and the errors of codecs where there are some: `python
experiments/outlier_channels/measure.py`.

This writes tensors.csv, how uneven channels and tokens are at every boundary of three models, and codecs.csv.
"""

import sys
from pathlib import Path

from testbed.studies import at_boundaries

HERE = Path(__file__).resolve().parent
STAGES = {"gpt2-mini": 4, "gpt2-mini-trained": 4, "smollm2-135m": 6}
"""Models, and into how many stages each is cut."""
_PLAIN = ("int8", "int4", "int8(group=64)", "int6(group=64)", "int4(group=64)", "int3(group=64)", "int2(group=64)")
CODECS = (
    "bf16",
    "fp8",
    "blockwise-8",
    *_PLAIN,
    *(f"hadamard({codec})" for codec in _PLAIN),
    "int4(group=32, asymmetric)",
    "tah",
    "topk(0.1)",
    "topk(0.02)",
    "powersgd(8)",
    "powersgd(32)",
)

if __name__ == "__main__":
    sys.exit(at_boundaries.main(HERE, STAGES, CODECS))
