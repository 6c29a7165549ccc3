"""A calibration's request and response, and how samples are taken and become durations. No torch."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from testbed.frozen import Frozen
from testbed.jobs.actions import Encoded, Key, Message, Node
from testbed.records import CodecCosts, Duration, MessageCosts, PlaceCosts, StageMaths, WorkerMaths
from testbed.spec import OptimiserSpec, Recipe, TrainingSpec

LEAST_SAMPLES = 12
"""Minimum samples of a duration before it is judged."""
_KEPT_SAMPLES = 32
"""Maximum samples of a duration that a record keeps."""
_STEPS = 1_000_000
"""More steps than any calibration makes."""


class TimedRecipe(Frozen):
    """One recipe to time: the `timed` form of requested recipes."""

    name: str
    recipe: Recipe
    vocabulary: int
    tokens: str
    """Path of the prepared text."""
    maths: str
    """Subjects with the same value do the same maths, unless their codecs change the model."""
    maths_known: bool
    """Whether that maths was timed before, so that only codecs need timing."""


class CalibrationJob(Frozen):
    """Arguments of the program `training.calibrate`."""

    groups: tuple[tuple[TimedRecipe, ...], ...]
    """Recipes of a group are timed in turns; groups run one after another if memory cannot hold all."""
    budget_s: float
    processor: int | None
    """Processor to run on; None: any."""


Maths = tuple[StageMaths, ...] | tuple[WorkerMaths, ...]
"""Maths durations, by stage or by worker."""


class Timed(Frozen):
    """The durations of one subject."""

    name: str
    maths: tuple[StageMaths, ...] | None
    """Maths durations, where its codecs change the model."""
    codecs: tuple[CodecCosts, ...] | tuple[MessageCosts, ...] | tuple[PlaceCosts, ...]
    """Codec durations, by stage or by sender; for a job from a `job` table, all durations of its places."""


class CalibrationDone(Frozen):
    """A program's response."""

    subjects: tuple[Timed, ...]
    maths: dict[str, Maths]
    """Shared maths durations, by name, without those already known."""
    seconds: float
    rounds: int


class TimedNode:
    """A node with a stopwatch, which counts the thread's processor time."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.samples: dict[tuple[str, str], list[int]] = defaultdict(list)
        """Samples in ns, by action (work, encode, decode) and its subject."""
        self.rest_s = 0.0
        """Sleep before each decode, in seconds."""

    def work(self, what: str, key: Key, value: Any) -> Any:
        """Compute, and time it."""
        return self._watch("work", what, lambda: self._node.work(what, key, value))

    def encode(self, key: Key, value: Any) -> Encoded:
        """Encode, and time it."""
        encoded: Encoded = self._watch("encode", key.what, lambda: self._node.encode(key, value))
        return encoded

    def decode(self, messages: Sequence[Message]) -> Sequence[Any]:
        """Decode, and time it."""
        if self.rest_s:
            time.sleep(self.rest_s)
        values: Sequence[Any] = self._watch("decode", messages[0].key.what, lambda: self._node.decode(messages))
        return values

    def _watch(self, does: str, what: str, call: Callable[[], Any]) -> Any:
        began_ns = time.thread_time_ns()
        result = call()
        self.samples[does, what].append(time.thread_time_ns() - began_ns)
        return result


def timed(recipe: Recipe) -> Recipe:
    """Return the recipe to time in place of this one, without fields that affect no duration.

    Durations of actions are independent of schedule, learning rate and seed; only few steps are run, so codecs see
    tensors from the start of training, and the learning rate is one that cannot diverge.
    """
    asked = recipe.pipeline
    microbatches = asked.microbatches * asked.accumulation
    order = {"microbatches": microbatches, "accumulation": 1, "schedule": "1f1b", "in_flight": asked.stages}
    pipeline = asked.model_copy(update=order)
    plain = recipe.optimiser.algorithm == "sgd"
    optimiser = OptimiserSpec(
        algorithm=recipe.optimiser.algorithm,
        learning_rate=1e-4,
        weight_decay=0.01 if recipe.optimiser.weight_decay else 0.0,  # at 0 AdamW skips an operation
        beta1=0.0 if plain and not recipe.optimiser.beta1 else 0.9,
        beta2=0.0 if plain else 0.999,
        clip_norm=1.0,
        frozen_after=None if recipe.optimiser.frozen_after is None else 1,
    )
    training = TrainingSpec(steps=_STEPS, warmup_steps=0, seed=0, evaluate_every=0)
    changes: dict[str, object] = {"pipeline": pipeline, "optimiser": optimiser, "training": training}
    if recipe.data is not None:
        # The duration of a local step is independent of staleness.
        changes["data"] = recipe.data.model_copy(update={"staleness": (0,), "local_steps": (1,)})
    return recipe.model_copy(update=changes)


def duration(samples: Sequence[int], *, per_step: int, step_ns: int) -> Duration:
    """Return the median of the fastest half of some samples, in ns, and the spread of that half.

    It occurs `per_step` times in a step of `step_ns`.
    """
    ordered, kept = sorted(samples), min(len(samples), _KEPT_SAMPLES)
    half = ordered[: -(-len(samples) // 2)]
    apart = half[-1] - half[0]
    return Duration(
        ns=max(1, round(median(half))),
        spread=apart / max(1, half[0]),
        samples=len(samples),
        spread_of_step=per_step * apart / max(1, step_ns),
        quantiles_ns=tuple(ordered[(2 * rank + 1) * len(samples) // (2 * kept)] for rank in range(kept)),
    )


def is_steady(measured: Duration) -> bool:
    """Return whether a duration needs no more samples."""
    return measured.samples >= LEAST_SAMPLES and not measured.noisy
