"""Claims: the published statement, the value measured here, and the verdict; as an experiment's claims.csv and as
Markdown.
"""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, get_args

from pydantic import field_validator, model_validator

from testbed import paths
from testbed.errors import SpecError
from testbed.frozen import Frozen, read_toml, validated
from testbed.report.numbers import markdown_table

Verdict = Literal[
    "holds", "fails", "arithmetic reproduced", "arithmetic not reproduced", "not resolved", "not comparable"
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Grade = Literal["A", "B", "C", "D"]
GRADES: dict[Grade, str] = {
    "A": "measured, at the full scale that the claim is about",
    "B": "measured with a smaller model, at the stated part of that scale: which is better, not by how much",
    "C": "computed from bytes and schedules, without training",
    "D": "fitted to the table that it explains",
}
FILE = "claims.csv"
EXACT = "exact"
"""Interval of deterministic measurements on the virtual clock."""


class Claim(Frozen):
    """One claim and its verdict. All fields are single-line text."""

    claim: str
    """The claim, as a sentence that can be true or false."""
    source: str
    """Source of the claim: paper and table, or "ours"; marked "second-hand" if the source itself was not read."""
    published: str = ""
    """The published number with its unit; empty if there is none."""
    ours: str
    """The number measured here, with its unit."""
    interval: str = ""
    """"exact", or "a to b" with its confidence or seeds; empty only without a verdict."""
    scale: str = ""
    """The scale here, and of the source if it is larger."""
    grade: Grade
    """Strength of the evidence (`GRADES`)."""
    verdict: Verdict
    why: str
    """Reason of the verdict; for "not resolved", the smallest detectable effect, and the seeds and time that would
    resolve it, or why more seeds would not (`experiments.open_words`)."""
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
        if not self.interval and self.verdict not in {"not resolved", "not comparable"}:
            raise ValueError(f"the verdict {self.verdict!r} needs an interval: {EXACT!r}, or 'a to b'")
        return self


COLUMNS = tuple(Claim.model_fields)


_HEADINGS = ("claim", "source", "published", "ours", "scale", "grade", "verdict", "why")


def write_claims(path: Path, claims: Iterable[Claim]) -> None:
    """Write claims.csv. SpecError for a duplicate claim."""
    text = format_claims(claims)
    path.write_text(text, encoding="utf8", newline="")
    paths.give_to_user(path)


def read_claims(path: Path) -> list[Claim]:
    """Read claims.csv. SpecError if it cannot be read; names an invalid line."""
    try:
        with path.open(encoding="utf8", newline="") as file:
            return parse_claims(file.read(), str(path))
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8: {error}") from None


def format_claims(claims: Iterable[Claim]) -> str:
    """Return claims as CSV. SpecError for a duplicate claim."""
    rows = list(claims)
    _check_distinct(rows, FILE)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(row.model_dump().values() for row in rows)
    return out.getvalue()


def parse_claims(text: str, where: str) -> list[Claim]:
    """Parse a CSV of claims. SpecError, naming `where`, for other columns, an invalid row, or a duplicate claim."""
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
        claims.append(validated(Claim, dict(zip(COLUMNS, row, strict=True)), f"{where}, claim {number}"))
    _check_distinct(claims, where)
    return claims


def _check_distinct(claims: Sequence[Claim], where: str) -> None:
    seen = set[tuple[str, str]]()
    for claim in claims:
        key = claim.claim, claim.source
        if key in seen:
            raise SpecError(f"{where}: duplicate claim {claim.claim!r} of {claim.source}; remove one")
        seen.add(key)


def claims_table(claims: Sequence[Claim]) -> str:
    """Write claims as the Markdown table of an experiment's README."""
    rows = [
        [cell(text) for text in (c.claim, c.source, c.published, ours(c), c.scale, c.grade, c.verdict, c.why)]
        for c in claims
    ]
    return markdown_table(_HEADINGS, rows).rstrip("\n")


class Headline(Frozen):
    """A line of the front page: a claim of an experiment, and what follows from it."""

    experiment: str
    claim: str
    """How the claim begins."""
    says: str
    figure: str
    """File of the experiment that shows it."""


def claims_page(headlines: Iterable[Headline], folders: Iterable[Path], above: str) -> str:
    """Generate docs/claims.md: the headlines, and an index of all claims. `above` is the path to the experiments.

    SpecError for a headline that belongs to no claim, or to several.
    """
    every = {folder.name: read_claims(folder / FILE) for folder in folders}
    lines = []
    for head in headlines:
        there = [claim for claim in every.get(head.experiment, ()) if claim.claim.startswith(head.claim)]
        if len(there) != 1:
            raise SpecError(f"{head.experiment} has {len(there)} claims that begin with {head.claim!r}, instead of one")
        (c,), home = there, f"{above}/{head.experiment}"
        names = [f"[{head.says}]({home}/README.md)", c.published, ours(c), c.scale, c.grade, _judged(c)]
        lines.append([*map(cell, names), f"[picture]({home}/{head.figure})"])
    index = [
        [
            f"[{name}]({above}/{name}/README.md)",
            *(str(sum(c.grade == grade for c in made)) for grade in GRADES),
            ", ".join(
                f"{count} {verdict}" for verdict in VERDICTS if (count := sum(c.verdict == verdict for c in made))
            ),
        ]
        for name, made in every.items()
    ]
    return _PAGE.format(
        headlines=markdown_table(("finding", "published", "here", "scale", "grade", "verdict", "figure"), lines),
        index=markdown_table(("experiment", *GRADES, "verdicts"), index, right=tuple(GRADES)),
        grades="\n".join(f"- **{grade}**: {words}" for grade, words in GRADES.items()),
        count=sum(map(len, every.values())), experiments=len(every),
    )  # fmt: skip


_PAGE = """# Claims

<!-- Generated from headlines.toml and experiments/*/claims.csv by `python -m testbed docs` -->

The findings that a practitioner or a reviewer may act on, a line each. [findings.md](findings.md) tells them as a
story.

The grade says what the evidence is, not how good:

{grades}

A claim, published or our own, *holds* or *fails* if the whole interval is on one side of its bound; otherwise it is
*not resolved*. What fails is quoted, and the finding is its opposite. With grade C or D, *arithmetic* reproduces a
published number to 5 %, or does not: then the paper or our assumptions are incomplete, and arithmetic cannot say which.
"exact": a deterministic result of the virtual clock.

{headlines}
## Rules

No verdict is set by hand ([claim_rows.py](../testbed/report/claim_rows.py)). Intervals are of 95 %, or of 97.5 or
98.3 % if two or three looks at growing data share the error. A claim of a paper holds or fails only with grade A or B,
in its own measure and at a stated part of its scale; otherwise it is *not comparable*. "Second-hand" sources are quoted
by others, but were not read themselves.

## All {count} claims of {experiments} experiments

By grade and verdict. Each README lists its experiment's claims with sources and reasons;
`python -m testbed reproduce NAME` measures them again.

{index}"""


def _judged(claim: Claim) -> str:
    """Return the verdict, with the claim if it fails: the finding beside it then says the opposite."""
    whose = "our hypothesis: " * claim.source.startswith("ours")
    return f"**{claim.verdict}**" + f": {whose}{claim.claim}" * (claim.verdict == "fails")


def ours(claim: Claim) -> str:
    """Return the measured value with its interval."""
    return f"{claim.ours} ({claim.interval})" if claim.interval else claim.ours


def cell(text: str) -> str:
    """Format text as a cell of a Markdown table; empty text becomes a dash."""
    return text.replace("|", "\\|") or "\N{EN DASH}"


Evidence = tuple[str, Claim, float]
"""An experiment, its claim that a setting keeps the loss, and the millions of parameters of the trained model."""


def read_evidence() -> dict[str, Evidence]:
    """Return the evidence by setting: a codec, or `8 local steps`. SpecError if a claim is missing."""
    found, folders = dict[str, Evidence](), paths.experiment_folders()
    for setting, row in read_toml(Path(__file__).with_name("evidence.toml")).items():
        file = next((path for each in folders if (path := each / row["experiment"] / FILE).is_file()), Path(FILE))
        claims = [claim for claim in read_claims(file) if claim.claim.startswith(row["claim"])]
        if len(claims) != 1:
            raise SpecError(f"{file} has {len(claims)} claims that begin with {row['claim']!r}, instead of one")
        found[setting] = row["experiment"], claims[0], row["parameters"]
    return found


def proven_codecs() -> list[str]:
    """Return the codecs whose claim holds."""
    return [name for name, (_, its, _) in read_evidence().items() if its.verdict == "holds" and "steps" not in name]
