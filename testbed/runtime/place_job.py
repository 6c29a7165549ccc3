"""The order to a place: one frozen record, sent over the control socket. It omits the link's profile on purpose."""

from __future__ import annotations

from pydantic import Field

from testbed.faults import NodeFault
from testbed.frozen import Frozen
from testbed.runtime.pacing import Coding
from testbed.spec import RINGS, Cell, CodecCost, Measured, Paced, Recipe, Stated, recipe_of


class Endpoint(Frozen):
    """The address at which a place listens for earlier places."""

    address: str
    """IPv4 address."""
    port: int = Field(ge=1, le=65535)

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


class Limits(Frozen):
    """Timeouts of a place, in seconds."""

    connect_s: float = Field(gt=0)
    """Timeout for its peers, each of which must first build its model."""
    message_s: float = Field(gt=0)
    """Timeout for one frame, and for the other places at the end of a step: covers a step on the slowest link, outages
    included."""


class PlaceJob(Frozen):
    """One place of one live run: a stage, a worker or a server, or a place of a `job` table's job."""

    place: int = Field(ge=0)
    """0-based."""
    recipe: Recipe
    budget_s: float | None
    """See `spec.TrainingSpec`; recipes have none."""
    compute: Measured | Paced | Stated = Field(discriminator="mode")
    codec_cost: CodecCost
    """Cost of encoding and decoding in paced runs without `coding`: host, as measured here; zero, nothing."""
    coding: Coding | None
    """Codec durations of data parallel training; None: `codec_cost` decides."""
    vocabulary: int = Field(ge=2)
    """Size of the tokenizer's vocabulary; for images, the number of classes."""
    tokens: str
    """Path of the prepared text, a .npy of token ids; for images, the folder of downloaded data."""
    folder: str
    """The run's folder: steps-<place>.jsonl and stage-<place>.log go there."""
    limits: Limits
    token: str = Field(pattern=r"^[0-9a-f]{32}$")
    """The run's token, part of every frame, so that a frame of another run is an error."""
    peers: tuple[tuple[int, ...], ...]
    """Peers with which each place exchanges messages, by place."""
    endpoints: tuple[Endpoint, ...]
    """Where each place listens for its earlier peers."""
    devices: tuple[str, ...]
    """Network devices of the place's links, one in a star and up to two in a line; each step records their counters.
    Empty without a lab."""
    overhead_bytes: int = Field(ge=0)
    """Bytes that those devices count in addition to each IP packet."""
    faults: tuple[NodeFault, ...] = ()
    """Faults of this place, from when the links were played."""
    played_at_ns: int = 0
    """When they were: a time of CLOCK_MONOTONIC."""
    checkpoints: str | None = None
    """Folder of the cell's checkpoints (`training.checkpoints.PlaceCheckpoints`); None: none are made."""
    checkpoint_every: int = 0
    """Steps between them."""
    resumes_at: int = 0
    """The step whose checkpoint the place resumes; 0: it begins."""

    @property
    def name(self) -> str:
        """Its name in error messages."""
        return self.recipe.parallelism.places[self.place]

    @property
    def prompt(self) -> bool:
        """Whether the place acts at stated moments and needs a real-time priority: see `pacing.set_priority`."""
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
    """Make one job per node of `cell`; `endpoints` (for earlier places) and `devices` are by node."""
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
        first.model_copy(update={"place": place, "devices": own, "faults": cell.faults_of(place)})
        for place, own in zip(places, devices, strict=True)
    )


def _are_peers(cell: Cell, one: int, other: int) -> bool:
    """Return whether two places exchange messages: neighbours, a server and its workers, or all."""
    apart, data = abs(one - other), cell.data
    if data is None:
        return apart == 1 or (apart > 1 and cell.job is not None and cell.topology == "star")
    if data.exchange == "star":
        return apart > 0 and data.workers in (one, other)
    return apart == 1 or (apart > 1 and (data.exchange not in RINGS or apart == data.workers - 1))
