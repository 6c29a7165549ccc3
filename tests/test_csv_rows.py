"""Tables of experiments' programs: what is appended is what would have been written at once, and nothing is lost."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed import csv_rows
from testbed.csv_rows import Table, read_records, read_rows, write_rows


class Row(NamedTuple):
    words: str
    count: int
    share: float


_rows = st.lists(
    st.builds(Row, st.text("a,\"' -", max_size=6), st.integers(), st.floats(allow_nan=False)), min_size=1, max_size=4
)


@given(first=_rows, then=_rows)
def test_appended_is_written_at_once(first: list[Row], then: list[Row]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        one, other = Path(folder, "one.csv"), Path(folder, "other.csv")
        Table(one, Row, say=False).add(first)
        Table(one, Row, say=False).add(then)
        write_rows(other, Row._fields, [*first, *then], digits=7)
        assert one.read_bytes() == other.read_bytes()
        assert [row[:2] for row in read_rows(one)] == [(row.words, str(row.count)) for row in (*first, *then)]
        assert [tuple(record.values()) for record in read_records(one)] == read_rows(one)


def test_a_row_is_known_by_its_key_before_and_after_it_is_read_back(tmp_path: Path) -> None:
    for _ in range(2):
        table = Table(tmp_path / "runs.csv", Row, "words", "count", digits=None)
        if ("one", 2) not in table:
            table.add([Row("one", 2, 0.1), Row("two", 2, math.nan)])
        assert table.find("two", 2) == {"words": "two", "count": "2", "share": "nan"}
        assert ("one", 3) not in table
        assert len(table.rows) == 2


def test_a_table_is_as_it_was_where_a_row_cannot_be_made(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    assert read_rows(path) == []
    write_rows(path, ["value"], [[0.1]])
    with pytest.raises(ZeroDivisionError):
        write_rows(path, ["value"], ([1 / value] for value in (1, 0)))
    assert read_rows(path) == [("0.1",)]


@pytest.mark.slow
def test_a_program_that_loads_torch_may_train_without_more_words(tmp_path: Path) -> None:
    """A sweep's children get one thread from it; a program that trains in its own process has to do so itself."""
    program = tmp_path / "program.py"
    program.write_text(
        "from testbed import csv_rows\n"
        "from testbed.training.kinds import set_up_torch\n"
        "csv_rows.run_program(lambda asked: set_up_torch(), 'does nothing', __file__)\n",
        encoding="utf8",
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = str(Path(csv_rows.__file__).parents[1])
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
