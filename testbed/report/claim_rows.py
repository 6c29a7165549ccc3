"""Claims as data: an experiment's claims.toml states each claim and its criterion, and this module decides it.

    command = "python -m testbed predict m95_throughput"       # default of all claims; so may be any other key
    grade = "C"

    [[claim]]
    claim = "{name} activations are {published:.1f} times as fast as dense ones"
    published = "{published:.1f}x"
    number = "masked"             # a function of figures.py or `predicted` that returns the measured value
    with = { bits = 2 }           # its arguments in addition to the folder
    more_than = "bar"             # the bound: a number, or the name of a fact
    ours = "{value:.1f}x with GPipe"
    why = "delay and schedule are not stated"

A number is a function `NAME(folder, **with)` that returns *facts* by name, or several sets of them (one claim each), or
None if the folder's CSVs lack the arms. Text may contain facts in braces, as in `str.format`: {share:.1%},
{row.column}, {ends[0]}; a format that ends with % puts a space before it, and a literal brace is doubled. These facts
have a special meaning:

value, low, high   the measured value and the ends of its interval; without ends it is exact
interval           the interval as text; default: "exact", or the interval of `judgement`
loss               the loss at which a claim is judged: marked if it is near a floor of the text, or above one; `text`
                   names the part of the experiment in floors.csv
judgement          a `Judgement`, which supplies value, low, high and interval
Any fact can also serve as a bound, or for `holds_if`.

There is a single rule, and no row states its verdict. A claim is met if the whole interval is on its side of the bound,
unmet if the whole interval is on the other side, and *not resolved* otherwise, with a single seed, whose interval is
unknown, or if the row names what confounds it. A met claim *holds*, an unmet one *fails*; but a claim of a source
other than ours is judged

    with grade C or D         as arithmetic: *reproduced* or *not reproduced*
    with grade A or B         like ours, if it is measured in the source's own measure and, with grade B, at a stated
                              part of its scale; otherwise it is *not comparable*

`near` has one tolerance for every published number, in both directions. If seeds were added after a first look at the
data, the row states the number of `looks`, which share the interval's 5 %.
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
from testbed.report import experiments, floors, predicted
from testbed.report.claims import EXACT, Claim, Grade, Verdict

FILE = "claims.toml"
NEAR = 0.05
"""Relative distance up to which a number equals a published one: rows of one published table at one rate differ as
much."""
Facts = Mapping[str, Any]
_RULES: Mapping[str, Callable[[float, float], bool]] = {
    "at_least": lambda value, bound: value >= bound,
    "more_than": lambda value, bound: value > bound,
    "at_most": lambda value, bound: value <= bound,
    "less_than": lambda value, bound: value < bound,
    "near": lambda value, bound: abs(value - bound) <= NEAR * abs(bound),
}


class ClaimRow(Frozen):
    """A row of claims.toml: one claim, or one for each of a number's facts."""

    claim: str
    source: str = "ours"
    published: str = ""
    number: str = ""
    """Name of the number; empty: nothing is measured for this claim, and its text is complete."""
    arguments: dict[str, Any] = Field(default={}, alias="with")
    ours: str
    interval: str = "{interval}"
    at_least: float | str | None = None
    more_than: float | str | None = None
    at_most: float | str | None = None
    less_than: float | str | None = None
    near: float | str | None = None
    holds_if: str | None = None
    """Name of a fact that decides instead of a bound: true, false, or None if undecided."""
    grade: Grade
    scale: str = ""
    measure: str = ""
    """What is measured or assumed here in place of the claim's own measure or conditions: not comparable."""
    looks: int = 1
    """How often this verdict was sought at growing data; a judgement must have as many."""
    confounded: str = ""
    """What prevents a verdict whatever the interval says: not resolved."""
    why: str
    command: str

    @model_validator(mode="after")
    def _one_rule(self) -> ClaimRow:
        rules = [name for name in (*_RULES, "holds_if") if getattr(self, name) is not None]
        if len(rules) != 1 and (rules or not (self.measure or self.confounded)):
            raise ValueError(
                f"claim {self.claim!r} is decided by {' and '.join(rules) or 'nothing'}; state one of "
                f"{', '.join(_RULES)}, holds_if, measure and confounded"
            )
        return self

    def unlike(self, measure: str) -> str:
        """Return the text of `measure`, or what else makes a claim not comparable; empty if nothing does."""
        others = not self.source.startswith("ours")
        unknown = "a small model, and no known scale of the source's" if self.grade == "B" and not self.scale else ""
        return measure or (unknown if others else "")

    def decided(self, facts: Facts, measure: str = "") -> Verdict:
        """Apply the rule to the facts of one claim, and to the text of `measure` that they fill."""
        others = not self.source.startswith("ours")
        if self.unlike(measure):
            return "not comparable"
        if (met := None if self.confounded else self._met(facts)) is None:
            return "not resolved"
        if others and self.grade in ("C", "D"):
            return "arithmetic reproduced" if met else "arithmetic not reproduced"
        return "holds" if met else "fails"

    def _met(self, facts: Facts) -> bool | None:
        if self.holds_if is not None:
            met = facts[self.holds_if]
            return None if met is None or met != met else bool(met)  # a missing number is NaN
        name, bound = next((name, bound) for name in _RULES if (bound := getattr(self, name)) is not None)
        ends = facts["low"], facts["high"]
        if any(end is None or end != end for end in ends):
            return None
        limit = facts[bound] if isinstance(bound, str) else bound
        inside = [limit] if name == "near" and ends[0] < limit < ends[1] else []
        sides = {bool(_RULES[name](each, limit)) for each in (*ends, *inside)}
        return sides.pop() if len(sides) == 1 else None


def claims(program: Mapping[str, Any], folder: Path) -> list[Claim]:
    """Return the claims for which a folder's CSVs have numbers. `program`: the globals of the figures.py next to
    claims.toml.

    SpecError if the file has no valid rows, or a row names an unknown function or fact.
    """
    path = Path(program["__file__"]).with_name(FILE)
    tables = read_toml(path)
    shared = {name: value for name, value in tables.items() if name != "claim"}
    made = []
    for number, table in enumerate(tables.get("claim", ()), 1):
        where = f"{path}, claim {number}"
        try:
            row = ClaimRow.model_validate(shared | table)
            made += [_claim(row, facts, where, path.parent) for facts in facts_of(row, program, folder)]
        except ValidationError as error:
            raise explain(error, ClaimRow, where) from None
    return made


def facts_of(row: ClaimRow, program: Mapping[str, Any], folder: Path) -> Iterator[Facts]:
    """Yield the facts of each claim of a row, completed by the special ones. SpecError for an unknown number."""
    measure = program.get(row.number) or getattr(predicted, row.number, None)
    if row.number and measure is None:
        raise SpecError(f"the claim {row.claim!r} is measured by {row.number!r}, but figures.py has no such function")
    measured = measure(folder, **row.arguments) if measure else row.arguments
    for facts in () if measured is None else [measured] if isinstance(measured, Mapping) else measured:
        judgement: Judgement | None = facts.get("judgement")
        ends: tuple[float | None, float | None] = (None, None)
        if judgement is not None:
            if judgement.looks != row.looks and not judgement.exact:
                raise SpecError(f"the claim {row.claim!r} has looks = {row.looks}, its judgement {judgement.looks}")
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


def _claim(row: ClaimRow, facts: Facts, where: str, home: Path) -> Claim:
    names = ("claim", "source", "published", "ours", "interval", "scale", "why", "measure", "confounded")
    try:
        said = {name: _Words().vformat(getattr(row, name), (), facts) for name in names}
        verdict, unlike = row.decided(facts, said["measure"]), row.unlike(said.pop("measure"))
        before = [words for words in (unlike and f"here: {unlike}", said.pop("confounded")) if words]
        after = [floors.floor_mark(home, facts["loss"], facts.get("text", ""))] if facts.get("loss") else []
        said["why"] = "; ".join(filter(None, [*before, said["why"], *after]))
        return Claim(**said, grade=row.grade, verdict=verdict, command=row.command)
    except (KeyError, AttributeError, IndexError, TypeError) as error:
        raise SpecError(f"{where}, names an unknown fact: {error!r}; known: {', '.join(facts)}") from error
