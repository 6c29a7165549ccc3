"""Run one job from a recording: frames as large as those that a finished run sent, between actions as long as its were. No torch.

In synchronous training no stage goes on before it has what it waits for, so the network decides when something is computed and
never what: sizes, losses and gradient norms are those of the recording, whatever the links. Frames are real, in the same order
over the same kind of connection, and stages wait for them; their bytes are random, so nothing on the way can shrink them.

Durations are those of the recording too. Where the stage is paced they only have to fit into the emulated device's, which hold
here as there. Where it is not, they include what the stages took from each other on this machine's processors: most of all in a
recording, where no stage ever waits for a link. A replay without pacing is as good as the machine has processors for its stages.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from testbed.errors import ResultsError
from testbed.pipeline import recording
from testbed.pipeline.control import Ended, Evaluated, Step
from testbed.pipeline.gather import Gather, Met
from testbed.pipeline.job import StageJob
from testbed.pipeline.pacing import Clock, SystemClock, wait_until, watch_for
from testbed.pipeline.port import Place, Port, Side
from testbed.pipeline.recorder import Recorder
from testbed.pipeline.stops import Stops
from testbed.pipeline.transport import Connection
from testbed.pipeline.wiring import Wiring
from testbed.records import ActionRecord, StepRecord


class _Effort:
    """Work as time that passes. It keeps a line of its own: what one wait is late, the next makes up for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._line_ns = 0

    def resume(self, moment_ns: int) -> None:
        """Before that moment nothing was to be done."""
        self._line_ns = moment_ns

    def spend(self, duration_ns: int) -> int:
        """The work is done when this returns, with the time."""
        self._line_ns += duration_ns
        return self._clock.wait_until(self._line_ns)


class Replay:
    """One stage that goes through a recording. Owns nothing that must be closed."""

    def __init__(
        self,
        job: StageJob,
        steps: Sequence[StepRecord],
        *,
        upstream: Port | None,
        downstream: Port | None,
        gather: Gather,
        recorder: Recorder,
        asked: Callable[[], bool],
    ) -> None:
        """`asked` says whether the job is to finish before its time."""
        self._job, self._steps = job, steps
        self._upstream, self._downstream = upstream, downstream
        self._gather, self._recorder, self._asked = gather, recorder, asked
        self._clock = SystemClock()
        self._watch = watch_for(job.compute, job.stage)
        self._effort = _Effort(self._clock)
        self._paced = job.compute.mode == "paced"
        self._noise = memoryview(
            os.urandom(max((sent.payload_bytes for step in steps for sent in step.sent), default=0))
        )
        self._left_ns = 0

    def run(self) -> Ended:
        """Replay to the end of the recording or of the budget; returns why training ended, the same at all stages.

        A recording has no budget, so where one ends training here, the evaluation that follows is replayed only if there is one.
        """
        self._left_ns = self._watch.start()
        met = self._gather.meet(self._left_ns, left_ns=self._left_ns)
        self._watch.synchronised(met.line_ns)
        stops = Stops(self._job.training, dilation=self._job.compute.dilation, start_ns=met.line_ns)
        ended: Ended | None = None
        clipping_ns = self._least_clipping_ns(0)
        for number, record in enumerate(self._steps):
            if ended == "asked" or (ended and record.phase == "train"):
                break
            met, clipping_ns = self._replay(record, clipping_ns, number + 1)
            if record.phase == "train":
                ended = stops.after_step(record.step + 1, met)
            else:
                reached = stops.after_evaluation(met)
                ended = "target" if reached == "target" else ended or reached
        assert ended is not None, "the last step ends training"
        return ended

    def _replay(self, record: StepRecord, clipping_ns: int, following: int) -> tuple[Met, int]:
        """One step or evaluation. Returns what all stages know then, and how long each will work on clipping in the following."""
        training = record.phase == "train"
        start_ns = self._watch.start()
        self._effort.resume(self._clock.now())
        actions = [self._act(record, work) for work in recording.works(record, self._job.compute.dilation)]
        done_ns, line_ns = self._watch.end()
        if not self._paced:
            self._effort.spend(clipping_ns)
        loss = record.loss if record.phase == "evaluation" else None
        met = self._gather.meet(line_ns, left_ns=self._left_ns, asked=self._asked(), loss=loss)
        synchronised_ns = self._watch.synchronised(met.line_ns)
        self._effort.resume(self._clock.now())
        snapshot = self._recorder.snapshot()
        clipping_ns = self._least_clipping_ns(following)
        if not self._paced:
            self._effort.spend(recording.update_ns(record))
        self._left_ns = self._watch.leave(update=training)
        self._recorder.write(
            record.step,
            record.phase,
            start_ns=start_ns,
            end_ns=self._left_ns,
            snapshot=snapshot,
            actions=actions,
            loss=record.loss,
            tokens=record.tokens,
            optimiser_start_ns=done_ns if training else None,
            synchronised_ns=synchronised_ns if training else None,
            gradient_norm=record.gradient_norm,
            learning_rate=record.learning_rate,
        )
        return met, clipping_ns

    def _act(self, record: StepRecord, work: recording.Work) -> ActionRecord:
        """One action, as `passes.Passes` goes about it."""
        kind, microbatch = work.action.kind, work.action.microbatch
        source, target = (self._upstream, self._downstream) if kind == "F" else (self._downstream, self._upstream)
        place = Place(record.phase, record.step, microbatch)
        if not self._paced:
            self._effort.spend(work.pause_ns)
        self._watch.ask()
        if self._paced:  # it may have waited for its turn
            self._effort.resume(self._clock.now())
        if source is not None:
            asked_ns = self._clock.now()
            arrival = source.take(place)
            input_ns = self._clock.now()
            if arrival.last_byte_ns > asked_ns:
                self._effort.resume(input_ns)
            self._watch.received(arrival.last_byte_ns, input_ns, self._effort.spend(work.decode_ns))
            source.note(place, arrival)
        self._watch.begin(kind)
        if self._paced:
            self._effort.resume(self._clock.now())
        self._effort.spend(work.maths_ns)
        self._watch.done()
        encoded_ns = None
        if target is not None:
            if work.sent is None:
                raise ResultsError(
                    f"stage {self._job.stage}: the recording lacks what was sent of {place}; record the run again"
                )
            self._effort.spend(work.encode_ns)
            payload = self._noise[: work.sent.payload_bytes]
            encoded_ns = target.post(place, payload, work.sent.raw_bytes, not_before_ns=self._watch.encoded())
        return self._watch.record(kind, microbatch, encoded_ns)

    def _least_clipping_ns(self, number: int) -> int:
        """How long every stage is to work on clipping in that record. The stage that was last waited for nobody, so it is the
        least of what the stages recorded.
        """
        mine = recording.clipping_ns(self._steps[number]) if number < len(self._steps) else 0
        return int(min(self._gather.exchange([mine])))


def run(
    job: StageJob,
    sockets: Sequence[socket.socket],
    report: Callable[[Step | Evaluated], None],
    asked: Callable[[], bool],
) -> Ended:
    """Do the whole job, as `run.run` does where it is trained; returns why training ended. ResultsError for a recording that
    cannot be replayed.
    """
    assert job.replay is not None
    with Wiring(job, sockets) as wiring:
        recorded = recording.load(Path(job.replay), job.stage)
        sys.stdout.write(f"stage {job.stage} replays {job.replay}\n")
        if (
            began_ns := recording.played_at_ns(Path(job.folder))
        ) is not None:  # what varies is to be met at the same moments
            wait_until(began_ns + recording.set_up_ns(Path(job.replay), recorded))
        wiring.connect()
        upstream = _port("upstream", wiring.upstream, job)
        downstream = _port("downstream", wiring.downstream, job)
        ports = [port for port in (upstream, downstream) if port is not None]
        with (Path(job.folder) / f"steps-{job.stage}.jsonl").open("x", encoding="utf8") as steps:
            ended = Replay(
                job,
                recorded,
                upstream=upstream,
                downstream=downstream,
                gather=wiring.gather,
                recorder=Recorder(job, steps, ports=ports, counters=wiring.counters, report=report),
                asked=asked,
            ).run()
        wiring.leave()
    return ended


def _port(side: Side, connection: Connection | None, job: StageJob) -> Port | None:
    return None if connection is None else Port(side, connection=connection, timeout_s=job.limits.message_s)
