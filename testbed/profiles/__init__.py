"""Link profiles: what one access link is asked to be. Pure: nothing here touches a network.

model.py (loss.py, ranges.py) is the record; files.py finds, extends and overrides TOML files, reading.py makes one direction
of them, writing.py is the inverse, keys.py says what the keys mean. A link varies by a schedule or a trace (trace.py):
timeline.py is what holds when, generate.py and convert.py make traces. line.py sums a profile up in one line, page.py draws the
README of a folder of profiles from its files.
"""

from __future__ import annotations

from testbed.profiles.files import load_profile, override, profile_files, read_profile
from testbed.profiles.loss import Bernoulli, GilbertElliott, Loss
from testbed.profiles.model import (
    Change,
    LinkProfile,
    Pipe,
    Schedule,
    Slot,
    Trace,
)
from testbed.profiles.writing import write_profile

__all__ = [
    "Bernoulli",
    "Change",
    "GilbertElliott",
    "LinkProfile",
    "Loss",
    "Pipe",
    "Schedule",
    "Slot",
    "Trace",
    "load_profile",
    "override",
    "profile_files",
    "read_profile",
    "write_profile",
]
