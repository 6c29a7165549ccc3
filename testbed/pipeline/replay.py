"""Replay one stage of a finished run: frames as large as those that it sent, between actions as long as its were. No
torch.

In synchronous training no stage goes on before it has what it waits for, so the network decides when something is
computed and never what: sizes, losses and gradient norms are those of the recording, whatever the links. Frames are
real, in the same order over the same kind of connection, and stages wait for them; their bytes are random, so nothing
on the way can shrink them.

Durations are those of the recording too. Where the stage is paced they only have to fit into the emulated device's,
which hold here as there. Where it is not, they include what the stages took from each other on this machine's
processors: most of all in a recording, where no stage ever waits for a link. A replay without pacing is as good as the
machine has processors for its stages.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from testbed import results
from testbed.errors import ResultsError
from testbed.message_key import MessageKey, Phase
from testbed.pipeline.control import Ended, EvaluationDone, StepDone
from testbed.pipeline.gather import Gather, Met, Stops
from testbed.pipeline.job import StageJob
from testbed.pipeline.pacing import Clock, SystemClock, stopwatch_for, wait_until
from testbed.pipeline.step_log import StepLog
from testbed.pipeline.transport import Connection
from testbed.pipeline.wiring import Wiring
from testbed.records import ActionRecord, SentRecord, StepRecord


# ---------------------------------------------------------------------- what the recording says
class Work(NamedTuple):
    """One recorded action: what it sent, and how long each part of it took on this machine, in nanoseconds."""

    action: ActionRecord
    pause_ns: int
    """Since the action before it, or the beginning of the step. Where the stage is paced, it idled meanwhile."""
    decode_ns: int
    maths_ns: int
    encode_ns: int
    sent: SentRecord | None


def recorded_work(step: StepRecord, dilation: int) -> list[Work]:
    """Return the actions of a recorded step or evaluation, in order. In a dilated lab codecs are held to `dilation`
    times their time.
    """
    sent = {(frame.direction, frame.microbatch): frame for frame in step.sent}
    works, end_ns = [], step.start_ns
    for action in step.actions:
        if action.began_ns is None or action.maths_ns is None:
            maths_ns = action.computed_ns - action.decoded_ns
        else:  # paced: the other times are the emulated device's
            maths_ns = action.maths_ns - action.began_ns
        works.append(
            Work(
                action=action,
                pause_ns=action.asked_ns - end_ns,
                decode_ns=(action.decoded_ns - action.input_ns) // dilation,
                maths_ns=maths_ns,
                encode_ns=(action.encoded_ns - action.computed_ns) // dilation,
                sent=sent.get(("forward" if action.kind == "F" else "backward", action.microbatch)),
            )
        )
        end_ns = action.encoded_ns
    return works


def load_recording(folder: Path, stage: int) -> list[StepRecord]:
    """Read what a recording says about one stage. ResultsError where the run did not end well, or is not whole."""
    run = results.Run(folder)
    summary, steps = run.summary, run.steps(stage)
    trained = sum(step.phase == "train" for step in steps)
    if summary is None or summary.status != "ok":
        reason = "it has no summary" if summary is None else f"it {summary.status}: {summary.error}"
    elif trained < summary.steps or steps[-1].phase == "train":
        lost = "" if trained < summary.steps else ", but not the evaluation after them"
        reason = f"steps-{stage}.jsonl holds {trained} of {summary.steps} training steps{lost}"
    else:
        return steps
    raise ResultsError(
        f"stage {stage}: cannot replay {folder}: {reason}; remove the folder, and the same sweep records the run again"
    )


def set_up_ns(folder: Path, steps: Sequence[StepRecord]) -> int:
    """Return the time from when varying links began to vary to the stage's first step: what building the model took,
    over links on which connecting takes no time. 0 where there were no links.
    """
    began_ns = played_at_ns(folder)
    return 0 if began_ns is None else steps[0].start_ns - began_ns


def played_at_ns(folder: Path) -> int | None:
    """Return when a run's links began to vary; None where it has no lab."""
    return results.Run(folder).lab.played_at_ns if (folder / "lab.json").exists() else None


def clipping_ns(step: StepRecord) -> int:
    """Return the longest that the stage can have worked on clipping after its last action: it then waited for the
    others, and the record has the two together. 0 in an evaluation.
    """
    if step.optimiser_start_ns is None or step.synchronised_ns is None:
        return 0
    return step.synchronised_ns - step.optimiser_start_ns


def update_ns(step: StepRecord) -> int:
    """Return the time from when the gradient's norm was known to the end of the step. 0 in an evaluation."""
    return 0 if step.synchronised_ns is None else step.end_ns - step.synchronised_ns


# ---------------------------------------------------------------------- replaying it


class _WorkClock:
    """Work as time that passes. It keeps a line of its own: what one wait is late, the next makes up for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._line_ns = 0

    def resume(self, moment_ns: int) -> None:
        """Start again at that moment: before it nothing was to be done."""
        self._line_ns = moment_ns

    def spend(self, duration_ns: int) -> int:
        """Let the time of some work pass. Returns when it is done, with the time."""
        self._line_ns += duration_ns
        return self._clock.wait_until(self._line_ns)


class Replay:
    """One stage that goes through a recording. Owns nothing that must be closed."""

    def __init__(
        self,
        job: StageJob,
        steps: Sequence[StepRecord],
        *,
        upstream: Connection | None,
        downstream: Connection | None,
        gather: Gather,
        log: StepLog,
        asked: Callable[[], bool],
    ) -> None:
        """`asked` says whether the job is to finish before its time."""
        self._job, self._steps = job, steps
        self._upstream, self._downstream = upstream, downstream
        self._gather, self._log, self._asked = gather, log, asked
        self._clock = SystemClock()
        self._watch = stopwatch_for(job.compute, job.stage)
        self._work = _WorkClock(self._clock)
        self._paced = job.compute.mode == "paced"
        self._noise = memoryview(
            os.urandom(max((sent.payload_bytes for step in steps for sent in step.sent), default=0))
        )
        self._evaluated: Counter[Phase] = Counter()
        """Evaluations so far."""
        self._left_ns = 0

    def run(self) -> Ended:
        """Replay to the end of the recording or of the budget; returns why training ended, the same at all stages.

        A recording has no budget, so where one ends training here, the evaluation that follows is replayed only if
        there is one.
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
        """Replay one step or evaluation. Returns what all stages know then, and how long each will work on clipping in
        the following.
        """
        training = record.phase == "train"
        start_ns = self._watch.start()
        self._work.resume(self._clock.now())
        actions = [self._act(record, work) for work in recorded_work(record, self._job.compute.dilation)]
        done_ns, line_ns = self._watch.end()
        if not self._paced:
            self._work.spend(clipping_ns)
        loss = record.loss if record.phase == "evaluation" else None
        met = self._gather.meet(line_ns, left_ns=self._left_ns, asked=self._asked(), loss=loss)
        synchronised_ns = self._watch.synchronised(met.line_ns)
        self._work.resume(self._clock.now())
        self._log.met(done_ns, synchronised_ns)
        clipping_ns = self._least_clipping_ns(following)
        if not self._paced:
            self._work.spend(update_ns(record))
        self._left_ns = self._watch.leave(update=training)
        self._log.write(
            record.step,
            record.phase,
            start_ns=start_ns,
            end_ns=self._left_ns,
            actions=actions,
            loss=record.loss,
            tokens=record.tokens,
            gradient_norm=record.gradient_norm,
            learning_rate=record.learning_rate,
        )
        self._evaluated[record.phase] += 1
        return met, clipping_ns

    def _act(self, record: StepRecord, work: Work) -> ActionRecord:
        """Do one action as `train.StageTrainer` does: wait, decode, compute, encode, send."""
        kind = work.action.kind
        source, target = (self._upstream, self._downstream) if kind == "F" else (self._downstream, self._upstream)
        key = self._key(record, work.action.microbatch)
        if not self._paced:
            self._work.spend(work.pause_ns)
        self._watch.ask(kind, work.action.microbatch)
        if self._paced:  # it may have waited for its turn
            self._work.resume(self._clock.now())
        if source is not None:
            asked_ns = self._clock.now()
            arrival = source.take(key, self._job.limits.message_s)
            input_ns = self._clock.now()
            if arrival.last_byte_ns > asked_ns:
                self._work.resume(input_ns)
            self._watch.received(arrival.last_byte_ns, input_ns, self._work.spend(work.decode_ns))
        self._watch.begin()
        if self._paced:
            self._work.resume(self._clock.now())
        self._work.spend(work.maths_ns)
        self._watch.done()
        if target is not None:
            if work.sent is None:
                raise ResultsError(
                    f"stage {self._job.stage}: the recording lacks what was sent of {key}; record the run again"
                )
            self._work.spend(work.encode_ns)
            payload, not_before_ns = self._noise[: work.sent.payload_bytes], self._watch.encoded()
            self._watch.queued(target.send(key, payload, raw_bytes=work.sent.raw_bytes, not_before_ns=not_before_ns))
        return self._watch.record()

    def _key(self, record: StepRecord, number: int) -> MessageKey:
        """Return the key of the micro-batch with that number in the record: see `step_log.number_in_record`."""
        if record.phase == "train":
            return MessageKey("train", record.step, number, ())
        batch, part = divmod(number, self._job.microbatches)
        return MessageKey(
            record.phase, self._evaluated[record.phase] * self._job.workload.validation_batches + batch, part, ()
        )

    def _least_clipping_ns(self, number: int) -> int:
        """Agree how long every stage is to work on clipping in that record: the least of what the stages recorded,
        because the stage that was last waited for nobody.
        """
        mine = clipping_ns(self._steps[number]) if number < len(self._steps) else 0
        return int(min(self._gather.exchange([mine])))


def replay_job(
    job: StageJob,
    sockets: Sequence[socket.socket],
    report: Callable[[StepDone | EvaluationDone], None],
    asked: Callable[[], bool],
) -> Ended:
    """Do the whole job, as `train.train_job` does where it is trained; returns why training ended.

    ResultsError for a recording that cannot be replayed.
    """
    assert job.replay is not None
    with Wiring(job, sockets) as wiring:
        recording = load_recording(Path(job.replay), job.stage)
        sys.stdout.write(f"stage {job.stage} replays {job.replay}\n")
        # so that links that vary are at the same point of their schedules as they were in the recording
        if (began_ns := played_at_ns(Path(job.folder))) is not None:
            wait_until(began_ns + set_up_ns(Path(job.replay), recording))
        wiring.connect()
        with (Path(job.folder) / f"steps-{job.stage}.jsonl").open("x", encoding="utf8") as steps:
            ended = Replay(
                job,
                recording,
                upstream=wiring.upstream,
                downstream=wiring.downstream,
                gather=wiring.gather,
                log=StepLog(job, steps, connections=wiring.connections, counters=wiring.counters, report=report),
                asked=asked,
            ).run()
        wiring.leave()
    return ended
