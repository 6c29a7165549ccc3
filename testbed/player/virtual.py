"""Plays traces on the virtual clock, and returns their times to a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from testbed import paths, vm
from testbed.errors import CapabilityError, LabError
from testbed.net.lab import LabSpec
from testbed.player.guests import play_jobs
from testbed.player.play_job import DirectorCall, PlayJob
from testbed.profiles import LinkProfile
from testbed.spec import Sites, Topology
from testbed.trace.format import Trace
from testbed.trace.played import Played, read_played


class OverLinks(NamedTuple):
    """A trace, and the links to play it over."""

    trace: Trace
    lab: LabSpec
    director: DirectorCall | None = None


def guest_lab(topology: Topology, profiles: Sequence[LinkProfile], nodes: int, sites: Sites = None) -> LabSpec:
    """Return the spec of a lab in a guest."""
    reason = "all that the guest has"
    fields = {"topology": topology, "profiles": tuple(profiles), "nodes": nodes, "sites": sites}
    return LabSpec(**fields, engine="netem", engine_reason=reason)


def need_kernel() -> vm.GuestKernel:
    """Return the guest kernel with a virtual clock. CapabilityError if there is none."""
    if (kernel := vm.find_clock_kernel()) is None:
        raise CapabilityError("there is no kernel with a virtual clock here; build it: python -m testbed vm --build")
    return kernel


def play_virtual(asked: Sequence[OverLinks], *, guests: int = 1, prove_steady: bool = True) -> list[Played]:
    """Play traces in guests and return their times; `prove_steady` as in `PlayJob`.

    CapabilityError without a kernel with a virtual clock, LabError if a trace cannot be played.
    """
    kernel = need_kernel()
    with paths.scratch_folder("testbed-play-") as folder:
        jobs = list[PlayJob]()
        for number, (trace, lab, director) in enumerate(asked):
            trace.write(file := folder / f"{number}.trace")
            output = folder / f"{number}.played"
            job = PlayJob(trace=file, lab=lab, director=director, prove_steady=prove_steady, output=output)
            jobs.append(job)
        outcomes = play_jobs(jobs, clock="virtual", folder=folder / "work", kernel=kernel, guests=guests)
        for outcome, (trace, lab, _) in zip(outcomes, asked, strict=True):
            if outcome.output is None:
                where = f"{', '.join(trace.nodes)} over {lab.profiles[0].summary}"
                raise LabError(f"a trace of {where} could not be played: {outcome.error}")
        return [read_played(job.output) for job in jobs]
