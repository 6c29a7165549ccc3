"""Claims as data: an experiment's claims.toml says what is claimed and what decides it, and this module decides.

    command = "python -m testbed predict m95_throughput"       # of every claim that names no other; source likewise

    [[claim]]
    claim = "{name} activations are {published:.1f} times as fast as dense ones"
    published = "{published:.1f}x"
    number = "masked"             # a function of figures.py, or of `predicted`: what was measured
    with = { bits = 2 }           # its arguments besides the folder
    more_than = "bar"             # the bound: a number, or the name of a fact
    ours = "{value:.1f}x with GPipe"
    why = "delay and schedule are not stated"

A number is a function `NAME(folder, **with)` that returns *facts* by name, or several of them (each becomes a claim),
or None where the CSVs of the folder lack the arms. Text may hold any fact in braces, as `str.format` has it:
{share:.1%}, {row.column}, {ends[0]}; a format that ends with % puts a space before it, and a literal brace is doubled.
These facts have a meaning here:

value, low, high   what was measured and the ends of its interval; without ends it is exact
interval           the interval in words; without it "exact", or what `judgement` says
judgement          a `Judgement`, which gives value, low, high and interval
Besides, every fact of a claim may be named as a bound, and by `holds_if`.

The rule is one: a claim *holds* where the whole interval is on its side of the bound, *fails* where the whole interval
is on the other side, and is *not resolved* otherwise, or where there is one seed, whose interval is not known.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from testbed.errors import SpecError
from testbed.frozen import Frozen, explain, read_toml
from testbed.metrics.verdicts import Judgement
from testbed.report import experiments, predicted
from testbed.report.claims import EXACT, Claim, Verdict

FILE = "claims.toml"
Facts = Mapping[str, Any]
_RULES: Mapping[str, Callable[[float, float], bool]] = {
    "at_least": lambda value, bound: value >= bound,
    "more_than": lambda value, bound: value > bound,
    "at_most": lambda value, bound: value <= bound,
    "less_than": lambda value, bound: value < bound,
}


class ClaimRow(Frozen):
    """A row of claims.toml: one claim, or one for each of a number's facts."""

    claim: str
    source: str = "ours"
    published: str = ""
    number: str = ""
    """Empty: nothing is measured for this claim, and all its text is here."""
    arguments: dict[str, Any] = Field(default={}, alias="with")
    ours: str
    interval: str = "{interval}"
    at_least: float | str | None = None
    more_than: float | str | None = None
    at_most: float | str | None = None
    less_than: float | str | None = None
    holds_if: str | None = None
    """A fact that is true or false, or None where nothing decides, instead of a bound."""
    verdict: Verdict | None = None
    """Stated, where no number decides: the conditions are too far from the published ones, or nothing varies."""
    otherwise: Verdict = "fails"
    """The verdict where the whole interval is on the bound's other side."""
    why: str
    command: str

    @model_validator(mode="after")
    def _one_rule(self) -> ClaimRow:
        rules = [name for name in (*_RULES, "holds_if", "verdict") if getattr(self, name) is not None]
        if len(rules) != 1:
            raise ValueError(
                f"claim {self.claim!r} is decided by {' and '.join(rules) or 'nothing'}; state one of "
                f"{', '.join(_RULES)}, holds_if and verdict"
            )
        return self

    def decided(self, facts: Facts) -> Verdict:
        """Apply the rule to the facts of one claim."""
        if self.verdict is not None:
            return self.verdict
        if self.holds_if is not None:
            met = facts[self.holds_if]
            return "not resolved" if met is None else "holds" if met else self.otherwise
        name, bound = next((name, bound) for name in _RULES if (bound := getattr(self, name)) is not None)
        ends = facts["low"], facts["high"]
        if None in ends:
            return "not resolved"
        sides = {bool(_RULES[name](end, facts[bound] if isinstance(bound, str) else bound)) for end in ends}
        return "not resolved" if len(sides) > 1 else "holds" if sides.pop() else self.otherwise


def claims(program: Mapping[str, Any], folder: Path) -> list[Claim]:
    """Return the claims that the CSVs of a folder have numbers for. `program`: the globals of the figures.py beside
    claims.toml.

    SpecError where the file has no such rows, or a row names what is not there.
    """
    path = Path(program["__file__"]).with_name(FILE)
    tables = read_toml(path)
    shared = {name: value for name, value in tables.items() if name != "claim"}
    made = []
    for number, table in enumerate(tables.get("claim", ()), 1):
        where = f"{path}, claim {number}"
        try:
            row = ClaimRow.model_validate(shared | table)
            made += [_claim(row, facts, where) for facts in facts_of(row, program, folder)]
        except ValidationError as error:
            raise explain(error, ClaimRow, where) from None
    return made


def facts_of(row: ClaimRow, program: Mapping[str, Any], folder: Path) -> Iterator[Facts]:
    """Yield the facts of each claim of a row, with those that have a meaning here. SpecError without such a number."""
    measure = program.get(row.number) or getattr(predicted, row.number, None)
    if row.number and measure is None:
        raise SpecError(f"the claim {row.claim!r} is measured by {row.number!r}, and figures.py has no such function")
    found = measure(folder, **row.arguments) if measure else {}
    for facts in () if found is None else [found] if isinstance(found, Mapping) else found:
        judgement: Judgement | None = facts.get("judgement")
        ends: tuple[float | None, float | None] = (None, None)
        if judgement is not None:
            ends = judgement.interval or ends
            facts = {"value": judgement.value, "interval": experiments.interval_words(judgement), **facts}
        elif "low" not in facts:
            ends = (facts.get("value"), facts.get("value"))
        low, high = ends
        yield {"low": low, "high": high, "interval": EXACT, **row.arguments, **facts}


class _Words(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        text: str = super().format_field(value, format_spec)
        return f"{text[:-1]} %" if format_spec.endswith("%") else text


def _claim(row: ClaimRow, facts: Facts, where: str) -> Claim:
    names = ("claim", "source", "published", "ours", "interval", "why")
    try:
        said = {name: _Words().vformat(getattr(row, name), (), facts) for name in names}
        return Claim(**said, verdict=row.decided(facts), command=row.command)
    except (KeyError, AttributeError, IndexError, TypeError) as error:
        raise SpecError(f"{where}, names a fact that is not there: {error!r}; there are {', '.join(facts)}") from error
