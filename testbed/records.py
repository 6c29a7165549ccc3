"""The records that a run leaves behind. Units end a name; a missing number is None, never 0.

All times are nanoseconds of CLOCK_MONOTONIC, which every process on the host shares.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from testbed.directions import EitherOrBoth, LinkDirection
from testbed.frozen import Frozen, is_none
from testbed.message_key import Direction, Phase, Side
from testbed.spec import Engine, Recipe, Timing, Topology

Verdict = Literal["PASS", "FAIL"]
ActionKind = Literal["F", "B", "L", "A"]
"""A forward or a backward pass of one micro-batch. In data parallel training: local steps, all of one step; and what is
done with one step's messages or aggregate, that is wait, decode, and sum or update.
"""


# ------------------------------------------------------------------ steps-<stage>.jsonl
class ActionRecord(Frozen):
    """One action of the schedule at one stage, in the order: wait, decode, compute, encode."""

    kind: ActionKind
    microbatch: int
    """In data parallel training the step that it is about."""
    asked_ns: int
    """When the stage began the action, that is, asked for its input."""
    input_ns: int
    """When the input was at hand (equal to asked_ns where no input crosses a link)."""
    decoded_ns: int
    """When the input was a tensor again."""
    computed_ns: int
    """When the maths was done; where the stage is paced, when the emulated device would have been."""
    began_ns: int | None = None
    """Paced: when the maths really began; the times above are then those of the emulated device, on the lab's clock."""
    maths_ns: int | None = None
    """Paced: when the maths was really done."""
    due_ns: int | None = None
    """Paced: when the action was to end. One whose maths is done later is an overrun."""
    encoded_ns: int
    """When the output was a payload and handed to the send thread (equal to computed_ns where there is no output)."""


FRAME_HEADER_BYTES = 56
"""What a frame has beside its payload and note; `pipeline.frame` makes sure."""


class SentRecord(Frozen):
    """One frame sent."""

    direction: Direction
    microbatch: int
    """In data parallel training the step whose message it is."""
    peer: int | None = Field(default=None, exclude_if=is_none)
    """The receiving node; None: the neighbour in that direction."""
    raw_bytes: int
    """The tensor as fp32, the reference type of every ratio."""
    payload_bytes: int
    frame_bytes: int
    """Payload, what the sender's program noted beside it, and our header."""
    queued_ns: int
    """Handed to the send thread."""
    first_byte_ns: int
    """Just before the first byte was handed to the kernel."""
    last_byte_ns: int
    """When the kernel had taken the last byte."""
    choice: str | None = None
    """Where the codec takes one of several by what it measures of its link: the name of the parameter that it took."""


class ReceivedRecord(Frozen):
    """One frame received."""

    direction: Direction
    microbatch: int
    """As of what was sent."""
    peer: int | None = Field(default=None, exclude_if=is_none)
    """The sending node; None: the neighbour from that direction."""
    payload_bytes: int
    first_byte_ns: int
    """When the sender handed over the first byte (one host, one clock)."""
    last_byte_ns: int
    """When the receiver had the last byte."""


class SocketRecord(Frozen):
    """TCP_INFO of one data-plane socket, counted from its start."""

    peer: Side | int
    """Where the neighbour is; in data parallel training which node it is."""
    congestion_control: str
    """Read back from the socket."""
    rtt_us: int
    min_rtt_us: int
    cwnd_packets: int
    bytes_sent: int
    """Payload of TCP, retransmissions included."""
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
    """A number that work found and by which the job goes on: a run without maths is given it again."""

    what: str
    """Which work, of which part and place."""
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
    """Where the actions end and clipping and the update begin; None in an evaluation."""
    synchronised_ns: int | None
    """When the gradient norm of all stages was known."""
    loss: float | None
    """Mean over the step's tokens, or images; None except at the last stage, or node of data parallel training."""
    accuracy: float | None = Field(default=None, exclude_if=is_none)
    """Of an evaluation on images, where `loss` is: the share of them that is named right."""
    gradient_norm: float | None
    """In data parallel training of the worker's own message, before it is coded."""
    learning_rate: float | None = None
    """Rate that the step was made with; None in an evaluation."""
    tokens: int
    """Or images."""
    actions: tuple[ActionRecord, ...]
    sent: tuple[SentRecord, ...]
    received: tuple[ReceivedRecord, ...]
    decided: tuple[DecidedRecord, ...] = Field(default=(), exclude_if=lambda value: value == ())
    counters: CountersRecord | None
    """At the end of the step; None where the machine has no such device (a run without a lab)."""
    sockets: tuple[SocketRecord, ...]


# ------------------------------------------------------------------ training.json
class TrainingRecord(Frozen):
    """A training in one process (`pipeline.alone`) that ended well: the last file of its folder."""

    recipe: Recipe
    ended: Literal["steps", "target"]
    """All steps done, or the target loss reached."""
    seconds: float
    """From the first step to the last record."""
    peak_memory_bytes: int
    """Of the process, while it trained (getrusage)."""
    taken_at: str
    """UTC, ISO 8601, at its end."""
    unigram_floor: float | None = None
    """Of the text that it learned from (`workloads.floor`), nats per token; None: it learned images, or was made before
    this was kept."""


# ------------------------------------------------------------------ calibration.json
STEADY_SPREAD = 0.01
"""How far the fastest half of a duration's samples may lie apart, as a share of the fastest; else it is noisy."""
NEGLIGIBLE_SPREAD = 0.0005
"""How far they may lie apart however short they are, as a share of the step."""


class Duration(Frozen):
    """How long something takes, timed alone on one core: the median of the fastest half of its samples."""

    ns: int
    spread: float
    """(slowest - fastest) / fastest, of the fastest half."""
    samples: int
    spread_of_step: float | None = None
    """The same as a share of the step, times how often it happens in one; None: not known. A codec that takes 10 us
    never agrees within 1 %, and it does not matter."""

    @property
    def noisy(self) -> bool:
        """Whether it neither agrees within 1 %, nor is so short that its spread is below 0.05 % of the step."""
        negligible = self.spread_of_step is not None and self.spread_of_step <= NEGLIGIBLE_SPREAD
        return self.spread > STEADY_SPREAD and not negligible


class StageMaths(Frozen):
    """What one stage of a recipe computes, in which codecs have no share, unless they change the model."""

    forward: Duration
    """The maths of one micro-batch."""
    backward: Duration
    """Recomputation included."""
    clip: Duration
    """From the last action to where this stage's part of the gradient norm is known."""
    update: Duration
    """From where the norm of all stages is known to the end of the step."""


class CodecCosts(Frozen):
    """What the codecs of one stage do."""

    encode: dict[Direction, Duration]
    """Of one micro-batch's tensor, by the direction in which it is sent."""
    decode: dict[Direction, Duration]
    """By the direction from which it came: forward is what the stage before sent."""
    decode_woken: dict[Direction, Duration] = Field(default_factory=dict)
    """The same by a stage that has slept before, as one does that waits for a link; {}: was not timed."""


class StageCosts(CodecCosts, StageMaths):
    """What one stage of a recipe does, action by action."""

    @property
    def durations(self) -> list[Duration]:
        """All of them that an action always takes."""
        maths = (self.forward, self.backward, self.clip, self.update)
        return [*maths, *self.encode.values(), *self.decode.values()]

    def waking_ns(self, direction: Direction) -> int:
        """Return how much longer decoding takes by a stage that has slept than by one that was busy."""
        woken = self.decode_woken.get(direction)
        return 0 if woken is None else max(0, woken.ns - self.decode[direction].ns)


class WorkerMaths(Frozen):
    """What one worker of data parallel training computes, in which codecs have no share."""

    local_step: Duration
    """Of its part of a batch; with the update of its own where workers send what these changed."""
    close: Duration
    """What else it does until what it sends can be encoded: keeps weights, subtracts, takes the norm."""
    update: Duration
    """An aggregate is applied."""


class MessageCosts(Frozen):
    """What codecs do with the messages of one sender. By fragment that is exchanged in turn."""

    encode: tuple[Duration, ...]
    decode: tuple[Duration, ...]
    """By one receiver."""


class ReplicaCosts(Frozen):
    """What the nodes of a recipe of data parallel training do."""

    workers: tuple[WorkerMaths, ...]
    messages: tuple[MessageCosts, ...]
    """By sender: the workers, and a star's server. In a ring that reduces, of each part of a message."""

    @property
    def durations(self) -> list[Duration]:
        """All of them."""
        maths = [one for worker in self.workers for one in (worker.local_step, worker.close, worker.update)]
        return maths + [one for sender in self.messages for one in (*sender.encode, *sender.decode)]


class PlaceCosts(Frozen):
    """What one place of a job of a table `job` does."""

    work: dict[str, Duration]
    """By what its program calls it."""
    encode: dict[str, Duration]
    """By what the message is called."""
    decode: dict[str, Duration]
    """Of as many messages as its program decodes at once."""

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
    """By the id of the recipe, then by stage."""
    replicas: dict[str, ReplicaCosts] = Field(default_factory=dict)
    """Of data parallel training, by the id of the recipe."""
    jobs: dict[str, tuple[PlaceCosts, ...]] = Field(default_factory=dict)
    """Of jobs of a table `job`, by the id of the recipe, then by place."""


# ------------------------------------------------------------------ certificate.json
BOUND = 0.02
"""A run stands where all that was found wrong with its links changes its step by less, as a share."""


CONTENDED = 0.05
"""A run whose own durations lie further from the calibration than this did not have the machine to itself."""


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
"""What is measured of a link."""


class Measurement(Frozen):
    """One quantity of one link, asked against found."""

    link: str
    """node-0 in a star, boundary-0 in a line."""
    direction: EitherOrBoth
    """up, down or both."""
    quantity: Quantity
    """What was measured."""
    detail: str
    """For example the message size."""
    unit: str
    """Of the next four numbers."""
    expected: float | None
    """None where nothing was asked (an unshaped link): then the number found is information, not a verdict."""
    measured: float | None
    """None where that was impossible."""
    tolerance: float | None
    """Largest |measured - expected| of a link that is exact as far as the probe can tell, in the unit; None where the
    number is information."""
    chance: float = 0.0
    """The part of it that chance and whole packets explain: a deviation within it says nothing."""
    samples: int
    """Number of observations."""
    fault: bool = False
    """There is no number, or the link does what no link of that profile does (drops nothing when it is full)."""
    bound: float | None = None
    """How much longer or shorter this deviation alone makes the certificate's step, at most, as a share of it. None
    where it cannot touch the step, or where no step was at hand."""
    verdict: Verdict
    """FAIL: at fault, or its bound is above `BOUND`; where no step was at hand, beyond its tolerance."""
    note: str
    """Why it failed, or what the reader must know; empty otherwise."""


class Certificate(Frozen):
    """Every link of a lab, measured at one moment."""

    form: Literal["quick", "full"]
    engine: Engine
    taken_at: str
    """UTC, ISO 8601."""
    seconds: float
    measurements: tuple[Measurement, ...]
    rejected: tuple[Measurement, ...]
    """What failed in another attempt: a machine that looks elsewhere for 5 ms spoils a measurement. Empty where the
    first attempt passed. There are two attempts at most."""
    bound: float | None = None
    """How much all deviations together change the duration of the step, at most, as a share of it. None where a link
    has no numbers, or no step was at hand."""
    step: str = ""
    """Whose step it is, and how long; empty where none was at hand."""
    clock: Literal["real", "virtual"] = "real"
    by_construction: tuple[str, ...] = ()
    """Virtual clock: what was not measured, because the lab read it back from the kernel as it was asked."""

    @property
    def verdict(self) -> Verdict:
        passed = self.measurements and all(m.verdict == "PASS" for m in self.measurements)
        return "PASS" if passed and (self.bound or 0.0) <= BOUND else "FAIL"


class DuringRecord(Frozen):
    """What the machine did to the links while a run lasted."""

    source: Literal["relay", "sampler"]
    """What was late: packets that left the relay, or the sleeps of the program that samples the counters. The kernel
    does not say how late netem is; what makes a sleeping program late makes its timers late too, and more."""
    mean_ms: float
    """Of how late they were; rounded up, to less than twice as much."""
    p99_ms: float
    worst_ms: float
    samples: int
    real_time: bool
    """Whether what was late had a real-time priority; a program without one is later than the kernel's timers are."""
    stolen: float
    """Share of all processor time that the hypervisor took."""
    busy: float
    """Share of all processor time that something used, the run or others."""
    bound: float | None = None
    """How much longer the step is if every message is as late as the mean, as a share of it; None: nothing is shaped,
    or nothing was counted."""


class RunCertificates(Frozen):
    """certificate.json: a run stands when both are there and pass, and with what was late meanwhile too.

    On the virtual clock nothing changes from run to run: `before` is the network's, and there is no other.
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
        """The larger of before and after, and what was late during the run on top; None where either is not known."""
        ends = [certificate.bound if certificate else None for certificate in self.needed]
        known = [bound for bound in ends if bound is not None]
        return max(known) + ((self.during and self.during.bound) or 0.0) if len(known) == len(ends) else None

    @property
    def verdict(self) -> Verdict:
        passed = all(c is not None and c.verdict == "PASS" for c in self.needed)
        return "PASS" if passed and (self.bound or 0.0) <= BOUND else "FAIL"


# ------------------------------------------------------------------ lab.json
class LinkRecord(Frozen):
    """One shaped link as the kernel says it is. Its `up` leads from the near end to the far end."""

    name: str
    """`node-0` in a star, `boundary-0` in a line: what certificates and counters call it."""
    profile: str
    near: str
    """The namespace at this end: a node."""
    far: str
    """The hub in a star, the next node in a line."""
    near_address: str
    far_address: str
    shaper: Literal["netem", "relay", "none"]
    settings: dict[str, Any]
    """What was read back: qdisc attributes, offloads, sysctls, congestion control, scheduling class."""


class LabRecord(Frozen):
    """A lab as it was built."""

    topology: Topology
    engine: Engine
    engine_reason: str
    """Why `auto` chose it, or that it was asked for."""
    rootless: bool
    """Whether it stands in a user namespace: without real-time priorities."""
    build_seconds: float
    overhead_bytes: int
    """What the nodes' devices count on top of each IP packet: 14 on veth, 0 on TUN."""
    links: tuple[LinkRecord, ...]
    played_at_ns: int | None
    """When the run began and the links' schedules and traces with it; None where the lab was not played."""
    link_seed: int | None = None
    """What was added to the seeds of links that draw at random; None where that was not noted."""


# ------------------------------------------------------------------ counters.jsonl
class LinkCounters(Frozen):
    """One direction of a link, counted from the lab's start, in IP packets."""

    packets: int
    """Packets that have left the wire (or, with netem, the pipe, which is the delay later). What was dropped is not
    among them."""
    bytes: int
    dropped_buffer: int
    dropped_loss: int | None
    """None where the kernel does not tell the reasons apart; then dropped_buffer counts both."""
    backlog_bytes: int
    """Waiting for the wire at this moment and, with netem, also under way."""


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
    """Everything that can be counted on a lab's links, ten times a second while a run lasts."""

    at_ns: int
    links: dict[str, dict[LinkDirection, LinkCounters]]
    sockets: tuple[SocketSample, ...]


# ------------------------------------------------------------------ summary.json
class Split(Frozen):
    """Where the time of a step goes, averaged over stages; seconds, adding up to the step."""

    compute_s: float
    codec_s: float
    """Encode and decode."""
    wire_s: float
    """Waiting for input while it was on the wire."""
    wait_s: float
    """Waiting for input that its sender had not sent yet, and for the other stages at the end of a step."""


NEAR_FLOOR = 0.1
"""How far below the unigram floor a loss must be, in nats, to say more than that word frequencies were learned."""


class Summary(Frozen):
    """One run in numbers; every one is computed from the run's other files by `metrics`.

    Times and rates are those of the emulated world: where the lab was dilated, what was found there is divided by the
    dilation.
    """

    status: Literal["ok", "failed", "interrupted"]
    error: str | None
    cell_id: str
    engine: Engine
    timing: Timing = "live"
    dilation: int = 1
    ended: Literal["steps", "target", "budget"] | None = None
    """Why training ended: all steps done, target loss reached, budget spent. None where the run did not end well."""
    lost: dict[str, str] = Field(default={}, exclude_if=lambda lost: not lost)
    """Workers that failed while asynchronous training went on without them, by name, and why; no number here is of
    them."""
    certificate: Verdict | None
    bound: float | None = None
    """How much what was found wrong with the links changes the run's step, at most, as a share (`metrics.bound`)."""
    contended: float | None = None
    """How far the durations of the run's own maths and codecs lie from the calibration, as a share, at the stage where
    they are furthest; None where nothing says how long they should last (`metrics.contention`)."""
    steps: int
    """Training steps done, warm-up included."""
    measured_steps: int
    step_s: float | None
    """Median over the measured steps."""
    step_quartiles_s: tuple[float, float] | None
    first_measured_step: int | None = None
    """Steps before it are warm-up: those that the cell says, and those before the steady state (`metrics.steps`)."""
    steady_from: int | None = None
    """Played: the step from which all repeat to the nanosecond, as the player proved; None: no such proof."""
    steady_period: int | None = None
    """After how many steps they repeat."""
    step_interval_s: tuple[float, float] | None = None
    """95 % interval of the median (`metrics.statistics`)."""
    ideal_step_s: float | None
    """Critical path of the schedule from measured compute and coding, counted bytes and the pipe formula; median."""
    efficiency: float | None
    """ideal / measured, median of the steps' ratios."""
    tokens_per_s: float | None
    """Of images, images per second."""
    raw_bytes_per_step: float | None
    """Bytes of tensors as fp32, all boundaries and both directions."""
    payload_bytes_per_step: float | None
    wire_bytes_per_step: float | None
    """IP packets that the stages sent: headers, acknowledgements and retransmissions too; mean."""
    header_bytes_per_step: float | None
    """TCP and IP headers among them, from the segments that the sockets count."""
    retransmitted_bytes_per_step: float | None
    compression_ratio: float | None
    """raw / payload; the raw type is fp32."""
    split: Split | None
    train_loss: float | None
    """Loss of the last training step."""
    validation_loss: float | None
    """Loss of the last evaluation; the boundaries' codec is in place."""
    validation_accuracy: float | None = Field(default=None, exclude_if=is_none)
    """Share of the test images that were named right in it; None: a text was learned."""
    uncompressed_loss: float | None = None
    """Loss of the last evaluation, made once more with fp32 at the boundaries; None where that was not asked for."""
    unigram_floor: float | None = None
    """Loss of a model that knows the frequencies of the training part's tokens and nothing else, on the same validation
    batches; None where it was not kept, or images were learned."""
    overrun_share: float | None = None
    """Share of the measured steps' actions whose maths took longer than the emulated device's; None where nothing is
    paced."""
    duty: float | None = None
    """Cores that the maths of all stages kept busy, on average over the measured steps; None where nothing is paced."""
    wall_s: float | None
    """From the start of the first step to the end of the last."""

    @property
    def at_floor(self) -> bool:
        """Whether the validation loss is so near the unigram floor that the model has learned little else."""
        known = self.validation_loss is not None and self.unigram_floor is not None
        return known and (self.validation_loss or 0.0) > (self.unigram_floor or 0.0) - NEAR_FLOOR
