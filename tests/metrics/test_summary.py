from __future__ import annotations

import pytest
from synthetic import FRAME_HEADER, Pipeline, cell, pipe, profile, train

from testbed.errors import ResultsError
from testbed.metrics import align, loss_curve, measured, summarise, traffic, validation_curve
from testbed.records import RunCertificates, StepRecord, Summary

SLOW = profile("slow", pipe(40_000_000, 5_000_000), pipe(80_000_000, 5_000_000))
Stages = list[list[StepRecord]]


def run(link=SLOW, **shape) -> tuple[Summary, Stages]:
    what = cell("int8", link, stages=shape.get("stages", 3))
    stages = train(Pipeline(link, **shape), what)
    return summarise(what, None, None, stages, status="ok", error=None), stages


def change(stages: Stages, stage: int, index: int, **fields) -> Stages:
    copy = [list(records) for records in stages]
    copy[stage][index] = copy[stage][index].model_copy(update=fields)
    return copy


def test_step_times_add_up_to_the_wall_clock() -> None:
    _, stages = run(jitter=0.5)
    steps = align(stages)
    assert sum(step.seconds for step in steps) == pytest.approx((steps[-1].end_ns - steps[0].begin_ns) / 1e9)


@pytest.mark.parametrize("jitter", [0.0, 0.7])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_split_adds_up_to_the_step(stages: int, jitter: float) -> None:
    summary, _ = run(stages=stages, jitter=jitter)
    split = summary.split
    assert split is not None
    assert split.compute_s + split.codec_s + split.wire_s + split.wait_s == pytest.approx(summary.step_s)
    assert min(split.compute_s, split.codec_s, split.wire_s, split.wait_s) >= 0


def test_split_without_jitter_is_what_the_stages_did() -> None:
    """Every stage computes 4 x (F + B) and an update; end stages code 8 times, the middle one 16 times."""
    pipeline, what = Pipeline(SLOW), cell()
    what = what.model_copy(update={"training": what.training.model_copy(update={"evaluate_every": 0})})
    summary = summarise(what, None, None, train(pipeline, what), status="ok", error=None)
    assert summary.split is not None
    compute_ns = 4 * (pipeline.forward_ns + pipeline.backward_ns) + pipeline.update_ns
    assert summary.split.compute_s == pytest.approx(compute_ns / 1e9)
    assert summary.split.codec_s == pytest.approx((8 + 16 + 8) / 3 * pipeline.codec_ns / 1e9)


def test_nothing_is_on_the_wire_of_an_unshaped_link() -> None:
    summary, _ = run(profile("unshaped"))
    assert summary.split is not None
    assert summary.split.wire_s == 0
    assert summary.efficiency == pytest.approx(1, abs=0.01)


def test_ideal_meets_the_simulated_link_and_jitter_lowers_efficiency() -> None:
    assert run()[0].efficiency == pytest.approx(1, abs=0.02)
    jittered = run(jitter=1.0)[0].efficiency
    assert jittered is not None
    assert jittered < 0.99


def test_warmup_and_evaluations_do_not_count() -> None:
    summary, stages = run()
    assert (summary.steps, summary.measured_steps) == (8, 6)
    slow = [
        [record.model_copy(update={"end_ns": record.end_ns + 10**12}) if record.warmup else record for record in records]
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
    assert summary.wire_bytes_per_step is not None
    assert summary.header_bytes_per_step is not None
    assert summary.wire_bytes_per_step == pytest.approx(
        summary.payload_bytes_per_step + frames * FRAME_HEADER + summary.header_bytes_per_step
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
    numbers = summary.model_dump(exclude={"status", "error", "cell_id", "engine", "steps", "measured_steps"})
    assert set(numbers.values()) == {None}
    assert (summary.steps, summary.measured_steps, summary.error) == (0, 0, "stage 1 died")


def test_a_step_that_not_every_stage_finished_is_left_out() -> None:
    _, stages = run()
    assert len(align([stages[0], stages[1][:-3], stages[2]])) == len(stages[0]) - 3


def test_records_of_different_steps_are_refused() -> None:
    _, stages = run()
    with pytest.raises(ResultsError, match="do not belong together"):
        align([stages[0], stages[1][1:], stages[2]])


def test_certificates_need_both_sides() -> None:
    what = cell()
    assert summarise(what, None, RunCertificates(before=None, after=None), [[]], status="ok", error=None).certificate == "FAIL"
    assert summarise(what, None, None, [[]], status="ok", error=None).certificate is None


def test_curves_leave_out_the_time_of_evaluations() -> None:
    summary, stages = run()
    train_points, validation = loss_curve(stages), validation_curve(stages)
    steps = align(stages)
    assert [point.step for point in train_points] == list(range(8))
    assert [point.step for point in validation] == [4, 8]
    assert (
        train_points[-1].seconds == validation[-1].seconds == pytest.approx(sum(s.seconds for s in steps if s.phase == "train"))
    )
    assert summary.wall_s is not None
    assert summary.wall_s > train_points[-1].seconds
    assert validation[-1].loss == summary.validation_loss
    assert train_points[-1].loss == summary.train_loss
