"""Claims as rows: what a file says, the facts that fill it, and the one rule that decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import SpecError
from testbed.metrics.verdicts import judge
from testbed.report import claim_rows
from testbed.report.claim_rows import ClaimRow

_SAID = {"claim": "c", "ours": "o", "why": "w", "command": "x"}
_NUMBERS = st.floats(-10, 10)
_OPPOSITE = {"holds": "fails", "fails": "holds", "not resolved": "not resolved"}


def row(**rule: Any) -> ClaimRow:
    return ClaimRow(**_SAID, **rule)


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
    assert (row(at_least=bound, otherwise="not comparable").decided(facts) == "not comparable") is (high < bound)
    assert row(at_least=bound).decided({"low": None, "high": None}) == "not resolved"


@given(st.lists(_NUMBERS, min_size=1, max_size=5), _NUMBERS)
def test_a_judgement_is_decided_as_it_judges_itself(losses: list[float], bound: float) -> None:
    found = judge("loss", dict(enumerate(losses)), dict.fromkeys(range(len(losses)), 0.0), bound)
    (facts,) = claim_rows.facts_of(row(number="f", at_most=bound), {"f": lambda folder: {"judgement": found}}, Path())
    assert row(at_most=bound).decided(facts) == found.verdict
    assert row(more_than=bound).decided(facts) == _OPPOSITE[found.verdict or ""]
    assert facts["value"] == found.value


ROWS = """
command = "make it"
[[claim]]
claim = "{name} is {at:.1%} better"
number = "gain"
with = { at = 0.25 }
at_least = "at"
ours = "{value:.1%}"
why = "because"
[[claim]]
claim = "nobody measured it"
verdict = "not comparable"
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
    assert made(tmp_path, ROWS, gain=lambda folder, at: None) == [last], "the folder lacks the arms"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (('at_least = "at"', ""), "is decided by nothing; state one of at_least"),
        (('at_least = "at"', "at_least = 1.0\nat_most = 1.0"), "at_least and at_most"),
        (("{value:.1%}", "{values}"), "claim 1.*'values'"),
        (('number = "gain"', 'number = "gains"'), "measured by 'gains', and figures.py has no such"),
        (("claim =", "claims ="), "there is no key 'claims'"),
    ],
)
def test_a_row_that_is_wrong_is_named(tmp_path: Path, changed: tuple[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        made(tmp_path, ROWS.replace(*changed, 1), gain=lambda folder, at: {"name": "one", "value": at})
