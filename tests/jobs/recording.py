"""An observer that keeps what it is told, links of which a function says how long messages take, and recipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testbed.jobs import loop
from testbed.jobs.kind import job_of_table
from testbed.spec import OptimiserSpec, PipelineSpec, Recipe, TrainingSpec
from tests.specs import text_spec


class Recording:
    """Keeps what ended: (node, lane, action, value, begin, end)."""

    def __init__(self) -> None:
        self.done: list[tuple[int, str, Any, Any, int, int]] = []

    def did(self, lane: loop.NodeLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        self.done.append((lane.node, lane.name, action, value, begin_ns, end_ns))

    def of(self, kind: type) -> list[tuple[int, str, Any, Any, int, int]]:
        return [each for each in self.done if isinstance(each[2], kind)]


class DelayedLinks(loop.NoLinks):
    """Every message takes as long, or as long as follows from its source, its target and its size."""

    def __init__(self, delay_ns: int | Callable[[int, int, int], int]) -> None:
        self.delay_ns = delay_ns if callable(delay_ns) else lambda source, target, size: delay_ns

    def carry(self, clock: loop.Clock, source: int, target: int, size: int, deliver: Any) -> None:
        clock.at(clock.now_ns + self.delay_ns(source, target, size), deliver)


def job_recipe(table: dict[str, Any], codec: str, *, model: str = "gpt2-nano", steps: int, **text: Any) -> Recipe:
    """The recipe of a job of a table `job`; `text` changes its workload."""
    return Recipe(
        codec=codec,
        workload=text_spec(model, **text),
        pipeline=PipelineSpec(stages=1, microbatches=1, schedule="gpipe", in_flight=1),
        job=job_of_table(table),
        optimiser=OptimiserSpec(learning_rate=3e-3, weight_decay=0.1, beta1=0.9, beta2=0.99, clip_norm=0.5),
        training=TrainingSpec(steps=steps, warmup_steps=0, seed=3, evaluate_every=0),
    )
