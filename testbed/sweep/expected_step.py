"""The step that certificates are judged by where no run has made one yet: the cell's schedule, and nothing computed.

Compute hides what a link does wrong, so no step with the same messages is moved by a larger share of itself. Paced
stages have their durations in the cell, and keep them.
"""

from __future__ import annotations

from testbed.metrics.bound import BoundedStep, stated_step
from testbed.pipeline.schedule import actions
from testbed.profiles import LinkProfile
from testbed.spec import Cell, Engine, Measured, OptimiserSpec, PipelineSpec, TrainingSpec, WorkloadSpec


def expected_step(cell: Cell, frame_bytes: int) -> BoundedStep:
    """Return a step of the cell with frames of this size."""
    return _stated(cell, "a step as the cell expects it", frame_bytes)


def reference_step(profile: LinkProfile, engine: Engine, message_bytes: int) -> BoundedStep:
    """Return what `testbed link` judges a link by: the default experiment's step in a star of three such links, with
    messages of this size.
    """
    cell = Cell(
        codec="fp32",
        profiles=(profile,),
        topology="star",
        engine=engine,
        compute=Measured(),
        workload=WorkloadSpec(
            family="gpt2",
            model="gpt2-mini",
            text="bundled",
            sequence_length=64,
            batch_size=16,
            validation_batches=1,
        ),
        pipeline=PipelineSpec(stages=3, microbatches=4, schedule="1f1b", in_flight=4),
        optimiser=OptimiserSpec(learning_rate=1e-3, weight_decay=0, beta1=0.9, beta2=0.999, clip_norm=1),
        training=TrainingSpec(steps=1, warmup_steps=0, seed=0, evaluate_every=0),
    )
    size = f"{message_bytes / 1024:.4g} KiB"
    said = f"3 stages in a star of such links, 4 micro-batches of {size} forward and backward, nothing computed"
    return _stated(cell, said, message_bytes, alike=True)


def _stated(cell: Cell, said: str, frame_bytes: int, *, alike: bool = False) -> BoundedStep:
    pipeline = cell.pipeline
    order = [
        actions(
            pipeline.schedule,
            stage=stage,
            stages=pipeline.stages,
            microbatches=pipeline.microbatches,
            in_flight=pipeline.in_flight,
            accumulation=pipeline.accumulation,
        )
        for stage in range(pipeline.stages)
    ]
    return stated_step(cell, order, said, frame_bytes=frame_bytes, alike=alike)
