"""What a stage writes down after each step, one JSON line in steps-<stage>.jsonl, and tells the controller. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import IO, NamedTuple

from testbed.counters import DeviceCounters
from testbed.message_key import Phase
from testbed.pipeline.control import Evaluated, Step
from testbed.pipeline.job import StageJob
from testbed.pipeline.port import Port
from testbed.records import ActionRecord, CountersRecord, SocketRecord, StepRecord


class Snapshot(NamedTuple):
    """What has crossed the stage's devices and connections since their start."""

    counters: CountersRecord | None
    sockets: tuple[SocketRecord, ...]


class Recorder:
    """Owns nothing that must be closed."""

    def __init__(
        self,
        job: StageJob,
        steps: IO[str],
        *,
        ports: Sequence[Port],
        counters: DeviceCounters | None,
        report: Callable[[Step | Evaluated], None],
    ) -> None:
        """`report` is told of what has a loss, which is the last stage's."""
        self._job, self._steps, self._ports, self._counters, self._report = job, steps, ports, counters, report

    def snapshot(self) -> Snapshot:
        """To be taken before the other stages' next step is on the links."""
        counters = self._counters.read() if self._counters is not None else None
        return Snapshot(counters, tuple(port.socket_record() for port in self._ports))

    def write(
        self,
        step: int,
        phase: Phase,
        *,
        start_ns: int,
        end_ns: int,
        snapshot: Snapshot,
        actions: Sequence[ActionRecord],
        loss: float | None,
        tokens: int,
        optimiser_start_ns: int | None = None,
        synchronised_ns: int | None = None,
        gradient_norm: float | None = None,
        learning_rate: float | None = None,
    ) -> StepRecord:
        """A step or evaluation is over. A whole line at a time, so that after a crash only the last can be cut off."""
        frames = [port.records() for port in self._ports]
        record = StepRecord(
            step=step,
            phase=phase,
            warmup=phase == "train" and step < self._job.training.warmup_steps,
            start_ns=start_ns,
            end_ns=end_ns,
            optimiser_start_ns=optimiser_start_ns,
            synchronised_ns=synchronised_ns,
            loss=loss,
            gradient_norm=gradient_norm,
            learning_rate=learning_rate,
            tokens=tokens,
            actions=tuple(actions),
            sent=tuple(one for sent, _ in frames for one in sent),
            received=tuple(one for _, received in frames for one in received),
            counters=snapshot.counters,
            sockets=snapshot.sockets,
        )
        self._steps.write(record.model_dump_json() + "\n")
        self._steps.flush()
        if record.loss is not None:
            seconds = (end_ns - start_ns) / 1e9
            if phase == "train":
                self._report(Step(step=step, loss=record.loss, seconds=seconds, tokens=tokens))
            else:
                self._report(Evaluated(phase=phase, step=step, loss=record.loss, seconds=seconds))
        return record
