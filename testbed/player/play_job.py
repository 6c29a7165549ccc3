"""Jobs of the player, and their outcomes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

from pydantic import Field, JsonValue

from testbed.errors import SpecError
from testbed.faults import NodeFault
from testbed.frozen import Frozen
from testbed.net.lab import LabSpec
from testbed.player.lanes import Director
from testbed.profiles import LinkProfile, Pipe


class DirectorCall(Frozen):
    """A `lanes.Director`, in the form of a job's file."""

    made_by: str = Field(pattern=r"^[\w.]+:\w+$")
    """'module:callable', importable from the folder where the program was started."""
    arguments: dict[str, JsonValue]
    """Keyword arguments."""

    def make(self) -> Director:
        """Create the director. SpecError if that fails."""
        module, _, name = self.made_by.partition(":")
        try:
            return cast(Director, getattr(importlib.import_module(module), name)(**self.arguments))
        except Exception as error:  # a third-party module may raise anything
            raise SpecError(f"cannot make the director {self.made_by}: {type(error).__name__}: {error}") from error


class PlayJob(Frozen):
    """One trace to play over one network."""

    trace: Path
    """A file of `testbed.trace.format`."""
    lab: LabSpec
    link_seed: int = Field(default=0, ge=0)
    """Added to the seed of every pipe: with another seed, other packets are lost."""
    steps: int | None = Field(default=None, ge=1)
    """Maximum number of steps of the trace to play; None: all."""
    node_faults: tuple[NodeFault, ...] = ()
    """Faults of its nodes, in the lab's time, none of a node at once."""
    prove_steady: bool = True
    """On the virtual clock, over links that neither lose nor vary: stop once steps provably repeat."""
    director: DirectorCall | None = None
    """Director that changes the trace during play; None: it is played unchanged."""
    output: Path
    """File for the result: see `testbed.trace.played`."""

    @property
    def seeded_lab(self) -> LabSpec:
        """The lab, with the link seed in every pipe."""
        return seeded_lab(self.lab, self.link_seed)

    @property
    def repeatable(self) -> bool:
        """Whether every step is the same over the same links: no director, nothing that varies or fails, no randomness,
        no queue with a memory (fq_codel, cake, red), and no bbr, which probes by timers of several seconds.
        """
        if self.director is not None or self.node_faults:
            return False
        links = self.lab.distinct
        if any(link.by_chance or link.varies or link.congestion_control == "bbr" for link in links):
            return False
        return not any(pipe.queue not in (None, "fifo") for profile in links for pipe in profile.pipes)


def seeded_lab(lab: LabSpec, seed: int) -> LabSpec:
    """Return the lab with `seed` added to that of each pipe."""
    sites = lab.sites and tuple(site.model_copy(update={"profile": seeded(site.profile, seed)}) for site in lab.sites)
    return lab.model_copy(update={"profiles": tuple(seeded(profile, seed) for profile in lab.profiles), "sites": sites})


def seeded(profile: LinkProfile, seed: int) -> LinkProfile:
    """Return the profile with `seed` added to that of each pipe."""

    def moved(pipe: Pipe | None) -> Pipe | None:
        return pipe and pipe.model_copy(update={"seed": (pipe.seed + seed) % 2**63})

    return profile.model_copy(update={"up": moved(profile.up), "down": moved(profile.down)})


class Outcome(Frozen):
    """Outcome of a job."""

    output: Path | None
    """File of the result; None if there is none."""
    error: str | None
    """Error message; None on success."""
    host_seconds: float
    """Duration in real time."""
    guest_seconds: float | None
    """Duration on the virtual clock; None on the real clock, or if it failed."""
