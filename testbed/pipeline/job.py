"""The job that a stage is given: one frozen record, sent over the control socket. It has no profile, on purpose."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

from pydantic import Field

from testbed.frozen import Frozen
from testbed.message_key import Phase
from testbed.spec import (
    Cell,
    CodecCost,
    DataParallelSpec,
    JobTable,
    Measured,
    OptimiserSpec,
    Paced,
    PipelineSpec,
    Recipe,
    Stated,
    TextSpec,
    TrainingSpec,
    Workload,
)


class Endpoint(Frozen):
    """Where a place listens for those before it."""

    address: str
    """IPv4 address."""
    port: int = Field(ge=1, le=65535)

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


class Limits(Frozen):
    """How long a stage waits before it gives up, in seconds."""

    connect_s: float = Field(gt=0)
    """For the neighbours: the slowest stage must have built its model by then."""
    message_s: float = Field(gt=0)
    """For one frame, and for the other stages at the end of a step: a step on the slowest link, outages included."""


class NodeWork(Frozen):
    """What one stage, or one node of data parallel training, is told wherever the others are."""

    stage: int = Field(ge=0)
    """0-based."""
    codec: str
    compute: Measured | Paced | Stated = Field(discriminator="mode")
    pipeline: PipelineSpec
    optimiser: OptimiserSpec
    training: TrainingSpec
    vocabulary: int = Field(ge=2)
    """Size of the tokenizer's vocabulary; of images, their classes."""
    tokens: str
    """Path of the prepared text, a .npy of token ids; of images, the folder that keeps what was fetched."""
    folder: str
    """The run's folder: steps-<stage>.jsonl and stage-<stage>.log go there."""
    limits: Limits

    @property
    @abstractmethod
    def name(self) -> str:
        """What messages call it."""


class StageWork(NodeWork):
    """What one stage trains, wherever its neighbours are."""

    workload: TextSpec

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"stage {self.stage}"

    @property
    def microbatches(self) -> int:
        """Micro-batches in a step: those of every round of the schedule."""
        return self.pipeline.microbatches * self.pipeline.accumulation

    def number_in_record(self, phase: Phase, step: int, microbatch: int) -> int:
        """Return the number that a micro-batch has in the record of its step or evaluation; `step`, as in its key.

        The two disagree in an evaluation, and must. To a codec each validation batch is a step of its own, so that what
        it remembers of a micro-batch is as old as it is in training; the key's step therefore goes on from batch to
        batch and from one evaluation to the next. A record is about the whole evaluation, so it counts the
        micro-batches of all its batches through.
        """
        if phase == "train":
            return microbatch
        return step % self.workload.validation_batches * self.microbatches + microbatch


class LinkedWork(NodeWork):
    """The part of a job over links that does not depend on what is trained."""

    token: str = Field(pattern=r"^[0-9a-f]{32}$")
    """The run's token, in every frame: a frame of another run is an error, not data."""
    endpoints: tuple[Endpoint, ...]
    """Where each place listens for those before it that it exchanges messages with."""
    codec_cost: CodecCost
    """What encoding and decoding cost where work is paced: host, what they cost here; zero, nothing."""
    devices: tuple[str, ...]
    """Network devices of the node's links, one in a star and up to two in a line: their counters go into every step.
    Empty without a lab."""
    overhead_bytes: int = Field(ge=0)
    """What those devices count on top of each IP packet."""

    @property
    def recipe(self) -> Recipe:
        """What is trained."""
        stated = Recipe.model_fields.keys() & type(self).model_fields.keys()
        return Recipe(**{name: getattr(self, name) for name in stated})

    @property
    def prompt(self) -> bool:
        """Whether the node is to do things at given moments, and not only as soon as it can: see `pacing.prefer`."""
        return not isinstance(self.compute, Measured)


class StageJob(LinkedWork, StageWork):
    """One stage of one run over links."""

    program: Literal["testbed.pipeline.train:train_job"] = "testbed.pipeline.train:train_job"
    """What a host calls with the job."""


class NodeJob(LinkedWork):
    """One node of one run of data parallel training over links: a worker, or a star's server, which is the last."""

    program: Literal["testbed.replicas.live:train_node"] = "testbed.replicas.live:train_node"
    workload: Workload
    data: DataParallelSpec

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"worker {self.stage}" if self.stage < self.data.workers else "server"


class KindJob(LinkedWork):
    """One place of one run of a job of a table `job` over links."""

    program: Literal["testbed.kinds.live:run_node"] = "testbed.kinds.live:run_node"
    workload: Workload
    job: JobTable
    peers: tuple[tuple[int, ...], ...]
    """By place: the others that it has connections with."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.recipe.parallelism.places[self.stage]


Job = StageJob | NodeJob | KindJob


def jobs(
    cell: Cell,
    *,
    addresses: tuple[str, ...],
    port: int,
    token: str,
    vocabulary: int,
    tokens: str,
    folder: str,
    devices: tuple[tuple[str, ...], ...],
    overhead_bytes: int,
    limits: Limits,
) -> tuple[Job, ...]:
    """Make one job per node of `cell`; `addresses` (where those before it connect to) and `devices` by node."""
    assert len(addresses) == len(devices) == cell.nodes
    common: list[dict[str, Any]] = [
        {
            "stage": node,
            "codec": cell.codec,
            "compute": cell.compute,
            "workload": cell.workload,
            "pipeline": cell.pipeline,
            "optimiser": cell.optimiser,
            "training": cell.training,
            "vocabulary": vocabulary,
            "tokens": tokens,
            "token": token,
            "endpoints": tuple(Endpoint(address=address, port=port) for address in addresses),
            "codec_cost": cell.codec_cost,
            "devices": devices[node],
            "overhead_bytes": overhead_bytes,
            "folder": folder,
            "limits": limits,
        }
        for node in range(cell.nodes)
    ]
    if cell.job is not None:
        reach = 1 if cell.topology == "line" else cell.nodes
        peers = [[peer for peer in range(cell.nodes) if 0 < abs(peer - node) <= reach] for node in range(cell.nodes)]
        return tuple(KindJob(job=cell.job, peers=peers, **each) for each in common)
    if cell.data is not None:
        return tuple(NodeJob(data=cell.data, **each) for each in common)
    return tuple(StageJob(**each) for each in common)
