"""The arithmetic of codec_or_baseline: a step's time by bytes, rate, schedule and one fitted compute time.

tables.toml states the conditions of each published table, published.csv its numbers. The compute time is fitted on the
fastest row of a table; where the source does not state what the time on the wire depends on, a factor of it is fitted
on the slowest row, too.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import brentq, minimize

from testbed.frozen import Frozen, read_toml
from testbed.metrics.links import InboundWire, Pipes
from testbed.predict.data_parallel_shapes import DataParallelShape
from testbed.predict.shapes import Shape
from testbed.profiles import load_profile
from testbed.trace.simulate import ideal_steps_ns

HERE = Path(__file__).parent
_link = functools.cache(load_profile)
_HIDDEN = {"nothing": 0.0, "backward": 2 / 3, "all": 1.0}
"""Share of the compute time that can hide an exchange."""
_BEST = {"gpipe": "all", "1f1b": "all", "data": "backward", "context": "all"}


class Table(Frozen):
    """The conditions of a published table; tables.toml explains them."""

    name: str
    source: str
    read: Literal["read", "second-hand"]
    conditions: str
    bytes: str
    unit: Literal["tokens/s", "images/s", "s", "ms", "min"]
    work: float
    kind: Literal["gpipe", "1f1b", "data", "context"]
    stages: int = 1
    delay: str
    baseline: str
    bits: Literal[16, 32]
    overlap: Literal["nothing", "backward", "all"] | None = None
    wire: bool = False

    def assuming(self, overlap: str) -> "Table":
        """Return the table with an assumption about what hides the time of messages."""
        return self.model_copy(update={"overlap": overlap})

    def seconds(self, value: float) -> float:
        """Return the seconds of a step from a published number."""
        return self.work / value if self.unit.endswith("/s") else self.work * value


class Fit(NamedTuple):
    """What a table does not state."""

    compute: float
    """Seconds of a step, or, in a pipeline, of one token's forward pass through a stage."""
    wire: float
    """Factor of the time on the wire."""


@functools.cache
def tables() -> Mapping[str, Table]:
    """Return the conditions of all tables by name."""
    return {name: Table.model_validate(table) for name, table in read_toml(HERE / "tables.toml").items()}


def step_s(table: Table, row: Any, fit: Fit, bits: int = 0, *, better: bool = False) -> float:
    """Return the seconds of a step. `bits`: of its values instead of the baseline's; `better`: if as much is hidden as
    can be, and 1F1B has twice as many micro-batches in flight, over links that carry both directions at once.
    """
    share = fit.wire * (bits / table.bits if bits else 1)
    profile = _link(f"link({row.rate}, {table.delay})")
    overlap = _BEST[table.kind] if better else table.overlap or "nothing"
    if table.kind in ("data", "context"):
        hidden = _HIDDEN[overlap] * fit.compute
        exchange_s = 0.0
        if row.workers > 1:
            sizes = (max(1, round(row.forward_bytes * share)),) * 2
            shape = DataParallelShape(
                workers=int(row.workers),
                exchange=row.exchange,
                staleness=0,
                compute_ns=0,
                message_bytes=sizes,
                tokens=1,
            )
            exchange_s = shape.formula_s("star", [profile] * int(row.workers)) or math.nan
        return fit.compute - hidden + max(hidden, exchange_s)
    stages, forward_ns = table.stages, round(fit.compute * row["size"] * 1e9)
    pipeline = Shape(
        stages=stages, microbatches=int(row.microbatches), blocking=overlap == "nothing", schedule=table.kind,  # type: ignore[arg-type]
        in_flight=stages * (1 + better), forward_ns=(forward_ns,) * stages, backward_ns=(2 * forward_ns,) * stages,
        update_ns=(0,) * stages, encode_ns=(0, 0), decode_ns=(0, 0), tokens=1,
        message_bytes=(round(row.forward_bytes * share), round(row.backward_bytes * share)),
    )  # fmt: skip
    if table.kind == "gpipe":
        return pipeline.formula_s("line", [profile])
    assert profile.up is not None  # 1F1B waits for round trips, which the formula leaves out
    meter = InboundWire(profile.up.rate_bps, profile.up.delay_ns)
    wires = Pipes("line", [profile] * (stages - 1), stages, None) if better else meter
    return ideal_steps_ns(pipeline.trace(2), wires, 2)[-1] / 1e9


def fitted(table: Table, rows: Any) -> Fit:
    """Return the unknowns with which the rows of `_used` are met exactly.

    Compute is 0 if the wire alone explains more than the fastest row.
    """
    fastest, *slowest = (rows.loc[at] for at in _used(table, rows))

    def solved(row: Any, at: Any, high: float) -> float:
        def off(number: float) -> float:
            return step_s(table, row, at(number)) - table.seconds(row.value)

        return float(brentq(off, 0, high, xtol=1e-12, rtol=1e-6)) if off(0) < 0 else 0.0

    fit = Fit(0.0, 1.0)
    for _ in range(40 if table.wire else 1):
        fit = Fit(solved(fastest, lambda compute: Fit(compute, fit.wire), table.seconds(fastest.value)), fit.wire)  # noqa: B023
        if slowest:
            fit = Fit(fit.compute, solved(slowest[0], lambda wire: Fit(fit.compute, wire), 1e4))  # noqa: B023
    return fit


def least_squares(table: Table, rows: Any, start: Fit) -> Fit:
    """Return the unknowns with the least squares of the relative error over `rows`."""

    def fit(logs: Sequence[float]) -> Fit:
        return Fit(*np.exp(logs), *([] if table.wire else [1.0]))

    def error(logs: Sequence[float]) -> float:
        now = fit(logs)
        return sum(math.log(step_s(table, row, now) / table.seconds(row.value)) ** 2 for _, row in rows.iterrows())

    begin = np.log([max(start.compute, 1e-12), start.wire][: 2 if table.wire else 1])
    return fit(minimize(error, begin, method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-9}).x)


def computed() -> tuple[Any, Any]:
    """Return the predictions, a row per published number, and the shares, a row per headline.

    Unless a table states what hides messages, the assumption with the smaller error is taken.
    """
    predicted, shares = [], []
    for name, rows in published().groupby("table", sort=False):
        stated = tables()[str(name)]
        tried = [stated.assuming(overlap) for overlap in ("nothing", _BEST[stated.kind])]
        off = [_off(table, rows) for table in tried]
        table = stated if stated.overlap else tried[off.index(min(off))]
        other = next(each for each in tried if each.overlap != table.overlap)
        fit, used = fitted(table, rows), _used(table, rows)
        for at, row in rows.iterrows():
            left_out = least_squares(table, rows.drop(index=at), fit)
            predicted.append(
                {"table": name, "at": row["at"], "arm": row.arm, "fitted": at in used}
                | {"published_s": table.seconds(row.value), "predicted_s": step_s(table, row, fit)}
                | {"left_out_s": step_s(table, row, left_out)}
            )
        hides = {"overlap_chosen": table.overlap, "error_nothing": off[0], "error_hidden": off[1]}
        hides["codec_otherwise"] = headline(other, rows, fitted(other, rows))["codec"]
        shares.append({"table": name, **headline(table, rows, fit), **hides})
    return pd.DataFrame(predicted), pd.DataFrame(shares)


def published() -> Any:
    """Return the published numbers."""
    return pd.read_csv(HERE / "published.csv")


def _used(table: Table, rows: Any) -> list[Any]:
    """Return the indices of the rows on which a table is fitted: the fastest, and the slowest if the wire is, too."""
    times = rows.value.map(table.seconds)
    return [times.idxmin(), times.idxmax()][: 1 + table.wire]


def _off(table: Table, rows: Any) -> float:
    """Return the median relative error of the rows that are not fitted."""
    fit, rest = fitted(table, rows), rows.drop(index=_used(table, rows))
    return float(rest.apply(lambda row: abs(step_s(table, row, fit) / table.seconds(row.value) - 1), axis=1).median())


def headline(table: Table, rows: Any, fit: Fit) -> dict[str, Any]:
    """Return the largest published speed-up of a table over its baseline in the same conditions, and its factors, whose
    product is the speed-up.
    """
    base = rows[rows.arm == table.baseline].set_index("at")
    if (both := rows[(rows.arm != table.baseline) & rows["at"].isin(base.index)]).empty:
        raise ValueError(f"{table.name}: no row has the conditions of one of the baseline")
    speed_ups = both.apply(lambda row: table.seconds(base.value[row["at"]]) / table.seconds(row.value), axis=1)
    row = both.loc[speed_ups.idxmax()]
    ours, theirs = row, base.loc[row["at"]]
    plain, coded = step_s(table, theirs, fit), step_s(table, ours, fit)
    narrow, good = (step_s(table, theirs, fit, 16, better=better) for better in (False, True))
    factors = {"format": plain / narrow, "overlap": narrow / good, "codec": good / coded}
    off = {"baseline_off": table.seconds(theirs.value) / plain, "codec_off": coded / table.seconds(ours.value)}
    where = {"at": row["at"], "arm": row.arm, "published": speed_ups.max()}
    rest = {"unexplained": math.prod(off.values()), **off, "compute": fit.compute, "wire": fit.wire}
    return {**where, **factors, **rest}
