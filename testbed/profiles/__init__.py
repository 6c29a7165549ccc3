"""Link profiles: the parameters of access links. Pure: nothing here touches a network.

link_profile      the record of a profile and its pipes
loss              the loss models of a pipe
background        the flows of others on a link
ranges            ranges of a profile's numbers, with errors in the units of profile files
keys              the keys of a profile file and their meaning
loading           finds, extends, overrides and reads profile files
link_text         an inline link in place of a profile's name: `link(80Mbit, 10ms)`
pipe_reading      reads one direction of a profile file into the fields of a Pipe
profile_writing   writes a profile as a file that can be read back
rate_trace        trace files and the arithmetic of delivery opportunities
trace_sources     traces from a seed or from a CSV file
faults            intervals in which a pipe is worse than its profile states
timeline          the state of a varying pipe over time
profiles_page     one-line summary of a profile, and the README of a folder of profiles
"""

from __future__ import annotations

from testbed.profiles.background import BackgroundFlow, split_networks
from testbed.profiles.faults import PipeFault
from testbed.profiles.link_profile import Change, LinkProfile, Pipe, RateTrace, Schedule, Slot
from testbed.profiles.link_text import buffer_remark
from testbed.profiles.loading import load_profile, override, profile_files, read_profile
from testbed.profiles.loss import Bernoulli, GilbertElliott, Loss
from testbed.profiles.profile_writing import write_profile

__all__ = [
    "BackgroundFlow",
    "Bernoulli",
    "Change",
    "GilbertElliott",
    "LinkProfile",
    "Loss",
    "Pipe",
    "PipeFault",
    "Schedule",
    "Slot",
    "RateTrace",
    "buffer_remark",
    "load_profile",
    "override",
    "profile_files",
    "read_profile",
    "split_networks",
    "write_profile",
]
