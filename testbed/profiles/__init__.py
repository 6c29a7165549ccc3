"""Link profiles: what is one access link asked to be? Pure: nothing here touches a network.

link_profile      the record of a profile and its pipes
loss              the loss models of a pipe
ranges            the ranges of a profile's numbers, refused in the units that files write
keys              the keys of a profile file and what they mean
loading           profile files: find, extend, override, read
link_text         a link written where a profile is named: `link(80Mbit, 10ms)`
pipe_reading      one direction of a profile file as the fields of a Pipe
profile_writing   a profile as the text of a file that reads back
trace             trace files, and the arithmetic of delivery opportunities
trace_sources     traces from a seed or from a CSV file
timeline          what a varying pipe is at each moment
profiles_page     a profile in one line, and the README of a folder of profiles
"""

from __future__ import annotations

from testbed.profiles.link_profile import Change, LinkProfile, Pipe, RateTrace, Schedule, Slot
from testbed.profiles.link_text import buffer_remark
from testbed.profiles.loading import load_profile, override, profile_files, read_profile
from testbed.profiles.loss import Bernoulli, GilbertElliott, Loss
from testbed.profiles.profile_writing import write_profile

__all__ = [
    "Bernoulli",
    "Change",
    "GilbertElliott",
    "LinkProfile",
    "Loss",
    "Pipe",
    "Schedule",
    "Slot",
    "RateTrace",
    "buffer_remark",
    "load_profile",
    "override",
    "profile_files",
    "read_profile",
    "write_profile",
]
