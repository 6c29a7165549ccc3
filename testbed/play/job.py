"""What is to be played, and what became of it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from testbed.frozen import Frozen
from testbed.net.lab import LabSpec
from testbed.profiles import LinkProfile, Pipe


class PlayJob(Frozen):
    """One trace over one network."""

    trace: Path
    """A file of `testbed.play.trace`."""
    lab: LabSpec
    link_seed: int = Field(default=0, ge=0)
    """Added to the seed of every pipe: another one loses other packets."""
    steps: int | None = Field(default=None, ge=1)
    """Of the trace's steps, the first so many at most; None: all."""
    prove_steady: bool = True
    """On the virtual clock, over links that neither lose nor vary: stop when steps are proved to repeat."""
    output: Path
    """Where the result goes: see `testbed.play.played`."""

    @property
    def seeded_lab(self) -> LabSpec:
        """The lab, with the link seed in every pipe."""
        profiles = tuple(seeded(profile, self.link_seed) for profile in self.lab.profiles)
        return self.lab.model_copy(update={"profiles": profiles})

    @property
    def repeatable(self) -> bool:
        """Whether every step crosses the same links: nothing varies and nothing is drawn."""
        pipes = [pipe for profile in self.lab.profiles for pipe in (profile.up, profile.down) if pipe is not None]
        return not any(
            pipe.varies or pipe.loss or pipe.jitter_ns or pipe.reorder or pipe.duplicate or pipe.slot for pipe in pipes
        )


def seeded(profile: LinkProfile, seed: int) -> LinkProfile:
    """Return the profile with `seed` added to that of each pipe."""

    def moved(pipe: Pipe | None) -> Pipe | None:
        return pipe and pipe.model_copy(update={"seed": (pipe.seed + seed) % 2**63})

    return profile.model_copy(update={"up": moved(profile.up), "down": moved(profile.down)})


class Outcome(Frozen):
    """What became of a job."""

    output: Path | None
    """The result's file; None where there is none."""
    error: str | None
    """What went wrong; None where nothing did."""
    host_seconds: float
    """How long it took here."""
    guest_seconds: float | None
    """How much of the virtual clock's time that was; None on the real clock, or where it failed."""
