"""What a calibration is asked, what it answers, and how samples are taken and become durations. No torch."""

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
"""Of a duration, before they are judged."""
_STEPS = 1_000_000
"""More than any calibration makes."""


class TimedRecipe(Frozen):
    """One recipe to be timed: the `timed` form of those that were asked for."""

    name: str
    recipe: Recipe
    vocabulary: int
    tokens: str
    """Path of the prepared text."""
    maths: str
    """Subjects with the same name here do the same maths, unless their codecs change the model."""
    maths_known: bool
    """Whether that maths was timed before, and only the codecs are asked for."""


class CalibrationJob(Frozen):
    """What the program `pipeline.calibrate` is told."""

    groups: tuple[tuple[TimedRecipe, ...], ...]
    """Those of a group are timed in turns; groups one after another, where memory does not hold all."""
    budget_s: float
    processor: int | None
    """Where to run; None: anywhere."""


Maths = tuple[StageMaths, ...] | tuple[WorkerMaths, ...]
"""By stage, or by worker."""


class Timed(Frozen):
    """What was found of one subject."""

    name: str
    maths: tuple[StageMaths, ...] | None
    """Its own, where its codecs change the model."""
    codecs: tuple[CodecCosts, ...] | tuple[MessageCosts, ...] | tuple[PlaceCosts, ...]
    """What codecs do, by stage or by sender; of a job of a table `job`, all that its places do."""


class CalibrationDone(Frozen):
    """A program's answer."""

    subjects: tuple[Timed, ...]
    maths: dict[str, Maths]
    """What subjects share, by its name; what was known is left out."""
    seconds: float
    rounds: int


class TimedNode:
    """A node with a stopwatch: it counts the time for which the thread has the processor."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.samples: dict[tuple[str, str], list[int]] = defaultdict(list)
        """In ns, by what was done (work, encode, decode), and of what."""
        self.rest_s = 0.0
        """How long it sleeps before it decodes."""

    def work(self, what: str, key: Key, value: Any) -> Any:
        """Compute, and note how long it took."""
        return self._watch("work", what, lambda: self._node.work(what, key, value))

    def encode(self, key: Key, value: Any) -> Encoded:
        """Encode, and note how long it took."""
        encoded: Encoded = self._watch("encode", key.what, lambda: self._node.encode(key, value))
        return encoded

    def decode(self, messages: Sequence[Message]) -> Sequence[Any]:
        """Decode, and note how long it took."""
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
    """Return the recipe that is timed for this one: without what decides no duration.

    One action takes as long under every schedule, learning rate and seed; few steps are made, so what codecs see are
    tensors from the beginning of training, and the learning rate is one that cannot diverge.
    """
    asked = recipe.pipeline
    microbatches = asked.microbatches * asked.accumulation
    order = {"microbatches": microbatches, "accumulation": 1, "schedule": "1f1b", "in_flight": asked.stages}
    pipeline = asked.model_copy(update=order)
    plain = recipe.optimiser.algorithm == "sgd"
    optimiser = OptimiserSpec(
        algorithm=recipe.optimiser.algorithm,
        learning_rate=1e-4,
        weight_decay=0.01 if recipe.optimiser.weight_decay else 0.0,  # without it AdamW leaves an operation out
        beta1=0.0 if plain and not recipe.optimiser.beta1 else 0.9,
        beta2=0.0 if plain else 0.999,
        clip_norm=1.0,
        frozen_after=None if recipe.optimiser.frozen_after is None else 1,
    )
    training = TrainingSpec(steps=_STEPS, warmup_steps=0, seed=0, evaluate_every=0)
    changes: dict[str, object] = {"pipeline": pipeline, "optimiser": optimiser, "training": training}
    if recipe.data is not None:
        # One local step is as long as another, however far workers are ahead.
        changes["data"] = recipe.data.model_copy(update={"staleness": (0,), "local_steps": (1,)})
    return recipe.model_copy(update=changes)


def duration(samples: Sequence[int], *, per_step: int, step_ns: int) -> Duration:
    """Return the median of the fastest half of some samples, in ns, and how far that half lies apart.

    It happens `per_step` times in a step of `step_ns`.
    """
    half = sorted(samples)[: -(-len(samples) // 2)]
    apart = half[-1] - half[0]
    return Duration(
        ns=round(median(half)),
        spread=apart / max(1, half[0]),
        samples=len(samples),
        spread_of_step=per_step * apart / max(1, step_ns),
    )


def is_steady(found: Duration) -> bool:
    """Say whether a duration needs no more samples."""
    return found.samples >= LEAST_SAMPLES and not found.noisy
