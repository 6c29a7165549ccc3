"""The layouts that are compared: what each computes, and with which workers."""

from typing import NamedTuple

from testbed.spec import OuterSpec
from testbed.studies.stacked_text import TextMethod

MEAN = OuterSpec(learning_rate=1.0, momentum=0.0, nesterov=False)
"""SparseLoCo's: go on from the mean."""
LOCAL_STEPS = 8
LATE = ", a step late"
INT4, INT2 = "int4(group=32)", "int2(group=32)"


class Layout(NamedTuple):
    """One way to train at a scenario's sites, or what such a way is compared with."""

    name: str
    """As cells.toml calls it, where it is played."""
    method: TextMethod
    first_rate: float
    """The middle of the learning rates that are tried first."""
    quick: bool = False
    """It is in the short form."""
    churned: str = ""
    """The layout whose sites come and go here."""


def _sparse(workers: int, batch_size: int = 4, **changes: object) -> TextMethod:
    method = TextMethod(
        "ef-decay(topk-chunk(0.0156), 0.95)",
        "values",
        local_steps=LOCAL_STEPS,
        outer=MEAN,
        workers=workers,
        batch_size=batch_size,
    )
    return method._replace(**changes)  # type: ignore[arg-type]


def _pipeline(codec: str) -> TextMethod:
    """One replica that reads what the others read together, and is cut everywhere."""
    return TextMethod("fp32", "values", workers=1, batch_size=16, split=(0,), boundary=codec)


def _hybrid(codec: str, *, split: tuple[int, ...] = (2, 3), quarter: bool = False) -> TextMethod:
    """Four replicas, the last two cut."""
    return _sparse(4, split=split, boundary=codec, batch_sizes=(4, 4, 1, 1) if quarter else ())


_LAYOUTS: tuple[Layout, ...] = (
    Layout("data parallel, 2 whole", _sparse(2), 0.016, quick=True),
    Layout("hybrid, a pipeline per site", _sparse(4), 0.016),
    Layout("pipeline of 16, bf16", _pipeline("bf16"), 0.008),
    Layout("hybrid, int2, quarter batches", _hybrid(INT2, quarter=True), 0.016),
    Layout("data parallel, 16 whole", _sparse(16, 1), 0.016, quick=True),
    Layout("pipeline of 10, int2", _pipeline(INT2), 0.008),
    Layout("hybrid, int2, full batches", _hybrid(INT2), 0.016),
    Layout("all cut, int2", _hybrid(INT2, split=(0, 1, 2, 3)), 0.016),
    Layout("hybrid, int4, quarter batches", _hybrid(INT4, quarter=True), 0.016, quick=True),
    Layout("hybrid, int4, full batches", _hybrid(INT4), 0.016),
    Layout("all cut, int4", _hybrid(INT4, split=(0, 1, 2, 3)), 0.016),
    Layout("pipeline of 10, int4", _pipeline(INT4), 0.008, quick=True),
    Layout(f"data parallel, 2 whole{LATE}", _sparse(2, staleness=1), 0.008),
    Layout(f"hybrid, a pipeline per site{LATE}", _sparse(4, staleness=1), 0.016),
    Layout(f"data parallel, 16 whole{LATE}", _sparse(16, 1, staleness=1), 0.016),
)
"""Within a site bf16 crosses from stage to stage, which "hybrid, a pipeline per site" takes for exact."""

CHURN = ", with churn"
CHURNED = ("data parallel, 2 whole", "hybrid, int4, quarter batches", "hybrid, int4, full batches")
"""Those of several replicas. A pipeline's losses are those without churn: it waits, and loses nothing."""
LAYOUTS: tuple[Layout, ...] = (
    *_LAYOUTS,
    *(each._replace(name=each.name + CHURN, churned=each.name) for each in _LAYOUTS if each.name in CHURNED),
)
