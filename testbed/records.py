"""The records that a run leaves behind. Units end a name; a missing number is None, never 0.

All times are nanoseconds of CLOCK_MONOTONIC, which every process on the host shares.
"""

from __future__ import annotations

import operator
from typing import Any, Literal, NamedTuple

from pydantic import Field

from testbed import units
from testbed.directions import EitherOrBoth, LinkDirection
from testbed.faults import LinkFault
from testbed.frozen import Frozen, is_none
from testbed.message_key import Direction, Phase, Side
from testbed.profiles import PipeFault
from testbed.spec import Engine, Recipe, Timing, Topology

Verdict = Literal["PASS", "FAIL"]
ActionKind = Literal["F", "B", "L", "A"]
"""F, B: forward or backward pass of one micro-batch. In data parallel training, L: all local steps of one step; A: the
handling of one step's messages or aggregate, i.e. wait, decode, and sum or update.
"""


# ------------------------------------------------------------------ steps-<stage>.jsonl
class ActionRecord(Frozen):
    """One action of the schedule at one stage, in the order: wait, decode, compute, encode."""

    kind: ActionKind
    microbatch: int
    """In data parallel training, the step."""
    asked_ns: int
    """When the stage began the action by requesting its input."""
    input_ns: int
    """When the input had arrived (equal to asked_ns if no input crosses a link)."""
    decoded_ns: int
    """When the input was decoded to a tensor."""
    computed_ns: int
    """When the maths was done; at a paced stage, when the emulated device would have finished."""
    began_ns: int | None = None
    """Paced: when the maths really began; the times above are then those of the emulated device, on the lab's clock."""
    maths_ns: int | None = None
    """Paced: when the maths really ended."""
    due_ns: int | None = None
    """Paced: when the action was due to end. An action whose maths ends later is an overrun."""
    encoded_ns: int
    """When the output was encoded and handed to the send thread (equal to computed_ns if there is no output)."""


FRAME_HEADER_BYTES = 56
"""Size of a frame without its payload and note; `runtime.frame` asserts it."""


class SentRecord(Frozen):
    """One frame sent."""

    direction: Direction
    microbatch: int
    """In data parallel training, the step of the message."""
    peer: int | None = Field(default=None, exclude_if=is_none)
    """The receiving node; None: the neighbour in that direction."""
    raw_bytes: int
    """Size of the tensor in fp32, the reference type of every ratio."""
    payload_bytes: int
    frame_bytes: int
    """Payload, the note of the sender's program, and testbed's header."""
    queued_ns: int
    """When the frame was handed to the send thread."""
    first_byte_ns: int
    """Just before the first byte was handed to the kernel."""
    last_byte_ns: int
    """When the kernel had accepted the last byte."""
    choice: str | None = None
    """The parameter chosen by a codec that adapts to its link; None for other codecs."""


class ReceivedRecord(Frozen):
    """One frame received."""

    direction: Direction
    microbatch: int
    """As in `SentRecord`."""
    peer: int | None = Field(default=None, exclude_if=is_none)
    """The sending node; None: the neighbour from that direction."""
    payload_bytes: int
    first_byte_ns: int
    """When the sender handed the first byte to the kernel (one host, one clock)."""
    last_byte_ns: int
    """When the receiver had read the last byte."""


class SocketRecord(Frozen):
    """TCP_INFO of one data-plane socket, counted from its start."""

    peer: Side | int
    """Side of the neighbour; in data parallel training, its node number."""
    congestion_control: str
    """Read back from the socket."""
    rtt_us: int
    min_rtt_us: int
    cwnd_packets: int
    bytes_sent: int
    """TCP payload, including retransmissions."""
    bytes_retransmitted: int
    segments_out: int
    segments_in: int
    retransmits: int


class CountersRecord(Frozen):
    """Interface counters of the stage's access link, counted from its start, in bytes of IP packets."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int


class DecidedRecord(Frozen):
    """A number computed by work that controls the job; a run without maths replays it."""

    what: str
    """The work that computed it, with its part and place."""
    part: int
    origin: int
    value: int


class StepRecord(Frozen):
    """One step, or one evaluation, at one stage."""

    step: int
    """Optimiser steps done before this one."""
    phase: Phase
    warmup: bool
    start_ns: int
    end_ns: int
    optimiser_start_ns: int | None
    """When the actions ended, and clipping and the update began; None in an evaluation."""
    synchronised_ns: int | None
    """When the gradient norm of all stages was known."""
    loss: float | None
    """Mean over the step's tokens or images; None except at the last stage, or at a data parallel node."""
    accuracy: float | None = Field(default=None, exclude_if=is_none)
    """Share of correctly classified images in an evaluation; set wherever `loss` is."""
    gradient_norm: float | None
    """In data parallel training, the norm of the worker's own message before encoding."""
    learning_rate: float | None = None
    """Learning rate of the step; None in an evaluation."""
    tokens: int
    """Or images."""
    actions: tuple[ActionRecord, ...]
    sent: tuple[SentRecord, ...]
    received: tuple[ReceivedRecord, ...]
    decided: tuple[DecidedRecord, ...] = Field(default=(), exclude_if=lambda value: value == ())
    counters: CountersRecord | None
    """Counters at the end of the step; None if there is no such device (a run without a lab)."""
    sockets: tuple[SocketRecord, ...]


# ------------------------------------------------------------------ training.json
class Floors(NamedTuple):
    """Losses on the validation batches of two tables of the training text (`workloads.floor`), in nats per token; None
    for images, or in old records.
    """

    unigram: float | None = None
    """Loss of a table of each token's frequency."""
    bigram: float | None = None
    """Loss of a table of the tokens that follow each token."""


class TrainedOn(Frozen):
    """The device of a training that did not run on the CPU."""

    device: str
    """Its name."""
    driver: str
    """Version of its driver; empty: unknown."""
    cuda: str
    """CUDA version that torch was built with."""
    copied: tuple[str, ...] = ()
    """Codecs that work only on the CPU: their messages were copied there and back."""
    peak_bytes: int | None = None
    """Peak of a GPU's memory that torch reserved for tensors."""


class TrainingRecord(Frozen):
    """A successful training in one process (`training.alone`)."""

    recipe: Recipe
    ended: Literal["steps", "target"]
    """Whether all steps were done or the target loss was reached."""
    seconds: float
    """Duration from the first step to the last record."""
    peak_memory_bytes: int
    """Peak memory of the process during training (getrusage)."""
    taken_at: str
    """UTC, ISO 8601, at its end."""
    unigram_floor: float | None = None
    """See `Floors`."""
    bigram_floor: float | None = None
    """See `Floors`."""
    finished_by: str | None = Field(default=None, exclude_if=is_none)
    """Name of the manifest of its folder, its last file; None in old records, whose folders have none."""
    weights: tuple[str | None, ...] = Field(default=(), exclude_if=operator.not_)
    """SHA-256 of each place's weights at the end; None for a place without any, empty in old records."""
    resumed: tuple[int, ...] = Field(default=(), exclude_if=operator.not_)
    """Steps at which it was resumed from a checkpoint. The peak memory is the last process's, and steps that
    were repeated count once in `seconds`."""
    trained_on: TrainedOn | None = Field(default=None, exclude_if=is_none)
    """None: the CPU."""


# ------------------------------------------------------------------ calibration.json
STEADY_SPREAD = 0.01
"""Largest spread of the fastest half of a duration's samples, relative to the fastest, that is not noisy."""
NEGLIGIBLE_SPREAD = 0.0005
"""Spread that is accepted for any duration, as a share of the step."""


class Duration(Frozen):
    """Duration of an action, timed alone on one core: the median of the fastest half of its samples."""

    ns: int = Field(ge=1, le=10**15)
    """At most eleven days."""
    spread: float = Field(ge=0)
    """(slowest - fastest) / fastest of the fastest half."""
    samples: int
    spread_of_step: float | None = None
    """(slowest - fastest) times the action's count per step, as a share of the step; None: unknown. The samples of a
    codec that takes 10 us never agree within 1 %, but that is negligible."""
    quantiles_ns: tuple[int, ...] = Field(default=(), exclude_if=operator.not_)
    """Samples at evenly spaced ranks, ascending, from which durations may be drawn (`spec.Spread`); (): not kept."""

    @property
    def noisy(self) -> bool:
        """Whether the spread exceeds both 1 % of the duration and 0.05 % of the step."""
        negligible = self.spread_of_step is not None and self.spread_of_step <= NEGLIGIBLE_SPREAD
        return self.spread > STEADY_SPREAD and not negligible


class StageMaths(Frozen):
    """Compute durations of one stage of a recipe, which do not depend on the codec unless it changes the model."""

    forward: Duration
    """The maths of one micro-batch."""
    backward: Duration
    """Including recomputation."""
    clip: Duration
    """From the last action until this stage's part of the gradient norm is known."""
    update: Duration
    """From the gradient norm of all stages to the end of the step."""


class CodecCosts(Frozen):
    """Codec durations of one stage."""

    encode: dict[Direction, Duration]
    """Time to encode one micro-batch's tensor, by the direction in which it is sent."""
    decode: dict[Direction, Duration]
    """Time to decode, by the direction of the message: forward ones come from the previous stage."""
    decode_woken: dict[Direction, Duration] = Field(default_factory=dict)
    """Time to decode after a sleep, as at a stage that waits for a link; {}: not timed."""


class StageCosts(CodecCosts, StageMaths):
    """Durations of one stage of a recipe, by action."""

    @property
    def durations(self) -> list[Duration]:
        """All durations, except those of decoding after a sleep."""
        maths = (self.forward, self.backward, self.clip, self.update)
        return [*maths, *self.encode.values(), *self.decode.values()]

    def waking_ns(self, direction: Direction) -> int:
        """Return the extra time to decode at a stage that has slept, compared with a busy one."""
        woken = self.decode_woken.get(direction)
        return 0 if woken is None else max(0, woken.ns - self.decode[direction].ns)


class WorkerMaths(Frozen):
    """Compute durations of one data parallel worker, which do not depend on the codec."""

    local_step: Duration
    """Time of a local step on the worker's part of a batch, including its update if workers send weight changes."""
    close: Duration
    """Time from the last local step until the message can be encoded: store weights, subtract, compute the norm."""
    update: Duration
    """Time to apply an aggregate."""


class MessageCosts(Frozen):
    """Codec durations for the messages of one sender, by fragment."""

    encode: tuple[Duration, ...]
    decode: tuple[Duration, ...]
    """Time to decode at one receiver."""


class ReplicaCosts(Frozen):
    """Durations of the nodes of a data parallel recipe."""

    workers: tuple[WorkerMaths, ...]
    messages: tuple[MessageCosts, ...]
    """By sender: the workers, and the server of a star. In a reducing ring, for each part of a message."""

    @property
    def durations(self) -> list[Duration]:
        """All of them."""
        maths = [one for worker in self.workers for one in (worker.local_step, worker.close, worker.update)]
        return maths + [one for sender in self.messages for one in (*sender.encode, *sender.decode)]


class PlaceCosts(Frozen):
    """Durations of one place of a job of a table `job`."""

    work: dict[str, Duration]
    """By the program's name of the work."""
    encode: dict[str, Duration]
    """By the name of the message."""
    decode: dict[str, Duration]
    """Time to decode the messages that its program decodes at once."""

    @property
    def durations(self) -> list[Duration]:
        """All of them."""
        return [*self.work.values(), *self.encode.values(), *self.decode.values()]


class Calibration(Frozen):
    """Every distinct duration of a sweep on this machine, measured once and shared by all its cells."""

    taken_at: str
    """UTC, ISO 8601."""
    machine: dict[str, Any]
    """See `sweep.environment`."""
    recipes: dict[str, tuple[StageCosts, ...]]
    """Durations of pipelines, by recipe id, then by stage."""
    replicas: dict[str, ReplicaCosts] = Field(default_factory=dict)
    """Durations of data parallel recipes, by recipe id."""
    jobs: dict[str, tuple[PlaceCosts, ...]] = Field(default_factory=dict)
    """Durations of jobs of a table `job`, by recipe id, then by place."""


# ------------------------------------------------------------------ certificate.json
BOUND = 0.02
"""Largest step-time error, as a share, that a run's link deviations may cause together."""


CONTENDED = 0.05
"""Largest deviation of a run's durations from the calibration; above it, the run did not have the machine to itself."""


Quantity = Literal[
    "rtt",
    "delay",
    "rate",
    "message",
    "goodput",
    "queue",
    "loss",
    "burst",
    "jitter",
    "reordered",
    "duplicated",
    "schedule",
    "lateness",
]
"""Quantities that are measured on a link."""


class Measurement(Frozen):
    """One quantity of one link: its requested and its measured value."""

    link: str
    """node-0 in a star, boundary-0 in a line."""
    direction: EitherOrBoth
    """up, down or both."""
    quantity: Quantity
    """What was measured."""
    detail: str
    """Further condition, for example the message size."""
    unit: str
    """Unit of the next four numbers."""
    expected: float | None
    """Requested value; None for an unshaped link, where the measured value is informative only."""
    measured: float | None
    """Measured value; None if the measurement was impossible."""
    tolerance: float | None
    """Largest |measured - expected| of a link that is exact to the probe's resolution; None if the value is informative
    only."""
    chance: float = 0.0
    """The part of the tolerance explained by chance and packet granularity; a deviation within it is meaningless."""
    samples: int
    """Number of observations."""
    fault: bool = False
    """Whether there is no value, or the link contradicts its profile (e.g. a full queue that drops nothing)."""
    bound: float | None = None
    """Largest relative change of the certificate's step time by this deviation alone. None if it cannot affect the
    step, or if there was no step."""
    verdict: Verdict
    """FAIL: at fault, or its bound exceeds `BOUND`; without a step, if the deviation exceeds the tolerance."""
    note: str
    """Why it failed, or a caveat; otherwise empty."""


class Certificate(Frozen):
    """Every link of a lab, measured at one moment."""

    form: Literal["quick", "full"]
    engine: Engine
    taken_at: str
    """UTC, ISO 8601."""
    seconds: float
    measurements: tuple[Measurement, ...]
    rejected: tuple[Measurement, ...]
    """Measurements that failed in the other attempt: a machine that stalls for 5 ms spoils a measurement. Empty if the
    first attempt passed. There are at most two attempts."""
    bound: float | None = None
    """Largest relative change of the step time by all deviations together. None if a link has no values, or if there
    was no step."""
    step: str = ""
    """The step that deviations are judged by, and its duration; empty without a step."""
    clock: Literal["real", "virtual"] = "real"
    by_construction: tuple[str, ...] = ()
    """Virtual clock: quantities that were not measured, but verified by reading the settings back from the kernel."""

    @property
    def verdict(self) -> Verdict:
        passed = self.measurements and all(m.verdict == "PASS" for m in self.measurements)
        return "PASS" if passed and (self.bound or 0.0) <= BOUND else "FAIL"


class DuringRecord(Frozen):
    """Influence of the machine on the links during a run."""

    source: Literal["relay", "sampler"]
    """Whose lateness was measured: packets leaving the relay, or sleeps of the sampler of counters. The kernel does not
    report netem's lateness; whatever delays a sleeping program delays the kernel's timers too, but less."""
    mean_ms: float
    """Mean lateness, rounded up by less than a factor of two."""
    p99_ms: float
    worst_ms: float
    samples: int
    real_time: bool
    """Whether the measured program had real-time priority; without it, a program is later than the kernel's timers."""
    stolen: float
    """Share of all processor time that the hypervisor took."""
    busy: float
    """Share of all processor time in use, by the run or by others."""
    bound: float | None = None
    """Relative increase of the step time if every message is late by the mean; None: no shaped link, or no counts."""


class RunCertificates(Frozen):
    """certificate.json: a run is certified if both certificates exist and pass, lateness during the run included.

    On the virtual clock links do not change between runs: `before` belongs to the network, and `after` is None.
    """

    before: Certificate | None
    after: Certificate | None
    during: DuringRecord | None = None

    @property
    def needed(self) -> tuple[Certificate | None, ...]:
        """The certificates that a run must have."""
        virtual = self.before is not None and self.before.clock == "virtual"
        return (self.before,) if virtual else (self.before, self.after)

    @property
    def bound(self) -> float | None:
        """The larger bound of before and after, plus that of lateness during the run; None if either is unknown."""
        ends = [certificate.bound if certificate else None for certificate in self.needed]
        known = [bound for bound in ends if bound is not None]
        return max(known) + ((self.during and self.during.bound) or 0.0) if len(known) == len(ends) else None

    @property
    def verdict(self) -> Verdict:
        passed = all(c is not None and c.verdict == "PASS" for c in self.needed)
        return "PASS" if passed and (self.bound or 0.0) <= BOUND else "FAIL"


# ------------------------------------------------------------------ lab.json
class LinkRecord(Frozen):
    """One shaped link, as read back from the kernel. `up` leads from the near end to the far end."""

    name: str
    """Name in certificates and counters: `node-0` in a star, `boundary-0` in a line."""
    profile: str
    near: str
    """The namespace at this end: a node."""
    far: str
    """The hub in a star, the next node in a line."""
    near_address: str
    far_address: str
    shaper: Literal["netem", "relay", "none"]
    settings: dict[str, Any]
    """Settings read back: qdisc attributes, offloads, sysctls, congestion control, scheduling class."""


class BackgroundRecord(Frozen):
    """One background flow of a link, from its start to the end of the play."""

    link: str
    flow: str
    """As in a profile: `1 cubic up`."""
    carried_bytes: int
    """Received, without headers."""
    lasted_ns: int

    @property
    def goodput_bps(self) -> float:
        return self.carried_bytes * 8e9 / max(1, self.lasted_ns)

    @property
    def words(self) -> str:
        """The flow and what it carried."""
        carried, rate = units.format_size(self.carried_bytes), units.format_rate(self.goodput_bps)
        return f"{self.link}, {self.flow}: carried {carried}, {rate}"


class FaultRecord(Frozen):
    """A fault of one direction of a link. Times are the lab's, from when the links were played."""

    link: str
    direction: LinkDirection
    fault: PipeFault
    """As stated, with dilation."""
    began_ns: int | None
    """When the kernel had confirmed its values; None: not before the end."""
    ended_ns: int | None
    """When the kernel had confirmed the values after it; None as above."""

    @property
    def words(self) -> str:
        """What happened, where and when."""
        return LinkFault(link=self.link, way=self.direction, **self.fault.model_dump()).words


class LabRecord(Frozen):
    """A lab as it was built."""

    topology: Topology
    engine: Engine
    engine_reason: str
    """Why `auto` chose the engine, or that the user did."""
    rootless: bool
    """Whether the lab is in a user namespace, and thus without real-time priorities."""
    build_seconds: float
    overhead_bytes: int
    """Bytes that the nodes' devices count in addition to each IP packet: 14 on veth, 0 on TUN."""
    links: tuple[LinkRecord, ...]
    played_at_ns: int | None
    """When the run began, and with it the links' schedules and traces; None if the lab was not played."""
    link_seed: int | None = None
    """Offset of the seeds of random links, and of drawn durations; None in old records."""
    durations: str | None = Field(default=None, exclude_if=is_none)
    """How durations vary, in words; None: they do not."""
    background: tuple[BackgroundRecord, ...] | None = Field(default=None, exclude_if=is_none)
    """What others sent over the links; None without background flows, and before the end."""
    faults: tuple[FaultRecord, ...] | None = Field(default=None, exclude_if=is_none)
    """Faults of the links, by link; None without any, before the end, and with engine relay, whose `settings` have
    them."""


# ------------------------------------------------------------------ counters.jsonl
class LinkCounters(Frozen):
    """One direction of a link, counted from the lab's start, in IP packets."""

    packets: int
    """Packets that have left the wire (with netem, the pipe, i.e. later by the delay), without dropped ones."""
    bytes: int
    dropped_buffer: int
    dropped_loss: int | None
    """None if the kernel does not distinguish the reasons; dropped_buffer then counts both."""
    backlog_bytes: int
    """Bytes waiting for the wire at this moment; with netem, also those in flight."""


class SocketSample(Frozen):
    """TCP_INFO of one data-plane socket at one moment."""

    node: str
    local: str
    """address:port"""
    remote: str
    congestion_control: str
    rtt_us: int
    cwnd_packets: int
    unacked_packets: int
    retransmits: int
    delivery_rate_bps: int
    bytes_acked: int
    bytes_received: int


class Sample(Frozen):
    """All counters of a lab's links, sampled ten times a second during a run."""

    at_ns: int
    links: dict[str, dict[LinkDirection, LinkCounters]]
    sockets: tuple[SocketSample, ...]


# ------------------------------------------------------------------ summary.json
class Split(Frozen):
    """Breakdown of the step time, averaged over stages; in seconds that add up to the step."""

    compute_s: float
    codec_s: float
    """Encode and decode."""
    wire_s: float
    """Waiting for input while it was on the wire."""
    wait_s: float
    """Waiting for input that was not sent yet, and for the other stages at the end of a step."""


class LinkTrouble(Frozen):
    """How one direction of a link was worse than its profile's constant values in the worst step; None: it was not."""

    link: str
    direction: LinkDirection
    rate_bps: int | None = None
    """Lowest rate of its schedule or trace."""
    delay_ns: int | None = None
    """Longest delay of its schedule."""
    loss: float | None = None
    """Largest share of lost packets of its schedule; 1: an outage."""
    dropped_packets: int | None = None
    """Packets that it dropped; None also in a played run, whose links are not sampled."""


class WorstStep(Frozen):
    """The worst step of a run, if it is much longer than the median; see `metrics.worst_step`."""

    step: int
    at_s: float
    """Start, from when the links were played, i.e. on the clock of their schedules."""
    seconds: float
    medians: float
    """Multiple of the median step."""
    retransmitted_bytes: int | None
    """Bytes of TCP payload sent again in it; None if they were not counted."""
    links: tuple[LinkTrouble, ...]
    """Only those that were worse than stated."""
    recovered_s: float | None
    """From its start to that of the first step of normal duration; None: the run ended first."""


FLOORS = {
    "unigram": "the frequency of each token in the training part",
    "bigram": "how often each token follows which other there",
}
"""What the model of each floor knows."""
NEAR_FLOOR = 0.1
"""Margin below the unigram floor, in nats, that shows that a model learned more than word frequencies."""


class Summary(Frozen):
    """One run in numbers; every one is computed from the run's other files by `metrics`.

    Times and rates are those of the emulated world: values from a dilated lab are divided by the dilation.
    """

    status: Literal["ok", "failed", "interrupted"]
    error: str | None
    cell_id: str
    engine: Engine
    timing: Timing = "live"
    dilation: int = 1
    ended: Literal["steps", "target", "budget"] | None = None
    """Why training ended: all steps done, target loss reached, budget spent. None if the run failed."""
    lost: dict[str, str] = Field(default={}, exclude_if=lambda lost: not lost)
    """Workers that failed while asynchronous training continued without them, by name, with reasons; excluded from all
    numbers here."""
    certificate: Verdict | None
    bound: float | None = None
    """Largest relative change of the run's step time by the deviations of its links (`metrics.bound`)."""
    contended: float | None = None
    """Relative deviation of the run's maths and codec durations from the calibration, at the worst stage; None without
    a calibration (`metrics.contention`)."""
    steps: int
    """Training steps done, including warm-up."""
    resumed_at: int | None = Field(default=None, exclude_if=is_none)
    """The first of them, in a live run that resumed a checkpoint; None: the training's first."""
    measured_steps: int
    step_s: float | None
    """Median over the measured steps."""
    step_quartiles_s: tuple[float, float] | None
    first_measured_step: int | None = None
    """First step after warm-up: after the cell's warm-up steps, and in the steady state (`metrics.steps`)."""
    steady_from: int | None = None
    """Played: first step from which all steps provably repeat to the nanosecond; None: not proved."""
    steady_period: int | None = None
    """Number of steps after which they repeat."""
    step_interval_s: tuple[float, float] | None = None
    """95 % interval of the median (`metrics.statistics`)."""
    ideal_step_s: float | None
    """Critical path of the schedule from measured compute and codecs, counted bytes and the link formula; median."""
    efficiency: float | None
    """ideal / measured, median of the steps' ratios."""
    tokens_per_s: float | None
    """Images per second, if images are learned."""
    raw_bytes_per_step: float | None
    """Bytes of tensors as fp32, all boundaries and both directions."""
    payload_bytes_per_step: float | None
    wire_bytes_per_step: float | None
    """IP packets sent by the stages, including headers, acknowledgements and retransmissions; mean."""
    header_bytes_per_step: float | None
    """TCP and IP headers in these, from the sockets' segment counts."""
    retransmitted_bytes_per_step: float | None
    compression_ratio: float | None
    """raw / payload; the raw type is fp32."""
    split: Split | None
    worst: WorstStep | None = Field(default=None, exclude_if=is_none)
    """The worst step after warm-up; None if it is at most twice the median."""
    train_loss: float | None
    """Loss of the last training step."""
    validation_loss: float | None
    """Loss of the last evaluation, with the boundaries' codec in place."""
    validation_accuracy: float | None = Field(default=None, exclude_if=is_none)
    """Share of test images classified correctly in the last evaluation; None if a text is learned."""
    uncompressed_loss: float | None = None
    """Loss of the last evaluation, repeated with fp32 at the boundaries; None if not requested."""
    unigram_floor: float | None = None
    """Loss, on the same validation batches, of a model that knows only the token frequencies of the training part; None
    for images, or in old records."""
    bigram_floor: float | None = None
    """The same of a table of the tokens that follow each token."""
    overrun_share: float | None = None
    """Share of the measured steps' actions whose maths took longer than the emulated device; None if nothing is
    paced."""
    duty: float | None = None
    """Mean number of cores kept busy by the maths of all stages in the measured steps; None if nothing is paced."""
    wall_s: float | None
    """From the start of the first step to the end of the last."""

    @property
    def floors(self) -> dict[str, float]:
        """The known floors, by name."""
        return {name: floor for name in FLOORS if (floor := getattr(self, f"{name}_floor")) is not None}

    @property
    def at_floor(self) -> bool:
        """Whether the validation loss is within NEAR_FLOOR of the unigram floor: little but frequencies was learned."""
        known = self.validation_loss is not None and self.unigram_floor is not None
        return known and (self.validation_loss or 0.0) > (self.unigram_floor or 0.0) - NEAR_FLOOR
