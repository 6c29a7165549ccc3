"""The cell: all that decides one run. Frozen records, every number resolved, no default that changes a measured number.

`sweep.plan` makes cells from experiment files; the link profiles in them come from `testbed.profiles`.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import math
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Final, Literal, NamedTuple

from pydantic import BeforeValidator, Discriminator, Field, SerializeAsAny, Tag, model_validator

from testbed.directions import LinkDirection
from testbed.errors import SpecError
from testbed.frozen import Frozen, canonical_json, is_none
from testbed.profiles import LinkProfile, Pipe

Engine = Literal["netem", "relay"]
Exchange = Literal["all-to-all", "star", "all-reduce", "all-gather"]
RINGS: Final[tuple[Exchange, ...]] = ("all-reduce", "all-gather")
"""Exchanges in which a worker speaks with the two beside it."""
Topology = Literal["star", "line"]
Timing = Literal["live", "played"]
Clock = Literal["virtual", "real"]
ScheduleName = Literal["gpipe", "1f1b"]
DurationNs = Annotated[int, Field(ge=1)]


class WorkloadSpec(Frozen):
    """Which model learns what: the part that texts and images have alike."""

    model: str
    """A named size (see `testbed.workloads`), or a checkpoint: one that a program of ours makes, or the id or path of a
    cached one; for images a network of `workloads.networks`."""
    batch_size: int = Field(ge=1)
    """Sequences, or images, in one step, all micro-batches and workers together."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """What the layers compute in: bf16 is torch's autocast; parameters, what crosses boundaries and the optimiser stay
    fp32. Images are learned in fp32."""

    @property
    def batch_tokens(self) -> int:
        """Tokens, or images, in a batch."""
        return self.batch_size


class TextSpec(WorkloadSpec):
    """A language model learns a text."""

    family: str
    """A row of `testbed.workloads.models.FAMILIES`."""
    weights: str | None = Field(default=None, exclude_if=is_none)
    """SHA-256 of the weights that training begins with; None for a named size, which begins with the seed's. Filled in
    when a cell is made of a file, or stated there, and compared with what is on the machine."""
    text: str
    """'bundled' or 'moby-dick', which come with the package; the path of a text or .parquet file; or a data set of the
    hub, 'hub:NAME' or 'hub:NAME:CONFIGURATION', for example 'hub:Salesforce/wikitext:wikitext-2-raw-v1'."""
    sequence_length: int = Field(ge=2)
    validation_batches: int = Field(ge=1)
    """Batches of the fixed validation split that an evaluation reads."""
    training_sequences: int | None = Field(default=None, ge=1)
    """How many sequences of the training split are read, the same in every epoch; None: all of them."""
    order: Literal["shuffled", "fixed"] = "shuffled"
    """Order of the training sequences: a new one each epoch, or the first epoch's again."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Drawn from the seed, step, micro-batch and layer, so that neither cut nor recomputation changes it."""

    @property
    def batch_tokens(self) -> int:
        """Tokens in a batch."""
        return self.batch_size * self.sequence_length


PREPARED_BY: Final = "text", "model", "sequence_length", "batch_size", "validation_batches", "training_sequences"
"""What decides a prepared text: its tokens come from the text and the model's tokenizer; the rest only decides whether
it is long enough."""


class ImagesSpec(WorkloadSpec):
    """A small network learns to name labelled images, in data parallel training; an evaluation scores all test images.

    Each worker has a shard of the training images, as large a part of them as its `data.shares` says.
    """

    precision: Literal["fp32"] = "fp32"
    images: str
    """'digits', which come with scikit-learn, or a data set of the hub that was fetched, 'hub:NAME' or
    'hub:NAME:CONFIGURATION', for example 'hub:ylecun/cifar10'."""
    alpha: float | None = Field(default=None, gt=0)
    """Of the Dirichlet distribution that workers' mixes of classes are drawn from (`workloads.shards`): the smaller,
    the fewer classes each has; None: classes are mixed alike."""


def _kind_of_workload(workload: object) -> str | None:
    """Return the name of the record that a table, or a record, is of; None where that would be two."""
    stated = workload.keys() if isinstance(workload, Mapping) else ()
    if "text" in stated and "images" in stated:
        return None
    return (ImagesSpec if "images" in stated or isinstance(workload, ImagesSpec) else TextSpec).__name__


Workload = Annotated[
    Annotated[TextSpec, Tag(TextSpec.__name__)] | Annotated[ImagesSpec, Tag(ImagesSpec.__name__)],
    Discriminator(
        _kind_of_workload,
        custom_error_type="two_workloads",
        custom_error_message="it has both text, which a language model learns, and images, which a small network "
        "learns; state one of them",
    ),
]
"""What is learned; in a file, which of the two follows from what is stated."""


class Parallelism(Frozen):
    """What every kind of job says of itself: a pipeline, data parallel training, or the kind of a table `job`."""

    unit: ClassVar[str]
    """What one of its places is called: a stage, a worker, a node."""
    counts: ClassVar[str]
    """What the numbers of its actions count: micro-batches, or steps."""
    computes: ClassVar[Sequence[str]]
    """Which of the activities of `metrics.spans` its computing is, but for updates."""

    @property
    @abstractmethod
    def places(self) -> Sequence[str]:
        """The names of its places, each of which is a node of the lab and has records."""

    @property
    @abstractmethod
    def in_short(self) -> tuple[str, str]:
        """Who works, and in which order, for a table of cells."""

    @property
    def cycle(self) -> int:
        """After how many steps a run may repeat itself."""
        return 1

    @property
    def batches_per_step(self) -> int:
        """How many batches the place that works most learns from in a step."""
        return 1

    @property
    def batch_parts(self) -> int:
        """Into how many equal parts its places cut a batch, beside the micro-batches that each of them makes."""
        return 1


class PipelineSpec(Parallelism):
    """How the model is cut and in which order the pieces work."""

    unit = "stage"
    counts = "micro-batch"
    computes = ("forward", "backward")

    stages: int = Field(ge=1, le=64)
    microbatches: int = Field(ge=1)
    schedule: ScheduleName
    in_flight: int = Field(ge=1)
    """Micro-batches that the first stage may have in flight at once (1f1b; gpipe has all of them)."""
    accumulation: int = Field(default=1, ge=1)
    """Times that the schedule is gone through, with its micro-batches each time, before the optimiser takes a step."""
    layers: tuple[int, ...] | None = None
    """Layers of each stage; None: as even as can be (see `workloads.models.split_layers`)."""
    recompute: bool = False
    """What a stage computes forward is not kept for the backward pass but computed again there: less memory for more
    time."""

    @property
    def places(self) -> Sequence[str]:
        """The stages' names."""
        return tuple(f"stage {stage}" for stage in range(self.stages))

    @property
    def in_short(self) -> tuple[str, str]:
        """Who works, and in which order, for a table of cells."""
        return str(self.stages), f"{self.schedule}, {self.in_flight} in flight"


def _listed(value: object) -> object:
    """Take one number for a list of one. What was a list in JSON must be a tuple here."""
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, int) else value


class OuterSpec(Frozen):
    """SGD on what the workers' local steps have changed (DiLoCo, arXiv 2311.08105)."""

    learning_rate: float = Field(gt=0)
    momentum: float = Field(ge=0, lt=1)
    nesterov: bool

    @model_validator(mode="after")
    def _has_a_momentum(self) -> OuterSpec:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov is true, and momentum 0; there is nothing to look ahead along")
        return self


class StreamingSpec(Frozen):
    """An exchange is of one fragment of the model, in turn (Streaming DiLoCo, arXiv 2501.18512)."""

    fragments: int = Field(ge=1)
    """Parts of the model, whole tensors each, as large as each other as that allows. Each is exchanged once in so many
    steps, so once in `fragments * local_steps` batches (the published H); staleness is below it, and the published
    overlap is `staleness * local_steps`."""
    mixing: float = Field(default=0.0, ge=0, lt=1)
    """How much of a worker's own weights remains in a fragment when the shared ones come: the published alpha."""


class DecoSpec(Frozen):
    """DeCo-SGD chooses ratio and staleness by what it measures of the links (`replicas.leader`)."""

    every: int = Field(ge=1)
    """Steps between choices."""
    noise: Literal["exp", "printed", "additive"]
    """By which formula a ratio and a staleness slow convergence down (`policies.deco`)."""
    noise_weight: float = Field(gt=0)
    """How much, where nothing hides behind computing."""


class ArrivalsSpec(Frozen):
    """A server that applies what workers send as it arrives, and waits for none of them (`replicas.arrivals`)."""

    period_s: float | None = Field(default=None, gt=0, exclude_if=is_none)
    """It applies what has arrived every so many seconds (FedLuck, arXiv 2407.05125)."""
    buffer: int | None = Field(default=None, ge=1, exclude_if=is_none)
    """As soon as so many have arrived (FedBuff, arXiv 2106.06639): 1, each by itself; all workers, synchronous."""

    @model_validator(mode="after")
    def _has_one(self) -> ArrivalsSpec:
        if (self.period_s is None) == (self.buffer is None):
            raise ValueError("arrivals are applied by period_s, or by buffer; state one of them")
        return self

    @property
    def period_ns(self) -> int | None:
        """The period in nanoseconds."""
        return None if self.period_s is None else round(self.period_s * 1e9)


class DataParallelSpec(Parallelism):
    """How workers that each train the whole model exchange what they learn. A step is one exchange."""

    unit = "worker"
    counts = "step"
    computes = ("local",)

    workers: int = Field(ge=2, le=64)
    exchange: Exchange
    """all-to-all: every worker sends its message to every other. star: to a server, the last node, which sends each the
    aggregate. all-reduce: a ring adds up parts of dense messages and passes the sums on. all-gather: a ring passes
    every message on."""
    staleness: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_listed)] = Field(min_length=1)
    """Steps that a worker may be ahead of the aggregate that it has; 0 is synchronous. With `arrivals`: steps that the
    server may have made since the weights that an update began with; what is older is refused. One number for all
    workers, or one per worker."""
    local_steps: Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_listed)] = Field(min_length=1)
    """Batches that a worker learns from between two exchanges. One number for all workers, or one per worker."""
    outer: OuterSpec | None = Field(default=None, exclude_if=is_none)
    """None: workers send gradients, and the optimiser is applied to their aggregate. Else the optimiser makes the local
    steps, workers send what these changed, and this is applied to that."""
    streaming: StreamingSpec | None = Field(default=None, exclude_if=is_none)
    """None: an exchange is of the whole model, and workers go on from the shared weights. Else of a fragment, and in
    the others they go on from their own: with `outer` only."""
    answer: str | None = None
    """Codec of the aggregate that a star's server sends."""
    deco: DecoSpec | None = Field(default=None, exclude_if=is_none)
    """None: ratio and staleness stay as stated. Else they are what training begins with: live only."""
    arrivals: ArrivalsSpec | None = Field(default=None, exclude_if=is_none)
    """None: a step has a message of every worker. Else a step has those that have arrived: live only."""
    shares: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """Parts of each batch that a worker reads, and its weight in the aggregate; None: all workers alike."""

    @model_validator(mode="after")
    def _is_possible(self) -> DataParallelSpec:
        for name in ("staleness", "local_steps", "shares"):
            count = len(getattr(self, name) or (0,))
            if count not in (1, self.workers) or (name == "shares" and self.shares and count == 1):
                raise ValueError(f"{name} has {count} numbers for {self.workers} workers; state one per worker")
        if (self.exchange == "star") != (self.answer is not None):
            raise ValueError(
                f"exchange is {self.exchange!r}; a star, and nothing else, needs the codec of its server's `answer`, "
                "for example 'fp32'"
            )
        if self.arrivals is not None and (self.exchange != "star" or self.outer is None or self.deco is not None):
            raise ValueError(
                "arrivals are applied by a star's server to what local steps changed, with ratios that stay: state "
                "exchange = 'star' and outer = { learning_rate = 1.0, momentum = 0.0, nesterov = false }, and no deco"
            )
        if self.arrivals is not None and (self.arrivals.buffer or 0) > self.workers:
            raise ValueError(f"arrivals.buffer is {self.arrivals.buffer}, and there are {self.workers} workers")
        if self.outer is None and max(self.local_steps) > 1:
            raise ValueError(
                "local_steps are more than 1, so workers send what they have changed; state what is done with that, "
                "for example outer = { learning_rate = 0.7, momentum = 0.9, nesterov = true }"
            )
        if self.streaming is not None:
            if self.outer is None or self.arrivals is not None or self.deco is not None:
                raise ValueError(
                    "streaming exchanges fragments of what local steps changed, in turn: state outer = "
                    "{ learning_rate = 0.4, momentum = 0.9, nesterov = true }, and neither arrivals nor deco"
                )
            if max(self.staleness) >= self.streaming.fragments:
                raise ValueError(
                    f"staleness is {max(self.staleness)}, and streaming.fragments {self.streaming.fragments}: a "
                    "fragment's aggregate is applied before it is exchanged again, so staleness is less"
                )
        return self

    @property
    def places(self) -> Sequence[str]:
        """The workers' names, and that of a star's server."""
        workers = tuple(f"worker {worker}" for worker in range(self.workers))
        return (*workers, "server") if self.exchange == "star" else workers

    @property
    def cycle(self) -> int:
        """After how many steps a run may repeat itself: where workers run ahead they wait once in so many steps,
        fragments differ in size, and a server that waits for nobody has no cycle.
        """
        return 1 if self.arrivals is not None else math.lcm(max(self.staleness) + 1, self.fragments)

    @property
    def in_short(self) -> tuple[str, str]:
        """Who works, and in which order, for a table of cells."""
        return f"{self.workers} workers", f"{self.exchange}, {max(self.staleness)} ahead"

    @property
    def batches_per_step(self) -> int:
        """The most local steps of any worker."""
        return max(self.local_steps)

    @property
    def batch_parts(self) -> int:
        """Workers learn from parts of a batch of their own."""
        return sum(self.parts)

    @property
    def fragments(self) -> int:
        """Parts of the model that are exchanged in turn."""
        return 1 if self.streaming is None else self.streaming.fragments

    def staleness_of(self, worker: int) -> int:
        """Return the staleness of one worker."""
        return (self.staleness * self.workers)[worker]

    def local_steps_of(self, worker: int) -> int:
        """Return the local steps of one worker."""
        return (self.local_steps * self.workers)[worker]

    @property
    def parts(self) -> tuple[int, ...]:
        """By worker: how many equal parts of a batch it reads, of as many as there are in all."""
        return self.shares or (1,) * self.workers

    @property
    def weights(self) -> tuple[float, ...]:
        """By worker: its share of the data, and of the aggregate."""
        return tuple(part / sum(self.parts) for part in self.parts)


def _known_job(table: object) -> object:
    """Make the record of a table `job`: its kind names a class (`jobs.kind.KINDS`, or package.module:Class).

    By name, because kinds are built on this module.
    """
    return importlib.import_module("testbed.jobs.kind").job_of_table(table) if isinstance(table, Mapping) else table


JobTable = Annotated[SerializeAsAny[Parallelism] | None, BeforeValidator(_known_job)]


class OptimiserSpec(Frozen):
    """AdamW, or SGD."""

    algorithm: Literal["adamw", "sgd"] = Field(default="adamw", exclude_if=lambda value: value == "adamw")
    """sgd: `beta1` is its momentum, and `beta2` is 0."""
    learning_rate: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    beta1: float = Field(ge=0, lt=1)
    beta2: float = Field(ge=0, lt=1)
    clip_norm: float = Field(gt=0)
    """The global gradient norm, over all stages, is clipped to this."""
    frozen_after: int | None = Field(default=None, ge=1, exclude_if=is_none)
    """Steps after which AdamW's second moment stays as it is, and data parallel workers send first moments instead of
    gradients (1-bit Adam, arXiv 2102.02888); None: never."""
    learning_rate_warmup: int = Field(default=0, ge=0)
    """First steps, over which the learning rate rises from 0 in a line."""
    learning_rate_decay: Literal["none", "cosine"] = "none"
    """From there to the last step."""
    learning_rate_floor: float = Field(default=0.0, ge=0, le=1)
    """What remains of it at the last step, as a share."""

    @model_validator(mode="after")
    def _has_its_momenta(self) -> OptimiserSpec:
        if self.algorithm == "sgd" and self.beta2:
            raise ValueError(f"beta2 is {self.beta2}; sgd has no second moment: state beta2 = 0")
        if self.algorithm == "sgd" and self.frozen_after is not None:
            raise ValueError(f"frozen_after is {self.frozen_after}; sgd has no second moment that could stay as it is")
        return self


class TrainingSpec(Frozen):
    """How long, and from which seed."""

    steps: int = Field(ge=1)
    warmup_steps: int = Field(ge=0)
    """First steps that are recorded, marked, and left out of timing statistics."""
    seed: int = Field(ge=0)
    evaluate_every: int = Field(ge=0)
    """Steps between evaluations; 0 means only at the end."""
    evaluate_uncompressed: bool = False
    """Each evaluation is made once more with fp32 at the boundaries: what the codec costs while it is in use, and what
    it has done to the weights, are two things."""
    target_loss: float | None = Field(default=None, gt=0)
    """Training ends with the evaluation whose loss, with the codec in place, is at most this."""
    budget_s: float | None = Field(default=None, gt=0)
    """Training ends with the step that reaches this wall-clock time, evaluations left out, in the emulated device's
    seconds."""

    @model_validator(mode="after")
    def _something_is_measured(self) -> TrainingSpec:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps is {self.warmup_steps}, which leaves none of {self.steps} steps")
        return self


class Calibrated(Frozen):
    """Every action takes as long as this machine needs for it, timed alone: played runs only."""

    mode: Literal["calibrated"] = "calibrated"
    dilation: ClassVar[int] = 1


class Measured(Frozen):
    """Every stage computes as fast as this machine does while the run lasts: live runs only."""

    mode: Literal["measured"] = "measured"
    dilation: ClassVar[int] = 1


class Paced(Frozen):
    """Each action lasts as long as on the device that is emulated; in a live run the real maths is held to that.

    Durations and the link profiles are those of the emulated world. In the lab everything takes `dilation` times as
    long.
    """

    mode: Literal["paced"] = "paced"
    forward_ns: tuple[DurationNs, ...] = Field(min_length=1)
    """Duration for one micro-batch: one for all stages, or one per stage."""
    backward_ns: tuple[DurationNs, ...] = Field(min_length=1)
    """Recomputation included."""
    update_ns: int = Field(ge=0)
    """From the moment at which all gradients are there to the end of the step, the same at all stages."""
    source: str = Field(min_length=1)
    """Where the durations come from: 'stated', or the device and how its numbers were had."""
    dilation: int = Field(default=1, ge=1, le=1000)
    """A fast device on a slow host: durations and delays in the lab are so many times as long, rates so many times
    smaller, and reported times are divided by it. What it cannot stretch are TCP's constants (the 200 ms floor of its
    retransmission timer, 40 ms of delayed acknowledgements) and the kernel's clock tick."""

    def takes_ns(self, place: int) -> dict[str, int]:
        """Return how long a stage or worker takes in the lab, by what its program works on."""
        forward_ns, backward_ns = (ns[min(place, len(ns) - 1)] for ns in (self.forward_ns, self.backward_ns))
        durations = {"forward": forward_ns, "backward": backward_ns, "update": self.update_ns}
        return {what: ns * self.dilation for what, ns in durations.items()}


class Stated(Frozen):
    """Each kind of work lasts as long as is stated, at every node alike: for jobs of a table `job`."""

    mode: Literal["stated"] = "stated"
    work_ns: dict[str, Annotated[int, Field(ge=0)]]
    """By what is worked on, as the job's program calls it."""
    source: str = Field(min_length=1)
    """Where the durations come from."""
    dilation: int = Field(default=1, ge=1, le=1000)
    """As of `Paced`."""

    def takes_ns(self, what: str, who: str) -> int:
        """Return how long work takes in the lab. SpecError, which says `who` does it, for work of which that is not
        stated.
        """
        if what not in self.work_ns:
            raise SpecError(
                f"compute.work has no duration for {what!r}, which {who} does; it has {', '.join(self.work_ns)}"
            )
        return self.work_ns[what] * self.dilation


CodecCost = Literal["host", "device", "zero"]
Compute = Annotated[Measured | Calibrated | Paced | Stated, Field(discriminator="mode")]


class CodecRates(Frozen):
    """How fast the emulated device does the work of codecs: see `devices.codec_cost`."""

    bandwidth_bytes_per_s: float = Field(gt=0)
    operations_per_s: float = Field(gt=0)
    source: str = Field(min_length=1)
    """The device."""


class Trained(Frozen):
    """What decides the numbers that training computes: the part that cells and recipes have alike."""

    codec: str
    """A name from `testbed codecs`, or 'pkg.mod:Class', perhaps with arguments, or such names by direction and
    boundary; the canonical text of `codecs.selection`."""
    workload: Workload
    pipeline: PipelineSpec
    """In data parallel training: how one worker works, which is a pipeline of one stage."""
    data: DataParallelSpec | None = Field(default=None, exclude_if=is_none)
    """None: one pipeline, and nothing else, trains the model."""
    job: JobTable = Field(default=None, exclude_if=is_none)
    """A job of another kind, which then stands in the place of both."""
    optimiser: OptimiserSpec
    training: TrainingSpec

    @property
    def parallelism(self) -> Parallelism:
        """The kind of its job."""
        return self.job or self.data or self.pipeline

    @property
    def nodes(self) -> int:
        """Nodes, each of which has records: stages, or workers and a server."""
        return len(self.parallelism.places)


class Cell(Trained):
    """One combination of a sweep: all that decides a run."""

    schema_version: Literal[4] = 4
    """Raised when a field changes its meaning, so that old results are not taken for new ones."""
    profiles: tuple[LinkProfile, ...] = Field(min_length=1)
    """One that all links have, or one per link: by stage in a star, by boundary in a line."""
    topology: Topology
    engine: Engine
    compute: Compute
    timing: Timing = "live"
    """live: it is trained over its own links, torch and TCP together. played: its recipe is trained once, without a
    network, and a player sends frames of its sizes over the cell's links, between actions of the durations that
    `compute` states; losses are the training's, because in synchronous training the network cannot change the maths."""
    clock: Clock = "real"
    """virtual: inside a user-mode Linux with time travel, where computing takes no time. real: on this machine."""
    played_steps: int | None = Field(default=None, ge=1)
    """Steps that are played; None: as many as were trained. Where there are more, those of the training follow again in
    turn, and nothing is said of their loss."""
    codec_cost: CodecCost = "host"
    """How long a played cell encodes and decodes. host: as this machine does, timed alone; device: as long as the
    emulated device would, by what codecs move and compute; zero: not at all. A live cell has the host's on the real
    clock, while it runs, and on the virtual one zero; in data parallel training on the real clock either, and on the
    virtual one all three, as a played cell (see `play.replicas`)."""
    codec_rates: CodecRates | None = None
    """Of the device, where codec_cost is `device`."""

    @model_validator(mode="after")
    def _batch_divides(self) -> Cell:
        batch, parts = self.workload.batch_size, self.pipeline.microbatches * self.pipeline.accumulation
        parts *= self.parallelism.batch_parts
        if batch % parts:
            raise ValueError(f"workload.batch_size {batch} cannot be cut into {parts} equal micro-batches")
        return self

    @model_validator(mode="after")
    def _parallelism_fits(self) -> Cell:
        if self.job is not None:
            if self.data is not None:
                raise ValueError("it has a table job and a table data; state one of them")
            return self
        if isinstance(self.compute, Stated):
            raise ValueError("compute is stated by kinds of work, which is for jobs of a table `job`; say 'paced'")
        if self.data is None:
            if isinstance(self.workload, ImagesSpec):
                raise ValueError(
                    f"workload.images is {self.workload.images!r}, which workers learn that each hold a whole small "
                    "network: state a table data, with workers and their exchange; a pipeline's stages learn a text"
                )
            return self
        if self.pipeline.stages > 1 or self.pipeline.recompute:
            raise ValueError(
                "a worker of data parallel training holds the whole model and keeps what it computes: "
                "pipeline.stages is 1 and pipeline.recompute false there; leave the pipeline table out"
            )
        if self.training.evaluate_uncompressed or self.training.budget_s is not None:
            raise ValueError(
                "in data parallel training nothing is coded in an evaluation, and steps do not end together: leave "
                "training.evaluate_uncompressed and training.budget_s out"
            )
        return self

    @model_validator(mode="after")
    def _timing_fits(self) -> Cell:
        if self.timing == "live" and isinstance(self.compute, Calibrated):
            raise ValueError("compute is calibrated, which is for played cells; a live cell's is measured or paced")
        if self.timing == "played" and isinstance(self.compute, Measured):
            raise ValueError("compute is measured, which is for live cells; a played cell's is calibrated or paced")
        if self.timing == "live" and self.played_steps is not None:
            raise ValueError("played_steps is for played cells; a live cell has training.steps")
        if self.timing == "live" and self.clock == "virtual":
            self._check_live_virtual()
        elif self.timing == "live" and self.codec_cost != "host" and self.data is None:
            raise ValueError(
                f"codec_cost is {self.codec_cost!r}, and on the real clock a live cell's codecs cost what they cost: "
                "'host'; on the virtual clock (--clock virtual) they cost nothing: 'zero'"
            )
        if (self.codec_cost == "device") != (self.codec_rates is not None):
            raise ValueError(f"codec_cost is {self.codec_cost!r}; codec_rates go with 'device', and with nothing else")
        if self.clock == "virtual" and self.engine != "netem":
            raise ValueError(f"engine is {self.engine!r}, and links on the virtual clock are netem's")
        return self

    def _check_live_virtual(self) -> None:
        if not isinstance(self.compute, Paced | Stated):
            raise ValueError(
                "the cell is live on the virtual clock, where computing takes no time: give its actions durations with "
                "compute.mode = 'paced' and a device, or durations; with 'stated' and work for a job of a table `job`"
            )
        if self.codec_cost != "zero" and self.data is None:
            raise ValueError(
                f"codec_cost is {self.codec_cost!r}; the cell is live on the virtual clock, where encoding and "
                "decoding take no time: state 'zero'"
            )

    @model_validator(mode="after")
    def _durations_fit(self) -> Cell:
        count, who = (self.pipeline.stages if self.data is None else self.data.workers), self.parallelism.unit
        for name in ("forward_ns", "backward_ns") if isinstance(self.compute, Paced) else ():
            if len(getattr(self.compute, name)) not in (1, count):
                raise ValueError(
                    f"compute.{name.removesuffix('_ns')} has {len(getattr(self.compute, name))} durations for "
                    f"{count} {who}s; state one for all of them, or one per {who}"
                )
        return self

    @model_validator(mode="after")
    def _links_fit(self) -> Cell:
        count = link_count(self.topology, self.nodes)
        if len(self.profiles) not in (1, count):
            raise ValueError(
                f"{len(self.profiles)} profiles for a {self.topology} of {self.nodes} "
                f"{self.parallelism.unit}s, which has {count} links; state one for all of them, or "
                "one per link"
            )
        if self.data is not None and self.topology == "line" and self.nodes > 2:
            raise ValueError("topology is 'line', whose nodes have links to their neighbours only; state 'star'")
        return self

    @property
    def node_names(self) -> tuple[str, ...]:
        """The nodes for people: 'stage 0', or 'worker 0' and 'server'."""
        return tuple(self.parallelism.places)

    @property
    def cycle(self) -> int:
        """After how many steps a run may repeat itself."""
        return self.parallelism.cycle

    @property
    def boundaries(self) -> int:
        """How many a codec may be chosen for: between stages, or one for the messages of each worker or node."""
        return self.pipeline.stages - 1 if self.parallelism is self.pipeline else len(self.parallelism.places)

    @property
    def links(self) -> tuple[LinkProfile, ...]:
        """What the lab is asked for, dilation included: the profile of each link, by stage in a star, by boundary in a
        line.
        """
        count = link_count(self.topology, self.nodes)
        dilated = {profile: profile.dilated(self.compute.dilation) for profile in dict.fromkeys(self.profiles)}
        asked = self.profiles if len(self.profiles) == count else self.profiles * count
        return tuple(dilated[profile] for profile in asked)

    @property
    def network(self) -> str:
        """What the links are, for people: `cable`, `cable+lte+cable`, or `31xcable+lte`."""
        groups = [
            (name, len(list(group))) for name, group in itertools.groupby(profile.name for profile in self.profiles)
        ]
        parts = [[name] * count if count < 4 else [f"{count}x{name}"] for name, count in groups]
        return "+".join(itertools.chain.from_iterable(parts))

    @property
    def shaped(self) -> bool:
        """Whether any link is shaped."""
        return any(profile.shaped for profile in self.profiles)

    @property
    def by_chance(self) -> bool:
        """Whether a link draws at random or changes with time, so that one playing is one of many."""
        return any(
            pipe is not None and pipe.by_chance for profile in self.profiles for pipe in (profile.up, profile.down)
        )

    @property
    def id(self) -> str:
        """Readable, and different whenever anything in the cell is: `int8-cable-1a2b3c4d5e`."""
        # It names a folder, and 32 links have many names.
        return f"{_codec_name(self.codec)}-{self.network[:80]}-{_digest(self)}"


class Recipe(Trained):
    """What decides the numbers that synchronous training computes: a cell without its network and its time.

    Cells of one recipe share one training (`pipeline.alone`).
    """

    schema_version: Literal[1] = 1
    """A training has no time budget: how many steps fit into one depends on the links."""

    @property
    def id(self) -> str:
        """Readable, and different whenever anything in the recipe is."""
        return f"{_codec_name(self.codec)}-{_digest(self)}"


def recipe_of(cell: Cell) -> Recipe:
    """Return the recipe that a cell is trained by."""
    learned = {name: getattr(cell, name) for name in Trained.model_fields}
    return Recipe(**learned | {"training": cell.training.model_copy(update={"budget_s": None})})


def text_of(of: Trained) -> TextSpec:
    """Return what a pipeline learns, which is a text: `Cell` makes sure."""
    assert isinstance(of.workload, TextSpec)
    return of.workload


def _digest(record: Frozen) -> str:
    return hashlib.blake2b(canonical_json(record).encode(), digest_size=5).hexdigest()


def _codec_name(codec: str) -> str:
    return "_".join(re.findall(r"[\w-]+", codec))[:80]


def link_count(topology: Topology, nodes: int) -> int:
    """Return how many shaped links a lab of `nodes` nodes has."""
    return nodes if topology == "star" else nodes - 1


class Hop(NamedTuple):
    """One direction of one link on the way from a stage to its neighbour."""

    link: int
    side: LinkDirection
    profile: LinkProfile

    @property
    def pipe(self) -> Pipe | None:
        """The pipe of this direction; None where it is not shaped."""
        return self.profile.pipe(self.side)


def route(cell: Cell, sender: int, receiver: int) -> tuple[Hop, ...]:
    """Return what a frame crosses between neighbouring stages. In a star the sender's uplink and the receiver's
    downlink; in a line the one link between them, whose `up` leads towards the last stage.
    """
    links = cell.links
    if cell.topology == "star":
        return (Hop(sender, "up", links[sender]), Hop(receiver, "down", links[receiver]))
    link = min(sender, receiver)
    return (Hop(link, "up" if receiver > sender else "down", links[link]),)
