"""Computes the comparisons of [compare] from the rows of seeds.csv, and formats them for a README.

Pure functions of data frames, so that each interval and verdict can be recomputed from an experiment's CSVs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas

from testbed.codecs.catalogue import placement
from testbed.frozen import flatten
from testbed.metrics.verdicts import MEASURES, Judgement, Measure, judge
from testbed.records import NEAR_FLOOR
from testbed.report import experiments
from testbed.results import CompareSpec

_MATHS = ("workload.", "pipeline.", "data.", "job.", "optimiser.", "training.")
"""Fields of a cell that determine its losses."""
_TIMES = ("topology", "engine", "timing", "clock", "codec_", "compute.", "played_steps", "fault", "tcp_rto")
"""Further fields that determine its times."""
_SEED, _CODEC = "training.seed", "codec"
_JUDGED = ("n", "paired", "rule", "detectable", "effect", "verdict", "words")
_COLUMN: Mapping[Measure, str] = {"loss": "validation_loss", "speed_up": "step_s", "time_to_loss": "target_s"}


def settings(columns: Iterable[str], measure: Measure | None = None) -> list[str]:
    """Return the columns that are fields of a cell, without codec, network and seed. `measure`: only the fields that
    determine it.
    """
    deciding = _MATHS if measure == "loss" else _MATHS + _TIMES
    return [name for name in columns if name.startswith(deciding) and name not in (_SEED, "compute.source")]


def compared(seeds: Any, asked: CompareSpec) -> Any:
    """Return a row for each comparison: every arm with each baseline by each measure with data, then the claims.

    Arms are compared with all else equal. Losses do not depend on the network, so each seed counts once over all
    networks; times are compared over the same network.
    """
    seeds = seeds.assign(codec=[placement.canonical_text(codec) for codec in seeds.codec])
    field = next(iter(seeds.tuned_field.fillna("")), "") if len(seeds) else ""
    chosen = seeds[~seeds.stated.astype(bool)]
    rows: list[dict[str, Any]] = []
    for measure in MEASURES:
        effect = getattr(asked, measure)
        keys = _keys(seeds, measure, field)
        for values, group in _groups(chosen, keys):
            arms = dict(iter(group.groupby(_CODEC, sort=False)))
            for baseline in map(placement.canonical_text, asked.baselines):
                for codec in arms if baseline in arms else ():
                    if codec != baseline:
                        judgement = _judged(measure, arms[codec], arms[baseline], effect, asked.looks)
                        rows += _row("", judgement, values, codec, baseline)
    for claim in asked.claims:
        sides = [dict(flatten(side)) for side in (claim.ours, claim.baseline)]
        measure = next(name for name in MEASURES if getattr(claim, name) is not None)
        ours, base = (_rows_of(seeds, side, field) for side in sides)
        named = {_column(name) for side in sides for name in side}
        keys = [name for name in _keys(seeds, measure, field) if name not in named]
        theirs = dict(_groups(base, keys))
        for values, group in _groups(ours, keys):
            if values in theirs:
                judgement = _judged(measure, group, theirs[values], getattr(claim, measure), asked.looks)
                rows += _row(claim.name, judgement, values, *map(_words, sides))
    return pandas.DataFrame(rows)


def _words(side: Mapping[str, Any]) -> str:
    return ", ".join(str(value) if name == _CODEC else f"{name}={value}" for name, value in side.items())


def _keys(seeds: Any, measure: Measure, field: str) -> list[str]:
    """Return the columns that must be equal in two arms to compare them."""
    deciding = [name for name in settings(seeds.columns, measure) if name != field]
    return deciding if measure == "loss" else ["profile", *deciding]


def _column(name: str) -> str:
    """Return the column of a condition's field."""
    return "seed" if name == _SEED else name


def _groups(frame: Any, keys: Sequence[str]) -> Iterator[tuple[tuple[tuple[str, Any], ...], Any]]:
    """Yield ((column, value), ...) and the rows with these values; a missing value is None."""
    if not keys:
        if len(frame):
            yield (), frame
        return
    for values, group in frame.groupby(list(keys), dropna=False, sort=False):
        yield (
            tuple((key, None if pandas.isna(value) else value) for key, value in zip(keys, values, strict=True)),
            group,
        )


def _rows_of(seeds: Any, condition: Mapping[str, Any], field: str) -> Any:
    """Return the rows that meet a condition; rows that state the tuned field only if the condition names it."""
    rows = seeds if field in condition else seeds[~seeds.stated.astype(bool)]
    for name, value in condition.items():
        wanted = value if isinstance(value, list) else [value]
        if name == _CODEC:
            wanted = [placement.canonical_text(codec) for codec in wanted]
        rows = rows[rows[_column(name)].isin(wanted)]
    return rows


def _judged(measure: Measure, ours: Any, base: Any, effect: float | None, looks: int) -> Judgement | None:
    """Compare two sets of rows; None if either lacks the number, or there is nothing to compare."""
    sides = []
    for rows in (ours, base):
        ordered = rows.sort_values(["seed", "run"])
        values = ordered[_COLUMN[measure]].astype(float)
        if measure == "time_to_loss" and values.isna().any():
            return None  # a mean of the runs that got there would be no time to expect
        if measure == "loss":
            first = ordered[values.notna()].drop_duplicates("seed")
            sides.append(dict(zip(first.seed, first[_COLUMN[measure]].astype(float), strict=True)))
        elif measure == "time_to_loss":  # runs of a seed are one training over other draws of the links
            means = values.groupby(ordered.seed).mean()
            sides.append(means[means > 0].to_dict())
        else:
            place = ordered.groupby("seed").cumcount()
            keys = zip(ordered.seed, place, strict=True)
            sides.append({key: value for key, value in zip(keys, values, strict=True) if value > 0})
    first_side, second = sides
    if not first_side or not second or (not first_side.keys() & second.keys() and min(map(len, sides)) < 2):
        return None
    exact = bool(ours.exact.astype(bool).all() and base.exact.astype(bool).all())
    return judge(measure, first_side, second, effect, exact=exact, looks=looks)


def _row(
    claim: str, judgement: Judgement | None, values: tuple[tuple[str, Any], ...], ours: str, baseline: str
) -> list[dict[str, Any]]:
    if judgement is None:
        return []
    low, high = judgement.interval if judgement.interval is not None else (None, None)
    return [
        {
            "claim": claim,
            "measure": judgement.measure,
            "ours": ours,
            "baseline": baseline,
            "profile": None,
            **dict(values),
            "value": judgement.value,
            "low": low,
            "high": high,
            "interval": judgement.interval_words,
            **{name: getattr(judgement, name) for name in _JUDGED},
            "seeds_needed": judgement.seeds,
        }
    ]


# ---------------------------------------------------------------------- for tables and blocks
def verdict_table(comparisons: Any, **where: Any) -> Any:
    """Return the columns of comparisons for a README; `where`: filter of rows, column = value."""
    rows = experiments.matching(comparisons, where)
    loss = rows.measure == "loss"
    numbers = [f"{v:+.4f}" if is_loss else f"{v:.2f}x" for v, is_loss in zip(rows.value, loss, strict=True)]
    columns = {
        "claim": rows.claim.fillna(""),
        "network": rows.profile.fillna(""),
        "arm": rows.ours,
        "baseline": rows.baseline,
        "measure": rows.measure.map({"loss": "loss", "speed_up": "step", "time_to_loss": "time to loss"}),
        "measured": numbers,
        "interval": rows.interval,
        "seeds": rows.n,
        "effect": rows.effect,
        "verdict": rows.words.fillna(""),
    }
    always = ("measured", "verdict")
    told = [name for name, column in columns.items() if name in always or len(set(map(str, column))) > 1]
    return pandas.DataFrame(columns)[told]


def floor_sentence(seeds: Any) -> str:
    """Return a sentence on the arms that ended within 0.1 nats of the unigram floor, or above; empty without floors."""
    known = seeds[seeds.unigram_floor.notna() & seeds.validation_loss.notna()]
    if known.empty:
        return ""
    floors = " or ".join(f"{floor:.2f}" for floor in sorted(known.unigram_floor.round(4).unique()))
    low = known[known.validation_loss > known.unigram_floor - NEAR_FLOOR]
    names = list(dict.fromkeys(low.codec))
    if not names:
        return f"Every run ended more than {NEAR_FLOOR:g} nats below the unigram floor, {floors}."
    return (
        f"Unigram floor: {floors} nats. Runs of {', '.join(names)} ended within {NEAR_FLOOR:g} of it or above, so they "
        "learned word frequencies and little else."
    )


def tuning_sentence(tuning: Any) -> str:
    """Return a sentence on the arms whose tuned value is unreliable, with reasons; empty if there are none."""
    if tuning.empty:
        return ""
    marked = tuning[tuning.mark.notna() & (tuning.mark != "")]
    arms = list(tuning.columns)[: list(tuning.columns).index("field")]
    said = [
        f"{', '.join(str(value) for value in rows.iloc[0][arms] if not pandas.isna(value))} ({rows.iloc[0].mark})"
        for _, rows in marked.groupby(arms, dropna=False, sort=False)
    ]
    return f"Marked {tuning.field.iloc[0]}: {'; '.join(said)}." if said else ""
