"""What was found: the records that a run leaves behind. Units end a name; a missing number is None, never 0.

All times are nanoseconds of CLOCK_MONOTONIC, which every process on the host shares.
"""

from __future__ import annotations

from typing import Any, Literal

from testbed.spec import Direction, Engine, Frozen

Phase = Literal["train", "evaluation"]
Verdict = Literal["PASS", "FAIL"]


# ------------------------------------------------------------------ steps-<stage>.jsonl
class ActionRecord(Frozen):
    """One action of the schedule at one stage, in the order: wait, decode, compute, encode."""

    kind: Literal["F", "B"]
    microbatch: int
    asked_ns: int
    """When the stage began the action, that is, asked for its input."""
    input_ns: int
    """When the input was at hand (equal to asked_ns where no input crosses a link)."""
    decoded_ns: int
    """When the input was a tensor again."""
    computed_ns: int
    """When the maths was done."""
    encoded_ns: int
    """When the output was a payload and handed to the send thread (equal to computed_ns where there is no output)."""


class SentRecord(Frozen):
    """One frame sent."""

    direction: Direction
    microbatch: int
    raw_bytes: int
    """The tensor as fp32, the reference type of every ratio."""
    payload_bytes: int
    frame_bytes: int
    """Payload and our header."""
    queued_ns: int
    """Handed to the send thread."""
    first_byte_ns: int
    """Just before the first byte was handed to the kernel."""
    last_byte_ns: int
    """When the kernel had taken the last byte."""


class ReceivedRecord(Frozen):
    """One frame received."""

    direction: Direction
    microbatch: int
    payload_bytes: int
    first_byte_ns: int
    """When the sender handed over the first byte (one host, one clock)."""
    last_byte_ns: int
    """When the receiver had the last byte."""


class SocketRecord(Frozen):
    """TCP_INFO of one data-plane socket, counted from its start."""

    peer: Literal["upstream", "downstream"]
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
    """Mean over the step's tokens; None except at the last stage."""
    gradient_norm: float | None
    tokens: int
    actions: tuple[ActionRecord, ...]
    sent: tuple[SentRecord, ...]
    received: tuple[ReceivedRecord, ...]
    counters: CountersRecord | None
    """At the end of the step; None where the machine has no such device (a run without a lab)."""
    sockets: tuple[SocketRecord, ...]


# ------------------------------------------------------------------ certificate.json
class Measurement(Frozen):
    """One quantity of one link, asked against found."""

    link: str
    direction: Literal["up", "down", "both"]
    quantity: Literal["rtt", "rate", "message", "goodput", "loss", "lateness"]
    detail: str
    """For example the message size."""
    unit: str
    expected: float | None
    """None where nothing was asked (an unshaped link): then the number found is information, not a verdict."""
    measured: float | None
    tolerance: float | None
    """Largest accepted |measured - expected|, in the unit."""
    samples: int
    verdict: Verdict
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
    """What failed in a first attempt that was then repeated, whole: a machine that looks elsewhere for 5 ms spoils a measurement.
    Empty where the first attempt passed. There are two attempts at most."""

    @property
    def verdict(self) -> Verdict:
        return "PASS" if self.measurements and all(m.verdict == "PASS" for m in self.measurements) else "FAIL"


class RunCertificates(Frozen):
    """certificate.json: a run stands when both are there and pass."""

    before: Certificate | None
    after: Certificate | None

    @property
    def verdict(self) -> Verdict:
        return "PASS" if all(c is not None and c.verdict == "PASS" for c in (self.before, self.after)) else "FAIL"


# ------------------------------------------------------------------ lab.json
class LinkRecord(Frozen):
    """One access link as the kernel says it is."""

    node: str
    address: str
    device: str
    shaper: Literal["netem", "relay", "none"]
    overhead_bytes: int
    """What the device counts on top of each IP packet: 14 on veth, 0 on TUN."""
    settings: dict[str, Any]
    """What was read back: qdisc attributes, offloads, sysctls, congestion control, scheduling class."""


class LabRecord(Frozen):
    """A lab as it was built."""

    topology: str
    engine: Engine
    engine_reason: str
    """Why `auto` chose it, or that it was asked for."""
    build_seconds: float
    links: tuple[LinkRecord, ...]


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


class Summary(Frozen):
    """One run in numbers; every one is computed from the run's other files by `metrics`."""

    status: Literal["ok", "failed", "interrupted"]
    error: str | None
    cell_id: str
    engine: Engine
    certificate: Verdict | None
    steps: int
    """Training steps done, warm-up included."""
    measured_steps: int
    step_s: float | None
    """Median over the measured steps."""
    step_quartiles_s: tuple[float, float] | None
    ideal_step_s: float | None
    """Critical path of the schedule from measured compute, counted bytes and the profile's pipe formula; median."""
    efficiency: float | None
    """ideal / measured, median of the steps' ratios."""
    tokens_per_s: float | None
    raw_bytes_per_step: float | None
    """Of tensors as fp32, all boundaries and both directions."""
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
    """Of the last training step."""
    validation_loss: float | None
    """Of the last evaluation; the boundaries' codec is in place."""
    wall_s: float | None
    """From the start of the first step to the end of the last."""
