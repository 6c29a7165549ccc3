"""The job that a place is given: one frozen record, sent over the control socket. It has no profile, on purpose."""

from __future__ import annotations

from pydantic import Field

from testbed.frozen import Frozen
from testbed.pipeline.pacing import Coding
from testbed.spec import RINGS, Cell, CodecCost, Measured, Paced, Recipe, Stated, recipe_of


class Endpoint(Frozen):
    """Where a place listens for those before it."""

    address: str
    """IPv4 address."""
    port: int = Field(ge=1, le=65535)

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


class Limits(Frozen):
    """How long a place waits before it gives up, in seconds."""

    connect_s: float = Field(gt=0)
    """For its peers: the slowest place must have built its model by then."""
    message_s: float = Field(gt=0)
    """For one frame, and for the other places at the end of a step: a step on the slowest link, outages included."""


class PlaceJob(Frozen):
    """One place of one run over links: a stage, a worker or a server, a node of a job of a table `job`."""

    place: int = Field(ge=0)
    """0-based."""
    recipe: Recipe
    budget_s: float | None
    """As in `spec.TrainingSpec`; recipes have none."""
    compute: Measured | Paced | Stated = Field(discriminator="mode")
    codec_cost: CodecCost
    """What encoding and decoding cost where work is paced and `coding` does not say it: host, what they cost here;
    zero, nothing."""
    coding: Coding | None
    """How long the codecs of data parallel training work; None: as `codec_cost` says."""
    vocabulary: int = Field(ge=2)
    """Size of the tokenizer's vocabulary; of images, their classes."""
    tokens: str
    """Path of the prepared text, a .npy of token ids; of images, the folder that keeps what was fetched."""
    folder: str
    """The run's folder: steps-<place>.jsonl and stage-<place>.log go there."""
    limits: Limits
    token: str = Field(pattern=r"^[0-9a-f]{32}$")
    """The run's token, in every frame: a frame of another run is an error, not data."""
    peers: tuple[tuple[int, ...], ...]
    """By place: the others that it exchanges messages with."""
    endpoints: tuple[Endpoint, ...]
    """Where each place listens for those before it that it exchanges messages with."""
    devices: tuple[str, ...]
    """Network devices of the place's links, one in a star and up to two in a line: their counters go into every step.
    Empty without a lab."""
    overhead_bytes: int = Field(ge=0)
    """What those devices count on top of each IP packet."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.recipe.parallelism.places[self.place]

    @property
    def prompt(self) -> bool:
        """Whether the place is to do things at given moments, and not only as soon as it can: see `pacing.prefer`."""
        return not isinstance(self.compute, Measured)


def jobs(
    cell: Cell,
    *,
    endpoints: tuple[Endpoint, ...],
    token: str,
    vocabulary: int,
    tokens: str,
    folder: str,
    devices: tuple[tuple[str, ...], ...],
    overhead_bytes: int,
    limits: Limits,
    coding: Coding | None = None,
) -> tuple[PlaceJob, ...]:
    """Make one job per node of `cell`; `endpoints` (where those before it connect to) and `devices` by node."""
    places = range(cell.nodes)
    first = PlaceJob(
        place=0,
        recipe=recipe_of(cell),
        budget_s=cell.training.budget_s,
        compute=cell.compute,
        codec_cost=cell.codec_cost,
        coding=coding,
        vocabulary=vocabulary,
        tokens=tokens,
        folder=folder,
        limits=limits,
        token=token,
        peers=tuple(tuple(peer for peer in places if _are_peers(cell, place, peer)) for place in places),
        endpoints=endpoints,
        devices=(),
        overhead_bytes=overhead_bytes,
    )
    return tuple(
        first.model_copy(update={"place": place, "devices": own}) for place, own in zip(places, devices, strict=True)
    )


def _are_peers(cell: Cell, one: int, other: int) -> bool:
    """Say whether two places exchange messages: neighbours, a server and its workers, or all."""
    apart, data = abs(one - other), cell.data
    if data is None:
        return apart == 1 or (apart > 1 and cell.job is not None and cell.topology == "star")
    if data.exchange == "star":
        return apart > 0 and data.workers in (one, other)
    return apart == 1 or (apart > 1 and (data.exchange not in RINGS or apart == data.workers - 1))
