"""A training becomes a trace that takes what the schedule takes, and what was played becomes records that say so."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import ResultsError, UserError
from testbed.metrics.ideal import ideal_step_s, unshaped_step_s
from testbed.metrics.steps import align
from testbed.metrics.wires import Wires
from testbed.records import StageCosts, StepRecord
from testbed.replay import pipelines
from testbed.replay.recorded import records_of
from testbed.spec import Calibrated, Cell, Paced
from testbed.trace.check import check_trace
from testbed.trace.format import RECEIVE, WORK
from testbed.trace.simulate import simulate, step_ends
from tests import synthetic
from tests.trace.made_traces import played_over, sent_bytes

FORWARD, BACKWARD, CODEC, CLIP, UPDATE = 2_000_000, 4_000_000, 300_000, 50_000, 5_000_000
WAKING = 200_000


def costs(stages: int) -> tuple[StageCosts, ...]:
    took = {"forward_ns": FORWARD, "backward_ns": BACKWARD, "clip_ns": CLIP, "update_ns": UPDATE}
    return (synthetic.stage_costs(**took, codec_ns=CODEC, waking_ns=WAKING),) * stages


def trained(**changes: object) -> tuple[Cell, list[list[StepRecord]]]:
    """A played cell, and a training of its recipe."""
    made = synthetic.Pipeline(synthetic.profile(), **changes)  # type: ignore[arg-type]
    records = synthetic.train(made, made.cell)
    return made.cell.model_copy(update={"timing": "played", "compute": Calibrated()}), records


def played(cell: Cell, training: list[list[StepRecord]]) -> list[list[StepRecord]]:
    """The records of such a play."""
    job = pipelines.job_of(cell, training, costs(len(training)))
    trace = job.trace()
    return records_of(cell, job, trace, played_over(trace), training)


@given(
    stages=st.integers(1, 4),
    microbatches=st.integers(1, 5),
    more=st.integers(0, 2),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    accumulation=st.integers(1, 2),
)
@settings(deadline=None, max_examples=25)
def test_over_links_that_take_no_time_a_step_takes_what_the_schedule_takes(
    stages: int, microbatches: int, more: int, schedule: str, accumulation: int
) -> None:
    cell, training = trained(
        stages=stages,
        microbatches=microbatches,
        in_flight=stages + more,
        schedule=schedule,
        accumulation=accumulation,
    )
    free = cell.model_copy(update={"codec_cost": "zero"})
    trace = pipelines.job_of(free, training, costs(stages)).trace()
    check_trace(trace, "the trace")
    lanes = simulate(trace)
    ends = step_ends(trace, lanes, trace.steps)
    expected = unshaped_step_s(
        cell.pipeline, forward_s=FORWARD / 1e9, backward_s=BACKWARD / 1e9, update_s=(CLIP + UPDATE) / 1e9
    )
    assert ends[0] / 1e9 == pytest.approx(expected, rel=1e-9)
    assert ends[-1] == trace.steps * ends[0]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recipe", ["calibrated", "paced"])
def test_the_records_of_what_was_played_have_the_ideal_time_over_free_links(schedule: str, recipe: str) -> None:
    cell, training = trained(stages=3, schedule=schedule)
    if recipe == "paced":
        compute = Paced(forward_ns=(FORWARD,), backward_ns=(BACKWARD,), update_ns=UPDATE, source="stated", dilation=3)
        cell = cell.model_copy(update={"compute": compute})
    stages = played(cell, training)
    steps = align(stages)
    assert [(s.phase, s.number, s.loss) for s in steps] == [(s.phase, s.number, s.loss) for s in align(training)]
    wires = Wires(cell, None)
    for step in steps:
        if step.phase == "train":
            ideal = ideal_step_s(wires, step.records, step.free_ns, cell.compute)
            assert ideal == pytest.approx(step.seconds, rel=1e-9)
        else:
            assert step.seconds == 0


def test_bytes_are_the_training_s_and_times_the_player_s() -> None:
    cell, training = trained(stages=3)
    trace = pipelines.job_of(cell, training, costs(3)).trace()
    for lane, before, after in zip(trace.lanes, training, played(cell, training), strict=True):
        frames = (frame for record in before if record.phase == "train" for frame in record.sent)
        assert sorted(sent_bytes(trace, lane.node)) == sorted(frame.frame_bytes for frame in frames)
        for record, made in zip(before, after, strict=True):
            if record.phase == "train":
                sent = {(f.direction, f.microbatch): f.payload_bytes for f in record.sent}
                assert {(f.direction, f.microbatch): f.payload_bytes for f in made.sent} == sent
                assert len(made.received) == len(record.received)
                assert made.start_ns <= made.actions[0].asked_ns
                assert made.end_ns - (made.synchronised_ns or 0) == UPDATE


@pytest.mark.parametrize(("rule", "codec_ns"), [("host", CODEC), ("zero", 0)])
def test_codecs_cost_what_the_rule_says(rule: str, codec_ns: int) -> None:
    cell, training = trained(stages=2)
    trace = pipelines.job_of(cell.model_copy(update={"codec_cost": rule}), training, costs(2)).trace()
    wanted = {trace.labels.index("encode"), trace.labels.index("decode")}
    for lane in trace.lanes:
        durations = {v for k, n, v in zip(lane.kind, lane.label, lane.value, strict=True) if k == WORK and n in wanted}
        assert durations == {codec_ns}
        assert {v for k, v in zip(lane.kind, lane.value, strict=True) if k == RECEIVE} == {WAKING if codec_ns else 0}


def test_a_budget_ends_a_run_with_the_step_that_reaches_it() -> None:
    cell, training = trained(stages=2)
    trace = pipelines.job_of(cell, training, costs(2)).trace()
    step_s = step_ends(trace, simulate(trace), 1)[0] / 1e9
    spent = cell.model_copy(update={"training": cell.training.model_copy(update={"budget_s": 2.5 * step_s})})
    whole, cut = (played(one, training)[0] for one in (cell, spent))
    assert sum(record.phase == "train" for record in cut) == 3
    assert cut == whole[: len(cut)]


def test_what_is_missing_is_named() -> None:
    cell, training = trained(stages=2)
    with pytest.raises(UserError, match="needs the durations of its recipe"):
        pipelines.job_of(cell, training, None).trace()
    first = training[0][0].model_copy(update={"sent": training[0][0].sent[1:]})
    with pytest.raises(ResultsError, match=r"have no forward message 0 \(activation\) in step 0"):
        pipelines.job_of(cell, [[first, *training[0][1:]], training[1]], costs(2)).trace()


@pytest.mark.parametrize("count", [3, 8, 20])
def test_steps_are_played_again_in_turn_where_more_are_wanted_than_were_trained(count: int) -> None:
    cell, training = trained(stages=2)
    asked = cell.model_copy(update={"played_steps": count})
    steps = pipelines.steps_to_play(asked, training)
    trace = pipelines.job_of(asked, steps, costs(2)).trace()
    check_trace(trace, "the trace")
    assert trace.steps == count
    made = align(played(asked, steps))
    train = [step for step in made if step.phase == "train"]
    assert [step.number for step in train] == list(range(count))
    first = [step for step in align(training) if step.phase == "train"]
    for step in train:
        like = first[step.number % len(first)]
        assert step.loss == (like.loss if step.number < len(first) else None)
        assert [[f.payload_bytes for f in r.sent] for r in step.records] == [
            [f.payload_bytes for f in r.sent] for r in like.records
        ]
