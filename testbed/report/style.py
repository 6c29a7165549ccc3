"""The style of every figure: a colour, a marker and a dash for each codec, and common rules for all axes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

_RULES: Any = matplotlib.rc_params_from_file(Path(__file__).with_name("testbed.mplstyle"), use_default_template=False)
INK: str = _RULES["text.color"]
MUTED: str = _RULES["xtick.color"]
RULE: str = _RULES["grid.color"]
PAPER = "#ffffff"

# Okabe and Ito's colour-blind safe palette; the baseline is grey.
_KNOWN = {"fp32": "#767d86", "bf16": "#0072b2", "int8": "#d55e00", "delta-int8": "#009e73"}
OTHERS = ("#cc79a7", "#e69f00", "#56b4e9", "#7b4fa3", "#8c5a2b", "#b3a000")
_MARKERS = {"fp32": "o", "bf16": "s", "int8": "D", "delta-int8": "^"}
_OTHER_MARKERS = ("v", "P", "X", "<", ">", "h")
_OTHER_DASHES: tuple[Any, ...] = ("-", (0, (1.2, 1.2)), (0, (5, 1.5)), (0, (5, 1.5, 1.2, 1.5)))
_DASHES: dict[str, Any] = {"delta-int8": (0, (4, 1.6))}


@contextmanager
def applied() -> Iterator[None]:
    """Apply the rules to figures drawn and saved inside; restores matplotlib's settings afterwards."""
    with matplotlib.rc_context(_RULES):
        yield


def state(figure: Figure, finding: str) -> None:
    """Put a figure's finding above it, as a sentence."""
    figure.suptitle(finding, x=0.01, ha="left", weight="bold", size=11.5)


class Look(NamedTuple):
    """The style of a codec in every figure."""

    colour: str
    marker: str
    dash: Any


def looks(codecs: Iterable[str]) -> dict[str, Look]:
    """Return the look of each codec: fixed for known ones, otherwise derived from the name, or the next free one.

    When the colours run out, they repeat with another marker and dash, which distinguishes 24 further codecs.
    """
    chosen: dict[str, Look] = {}
    taken = [0] * len(OTHERS)
    for codec in sorted(set(codecs)):
        if codec in _KNOWN:
            chosen[codec] = Look(_KNOWN[codec], _MARKERS[codec], _DASHES.get(codec, "-"))
            continue
        place = hashlib.blake2b(codec.encode(), digest_size=2).digest()[0] % len(OTHERS)
        place = min(range(len(OTHERS)), key=lambda other: (taken[other], (other - place) % len(OTHERS)))
        again = taken[place]
        taken[place] += 1
        marker = _OTHER_MARKERS[(place + again) % len(_OTHER_MARKERS)]
        chosen[codec] = Look(OTHERS[place], marker, _OTHER_DASHES[again % len(_OTHER_DASHES)])
    return chosen
