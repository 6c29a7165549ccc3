"""Every experiment's README and claims.csv say what its CSVs say."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from testbed.commands import docs
from testbed.report import blocks, claims, experiments, publishing
from tests.commands import Command
from tests.handwritten import outside_blocks

_PROGRAMS = sorted(Command.shipped.glob("*/figures.py"))
_LINES, _COLUMNS = 4, 120
_NUMBER = re.compile(r"[~*`(]*[-+\N{MINUS SIGN}]?\d")
_MENDED_BY = "python -m testbed docs writes it again from the CSVs beside it"


@pytest.mark.slow
@pytest.mark.parametrize("program", _PROGRAMS, ids=lambda path: path.parent.name)
def test_a_readme_is_what_its_figures_program_makes_of_the_csvs(program: Path) -> None:
    stale = [str(path.relative_to(docs.ROOT)) for path, _ in docs.stale_in_experiment(program.parent)]
    assert stale == [], _MENDED_BY
    with publishing.figures_program(program.parent) as figures:
        made = publishing.blocks_of(vars(figures), program.parent)
    readme = program.parent / "README.md"
    assert blocks.read_blocks(readme).keys() == made.keys()
    tables = _tables_with_numbers(outside_blocks(readme.read_text(encoding="utf8"), readme.name))
    assert tables == [], "a table with numbers belongs into a generated block"


@pytest.mark.parametrize("readme", sorted(Command.shipped.glob("*/README.md")), ids=lambda path: path.parent.name)
def test_a_readme_answers_in_a_few_lines_before_its_picture(readme: Path) -> None:
    _, *lines = readme.read_text(encoding="utf8").split("\n")
    before = itertools.takewhile(lambda line: not line.startswith(("![", "**Question.**", "```", "## ")), lines)
    answer = [line for line in before if line and not line.startswith("<!--")]
    assert 1 <= len(answer) <= _LINES, "the rest of the numbers belongs into a table further down"
    assert max(map(len, answer)) <= _COLUMNS
    assert not re.findall(r"\b0\.\d+ times smaller", "\n".join(lines)), "nothing is less than once smaller"


@pytest.mark.parametrize("path", sorted(Command.shipped.glob("*/claims.csv")), ids=lambda path: path.parent.name)
def test_there_are_claims_and_one_that_is_open_says_what_would_resolve_it(path: Path) -> None:
    ways, made = (experiments.SEEDS_NEEDED, experiments.NO_SEEDS), claims.read_claims(path)
    assert made
    still = [claim for claim in made if claim.verdict == "not resolved"]
    silent = [claim.claim for claim in still if not any(way in claim.why for way in ways)]
    assert not silent, "say how many seeds and hours it takes (experiments.open_words), or NO_SEEDS and what is missing"


def _tables_with_numbers(page: str) -> list[str]:
    rows = [line for line in page.split("\n") if line.startswith("|")]
    return [row for row in rows if any(_NUMBER.match(cell.strip()) for cell in row.split("|"))]


def test_a_table_with_numbers_is_found() -> None:
    words = "| codec | loss |\n|---|---:|\n| `int8(group=64)` | see 2 below |\n"
    assert _tables_with_numbers(words) == []
    for cell in ("1.2", "~+0.3 %", "**3.9x**", "-1", "`4`"):
        assert len(_tables_with_numbers(f"{words}| fp32 | {cell} |\n")) == 1
