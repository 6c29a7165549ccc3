"""A trace of a pipeline without a model: stated durations and sizes, for `bench play` and for tests."""

from __future__ import annotations

from testbed.pipeline.schedule import actions
from testbed.play.trace import RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace
from testbed.spec import ScheduleName

LABELS = ("forward", "backward", "encode", "decode", "update", "activation", "gradient", "barrier")


def pipeline_trace(
    *,
    stages: int,
    microbatches: int,
    steps: int,
    message_bytes: int,
    forward_ns: int,
    backward_ns: int,
    codec_ns: int = 0,
    update_ns: int = 0,
    schedule: ScheduleName = "1f1b",
    in_flight: int | None = None,
) -> Trace:
    """Return the trace of synchronous pipeline training: one lane per stage, messages of one size both ways; each step
    ends with an event that all stages signal and wait for, and the update.
    """
    label = {name: number for number, name in enumerate(LABELS)}
    lanes = tuple(Lane(stage, "compute") for stage in range(stages))
    for step in range(steps):
        for stage, lane in enumerate(lanes):
            for kind, microbatch in actions(
                schedule, stage=stage, stages=stages, microbatches=microbatches, in_flight=in_flight or stages
            ):
                before, after = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
                what = "activation" if kind == "F" else "gradient"
                tag = (step * microbatches + microbatch) * 2 + (kind == "B")
                if 0 <= before < stages:
                    lane.add(RECEIVE, label=label[what], peer=before, tag=tag)
                    lane.add(WORK, label=label["decode"], value=codec_ns)
                work_ns, name = (forward_ns, "forward") if kind == "F" else (backward_ns, "backward")
                lane.add(WORK, label=label[name], value=work_ns)
                if 0 <= after < stages:
                    lane.add(WORK, label=label["encode"], value=codec_ns)
                    lane.add(SEND, label=label[what], peer=after, tag=tag, value=message_bytes)
            lane.add(SIGNAL, label=label["barrier"], tag=step)
            lane.add(WAIT, label=label["barrier"], tag=step, value=stages)
            lane.add(WORK, label=label["update"], value=update_ns)
            lane.end_step()
    return Trace(tuple(f"stage {stage}" for stage in range(stages)), LABELS, lanes, {"maker": "synthetic pipeline"})
