"""The cell: everything that determines one run. Frozen records, every number resolved, no default that changes a
measured number.

`sweep.plan` makes cells from experiment files; the link profiles in them come from `testbed.profiles`.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import math
import operator
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple

from pydantic import BeforeValidator, Discriminator, Field, SerializeAsAny, Tag, model_validator

from testbed.directions import LinkDirection
from testbed.errors import SpecError
from testbed.faults import Fault, LinkFault, NodeFault, check_faults, with_faults
from testbed.frozen import Frozen, canonical_json, is_none
from testbed.profiles import LinkProfile, Pipe, load_profile

Engine = Literal["netem", "relay"]
Exchange = Literal["all-to-all", "star", "all-reduce", "all-gather", "pairs"]
RINGS: Final[tuple[Exchange, ...]] = ("all-reduce", "all-gather")
"""Exchanges in which a worker communicates only with its two neighbours."""
Topology = Literal["star", "line"]
Timing = Literal["live", "played"]
Clock = Literal["virtual", "real"]
TrainingDevice = Literal["cpu", "cuda"]
ScheduleName = Literal["gpipe", "1f1b"]
RtoMaxMs = Annotated[int | None, Field(ge=1000, le=120_000)]
"""Longest time after which TCP sends again what was not acknowledged, in milliseconds; None: the kernel's, 120 s. It
decides how long after an outage nothing moves. In the lab's time, as all of TCP's constants."""
DurationNs = Annotated[int, Field(ge=1, le=10**15)]
"""At most eleven days."""


class SiteSpec(Frozen):
    """Nodes of a star behind a router, whose link to the hub they share."""

    nodes: tuple[int, ...] = Field(min_length=1)
    profile: Annotated[
        LinkProfile, BeforeValidator(lambda value: load_profile(value) if isinstance(value, str) else value)
    ]
    """Of the link from the router to the hub; in a file by name."""


Sites = tuple[SiteSpec, ...] | None
"""Sites of a lab; None: every node's link leads to the hub."""


class WorkloadSpec(Frozen):
    """Model and data: the fields shared by texts and images."""

    model: str
    """A named size (see `testbed.workloads`), or a checkpoint: one made by a testbed program, or the id or path of a
    cached one; for images a network of `workloads.networks`."""
    batch_size: int = Field(ge=1)
    """Sequences or images per step, over all micro-batches and workers."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the layers: bf16 is torch's autocast; parameters, tensors at boundaries and the optimiser stay fp32.
    Images are learned in fp32."""

    @property
    def batch_tokens(self) -> int:
        """Tokens or images per batch."""
        return self.batch_size


class TextSpec(WorkloadSpec):
    """Training of a language model on a text."""

    family: str
    """A row of `testbed.workloads.models.FAMILIES`."""
    weights: str | None = Field(default=None, exclude_if=is_none)
    """SHA-256 of the initial weights; None for a named size, whose weights come from the seed. Stated in the file, or
    filled in when the cell is resolved; checked against the weights on this machine."""
    text: str
    """'bundled' or 'moby-dick' (part of the package); the path of a text, .parquet or .bin (tokens) file, or of a
    folder of such files; or a data set of the hub, 'hub:NAME' or 'hub:NAME:CONFIGURATION', for example
    'hub:Salesforce/wikitext:wikitext-2-raw-v1'."""
    sequence_length: int = Field(ge=2)
    validation_batches: int = Field(ge=1)
    """Number of batches of the fixed validation split per evaluation."""
    training_sequences: int | None = Field(default=None, ge=1)
    """Number of sequences of the training split to use, the same in every epoch; None: all of them."""
    order: Literal["shuffled", "fixed"] = "shuffled"
    """Order of the training sequences: a new one each epoch, or always that of the first epoch."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Drawn from the seed, step, micro-batch and layer, so that it does not depend on the cut or on recomputation."""

    @property
    def batch_tokens(self) -> int:
        """Tokens per batch."""
        return self.batch_size * self.sequence_length


PREPARED_BY: Final = "text", "model", "sequence_length", "batch_size", "validation_batches", "training_sequences"
"""Fields that determine a prepared text: its tokens depend on the text and the model's tokenizer, the other fields are
for the check that it is long enough."""


class ImagesSpec(WorkloadSpec):
    """Training of a small network to classify images, data parallel; an evaluation scores all test images.

    Each worker has a shard of the training images, of the relative size in `data.shares`.
    """

    precision: Literal["fp32"] = "fp32"
    images: str
    """'digits' (part of scikit-learn), or a fetched data set of the hub, 'hub:NAME' or 'hub:NAME:CONFIGURATION', for
    example 'hub:ylecun/cifar10'."""
    alpha: float | None = Field(default=None, gt=0)
    """Parameter of the Dirichlet distribution from which the class mixes of workers are drawn (`workloads.shards`): a
    smaller alpha gives each worker fewer classes; None: all workers have the same mix."""


def _kind_of_workload(workload: object) -> str | None:
    """Return the name of the record type of a table or record; None if it is ambiguous."""
    stated = workload.keys() if isinstance(workload, Mapping) else ()
    if "text" in stated and "images" in stated:
        return None
    return (ImagesSpec if "images" in stated or isinstance(workload, ImagesSpec) else TextSpec).__name__


Workload = Annotated[
    Annotated[TextSpec, Tag(TextSpec.__name__)] | Annotated[ImagesSpec, Tag(ImagesSpec.__name__)],
    Discriminator(
        _kind_of_workload,
        custom_error_type="two_workloads",
        custom_error_message="it has both text, for a language model, and images, for a small network; state only one "
        "of them",
    ),
]
"""Model and data; in a file, the stated keys select the type."""


class Parallelism(Frozen):
    """Interface of every kind of job: a pipeline, data parallel training, or the kind of a table `job`."""

    unit: ClassVar[str]
    """Name of one of its places: stage, worker or node."""
    counts: ClassVar[str]
    """What the numbers of its actions count: micro-batches or steps."""
    computes: ClassVar[Sequence[str]]
    """Activities of `metrics.spans` that count as compute, in addition to updates."""

    @property
    @abstractmethod
    def places(self) -> Sequence[str]:
        """Names of its places; each is a node of the lab and has records."""

    @property
    @abstractmethod
    def in_short(self) -> tuple[str, str]:
        """Workers and their order, for a table of cells."""

    @property
    def cycle(self) -> int:
        """Number of steps after which a run may repeat itself."""
        return 1

    @property
    def needs_star(self) -> bool:
        """Whether places send to others than their neighbours; where it is not known, the player refuses a line."""
        return False

    @property
    def batches_per_step(self) -> int:
        """Number of batches per step at the busiest place."""
        return 1

    @property
    def batch_parts(self) -> int:
        """Number of equal parts of a batch, one per place, before each cuts its part into micro-batches."""
        return 1


class PipelineSpec(Parallelism):
    """The cut of the model into stages, and the order of their work."""

    unit = "stage"
    counts = "micro-batch"
    computes = ("forward", "backward")

    stages: int = Field(ge=1, le=64)
    microbatches: int = Field(ge=1)
    schedule: ScheduleName
    in_flight: int = Field(ge=1)
    """Maximum number of micro-batches in flight at the first stage (1f1b; in gpipe, all of them)."""
    accumulation: int = Field(default=1, ge=1)
    """Number of passes through the schedule, each with all its micro-batches, per optimiser step."""
    layers: tuple[int, ...] | None = None
    """Number of layers of each stage; None: as even as possible (see `workloads.models.split_layers`)."""
    recompute: bool = False
    """Recompute activations in the backward pass instead of keeping them: less memory for more time."""

    @property
    def places(self) -> Sequence[str]:
        """The stages' names."""
        return tuple(f"stage {stage}" for stage in range(self.stages))

    @property
    def in_short(self) -> tuple[str, str]:
        """Workers and their order, for a table of cells."""
        return str(self.stages), f"{self.schedule}, {self.in_flight} in flight"


def _listed(value: object) -> object:
    """Convert a number to a tuple of one, and a JSON list to a tuple."""
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, int) else value


class OuterSpec(Frozen):
    """SGD on the weight changes of the workers' local steps (DiLoCo, arXiv 2311.08105)."""

    learning_rate: float = Field(gt=0)
    momentum: float = Field(ge=0, lt=1)
    nesterov: bool

    @model_validator(mode="after")
    def _has_a_momentum(self) -> OuterSpec:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov is true, but momentum is 0, so there is nothing to look ahead along; set either")
        return self


class StreamingSpec(Frozen):
    """Each exchange covers one fragment of the model, in turn (Streaming DiLoCo, arXiv 2501.18512)."""

    fragments: int = Field(ge=1)
    """Number of parts of the model, of whole tensors and as equal in size as possible. Each is exchanged once in this
    many steps, i.e. once in `fragments * local_steps` batches (the published H). Staleness is below it; the published
    overlap is `staleness * local_steps`."""
    mixing: float = Field(default=0.0, ge=0, lt=1)
    """Share of a worker's own weights that remains when it receives a shared fragment: the published alpha."""


class AlignedSpec(Frozen):
    """All workers send the same rows of their matrices, chosen by a sketch that is summed first (`nodes.aligned`)."""

    share: float = Field(gt=0, le=1)
    """Share of each matrix's rows that is sent, at least one; tensors with one axis are sent in full."""
    directions: int = Field(default=4, ge=1)
    """Random directions of the sketch: it has this many values per row."""


class LowRankSpec(Frozen):
    """Matrices are trained in small bases that all workers share, and only coordinates are sent (`nodes.low_rank`)."""

    rank: int = Field(ge=1)
    """Vectors per basis, of which a matrix has two. Vectors, and matrices for which it saves nothing, are sent in full.
    """
    refresh: int = Field(ge=1)
    """Steps between changes of the bases."""
    directions: int = Field(default=1, ge=1)
    """Columns that each message has for each new basis, as long as its vectors."""


class DecoSpec(Frozen):
    """DeCo-SGD: chooses ratio and staleness from its measurements of the links (`nodes.leader`)."""

    every: int = Field(ge=1)
    """Steps between choices."""
    noise: Literal["exp", "printed", "additive"]
    """Formula for the slowdown of convergence by a ratio and a staleness (`policies.deco`)."""
    noise_weight: float = Field(gt=0)
    """Weight of that slowdown if no communication is hidden by compute."""


class ArrivalsSpec(Frozen):
    """A server that applies the workers' updates as they arrive, without waiting for any worker (`nodes.arrivals`)."""

    period_s: float | None = Field(default=None, gt=0, exclude_if=is_none)
    """Seconds between two applications of the arrived updates (FedLuck, arXiv 2407.05125)."""
    buffer: int | None = Field(default=None, ge=1, exclude_if=is_none)
    """Number of arrived updates that triggers their application (FedBuff, arXiv 2106.06639). 1: each by itself; the
    number of workers: synchronous. With `grace_s`: the quorum."""
    grace_s: float | None = Field(default=None, gt=0, exclude_if=is_none)
    """Seconds after the arrival that completes the buffer in which further updates are applied with it (Decoupled
    DiLoCo, arXiv 2604.21428); less if all workers' have arrived. Later ones count in the next step, or are rejected by
    `staleness`."""

    @model_validator(mode="after")
    def _has_one(self) -> ArrivalsSpec:
        if (self.period_s is None) == (self.buffer is None):
            raise ValueError("arrivals are applied by period_s or by buffer; state exactly one of them")
        if self.grace_s is not None and self.buffer is None:
            raise ValueError("grace_s is stated with period_s, but it begins when a buffer is full: state buffer")
        return self

    @property
    def period_ns(self) -> int | None:
        """The period in nanoseconds."""
        return None if self.period_s is None else round(self.period_s * 1e9)

    @property
    def grace_ns(self) -> int:
        """The grace window in nanoseconds."""
        return round((self.grace_s or 0) * 1e9)


class DataParallelSpec(Parallelism):
    """Data parallel training: each worker trains the whole model, and they exchange updates. A step is one exchange."""

    unit = "worker"
    counts = "step"
    computes = ("local",)

    workers: int = Field(ge=2, le=64)
    exchange: Exchange
    """all-to-all: every worker sends its message to every other one. star: to a server, the last node, which returns
    the aggregate. all-reduce: a ring sums parts of dense messages and forwards the sums. all-gather: a ring forwards
    every message. pairs: in each step workers average their weights in random pairs, with `outer`, and all keep weights
    of their own (NoLoCo, arXiv 2506.10911). An evaluation uses the last worker's."""
    staleness: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_listed)] = Field(min_length=1)
    """Maximum number of steps between a worker and its last aggregate; 0 is synchronous. With `arrivals`: maximum
    number of server steps since the weights that an update is based on; older updates are rejected. One number for all
    workers, or one per worker."""
    look_ahead: bool = Field(default=False, exclude_if=operator.not_)
    """Whether a stale worker takes gradients at the weights to which momentum alone (`beta1`) would lead by the step
    that applies them (`nodes.worker`). That this takes time is not counted."""
    local_steps: Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_listed)] = Field(min_length=1)
    """Number of batches per worker between two exchanges. One number for all workers, or one per worker."""
    outer: OuterSpec | None = Field(default=None, exclude_if=is_none)
    """None: workers send gradients, and the optimiser is applied to their aggregate. Otherwise the optimiser makes the
    local steps, workers send the weight changes, and this outer optimiser is applied to their aggregate."""
    streaming: StreamingSpec | None = Field(default=None, exclude_if=is_none)
    """None: each exchange covers the whole model, and workers continue from the shared weights. Otherwise it covers a
    fragment, and workers keep their own weights in the others; requires `outer`."""
    aligned: AlignedSpec | None = Field(default=None, exclude_if=is_none)
    """None: messages are whole. Otherwise an all-reduce sums only the rows that all workers have agreed on."""
    low_rank: LowRankSpec | None = Field(default=None, exclude_if=is_none)
    """None: optimiser and messages are of whole tensors. Otherwise of matrices' cores (TSR-Adam, arXiv 2602.08007);
    with `outer`, of local steps."""
    answer: str | None = None
    """Codec of the aggregate sent by the server of a star."""
    deco: DecoSpec | None = Field(default=None, exclude_if=is_none)
    """None: ratio and staleness are constant. Otherwise the stated ones are only initial; live cells only."""
    arrivals: ArrivalsSpec | None = Field(default=None, exclude_if=is_none)
    """None: a step uses a message of every worker. Otherwise it uses those that have arrived; live cells only."""
    shares: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """Relative share of each worker in a batch and in the aggregate; None: equal shares."""

    @model_validator(mode="after")
    def _is_possible(self) -> DataParallelSpec:
        for name in ("staleness", "local_steps", "shares"):
            count = len(getattr(self, name) or (0,))
            if count not in (1, self.workers) or (name == "shares" and self.shares and count == 1):
                raise ValueError(f"{name} has {count} numbers for {self.workers} workers; state one per worker")
        if (self.exchange == "star") != (self.answer is not None):
            raise ValueError(
                f"exchange is {self.exchange!r}; `answer`, the codec of the server, for example 'fp32', is required "
                "for a star and allowed only there"
            )
        if self.arrivals is not None and (self.exchange != "star" or self.outer is None or self.deco is not None):
            raise ValueError(
                "arrivals needs a star whose server applies weight changes, with constant ratios: state exchange = "
                "'star' and outer = { learning_rate = 1.0, momentum = 0.0, nesterov = false }, and remove deco"
            )
        if self.arrivals is not None and (self.arrivals.buffer or 0) > self.workers:
            raise ValueError(f"arrivals.buffer is {self.arrivals.buffer}, but there are only {self.workers} workers")
        if self.outer is None and max(self.local_steps) > 1:
            raise ValueError(
                "local_steps is more than 1, so workers send weight changes; state the optimiser applied to them, for "
                "example outer = { learning_rate = 0.7, momentum = 0.9, nesterov = true }"
            )
        if self.look_ahead and (self.outer is not None or not (max(self.staleness) or self.deco)):
            raise ValueError(
                "look_ahead is for gradients of stale weights; state a staleness and remove outer, or remove look_ahead"
            )
        if self.aligned is not None and self.exchange != "all-reduce":
            raise ValueError(f"aligned is for sums, but exchange is {self.exchange!r}; set exchange = 'all-reduce'")
        apart = self.exchange == "pairs" or self.aligned or self.streaming or self.deco or self.arrivals
        if self.low_rank is not None and (apart or max(self.staleness)):
            raise ValueError(
                "low_rank needs bases that all workers share and change at once: set staleness = 0 and an exchange "
                "other than 'pairs', and remove aligned, streaming, deco and arrivals"
            )
        refused = max(self.staleness) or self.workers % 2 or self.shares or self.streaming or self.deco
        if self.exchange == "pairs" and (self.outer is None or refused):
            raise ValueError(
                "exchange is 'pairs', in which an even number of workers keep weights of their own: set outer = "
                "{ learning_rate = 0.7, momentum = 0.5, nesterov = false } and staleness = 0, and remove shares, "
                "streaming and deco"
            )
        if self.streaming is not None:
            if self.outer is None or self.arrivals is not None or self.deco is not None:
                raise ValueError(
                    "streaming exchanges fragments of the weight changes: state outer = "
                    "{ learning_rate = 0.4, momentum = 0.9, nesterov = true }, and neither arrivals nor deco"
                )
            if max(self.staleness) >= self.streaming.fragments:
                raise ValueError(
                    f"staleness is {max(self.staleness)}, but must be less than streaming.fragments "
                    f"{self.streaming.fragments}: a fragment's aggregate is applied before its next exchange"
                )
        return self

    @property
    def places(self) -> Sequence[str]:
        """Names of the workers, and of the server of a star."""
        workers = tuple(f"worker {worker}" for worker in range(self.workers))
        return (*workers, "server") if self.exchange == "star" else workers

    @property
    def cycle(self) -> int:
        """Number of steps after which a run may repeat itself: workers that run ahead wait once per cycle, fragments
        differ in size, and a server that waits for no worker has no cycle.
        """
        return 1 if self.arrivals is not None else math.lcm(max(self.staleness) + 1, self.fragments)

    @property
    def needs_star(self) -> bool:
        return len(self.places) > 2

    @property
    def in_short(self) -> tuple[str, str]:
        """Workers and their order, for a table of cells."""
        return f"{self.workers} workers", f"{self.exchange}, {max(self.staleness)} ahead"

    @property
    def batches_per_step(self) -> int:
        """Largest number of local steps of any worker."""
        return max(self.local_steps)

    @property
    def batch_parts(self) -> int:
        """Number of equal parts of a batch, which the workers share."""
        return sum(self.parts)

    @property
    def fragments(self) -> int:
        """Number of parts of the model that are exchanged in turn."""
        return 1 if self.streaming is None else self.streaming.fragments

    def staleness_of(self, worker: int) -> int:
        """Return the staleness of one worker."""
        return (self.staleness * self.workers)[worker]

    def local_steps_of(self, worker: int) -> int:
        """Return the local steps of one worker."""
        return (self.local_steps * self.workers)[worker]

    @property
    def parts(self) -> tuple[int, ...]:
        """By worker: number of equal parts of a batch that it reads."""
        return self.shares or (1,) * self.workers

    @property
    def weights(self) -> tuple[float, ...]:
        """By worker: its share of the data and of the aggregate."""
        return tuple(part / sum(self.parts) for part in self.parts)


def _known_job(table: object) -> object:
    """Build the record of a table `job`, whose kind names a class (`jobs.kind.KINDS`, or package.module:Class).

    Imported by name, because kinds depend on this module.
    """
    return importlib.import_module("testbed.jobs.kind").job_of_table(table) if isinstance(table, Mapping) else table


JobTable = Annotated[SerializeAsAny[Parallelism] | None, BeforeValidator(_known_job)]


class OptimiserSpec(Frozen):
    """AdamW, SGD, or Muon."""

    algorithm: Literal["adamw", "sgd", "muon"] = Field(default="adamw", exclude_if=lambda value: value == "adamw")
    """sgd: `beta1` is its momentum, and `beta2` is 0. muon: `beta1` is also the momentum of matrices
    (`nodes.optimise.Muon`); embeddings, the output layer and all other tensors have AdamW. On an emulated device an
    update takes AdamW's time with each of them."""
    learning_rate: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    beta1: float = Field(ge=0, lt=1)
    beta2: float = Field(ge=0, lt=1)
    clip_norm: float = Field(gt=0)
    """Maximum of the gradient norm over all stages; larger gradients are clipped."""
    frozen_after: int | None = Field(default=None, ge=1, exclude_if=is_none)
    """Number of steps after which AdamW's second moment is frozen, and data parallel workers send first moments instead
    of gradients (1-bit Adam, arXiv 2102.02888); None: never."""
    learning_rate_warmup: int = Field(default=0, ge=0)
    """Number of first steps, over which the learning rate rises linearly from 0."""
    learning_rate_decay: Literal["none", "cosine"] = "none"
    """Decay of the learning rate from the end of the warm-up to the last step."""
    learning_rate_floor: float = Field(default=0.0, ge=0, le=1)
    """Share of the learning rate that remains at the last step."""

    @model_validator(mode="after")
    def _has_its_momenta(self) -> OptimiserSpec:
        if self.algorithm == "sgd" and self.beta2:
            raise ValueError(f"beta2 is {self.beta2}; sgd has no second moment: state beta2 = 0")
        if self.algorithm != "adamw" and self.frozen_after is not None:
            raise ValueError(
                f"frozen_after is {self.frozen_after}; only adamw has a second moment to freeze: remove it"
            )
        return self


class TrainingSpec(Frozen):
    """Length of the training, its evaluations and its seed."""

    steps: int = Field(ge=1)
    warmup_steps: int = Field(ge=0)
    """Number of first steps that are recorded, marked, and excluded from timing statistics."""
    seed: int = Field(ge=0)
    evaluate_every: int = Field(ge=0)
    """Steps between evaluations; 0 means only at the end."""
    evaluate_uncompressed: bool = False
    """Repeat each evaluation with fp32 at the boundaries, to separate the codec's error in the forward pass from its
    effect on the weights."""
    target_loss: float | None = Field(default=None, gt=0)
    """Training ends with the first evaluation whose loss, with the codec in place, is at most this."""
    budget_s: float | None = Field(default=None, gt=0)
    """Training ends with the step that reaches this wall-clock time, in the emulated device's seconds, excluding
    evaluations."""
    checkpoint_every: int | None = Field(default=None, ge=1, exclude=True)
    """Steps between checkpoints, from which a killed training is resumed; None: none. In no record and no id, because
    it changes no result."""
    device: TrainingDevice = Field(default="cpu", exclude_if=lambda value: value == "cpu")
    """Where nodes are trained: on one core, or on a GPU, whose sums are rounded otherwise. All nodes of a played cell
    are in one process; stages of a live one take turns on this machine's GPUs. Whose durations count is `compute`."""

    @model_validator(mode="after")
    def _something_is_measured(self) -> TrainingSpec:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps is {self.warmup_steps}, which leaves no step of {self.steps} to measure")
        return self


class Spread(Frozen):
    """Durations drawn for each action; the stated one is their mean."""

    kind: Literal["lognormal", "exponential", "measured"] = "lognormal"
    """exponential: a least duration with an exponential tail. measured: as the calibration's samples of this kind of
    work are spread, over all nodes; calibrated cells only."""
    cv: float | None = Field(default=None, gt=0, le=10, exclude_if=is_none)
    """Coefficient of variation: standard deviation / mean. None if measured."""

    @model_validator(mode="after")
    def _has_a_width(self) -> Spread:
        if (self.cv is None) != (self.kind == "measured"):
            raise ValueError(f"kind is {self.kind!r}; cv is required, except with 'measured', which has its own")
        if self.kind == "exponential" and self.cv is not None and self.cv > 1:
            raise ValueError(f"cv is {self.cv}; an exponential tail alone has 1, and a least duration makes it smaller")
        return self


class Stragglers(Frozen):
    """Actions that take several times as long, by chance."""

    share: float = Field(gt=0, le=1)
    """Probability that an action is one of them."""
    factor: float = Field(gt=1, le=1000)
    """Multiple of its duration."""


class Slowdown(Frozen):
    """Nodes that are slower than stated, or become so: another device, a hot one, a shared one.

    By the step and not by the clock: heat follows work, of which each step has the same amount in every cell, and not
    the time that a node waits for its links.
    """

    factor: float = Field(gt=0, le=1000)
    """Multiple of all durations."""
    node: int | None = Field(default=None, ge=0)
    """None: all nodes."""
    after: int = Field(default=0, ge=0)
    """Number of steps before it begins."""
    over: int = Field(default=0, ge=0)
    """Number of steps from then on in which the factor rises, linearly."""

    def at(self, node: int, step: int) -> float:
        """Return the multiple of a node's durations in a step."""
        if step < self.after or self.node not in (None, node):
            return 1.0
        return 1 + (self.factor - 1) * min(1.0, (step - self.after + 1) / (self.over + 1))


class Varied(Frozen):
    """Durations that vary from action to action (`jobs.draws`)."""

    spread: Spread | None = Field(default=None, exclude_if=is_none)
    stragglers: Stragglers | None = Field(default=None, exclude_if=is_none)
    slow: Slowdown | None = Field(default=None, exclude_if=is_none)
    seed: int = Field(default=0, ge=0, exclude_if=operator.not_)
    """Seed of the draws, to which a run's link seed is added."""

    @property
    def drawn(self) -> bool:
        """Whether durations are random."""
        return self.spread is not None or self.stragglers is not None

    @property
    def varied(self) -> bool:
        """Whether durations differ from the stated ones."""
        return self.drawn or self.slow is not None

    @property
    def longest(self) -> float:
        """Multiple of the stated duration of a straggler at a slow node; a spread is not counted."""
        return max(1.0, self.slow.factor if self.slow else 1.0) * (self.stragglers.factor if self.stragglers else 1.0)

    @property
    def varies_by(self) -> str:
        """How durations vary, in words; empty if they do not."""
        words = []
        if (spread := self.spread) is not None:
            words += [f"drawn for each action ({spread.kind}" + (f", cv {spread.cv:g})" if spread.cv else ")")]
        if (late := self.stragglers) is not None:
            words += [f"{100 * late.share:g} % of actions take {late.factor:g} times as long"]
        if (slow := self.slow) is not None:
            who = "all nodes take" if slow.node is None else f"node {slow.node} takes"
            since = f" from step {slow.after} on" if slow.after else ""
            rises = f", reached over {slow.over} steps" if slow.over else ""
            words += [f"{who} {slow.factor:g} times as long{since}{rises}"]
        return "; ".join(words + [f"seed {self.seed}"] * bool(self.seed))


class Calibrated(Varied):
    """Every action takes as long as on this machine, timed alone; played cells only."""

    mode: Literal["calibrated"] = "calibrated"
    dilation: ClassVar[int] = 1


class Measured(Frozen):
    """Every stage computes at this machine's speed during the run; live cells only."""

    mode: Literal["measured"] = "measured"
    dilation: ClassVar[int] = 1
    drawn: ClassVar[bool] = False
    varied: ClassVar[bool] = False
    varies_by: ClassVar[str] = ""


class Paced(Varied):
    """Each action takes as long as on the emulated device; a live run delays the real maths to that.

    Durations and link profiles are those of the emulated world. In the lab everything takes `dilation` times as long.
    """

    mode: Literal["paced"] = "paced"
    forward_ns: tuple[DurationNs, ...] = Field(min_length=1)
    """Duration for one micro-batch: one for all stages, or one per stage."""
    backward_ns: tuple[DurationNs, ...] = Field(min_length=1)
    """The same for the backward pass, including recomputation."""
    update_ns: int = Field(ge=0, le=10**15)
    """Duration from the last gradient to the end of the step, the same at all stages."""
    source: str = Field(min_length=1)
    """Source of the durations: 'stated', or the device and the source of its numbers."""
    dilation: int = Field(default=1, ge=1, le=1000)
    """For a fast device on a slow host: durations and delays in the lab are multiplied by it, rates and reported times
    divided. It does not stretch TCP's constants (the 200 ms minimum of its retransmission timer, 40 ms of delayed
    acknowledgements) or the kernel's clock tick."""

    def takes_ns(self, place: int) -> dict[str, int]:
        """Return the durations of a stage or worker in the lab, by kind of work of its program."""
        forward_ns, backward_ns = (ns[min(place, len(ns) - 1)] for ns in (self.forward_ns, self.backward_ns))
        durations = {"forward": forward_ns, "backward": backward_ns, "update": self.update_ns}
        return {what: ns * self.dilation for what, ns in durations.items()}


class Stated(Varied):
    """Each kind of work has a stated duration, the same at every node; for jobs of a table `job`."""

    mode: Literal["stated"] = "stated"
    work_ns: dict[str, Annotated[int, Field(ge=0)]]
    """By kind of work, as named by the job's program."""
    source: str = Field(min_length=1)
    """Source of the durations."""
    dilation: int = Field(default=1, ge=1, le=1000)
    """As of `Paced`."""

    def takes_ns(self, what: str, who: str) -> int:
        """Return the duration of a kind of work in the lab. SpecError, naming `who` does it, if it is not stated."""
        if what not in self.work_ns:
            raise SpecError(
                f"compute.work has no duration for {what!r}, which {who} does; it has {', '.join(self.work_ns)}"
            )
        return self.work_ns[what] * self.dilation


CodecCost = Literal["host", "device", "zero"]
Compute = Annotated[Measured | Calibrated | Paced | Stated, Field(discriminator="mode")]


class CodecRates(Frozen):
    """Speed of the emulated device for the work of codecs: see `devices.codec_cost`."""

    bandwidth_bytes_per_s: float = Field(gt=0)
    operations_per_s: float = Field(gt=0)
    source: str = Field(min_length=1)
    """The device."""


class Trained(Frozen):
    """Fields that determine the numbers that training computes; shared by cells and recipes."""

    codec: str
    """A name from `testbed codecs`, or 'pkg.mod:Class', optionally with arguments, or one per direction and boundary;
    in the canonical form of `codecs.selection`."""
    workload: Workload
    pipeline: PipelineSpec
    """In data parallel training: the work of one worker, as a pipeline of one stage."""
    data: DataParallelSpec | None = Field(default=None, exclude_if=is_none)
    """None: a single pipeline trains the model."""
    job: JobTable = Field(default=None, exclude_if=is_none)
    """A job of another kind, which replaces both."""
    optimiser: OptimiserSpec
    training: TrainingSpec
    outside: str | None = Field(default=None, exclude_if=is_none)
    """SHA-256 of files that also determine the numbers: modules of third-party codecs and jobs, and a local text.
    Filled in when a cell is resolved, so that no result of an earlier version of them is reused."""

    @property
    def parallelism(self) -> Parallelism:
        """The kind of its job."""
        return self.job or self.data or self.pipeline

    @property
    def nodes(self) -> int:
        """Number of nodes with records: stages, or workers and a server."""
        return len(self.parallelism.places)


class Cell(Trained):
    """One combination of a sweep: everything that determines a run."""

    schema_version: Literal[4] = 4
    """Increased when a field changes its meaning, so that old results are not mistaken for new ones."""
    profiles: tuple[LinkProfile, ...] = Field(min_length=1)
    """One profile for all links, or one per link: by stage in a star, by boundary in a line."""
    topology: Topology
    sites: Sites = Field(default=None, exclude_if=is_none)
    fault: tuple[Fault, ...] | None = Field(default=None, min_length=1, exclude_if=is_none)
    """Faults of links and nodes, by time; in a file in the form of `testbed.faults`."""
    tcp_rto_max_ms: RtoMaxMs = Field(default=None, exclude_if=is_none)
    engine: Engine
    compute: Compute
    timing: Timing = "live"
    """live: trained over the cell's links, torch and TCP together. played: the recipe is trained once, without a
    network, and a player sends frames of the recorded sizes over the cell's links, between actions of the durations in
    `compute`; losses are those of the training, because the network cannot change the maths of synchronous training."""
    clock: Clock = "real"
    """virtual: inside a user-mode Linux with time travel, where compute takes no time. real: on this machine."""
    played_steps: int | None = Field(default=None, ge=1)
    """Number of steps to play; None: as many as were trained. Further steps repeat those of the training in turn, and
    have no loss."""
    codec_cost: CodecCost = "host"
    """Duration of encode and decode in a played cell. host: as on this machine, timed alone; device: as on the emulated
    device, from the codec's bytes and operations; zero: none. A live cell has `host` on the real clock, measured during
    the run, and `zero` on the virtual one; a live data parallel cell allows both on the real clock, and on the virtual
    one all three, as a played cell does (see `replay.workers`)."""
    codec_rates: CodecRates | None = None
    """Rates of the device, if codec_cost is `device`."""

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
                raise ValueError("there are both a table job and a table data; state only one of them")
            return self
        if isinstance(self.compute, Stated):
            raise ValueError("compute.mode 'stated' is for jobs of a table `job` only; use 'paced'")
        if self.data is None:
            if isinstance(self.workload, ImagesSpec):
                raise ValueError(
                    f"workload.images is {self.workload.images!r}, but images are learned in data parallel training "
                    "only: add a table data, with workers and their exchange, or train the pipeline on a text"
                )
            return self
        if self.pipeline.stages > 1 or self.pipeline.recompute:
            raise ValueError(
                "a data parallel worker holds the whole model and keeps its activations, so pipeline.stages must be 1 "
                "and pipeline.recompute false; remove the pipeline table"
            )
        if self.training.evaluate_uncompressed or self.training.budget_s is not None:
            raise ValueError(
                "in data parallel training, evaluations use no codec and steps do not end together: remove "
                "training.evaluate_uncompressed and training.budget_s"
            )
        return self

    @model_validator(mode="after")
    def _timing_fits(self) -> Cell:
        if self.timing == "live" and isinstance(self.compute, Calibrated):
            raise ValueError("compute is calibrated, which only played cells can be; a live cell is measured or paced")
        if self.timing == "played" and isinstance(self.compute, Measured):
            raise ValueError("compute is measured, which only live cells can be; a played cell is calibrated or paced")
        if self.timing == "live" and self.training.checkpoint_every is not None:
            self._check_live_checkpoints()
        if self.timing == "live" and self.played_steps is not None:
            raise ValueError("played_steps applies to played cells only; set training.steps for a live cell")
        if self.timing == "live" and self.clock == "virtual":
            self._check_live_virtual()
        elif self.timing == "live" and self.codec_cost != "host" and self.data is None:
            raise ValueError(
                f"codec_cost is {self.codec_cost!r}; in a live cell, codecs take their actual time on the real clock: "
                "'host', and no time on the virtual clock (--clock virtual): 'zero'"
            )
        if (self.codec_cost == "device") != (self.codec_rates is not None):
            raise ValueError(f"codec_cost is {self.codec_cost!r}; codec_rates must be set with 'device', and only then")
        if self.clock == "virtual" and self.engine != "netem":
            raise ValueError(f"engine is {self.engine!r}, but links on the virtual clock use netem")
        return self

    def _check_live_checkpoints(self) -> None:
        data = self.data
        if data is not None and (data.arrivals is not None or data.deco is not None):
            raise ValueError(
                "training.checkpoint_every is stated, but these workers act by when messages arrive, so there is no "
                "step that all end together; remove it, or the table data.arrivals or data.deco"
            )
        if self.training.budget_s is not None:
            raise ValueError(
                "training.checkpoint_every is stated with training.budget_s, which a resumed live run could not "
                "continue to count; remove one of them"
            )

    def _check_live_virtual(self) -> None:
        if not isinstance(self.compute, Paced | Stated):
            raise ValueError(
                "the cell is live on the virtual clock, where compute takes no time: state durations with compute.mode "
                "= 'paced' and a device or durations, or with 'stated' and work for a job of a table `job`"
            )
        if self.codec_cost != "zero" and self.data is None:
            raise ValueError(
                f"codec_cost is {self.codec_cost!r}, but the cell is live on the virtual clock, where encoding and "
                "decoding take no time: set 'zero'"
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
        if not isinstance(self.compute, Measured):
            spread, slow = self.compute.spread, self.compute.slow
            if spread is not None and spread.kind == "measured" and not isinstance(self.compute, Calibrated):
                raise ValueError(
                    f"compute.spread.kind is 'measured', but compute.mode is {self.compute.mode!r}, which has no "
                    "samples; use 'calibrated', or a kind with a cv"
                )
            if slow is not None and (slow.node or 0) >= self.nodes:
                raise ValueError(f"compute.slow.node is {slow.node}, but the last of {self.nodes} is {self.nodes - 1}")
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
        if self.topology == "line" and self.parallelism.needs_star:
            raise ValueError("topology is 'line', whose nodes have links to their neighbours only; set 'star'")
        if fault := sites_fault(self.topology, self.nodes, self.sites):
            raise ValueError(fault)
        check_faults(self.fault or (), self.links_by_name, self.nodes)
        if isinstance(self.compute, Measured) and any(fault.slow for fault in self.node_faults):
            raise ValueError("a fault makes a node slow, whose durations are not stated; set compute.mode = 'paced'")
        return self

    @property
    def node_names(self) -> tuple[str, ...]:
        """Readable names of the nodes: 'stage 0', or 'worker 0' and 'server'."""
        return tuple(self.parallelism.places)

    @property
    def cycle(self) -> int:
        """Number of steps after which a run may repeat itself."""
        return self.parallelism.cycle

    @property
    def boundaries(self) -> int:
        """Number of boundaries that a codec can be chosen for: between stages, or one per worker or node."""
        return self.pipeline.stages - 1 if self.parallelism is self.pipeline else len(self.parallelism.places)

    @property
    def all_profiles(self) -> tuple[LinkProfile, ...]:
        """`profiles`, then those of the sites."""
        return (*self.profiles, *(site.profile for site in self.sites or ()))

    @property
    def links(self) -> tuple[LinkProfile, ...]:
        """Profile of each link for the lab, including dilation: by stage in a star, by boundary in a line; then those
        of the sites. Pipes have their faults.
        """
        named = self.links_by_name.items()
        links = [with_faults(profile, name, self.link_faults) if self.fault else profile for name, profile in named]
        dilated = {profile: profile.dilated(self.compute.dilation) for profile in dict.fromkeys(links)}
        return tuple(dilated[profile] for profile in links)

    @property
    def fault_words(self) -> str | None:
        """Its faults, in words; None without any."""
        return "; ".join(fault.words for fault in self.fault) if self.fault else None

    @property
    def link_faults(self) -> tuple[LinkFault, ...]:
        """Faults of links."""
        return tuple(fault for fault in self.fault or () if isinstance(fault, LinkFault))

    @property
    def node_faults(self) -> tuple[NodeFault, ...]:
        """Faults of nodes, for the lab, including dilation."""
        faults = (fault for fault in self.fault or () if isinstance(fault, NodeFault))
        return tuple(fault.dilated(self.compute.dilation) for fault in faults)

    def faults_of(self, node: int) -> tuple[NodeFault, ...]:
        """Return those of one node."""
        return tuple(fault for fault in self.node_faults if fault.node == node)

    @property
    def links_by_name(self) -> dict[str, LinkProfile]:
        """Profile of each link by its name, without dilation and faults."""
        count = link_count(self.topology, self.nodes)
        access = self.profiles if len(self.profiles) == count else self.profiles * count
        profiles = (*access, *self.all_profiles[len(self.profiles) :])
        return dict(zip(self.link_names, profiles, strict=True))

    @property
    def link_names(self) -> tuple[str, ...]:
        """Name of each of `links` in the lab."""
        return link_names(self.topology, self.nodes, self.sites)

    @property
    def lab(self) -> dict[str, Any]:
        """Fields of the lab that its network is."""
        links, count = self.links, link_count(self.topology, self.nodes)
        sites = self.sites and tuple(
            site.model_copy(update={"profile": profile})
            for site, profile in zip(self.sites, links[count:], strict=True)
        )
        stated = {"topology": self.topology, "profiles": links[:count], "nodes": self.nodes, "sites": sites}
        return stated | ({"tcp_rto_max_ms": self.tcp_rto_max_ms} if self.tcp_rto_max_ms else {})

    @property
    def network(self) -> str:
        """Readable name of the links: `cable`, `cable+lte+cable`, or `31xcable+lte`; `lte@cable-0.1` where nodes 0 and
        1 share a cable.
        """
        groups = [
            (name, len(list(group))) for name, group in itertools.groupby(profile.name for profile in self.profiles)
        ]
        parts = [[name] * count if count < 4 else [f"{count}x{name}"] for name, count in groups]
        sites = (f"@{site.profile.name}-{'.'.join(map(str, site.nodes))}" for site in self.sites or ())
        return "+".join(itertools.chain.from_iterable(parts)) + "".join(sites)

    @property
    def shaped(self) -> bool:
        """Whether any link is shaped."""
        return any(profile.shaped for profile in self.all_profiles)

    @property
    def by_chance(self) -> bool:
        """Whether durations are drawn, or a link is random or varies with time, so that a single play is only one
        sample.
        """
        links = self.links if self.fault else self.all_profiles
        return self.compute.drawn or any(profile.by_chance for profile in links)

    def with_draws(self, link_seed: int) -> Cell:
        """Return the cell with the draws of a run with this link seed; they are part of its compute."""
        if isinstance(self.compute, Measured) or not self.compute.drawn:
            return self
        compute = self.compute.model_copy(update={"seed": self.compute.seed + link_seed})
        return self.model_copy(update={"compute": compute})

    @property
    def id(self) -> str:
        """Readable, and unique for the content of the cell: `int8-cable-1a2b3c4d5e`."""
        # The id names a folder, so the names of many links must be shortened.
        return f"{_codec_name(self.codec)}-{self.network[:80]}-{_digest(self)}"


class Recipe(Trained):
    """Fields that determine the numbers of synchronous training: a cell without its network and its durations.

    Cells of one recipe share one training (`training.alone`).
    """

    schema_version: Literal[1] = 1
    """A training has no time budget: the number of steps in a budget depends on the links."""

    @property
    def id(self) -> str:
        """Readable, and unique for the content of the recipe."""
        return f"{_codec_name(self.codec)}-{_digest(self)}"


def recipe_of(cell: Cell) -> Recipe:
    """Return the recipe that a cell is trained by."""
    learned = {name: getattr(cell, name) for name in Trained.model_fields}
    return Recipe(**learned | {"training": cell.training.model_copy(update={"budget_s": None})})


def text_of(of: Trained) -> TextSpec:
    """Return the text that a pipeline learns; `Cell` ensures that it is one."""
    assert isinstance(of.workload, TextSpec)
    return of.workload


def _digest(record: Frozen) -> str:
    return hashlib.blake2b(canonical_json(record).encode(), digest_size=5).hexdigest()


def _codec_name(codec: str) -> str:
    return "_".join(re.findall(r"[\w-]+", codec))[:80]


def link_count(topology: Topology, nodes: int) -> int:
    """Return how many links a lab of `nodes` nodes has, without those of its sites."""
    return nodes if topology == "star" else nodes - 1


def link_names(topology: Topology, nodes: int, sites: Sites = None) -> tuple[str, ...]:
    """Return the name of each link of a lab: `node-0` in a star, `boundary-0` in a line, then `site-0`."""
    word = "node" if topology == "star" else "boundary"
    count = link_count(topology, nodes)
    return (*(f"{word}-{i}" for i in range(count)), *(f"site-{i}" for i in range(len(sites or ()))))


def sites_fault(topology: Topology, nodes: int, sites: Sites) -> str | None:
    """Return what is wrong with the sites of a lab, and what to do; None if nothing is."""
    inside = [node for site in sites or () for node in site.nodes]
    if sites is not None and (topology != "star" or not sites):
        return "sites join nodes of a star; state at least one, and topology = 'star', or remove them"
    if outside := [node for node in inside if not 0 <= node < nodes]:
        return f"sites name node {outside[0]}, but the nodes are 0 to {nodes - 1}"
    if twice := [node for node in inside if inside.count(node) > 1]:
        return f"node {twice[0]} is named twice in sites; a node is in one site at most"
    return None


def link_path(
    topology: Topology, nodes: int, sites: Sites, source: int, target: int
) -> tuple[tuple[int, LinkDirection], ...]:
    """Return the links from one node to another, by number, and their directions: in a star the source's uplink, the
    uplink of its site, the downlink of the target's site, the target's downlink; in a line the link between them, whose
    `up` leads towards the last node.
    """
    if topology == "line":
        return ((min(source, target), "up" if target > source else "down"),)
    homes = {node: nodes + number for number, site in enumerate(sites or ()) for node in site.nodes}
    home, away = homes.get(source), homes.get(target)
    path: list[tuple[int | None, LinkDirection]] = [(source, "up"), (target, "down")]
    if home != away:
        path[1:1] = [(home, "up"), (away, "down")]
    return tuple((link, way) for link, way in path if link is not None)


class Hop(NamedTuple):
    """One direction of one link on the path from a stage to its neighbour."""

    link: int
    side: LinkDirection
    profile: LinkProfile

    @property
    def pipe(self) -> Pipe | None:
        """The pipe of this direction; None if it is not shaped."""
        return self.profile.pipe(self.side)


def route(cell: Cell, sender: int, receiver: int) -> tuple[Hop, ...]:
    """Return the path of a frame between nodes that exchange frames; see `link_path`."""
    links = cell.links
    path = link_path(cell.topology, cell.nodes, cell.sites, sender, receiver)
    return tuple(Hop(link, way, links[link]) for link, way in path)
