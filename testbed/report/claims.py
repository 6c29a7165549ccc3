"""Claims: what somebody published, what was measured here, and the verdict; as the claims.csv of an experiment and as
Markdown.
"""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, get_args

from pydantic import ValidationError, field_validator, model_validator

from testbed import paths
from testbed.errors import SpecError
from testbed.frozen import Frozen, explain
from testbed.report.numbers import markdown_table

Verdict = Literal["holds", "fails", "not resolved", "not comparable"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
FILE = "claims.csv"
EXACT = "exact"
"""The interval of what is measured on the virtual clock without chance."""


class Claim(Frozen):
    """One claim and what became of it. All fields are text in one line."""

    claim: str
    """What is claimed, as a sentence that can be true or false."""
    source: str
    """Who claims it and where: paper and table, or "ours". Where the source itself was not read: "second-hand"."""
    published: str = ""
    """The published number with its unit; empty where there is none."""
    ours: str
    """The number measured here, with its unit."""
    interval: str = ""
    """"exact", or "a to b" with the confidence or the seeds that it rests on; empty only without a verdict."""
    verdict: Verdict
    why: str
    """What decided it; for "not resolved" the smallest effect that would have shown, and how many seeds and how much
    time would resolve it, or why more seeds would not (`experiments.open_words`)."""
    command: str
    """The command that measures it again."""

    @field_validator("*", mode="after")
    @classmethod
    def _one_line(cls, value: str) -> str:
        if any(unicodedata.category(character) in {"Cc", "Zl", "Zp"} for character in value):
            raise ValueError(f"{value!r} is not one line of text")
        if value != value.strip():
            raise ValueError(f"{value!r} begins or ends with a space")
        return value

    @model_validator(mode="after")
    def _complete(self) -> Claim:
        for name in ("claim", "source", "ours", "why", "command"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty")
        if not self.interval and self.verdict in {"holds", "fails"}:
            raise ValueError(f"the verdict {self.verdict!r} needs an interval: {EXACT!r}, or 'a to b'")
        return self


COLUMNS = tuple(Claim.model_fields)


_HEADINGS = ("claim", "source", "published", "ours", "verdict", "why")


def write_claims(path: Path, claims: Iterable[Claim]) -> None:
    """Write claims.csv. SpecError where a claim stands twice."""
    text = format_claims(claims)
    path.write_text(text, encoding="utf8", newline="")
    paths.give_to_user(path)


def read_claims(path: Path) -> list[Claim]:
    """Read claims.csv. SpecError when it cannot be read, or names the line that is no claim."""
    try:
        with path.open(encoding="utf8", newline="") as file:
            return parse_claims(file.read(), str(path))
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8: {error}") from None


def format_claims(claims: Iterable[Claim]) -> str:
    """Return claims as CSV. SpecError where a claim stands twice."""
    rows = list(claims)
    _check_distinct(rows, FILE)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(row.model_dump().values() for row in rows)
    return out.getvalue()


def parse_claims(text: str, where: str) -> list[Claim]:
    """Return the claims in a CSV. SpecError for other columns, a row that is no claim, or a claim that stands twice;
    it names `where`.
    """
    try:
        head, *rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    except (csv.Error, ValueError) as error:
        raise SpecError(f"{where} is not a table of claims: {error}") from None
    if tuple(head) != COLUMNS:
        raise SpecError(f"{where} has the columns {', '.join(head)}; claims have {', '.join(COLUMNS)}")
    claims = []
    for number, row in enumerate(rows, 1):
        if len(row) != len(COLUMNS):
            raise SpecError(f"{where}, claim {number}: {len(row)} cells instead of {len(COLUMNS)}")
        try:
            claims.append(Claim.model_validate(dict(zip(COLUMNS, row, strict=True))))
        except ValidationError as error:
            raise explain(error, Claim, f"{where}, claim {number}") from None
    _check_distinct(claims, where)
    return claims


def _check_distinct(claims: Sequence[Claim], where: str) -> None:
    seen = set[tuple[str, str]]()
    for claim in claims:
        key = claim.claim, claim.source
        if key in seen:
            raise SpecError(f"{where}: the claim {claim.claim!r} of {claim.source} stands twice")
        seen.add(key)


def claims_table(claims: Sequence[Claim]) -> str:
    """Write claims as the Markdown table of an experiment's README."""
    rows = [[cell(text) for text in (c.claim, c.source, c.published, ours(c), c.verdict, c.why)] for c in claims]
    return markdown_table(_HEADINGS, rows).rstrip("\n")


def claims_page(folders: Iterable[Path], above: str) -> str:
    """Write docs/claims.md: the claims of all experiments that have some. `above` is the way to their folders."""
    parts, every = [], list[Claim]()
    for folder in folders:
        claims = read_claims(folder / FILE)
        rows = [
            [cell(text) for text in (c.claim, c.source, c.published, ours(c), f"**{c.verdict}**", c.why)]
            + [f"`{cell(c.command)}`"]
            for c in claims
        ]
        parts.append(
            f"## [{folder.name}]({above}/{folder.name}/README.md)\n\n{markdown_table((*_HEADINGS, 'command'), rows)}"
        )
        every += claims
    counts = ", ".join(f"{sum(c.verdict == verdict for c in every)} {words}" for verdict, words in _COUNTED.items())
    return _PAGE.format(count=len(every), experiments=len(parts), counts=counts) + "\n" + "\n".join(parts)


_COUNTED: dict[Verdict, str] = {
    "holds": "hold",
    "fails": "fail",
    "not resolved": "are not resolved",
    "not comparable": "are not comparable",
}
_PAGE = """# Claims

<!-- Generated from experiments/*/claims.csv by `python -m testbed docs` -->

{count} claims about codecs over slow links, their own authors' and ours, measured in {experiments} experiments:
{counts}.

A claim *holds* or *fails* where the whole 95 % interval is on one side of what it says; else it is *not resolved*, and
the reason says what would have shown, and how many seeds per arm, in how much time of one core, would find the effect
in question 4 times in 5; or why more seeds would not settle it. *Not comparable* is what was measured under conditions
too far from the published ones. "exact" is what the virtual clock gives on every run, without chance. A source that is
marked "second-hand" was quoted by others, and not read itself. `python -m testbed reproduce NAME` measures an
experiment's claims again, and prints what they come to then.
"""


def ours(claim: Claim) -> str:
    """Return what was measured, with its interval."""
    return f"{claim.ours} ({claim.interval})" if claim.interval else claim.ours


def cell(text: str) -> str:
    """Write text as a cell of a Markdown table; what is missing is a dash."""
    return text.replace("|", "\\|") or "\N{EN DASH}"
