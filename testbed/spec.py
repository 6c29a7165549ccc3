"""What is asked for: link profiles and cells. Frozen records, every number resolved, no default that changes a measured number.

A profile file (`netem_profiles/NAME.toml`) is read by `load_profile`; experiment files by `sweep.plan`.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from testbed.frozen import Frozen, canonical_json
from testbed.profiles import LinkProfile, Pipe

Engine = Literal["netem", "relay"]
Direction = Literal["forward", "backward"]
Topology = Literal["star", "line"]
Family = Literal["gpt2", "llama"]


class WorkloadSpec(Frozen):
    """Which model learns what."""

    family: Family
    model: str
    """A named size (see `testbed.workloads`), or the id or path of a cached checkpoint."""
    text: str
    """'bundled', or the path of a UTF-8 text file."""
    sequence_length: int = Field(ge=2)
    batch_size: int = Field(ge=1)
    """Sequences in one step, all micro-batches together."""
    validation_batches: int = Field(ge=1)
    """Batches of the fixed validation split that an evaluation reads."""


class PipelineSpec(Frozen):
    """How the model is cut and in which order the pieces work."""

    stages: int = Field(ge=1, le=64)
    microbatches: int = Field(ge=1)
    schedule: Literal["gpipe", "1f1b"]
    in_flight: int = Field(ge=1)
    """Micro-batches that the first stage may have in flight at once (1f1b; gpipe has all of them)."""
    layers: tuple[int, ...] | None = None
    """Layers of each stage; None: as even as can be (see `workloads.table.split`)."""
    recompute: bool = False
    """What a stage computes forward is not kept for the backward pass but computed again there: less memory for more time."""


class OptimiserSpec(Frozen):
    """AdamW."""

    learning_rate: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    beta1: float = Field(ge=0, lt=1)
    beta2: float = Field(ge=0, lt=1)
    clip_norm: float = Field(gt=0)
    """The global gradient norm, over all stages, is clipped to this."""


class TrainingSpec(Frozen):
    """How long, and from which seed."""

    steps: int = Field(ge=1)
    warmup_steps: int = Field(ge=0)
    """First steps that are recorded, marked, and left out of timing statistics."""
    seed: int = Field(ge=0)
    evaluate_every: int = Field(ge=0)
    """Steps between evaluations; 0 means only at the end."""

    @model_validator(mode="after")
    def _something_is_measured(self) -> TrainingSpec:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps is {self.warmup_steps}, which leaves none of {self.steps} steps")
        return self


class Cell(Frozen):
    """One combination of a sweep: all that decides a run."""

    schema_version: Literal[2] = 2
    """Raised when a field changes its meaning, so that old results are not taken for new ones."""
    codec: str
    """A name from `testbed codecs`, or 'pkg.mod:Class'."""
    profiles: tuple[LinkProfile, ...] = Field(min_length=1)
    """One that all links have, or one a link: by stage in a star, by boundary in a line."""
    topology: Topology
    engine: Engine
    compute: Literal["measured"]
    workload: WorkloadSpec
    pipeline: PipelineSpec
    optimiser: OptimiserSpec
    training: TrainingSpec

    @model_validator(mode="after")
    def _batch_divides(self) -> Cell:
        if self.workload.batch_size % self.pipeline.microbatches:
            batch, parts = self.workload.batch_size, self.pipeline.microbatches
            raise ValueError(f"workload.batch_size {batch} cannot be cut into {parts} equal micro-batches")
        return self

    @model_validator(mode="after")
    def _links_fit(self) -> Cell:
        count = link_count(self.topology, self.pipeline.stages)
        if len(self.profiles) not in (1, count):
            raise ValueError(
                f"{len(self.profiles)} profiles for a {self.topology} of {self.pipeline.stages} stages, which has {count} links; "
                "state one for all of them, or one a link"
            )
        return self

    @property
    def links(self) -> tuple[LinkProfile, ...]:
        """The profile of each link: by stage in a star, by boundary in a line."""
        count = link_count(self.topology, self.pipeline.stages)
        return self.profiles if len(self.profiles) == count else self.profiles * count

    @property
    def network(self) -> str:
        """What the links are, for people: `cable`, `cable+lte+cable`, or `31xcable+lte`."""
        groups = [(name, len(list(group))) for name, group in itertools.groupby(profile.name for profile in self.profiles)]
        parts = [[name] * count if count < 4 else [f"{count}x{name}"] for name, count in groups]
        return "+".join(itertools.chain.from_iterable(parts))

    @property
    def shaped(self) -> bool:
        """Whether any link is."""
        return any(profile.shaped for profile in self.profiles)

    @property
    def id(self) -> str:
        """Readable, and different whenever anything in the cell is: `int8-cable-1a2b3c4d5e`."""
        digest = hashlib.blake2b(canonical_json(self).encode(), digest_size=5).hexdigest()
        codec = "".join(c if c.isalnum() or c in "-_" else "_" for c in self.codec)
        return f"{codec}-{self.network[:80]}-{digest}"  # it names a folder, and 32 links have many names


def link_count(topology: Topology, nodes: int) -> int:
    """How many shaped links a lab of so many nodes has."""
    return nodes if topology == "star" else nodes - 1


class Hop(NamedTuple):
    """One direction of one link on the way from a stage to its neighbour."""

    link: int
    side: Literal["up", "down"]
    profile: LinkProfile

    @property
    def pipe(self) -> Pipe | None:
        """None: unshaped."""
        return self.profile.pipe(self.side)


def route(cell: Cell, sender: int, receiver: int) -> tuple[Hop, ...]:
    """What a frame crosses between neighbouring stages. In a star the sender's uplink and the receiver's downlink; in a line the
    one link between them, whose `up` leads towards the last stage.
    """
    links = cell.links
    if cell.topology == "star":
        return (Hop(sender, "up", links[sender]), Hop(receiver, "down", links[receiver]))
    link = min(sender, receiver)
    return (Hop(link, "up" if receiver > sender else "down", links[link]),)
