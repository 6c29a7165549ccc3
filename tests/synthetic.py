"""Runs that never happened: records made by a packet-by-packet simulation, for the tests of metrics and report.

The simulation obeys the pipe formula for every packet; `metrics.ideal` must agree with it although it knows no packets.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from testbed import results
from testbed.directions import LINK_DIRECTIONS
from testbed.jobs.pipeline import orders_of
from testbed.message_key import Direction
from testbed.metrics import summarise
from testbed.profiles import LinkProfile, Pipe, Schedule
from testbed.profiles.timeline import timeline
from testbed.records import (
    FRAME_HEADER_BYTES,
    ActionRecord,
    Certificate,
    CountersRecord,
    Duration,
    LabRecord,
    LinkCounters,
    LinkRecord,
    Measurement,
    ReceivedRecord,
    RunCertificates,
    Sample,
    SentRecord,
    SocketRecord,
    SocketSample,
    StageCosts,
    StepRecord,
    Summary,
)
from testbed.spec import (
    Cell,
    Hop,
    Measured,
    OptimiserSpec,
    Paced,
    PipelineSpec,
    TextSpec,
    Topology,
    TrainingSpec,
    route,
)

MEASURED = Measured()


def pipe(rate_bps: int, delay_ns: int, schedule: Schedule | None = None, **changes: Any) -> Pipe:
    stated: dict[str, Any] = {"buffer_bytes": 10_000_000, "schedule": schedule, **changes}
    return Pipe.plain(rate_bps=rate_bps, delay_ns=delay_ns, **stated)


def profile(name: str = "test", up: Pipe | None = None, down: Pipe | None = None, **changes: Any) -> LinkProfile:
    fields = {"summary": "s", "source": "s", "layer": "ip", "mtu": 1500, "congestion_control": "cubic"}
    stated = {**fields, "slow_start_after_idle": False, "name": name, "up": up, "down": down}
    return LinkProfile.model_validate(stated | changes)


def cell(
    codec: str = "fp32",
    links: LinkProfile | tuple[LinkProfile, ...] | None = None,
    *,
    stages: int = 3,
    microbatches: int = 4,
    steps: int = 8,
    topology: Topology = "star",
    compute: Measured | Paced = MEASURED,
    training: Mapping[str, Any] = MappingProxyType({}),
    **pipeline: Any,
) -> Cell:
    """`links`: one that all have, or one a link. `training` changes what is stated here, `pipeline` too."""
    shape = {"stages": stages, "microbatches": microbatches, "schedule": "gpipe", "in_flight": microbatches, **pipeline}
    learned: dict[str, Any] = {"family": "gpt2", "model": "mini", "text": "bundled", "sequence_length": 64}
    stated = {"steps": steps, "warmup_steps": 2, "seed": 1, "evaluate_every": 4, **training}
    return Cell(
        codec=codec,
        profiles=links if isinstance(links, tuple) else (links or profile(),),
        topology=topology,
        engine="relay",
        compute=compute,
        workload=TextSpec(**learned, batch_size=4 * microbatches, validation_batches=1),
        pipeline=PipelineSpec(**shape),
        optimiser=OptimiserSpec(learning_rate=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, clip_norm=1.0),
        training=TrainingSpec(**stated),
    )


def ended(of: Cell, status: str, **known: Any) -> Summary:
    """The summary of a run of which little more is known than how it ended."""
    empty = {name: None for name, field in Summary.model_fields.items() if field.is_required()}
    stated = {"status": status, "cell_id": of.id, "engine": "relay", "steps": 0, "measured_steps": 0, **known}
    return Summary.model_validate(empty | stated)


@dataclass
class Pipeline:
    """The pipeline that is pretended; durations in nanoseconds, of the emulated world where it is dilated."""

    links: LinkProfile | tuple[LinkProfile, ...]
    stages: int = 3
    microbatches: int = 4
    forward_ns: int = 2_000_000
    backward_ns: int = 4_000_000
    codec_ns: int = 300_000
    update_ns: int = 5_000_000
    payload_bytes: int = 32_768
    raw_bytes: int = 131_072
    jitter: float = 0.0
    """Every action takes up to this share longer, and every input is noticed up to a millisecond times this later."""
    seed: int = 1
    topology: Topology = "star"
    played_at_ns: int | None = None
    """None: varying links stay at their own numbers."""
    schedule: str = "gpipe"
    in_flight: int | None = None
    """None: all micro-batches."""
    accumulation: int = 1
    paced: bool = False
    """Maths takes half of the durations and is held; codecs and updates are not."""
    dilation: int = 1
    now: list[int] = field(init=False)
    records: list[list[StepRecord]] = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.parts = self.microbatches * self.accumulation
        forward, backward = ((max(1, duration),) for duration in (self.forward_ns, self.backward_ns))
        pace: dict[str, Any] = {"forward_ns": forward, "backward_ns": backward, "update_ns": self.update_ns}
        compute = Paced(**pace, source="stated", dilation=self.dilation)
        self.cell = cell(
            "fp32",
            self.links,
            stages=self.stages,
            microbatches=self.microbatches,
            topology=self.topology,
            schedule=self.schedule,
            in_flight=self.in_flight or self.microbatches,
            accumulation=self.accumulation,
            compute=compute if self.paced else MEASURED,
        )
        self.carried: list[tuple[int, Hop, int]] = []
        self.now = [1_000_000_000] * self.stages
        self.records = [[] for _ in range(self.stages)]
        self.sent_bytes = [0] * self.stages
        self.sent_packets = [0] * self.stages
        self.segments: dict[tuple[int, str], int] = {}
        self.tcp_bytes: dict[tuple[int, str], int] = {}

    def _neighbours(self, stage: int) -> list[str]:
        return ["upstream"] * (stage > 0) + ["downstream"] * (stage < self.stages - 1)

    def _longer(self, duration: int) -> int:
        return round(duration * self.dilation * (1 + self.jitter * self.random.random()))

    def _order(self, stage: int, phase: str) -> Sequence[tuple[str, int]]:
        if phase != "train":
            return [("F", part) for part in range(self.parts)]
        return orders_of(self.cell.pipeline)[stage]

    def run(self, number: int, phase: str = "train", *, warmup: bool = False, loss: float = 5.0) -> Pipeline:
        """One step or evaluation of all stages; appends a record to each. Returns this."""
        plan = [deque(self._order(stage, phase)) for stage in range(self.stages)]
        start = list(self.now)
        inbox: dict[tuple[int, str, int], tuple[int, int]] = {}
        free: dict[Any, float] = {}
        reached: dict[Any, float] = {}
        events: list[tuple[float, int, str, int, Any]] = []
        made: list[dict[str, list[Any]]] = [{"actions": [], "sent": [], "received": []} for _ in plan]
        count = 0

        def at(time: float, kind: str, stage: int, detail: Any = None) -> None:
            nonlocal count
            count += 1
            heapq.heappush(events, (time, count, kind, stage, detail))

        def send(stage: int, direction: str, microbatch: int, now: int) -> None:
            target = stage + 1 if direction == "forward" else stage - 1
            frame = self.payload_bytes + FRAME_HEADER_BYTES
            left, peer = frame, "downstream" if target > stage else "upstream"
            self.tcp_bytes[stage, peer] = self.tcp_bytes.get((stage, peer), 0) + frame
            hops = route(self.cell, stage, target)
            while left > 0:
                size = min(left, self.cell.profiles[0].mtu - 52)
                left -= size
                self._count(stage, peer, size + 52)
                at(now, "packet", target, (direction, microbatch, size + 52, left == 0, now, hops))
            self._count(target, "upstream" if peer == "downstream" else "downstream", 52)
            about = {"direction": direction, "microbatch": microbatch}
            sizes = {"raw_bytes": self.raw_bytes, "payload_bytes": self.payload_bytes, "frame_bytes": frame}
            moments = dict.fromkeys(("queued_ns", "first_byte_ns", "last_byte_ns"), now)
            made[stage]["sent"].append(SentRecord.model_validate({**about, **sizes, **moments}))

        def begin(stage: int, now: int) -> None:
            if not plan[stage] or now < self.now[stage]:
                return
            kind, microbatch = plan[stage][0]
            direction, source = ("forward", stage - 1) if kind == "F" else ("backward", stage + 1)
            linked = 0 <= source < self.stages
            if linked and (stage, direction, microbatch) not in inbox:
                return
            plan[stage].popleft()
            asked = self.now[stage]
            noticed = now + round(self.jitter * 1e6 * self.random.random()) if linked else now
            decoded = noticed + (self._longer(self.codec_ns) if linked else 0)
            asked_of_it = self.forward_ns if kind == "F" else self.backward_ns
            computed = decoded + (asked_of_it * self.dilation if self.paced else self._longer(asked_of_it))
            outputs = 0 <= (stage + 1 if kind == "F" else stage - 1) < self.stages
            encoded = computed + (self._longer(self.codec_ns) if outputs else 0)
            if linked:
                first, last = inbox[stage, direction, microbatch]
                about = {"direction": direction, "microbatch": microbatch, "payload_bytes": self.payload_bytes}
                came = ReceivedRecord.model_validate({**about, "first_byte_ns": first, "last_byte_ns": last})
                made[stage]["received"].append(came)
            moments = {"asked_ns": asked, "input_ns": noticed, "decoded_ns": decoded, "computed_ns": computed}
            moments |= {"encoded_ns": encoded, **self._pace(decoded, computed)}
            action = ActionRecord.model_validate({"kind": kind, "microbatch": microbatch, **moments})
            made[stage]["actions"].append(action)
            self.now[stage] = encoded
            at(encoded, "done", stage, (direction, microbatch) if outputs else None)

        for stage in range(self.stages):
            at(start[stage], "done", stage)
        while events:
            time, _, what, stage, detail = heapq.heappop(events)
            if what == "packet":
                direction, microbatch, size, last, first_byte, hops = detail
                if hops:
                    due = self._carry(time, size, hops[0], free, reached)
                    at(due, "packet", stage, (direction, microbatch, size, last, first_byte, hops[1:]))
                elif last:
                    at(math.ceil(time), "arrived", stage, (direction, microbatch, first_byte))
                continue
            if what == "arrived":
                inbox[stage, detail[0], detail[1]] = (detail[2], int(time))
            elif detail is not None:
                direction, microbatch = detail
                send(stage, direction, microbatch, int(time))
            begin(stage, int(time))
        self._finish({"step": number, "phase": phase, "warmup": warmup}, loss, start, made)
        return self

    def _pace(self, decoded: int, computed: int) -> dict[str, int]:
        """The maths is done after half of its time, and one action of fifty is too late."""
        if not self.paced:
            return {}
        done = computed + 1 if self.random.random() < 0.02 else (decoded + computed) // 2
        return {"began_ns": decoded, "maths_ns": done, "due_ns": computed}

    def _carry(self, now: float, ip_bytes: int, hop: Hop, free: dict[Any, float], reached: dict[Any, float]) -> float:
        """The pipe formula, for one packet: when it leaves the hop. Order is kept."""
        one = hop.pipe
        if one is None:
            self.carried.append((int(now), hop, ip_bytes))
            return now
        start = max(now, free.get(hop[:2], now))
        held = timeline(one).at(0 if self.played_at_ns is None else int(start) - self.played_at_ns)
        rate, delay = (one.rate_bps, one.delay_ns) if self.played_at_ns is None else (held.rate_bps, held.delay_ns)
        free[hop[:2]] = start + (ip_bytes + hop.profile.overhead_bytes) * 8e9 / rate
        self.carried.append((int(free[hop[:2]]), hop, ip_bytes))
        reached[hop[:2]] = max(free[hop[:2]] + delay, reached.get(hop[:2], 0.0))
        return reached[hop[:2]]

    def _count(self, stage: int, peer: str, size: int) -> None:
        self.sent_bytes[stage] += size
        self.sent_packets[stage] += 1
        self.segments[stage, peer] = self.segments.get((stage, peer), 0) + 1

    def _finish(self, step: dict[str, Any], loss: float, start: list[int], made: list[dict[str, list[Any]]]) -> None:
        ends, train = list(self.now), step["phase"] == "train"
        known = max(ends) + (0 if self.paced else self._longer(200_000))
        for stage in range(self.stages):
            update_ns = self.update_ns * self.dilation if self.paced else self._longer(self.update_ns)
            end = known + update_ns if train else ends[stage]
            sockets = []
            for peer in self._neighbours(stage):
                moved = {"bytes_sent": self.tcp_bytes.get((stage, peer), 0), "bytes_retransmitted": 0, "retransmits": 0}
                moved |= {"segments_out": self.segments.get((stage, peer), 0), "segments_in": 0}
                state = {"congestion_control": "cubic", "rtt_us": 40_000, "min_rtt_us": 40_000, "cwnd_packets": 100}
                sockets.append(SocketRecord.model_validate({"peer": peer, **state, **moved}))
            counted = {"sent_bytes": self.sent_bytes[stage], "sent_packets": self.sent_packets[stage]}
            self.records[stage].append(
                StepRecord(
                    **step,
                    start_ns=start[stage],
                    end_ns=end,
                    optimiser_start_ns=ends[stage] if train else None,
                    synchronised_ns=known if train else None,
                    loss=loss if stage == self.stages - 1 else None,
                    gradient_norm=1.0 if train else None,
                    tokens=1024,
                    counters=CountersRecord(**counted, received_bytes=0, received_packets=0),
                    sockets=tuple(sockets),
                    **made[stage],
                )
            )
            self.now[stage] = end + (0 if self.paced else 50_000)


def lasting(ns: int) -> Duration:
    """How long something took that was timed."""
    return Duration(ns=ns, spread=0.0, samples=12)


def stage_costs(
    *, forward_ns: int, backward_ns: int, clip_ns: int, update_ns: int, codec_ns: int, waking_ns: int = 0
) -> StageCosts:
    """What a stage takes that has neighbours on both sides."""
    ways: tuple[Direction, ...] = ("forward", "backward")
    return StageCosts(
        forward=lasting(forward_ns),
        backward=lasting(backward_ns),
        clip=lasting(clip_ns),
        update=lasting(update_ns),
        encode=dict.fromkeys(ways, lasting(codec_ns)),
        decode=dict.fromkeys(ways, lasting(codec_ns)),
        decode_woken=dict.fromkeys(ways, lasting(codec_ns + waking_ns)),
    )


def summed(what: Cell, stages: list[list[StepRecord]], **more: Any) -> Summary:
    """The summary of a run that ended well."""
    return summarise(what, None, None, stages, status="ok", error=None, **more)


def train(pipeline: Pipeline, what: Cell, error: float = 0.0) -> list[list[StepRecord]]:
    """Make all steps and evaluations of a cell: the same losses on every link, others for every seed.

    `error` is what the codec adds to the loss.
    """
    training = what.training
    noise, luck = random.Random(training.seed), random.Random(1000 + training.seed).gauss(0, 0.02)
    for step in range(training.steps):
        loss = 5.0 + 3.0 * math.exp(-step / 12) + noise.gauss(0, 0.03) + error * math.sin(step) ** 2
        pipeline.run(step, warmup=step < training.warmup_steps, loss=loss)
        done = step + 1
        if done == training.steps or (training.evaluate_every and done % training.evaluate_every == 0):
            loss = 5.05 + luck + 3.0 * math.exp(-done / 12)
            pipeline.run(done, "evaluation", loss=loss + error)
            if training.evaluate_uncompressed:
                pipeline.run(done, "uncompressed", loss=loss + error / 2)
    return pipeline.records


def reading(quantity: str, expected: float | None, measured: float | None, **changes: Any) -> Measurement:
    """What a certificate says that was measured of a link; `changes` of what is stated here."""
    stated = {"link": "node-0", "direction": "up", "detail": "", "unit": "", "tolerance": 1.0, "samples": 1}
    reading_fields = {"quantity": quantity, "expected": expected, "measured": measured, "verdict": "PASS", "note": ""}
    return Measurement.model_validate(stated | reading_fields | changes)


def certified(*measurements: Measurement, **changes: Any) -> Certificate:
    """A certificate of these measurements."""
    stated = {"form": "quick", "engine": "relay", "taken_at": "2026-01-02T03:04:05Z", "seconds": 1.2, "rejected": ()}
    return Certificate.model_validate({**stated, "measurements": measurements, **changes})


def certificate(what: Cell, verdict: str) -> Certificate:
    measurements = []
    for number, link in enumerate(what.links):
        name = link_name(what, number)
        for side in LINK_DIRECTIONS:
            about: dict[str, Any] = {"link": name, "direction": side, "unit": "Mbit/s"}
            if (one := link.pipe(side)) is None:
                measurements.append(reading("rate", None, 9_400.0, tolerance=None, **about))
                continue
            asked, note = one.rate_bps / 1e6, "" if verdict == "PASS" else "slower than asked"
            about |= {"tolerance": asked / 100, "verdict": verdict, "note": note}
            measurements.append(reading("rate", asked, asked * (0.998 if verdict == "PASS" else 0.8), **about))
        about = {"link": name, "direction": "both", "detail": "idle", "unit": "ms"}
        measurements.append(reading("rtt", 20.0, 20.1, tolerance=0.3, samples=20, **about))
    return certified(*measurements, engine=what.engine)


ENVIRONMENT = {
    "cpu_model": "Example CPU @ 2.00GHz",
    "cores": 2,
    "kernel": "6.1.0-test",
    "memory_bytes": 8_000_000_000,
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
}


def link_name(what: Cell, number: int) -> str:
    return f"node-{number}" if what.topology == "star" else f"boundary-{number}"


def lab_record(what: Cell, played_at_ns: int | None) -> LabRecord:
    links = []
    for number, link in enumerate(what.links):
        far, at = ("hub", "10.77.0.1") if what.topology == "star" else (f"node-{number + 1}", f"10.77.{number + 1}.3")
        ends = {"near": f"node-{number}", "near_address": f"10.77.{number + 1}.2", "far": far, "far_address": at}
        shaper: Literal["relay", "none"] = "relay" if link.shaped else "none"
        names = {"name": link_name(what, number), "profile": link.name}
        links.append(LinkRecord(**names, **ends, shaper=shaper, settings={"mtu": 1500}))
    about = {"topology": what.topology, "engine": what.engine, "engine_reason": "sch_netem is missing"}
    built: dict[str, Any] = {**about, "rootless": False, "build_seconds": 0.5, "overhead_bytes": 0}
    return LabRecord(**built, links=tuple(links), played_at_ns=played_at_ns)


def _samples(what: Cell, pipeline: Pipeline, period_ns: int = 100_000_000) -> list[Sample]:
    """Ten a second; one packet of a hundred is said to have been dropped before it was sent again."""
    zero = LinkCounters(packets=0, bytes=0, dropped_buffer=0, dropped_loss=0, backlog_bytes=0)
    links: dict[str, Any] = {link_name(what, n): {"up": zero, "down": zero} for n in range(len(what.links))}
    socket = SocketSample(
        node="node-0", local="10.77.1.2:40000", remote="10.77.2.2:29500", congestion_control="cubic", rtt_us=40_000,
        cwnd_packets=10, unacked_packets=0, retransmits=0, delivery_rate_bps=0, bytes_acked=0, bytes_received=0,
    )  # fmt: skip
    at = 1_000_000_000
    samples = []

    def sample() -> None:
        samples.append(Sample(at_ns=at, links={name: dict(pair) for name, pair in links.items()}, sockets=(socket,)))

    for time, hop, size in sorted(pipeline.carried, key=lambda one: one[0]):
        while time > at:
            sample()
            at += period_ns
        pair = links[link_name(what, hop.link)]
        old = pair[hop.side]
        new = {"packets": old.packets + 1, "bytes": old.bytes + size, "dropped_buffer": (old.packets + 1) // 100}
        pair[hop.side] = old.model_copy(update=new)
    sample()
    return samples


def write_run(
    experiment: Path,
    what: Cell,
    pipeline: Pipeline,
    *,
    error: float = 0.0,
    verdict: str = "PASS",
    failure: str | None = None,
) -> results.Run:
    """Pretend a run and leave its folder behind as the controller would."""
    run = results.new_run(experiment, what)
    stages = train(pipeline, what, error)
    lab = lab_record(what, 1_000_000_000 if pipeline.played_at_ns is None else pipeline.played_at_ns)
    made = certificate(what, verdict)
    certificates = RunCertificates(before=made, after=None if failure else made)
    results.write_json(run.folder / "environment.json", ENVIRONMENT)
    results.write_json(run.folder / "lab.json", lab)
    results.write_json(run.folder / "certificate.json", certificates)
    for stage, records in enumerate(stages):
        text = "".join(record.model_dump_json() + "\n" for record in records)
        (run.folder / f"steps-{stage}.jsonl").write_text(text, encoding="utf8")
    text = "".join(sample.model_dump_json() + "\n" for sample in _samples(what, pipeline))
    (run.folder / "counters.jsonl").write_text(text, encoding="utf8")
    status: Literal["ok", "failed"] = "failed" if failure else "ok"
    summary = summarise(what, lab, certificates, stages, status=status, error=failure)
    run.finish(summary)
    return run


def record_sweep(folder: Path, cells: Iterable[Cell], **stated: Any) -> Path:
    """Say in a result folder which cells its last sweep had, and return the folder."""
    about = {"question": "What is it worth?", "command": "testbed sweep x", **stated}
    results.write_json(folder / "sweep.json", results.SweepRecord(**about, cells=tuple(cell.id for cell in cells)))
    return folder


def change_summary(run: results.Run, **fields: Any) -> Summary:
    """Write other numbers into the summary of a run that was pretended."""
    changed = run.summary.model_copy(update=fields)  # type: ignore[union-attr]
    run.finish(changed)
    return changed
