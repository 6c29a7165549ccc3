"""Claims as rows: what a file says, the facts that fill it, and the one rule that decides."""

from __future__ import annotations

from math import nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import SpecError
from testbed.metrics.verdicts import judge
from testbed.report import claim_rows
from testbed.report.claim_rows import ClaimRow

_SAID = {"claim": "c", "ours": "o", "why": "w", "command": "x", "grade": "B"}
_NUMBERS = st.floats(-10, 10)
_OPPOSITE = {"holds": "fails", "fails": "holds", "not resolved": "not resolved"}


def row(**rule: Any) -> ClaimRow:
    return ClaimRow(**(_SAID | rule))


def made(tmp_path: Path, text: str, **numbers: Any) -> list[Any]:
    (tmp_path / "claims.toml").write_text(text, encoding="utf8")
    return claim_rows.claims({"__file__": str(tmp_path / "figures.py"), **numbers}, tmp_path)


@given(_NUMBERS, _NUMBERS, _NUMBERS)
def test_a_claim_holds_where_the_whole_interval_is_on_its_side(low: float, high: float, bound: float) -> None:
    low, high = sorted((low, high))
    facts = {"low": low, "high": high, "bound": bound}
    at_least, more_than = row(at_least=bound).decided(facts), row(more_than="bound").decided(facts)
    assert (at_least == "holds") is (low >= bound)
    assert (at_least == "fails") is (high < bound)
    assert row(less_than=bound).decided(facts) == _OPPOSITE[at_least]
    assert row(at_most=bound).decided(facts) == _OPPOSITE[more_than]
    assert row(at_least=bound).decided({"low": None, "high": None}) == "not resolved"
    assert {row(**{rule: bound}).decided({"low": nan, "high": nan}) for rule in claim_rows._RULES} == {"not resolved"}
    assert row(holds_if="met").decided({"met": nan}) == "not resolved"


@given(st.lists(_NUMBERS, min_size=1, max_size=5), _NUMBERS)
def test_a_judgement_is_decided_as_it_judges_itself(losses: list[float], bound: float) -> None:
    judged = judge("loss", dict(enumerate(losses)), dict.fromkeys(range(len(losses)), 0.0), bound)
    (facts,) = claim_rows.facts_of(row(number="f", at_most=bound), {"f": lambda folder: {"judgement": judged}}, Path())
    assert row(at_most=bound).decided(facts) == judged.verdict
    assert row(more_than=bound).decided(facts) == _OPPOSITE[judged.verdict or ""]
    assert facts["value"] == judged.value


@given(_NUMBERS, st.sampled_from("ABCD"), st.sampled_from(["", "1 of 8"]), st.sampled_from(["", "another loss"]))
def test_a_paper_s_claim_holds_only_in_its_own_measure_and_at_a_stated_scale(
    value: float, grade: str, scale: str, measure: str
) -> None:
    facts = {"low": value, "high": value}
    ours, theirs = (
        row(at_least=0, grade=grade, scale=scale, source=source).decided(facts, measure) for source in ("ours", "paper")
    )
    if measure or (grade == "B" and not scale):
        assert theirs == "not comparable"
        assert (ours == theirs) is bool(measure)
    elif grade in "CD":
        assert theirs == f"arithmetic {'' if value >= 0 else 'not '}reproduced"
        assert ours == ("holds" if value >= 0 else "fails")
    else:
        assert ours == theirs == ("holds" if value >= 0 else "fails")
    assert row(at_least=0, grade=grade, confounded="two causes").decided(facts) == "not resolved"


@given(st.floats(0.5, 2), st.floats(0.1, 100))
def test_one_tolerance_bounds_a_published_number_on_both_sides(ratio: float, published: float) -> None:
    facts = {"low": ratio * published, "high": ratio * published, "published": published}
    met = row(near="published", grade="C", source="a paper").decided(facts) == "arithmetic reproduced"
    assert met is (abs(ratio * published / published - 1) <= claim_rows.NEAR)
    assert row(near="published").decided({**facts, "low": 0.0, "high": published}) == "not resolved"
    around = {**facts, "low": published / 2, "high": published * 2}
    assert row(near="published").decided(around) == "not resolved", "wide, but not elsewhere"


ROWS = """
command = "make it"
grade = "B"
[[claim]]
claim = "{name} is {at:.1%} better"
number = "gain"
with = { at = 0.25 }
at_least = "at"
ours = "{value:.1%}"
why = "because"
[[claim]]
claim = "nobody measured it"
measure = "nothing"
ours = "nothing"
interval = ""
why = "because"
"""


def test_a_row_is_a_claim_for_each_of_its_facts(tmp_path: Path) -> None:
    def gain(folder: Path, at: float) -> list[dict[str, Any]]:
        assert folder == tmp_path
        return [{"name": "one", "value": at}, {"name": "two", "value": 0.1}]

    one, two, last = made(tmp_path, ROWS, gain=gain)
    assert (one.claim, one.ours, one.interval, one.verdict) == ("one is 25.0 % better", "25.0 %", "exact", "holds")
    assert (two.claim, two.ours, two.verdict, two.command) == ("two is 25.0 % better", "10.0 %", "fails", "make it")
    assert (last.source, last.interval, last.verdict) == ("ours", "", "not comparable")
    assert last.why == "here: nothing; because"
    assert made(tmp_path, ROWS, gain=lambda folder, at: None) == [last], "the folder lacks the arms"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (('at_least = "at"', ""), "is decided by nothing; state one of at_least"),
        (('at_least = "at"', "at_least = 1.0\nat_most = 1.0"), "at_least and at_most"),
        (("{value:.1%}", "{values}"), "claim 1.*'values'"),
        (('number = "gain"', 'number = "gains"'), "measured by 'gains', but figures.py has no such"),
        (("claim =", "claims ="), "there is no key 'claims'"),
    ],
)
def test_a_row_that_is_wrong_is_named(tmp_path: Path, changed: tuple[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        made(tmp_path, ROWS.replace(*changed, 1), gain=lambda folder, at: {"name": "one", "value": at})


def test_a_row_states_how_often_its_judgement_was_sought() -> None:
    arms = ({0: 1.0, 1: 1.1, 2: 1.3}, {0: 2.0, 1: 2.1, 2: 2.2})
    once, twice = (judge("loss", *arms, 0.0, looks=looks) for looks in (1, 2))
    assert twice.interval.high > once.interval.high
    asked = row(number="f", at_most=0.0, looks=2)
    (facts,) = claim_rows.facts_of(asked, {"f": lambda folder: {"judgement": twice}}, Path())
    assert facts["interval"].endswith("97.5 %, 2 looks, 3 seeds")
    with pytest.raises(SpecError, match="looks = 2, its judgement 1"):
        list(claim_rows.facts_of(asked, {"f": lambda folder: {"judgement": once}}, Path()))
