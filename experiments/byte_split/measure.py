"""Measure how short byte planes make activations and gradients: `python experiments/byte_split/measure.py`.

This writes codecs.csv, bits per value of lossless codecs at every boundary of three models, and tensors.csv.
"""

import sys
from pathlib import Path

from testbed.studies import at_boundaries

HERE = Path(__file__).resolve().parent
STAGES = {"gpt2-mini": 4, "gpt2-mini-trained": 4, "smollm2-135m": 6}
"""Models, and into how many stages each is cut."""
CODECS = tuple(
    packer.format(cast)
    for cast in ("fp16", "bf16")
    for packer in ("zstd({}, 3)", "zstd({}, 3, whole)", "zstd({})", "entropy({})")
)
"""BloomBee's own is zstd of level 3 over the byte planes of fp16."""

if __name__ == "__main__":
    sys.exit(at_boundaries.main(HERE, STAGES, CODECS, ("bundled", "repeated")))
