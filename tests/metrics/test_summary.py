from __future__ import annotations

from collections.abc import Callable

import pytest

from testbed.errors import ResultsError
from testbed.metrics import align, loss_curve, measured, summarise
from testbed.metrics.compare import run_steps
from testbed.metrics.traffic import traffic
from testbed.records import FRAME_HEADER_BYTES, ActionRecord, Floors, RunCertificates, StepRecord, Summary
from testbed.spec import Cell, Paced
from tests.synthetic import Pipeline, cell, pipe, profile, summed, train

SLOW = profile("slow", pipe(40_000_000, 5_000_000), pipe(80_000_000, 5_000_000))
Stages = list[list[StepRecord]]


def run(link=SLOW, **shape) -> tuple[Summary, Stages]:
    what = cell("int8", link, stages=shape.get("stages", 3))
    stages = train(Pipeline(link, **shape), what)
    return summed(what, stages), stages


def change(stages: Stages, stage: int, index: int, **fields) -> Stages:
    copy = [list(records) for records in stages]
    copy[stage][index] = copy[stage][index].model_copy(update=fields)
    return copy


def changed_actions(stages: Stages, change: Callable[[StepRecord, ActionRecord], dict[str, int]]) -> Stages:
    def changed(record: StepRecord) -> StepRecord:
        actions = tuple(action.model_copy(update=change(record, action)) for action in record.actions)
        return record.model_copy(update={"actions": actions})

    return [[changed(record) for record in records] for records in stages]


def test_step_times_add_up_to_the_wall_clock() -> None:
    _, stages = run(jitter=0.5)
    steps = align(stages)
    assert sum(step.seconds for step in steps) == pytest.approx((steps[-1].end_ns - steps[0].begin_ns) / 1e9)


@pytest.mark.parametrize("jitter", [0.0, 0.7])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_split_adds_up_to_the_step(stages: int, jitter: float) -> None:
    summary, _ = run(stages=stages, jitter=jitter)
    split = summary.split
    assert split.compute_s + split.codec_s + split.wire_s + split.wait_s == pytest.approx(summary.step_s)
    assert min(split.compute_s, split.codec_s, split.wire_s, split.wait_s) >= 0


def test_split_without_jitter_is_what_the_stages_did() -> None:
    """Every stage computes 4 x (F + B) and an update; end stages code 8 times, the middle one 16 times."""
    pipeline, what = Pipeline(SLOW), cell()
    what = what.model_copy(update={"training": what.training.model_copy(update={"evaluate_every": 0})})
    summary = summed(what, train(pipeline, what))
    compute_ns = 4 * (pipeline.forward_ns + pipeline.backward_ns) + pipeline.update_ns
    assert summary.split.compute_s == pytest.approx(compute_ns / 1e9)
    assert summary.split.codec_s == pytest.approx((8 + 16 + 8) / 3 * pipeline.codec_ns / 1e9)


def test_nothing_is_on_the_wire_of_an_unshaped_link() -> None:
    summary, _ = run(profile("unshaped"))
    assert summary.split.wire_s == 0
    assert summary.efficiency == pytest.approx(1, abs=0.01)


def test_ideal_meets_the_simulated_link_and_jitter_lowers_efficiency() -> None:
    assert run()[0].efficiency == pytest.approx(1, abs=0.02)
    jittered = run(jitter=1.0)[0].efficiency
    assert jittered < 0.99


def test_warmup_and_evaluations_do_not_count() -> None:
    summary, stages = run()
    assert (summary.steps, summary.measured_steps) == (8, 6)
    slow = [
        [
            record.model_copy(update={"end_ns": record.end_ns + 10**12}) if record.warmup else record
            for record in records
        ]
        for records in stages
    ]
    assert [step.number for step in measured(align(slow))] == [2, 3, 4, 5, 6, 7]


def test_traffic_is_counted_between_records() -> None:
    summary, _ = run()
    frames = 2 * 2 * 4  # boundaries, directions, micro-batches
    pipeline = Pipeline(SLOW)
    assert summary.raw_bytes_per_step == frames * pipeline.raw_bytes
    assert summary.payload_bytes_per_step == frames * pipeline.payload_bytes
    assert summary.compression_ratio == 4
    assert summary.wire_bytes_per_step == pytest.approx(
        summary.payload_bytes_per_step + frames * FRAME_HEADER_BYTES + summary.header_bytes_per_step
    )
    assert summary.retransmitted_bytes_per_step == 0


def test_missing_counts_are_missing() -> None:
    _, stages = run()
    steps = measured(align(change(stages, 1, 5, counters=None)))
    assert traffic(steps).wire is None
    assert traffic(steps).header is not None
    steps = measured(align(change(stages, 2, 5, sockets=())))
    assert traffic(steps).header is None
    assert traffic(steps).retransmitted is None


def test_one_stage_sends_nothing_and_says_so() -> None:
    summary, _ = run(stages=1)
    assert summary.payload_bytes_per_step == summary.wire_bytes_per_step == summary.header_bytes_per_step == 0
    assert summary.compression_ratio is None


def test_a_run_without_records_has_no_numbers() -> None:
    summary = summarise(cell(), None, None, [[], [], []], status="failed", error="stage 1 died")
    stated = {"status", "error", "cell_id", "engine", "timing", "dilation", "steps", "measured_steps"}
    numbers = summary.model_dump(exclude=stated)
    assert set(numbers.values()) == {None}
    assert (summary.steps, summary.measured_steps, summary.error) == (0, 0, "stage 1 died")


def test_the_floors_that_are_known_are_noted_by_name() -> None:
    both = {"unigram": 6.6, "bigram": 4.7}
    for floors, named in ((Floors(**both), both), (Floors(6.6), {"unigram": 6.6}), (None, {})):
        summary = summarise(cell(), None, None, [[], [], []], status="failed", error="died", floors=floors)
        assert summary.floors == named


def test_a_step_that_not_every_stage_finished_is_left_out() -> None:
    _, stages = run()
    assert len(align([stages[0], stages[1][:-3], stages[2]])) == len(stages[0]) - 3


def test_a_run_that_went_on_without_a_node_is_summed_up_without_it() -> None:
    what, (whole, stages) = cell("int8", SLOW, stages=3), run()
    short = [stages[0], stages[1][:2], stages[2]]
    assert summed(what, short).steps == 2
    summary = summed(what, short, lost={"stage 1": "killed"})
    assert (summary.steps, summary.lost) == (whole.steps, {"stage 1": "killed"})
    assert "lost" not in whole.model_dump()


def test_records_of_different_steps_are_refused() -> None:
    _, stages = run()
    with pytest.raises(ResultsError, match="do not belong together"):
        align([stages[0], stages[1][1:], stages[2]])


def test_certificates_need_both_sides() -> None:
    what = cell()
    assert (
        summarise(what, None, RunCertificates(before=None, after=None), [[]], status="ok", error=None).certificate
        == "FAIL"
    )
    assert summed(what, [[]]).certificate is None


PACED = Paced(forward_ns=(2_000_000,), backward_ns=(4_000_000,), update_ns=5_000_000, source="stated")


@pytest.mark.parametrize("dilation", [2, 8])
def test_a_dilated_run_is_reported_as_if_it_were_not(dilation: int) -> None:
    """Everything takes `dilation` times as long in the lab, and the emulated world is the same."""
    found, spent, taken = [], [], []
    for factor in (1, dilation):
        what = cell("int8", SLOW, compute=PACED.model_copy(update={"dilation": factor}), training={"budget_s": 1000.0})
        stages = train(Pipeline(SLOW, paced=True, dilation=factor), what)
        found.append(summed(what, stages))
        spent.append(loss_curve(what, stages)[-1].seconds)
        taken.append(sum(run_steps(what, 1, stages).seconds))
    plain, dilated = found
    assert spent[1] == pytest.approx(spent[0], rel=0.01)
    assert taken[1] == pytest.approx(taken[0], rel=0.01)
    assert (plain.dilation, dilated.dilation) == (1, dilation)
    assert dilated.split.model_dump() == pytest.approx(plain.split.model_dump(), rel=0.01)
    assert 0 < plain.overrun_share < 0.2
    assert dilated.overrun_share == plain.overrun_share
    for name in (
        "duty",
        "step_s",
        "ideal_step_s",
        "efficiency",
        "tokens_per_s",
        "wall_s",
        "payload_bytes_per_step",
        "step_interval_s",
    ):
        assert getattr(dilated, name) == pytest.approx(getattr(plain, name), rel=0.01), name


def test_overruns_and_duty_are_those_of_the_measured_steps() -> None:
    """The warm-up's maths is always late, the others' never."""
    what = cell(compute=PACED)

    def done(record: StepRecord, action: ActionRecord) -> dict[str, int]:
        return {"maths_ns": (action.due_ns or 0) + (1 if record.warmup else -1)}

    stages = changed_actions(train(Pipeline(SLOW, paced=True), what), done)
    assert summed(what, stages).overrun_share == 0
    unpaced, _ = run()
    assert (unpaced.overrun_share, unpaced.duty) == (None, None)


def test_the_ideal_of_paced_stages_is_what_was_asked_for() -> None:
    """The time by which actions overrun belongs to the run, not to its ideal."""
    stages = train(Pipeline(SLOW, paced=True), cell(compute=PACED))
    late = changed_actions(
        stages,
        lambda record, action: {name: getattr(action, name) + 1_000_000 for name in ("computed_ns", "encoded_ns")},
    )

    def ideals(what: Cell) -> list[float | None]:
        return [summed(what, found).ideal_step_s for found in (stages, late)]

    asked, still_asked = ideals(cell(compute=PACED))
    assert still_asked == asked
    measured_s, longer_s = ideals(cell())
    assert measured_s == pytest.approx(asked)
    assert longer_s > measured_s + 8 * 0.001


def ended(steps: int = 8, status: str = "ok", **training) -> str | None:
    what = cell(training={"steps": 8, **training})
    done = what.model_copy(update={"training": what.training.model_copy(update={"steps": steps})})
    stages = train(Pipeline(SLOW), done)
    return summarise(what, None, None, stages, status=status, error=None).ended


def test_why_a_run_ended() -> None:
    assert ended() == "steps"
    assert ended(target_loss=0.1) == "steps"
    assert ended(steps=4, target_loss=100.0) == "target"
    assert ended(target_loss=100.0) == "target"
    assert ended(steps=5, budget_s=1.0) == "budget"
    assert ended(steps=5, budget_s=1.0, target_loss=0.1) == "budget"
    assert ended(status="failed") is None
    assert ended(steps=5, status="interrupted") is None


def test_accumulated_passes_are_one_step() -> None:
    """There are twice the frames, actions and codec calls, and one update."""
    found = []
    for times in (1, 2):
        pipeline = Pipeline(SLOW, accumulation=times)
        for step in range(4):
            pipeline.run(step, warmup=step < 1)
        found.append(summed(pipeline.cell, pipeline.records))
    once, twice = found
    assert twice.efficiency == pytest.approx(1, abs=0.02)
    assert twice.payload_bytes_per_step == 2 * (once.payload_bytes_per_step or 0)
    assert twice.split.codec_s == pytest.approx(2 * once.split.codec_s)
    assert twice.split.compute_s == pytest.approx(2 * once.split.compute_s - pipeline.update_ns / 1e9)
