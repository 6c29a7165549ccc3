"""What is to be played, and what became of it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

from pydantic import Field, JsonValue

from testbed.errors import SpecError
from testbed.frozen import Frozen
from testbed.net.lab import LabSpec
from testbed.play.lanes import Director
from testbed.profiles import LinkProfile, Pipe


class DirectorCall(Frozen):
    """A `lanes.Director`, as a job's file can say it."""

    made_by: str = Field(pattern=r"^[\w.]+:\w+$")
    """'module:callable', which can be imported where the program was started, too."""
    arguments: dict[str, JsonValue]
    """By name."""

    def make(self) -> Director:
        """Make it. SpecError where that fails."""
        module, _, name = self.made_by.partition(":")
        try:
            return cast(Director, getattr(importlib.import_module(module), name)(**self.arguments))
        except Exception as error:  # a stranger's module may raise anything
            raise SpecError(f"cannot make the director {self.made_by}: {type(error).__name__}: {error}") from error


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
    director: DirectorCall | None = None
    """Who fills in numbers of the trace while it is played; None: it is played as it stands."""
    output: Path
    """Where the result goes: see `testbed.play.played`."""

    @property
    def seeded_lab(self) -> LabSpec:
        """The lab, with the link seed in every pipe."""
        profiles = tuple(seeded(profile, self.link_seed) for profile in self.lab.profiles)
        return self.lab.model_copy(update={"profiles": profiles})

    @property
    def repeatable(self) -> bool:
        """Whether every step does the same over the same links: nothing is chosen, nothing varies, nothing is drawn."""
        if self.director is not None:
            return False
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
