"""What a file of saved tensors holds, in words: `python -m testbed.codecs.check.about FILE`."""

from __future__ import annotations

import json
import sys

import numpy as np


def main(path: str) -> int:
    """One line."""
    with np.load(path) as file:
        about = json.loads(str(file["about"]))
    print(f"{about['model']}, {about['text']} text, after {about['steps']} steps (loss {about['loss']})")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
