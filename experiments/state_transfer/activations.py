"""Measure MesonGS's chain on activations and gradients: `python experiments/state_transfer/activations.py`.

This writes codecs.csv, bits and errors at every boundary of two models, and tensors.csv.
"""

import sys

import state

from testbed.studies import at_boundaries

STAGES = {"gpt2-mini-trained": 4, "smollm2-135m": 6}
"""Models, and into how many stages each is cut."""
CODECS = tuple(codec for width in ("int8", "int4") for codec in (*state.chain(width)[1:], *state.one_step(width)))

if __name__ == "__main__":
    sys.exit(at_boundaries.main(state.HERE, STAGES, CODECS))
