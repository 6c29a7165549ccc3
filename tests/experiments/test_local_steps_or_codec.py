"""local_steps_or_codec: what is played is what was trained."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from testbed.errors import ResultsError
from testbed.report import publishing
from tests.commands import Command, module_beside

FOLDER = Command.shipped / "local_steps_or_codec"


def test_every_method_is_played_as_it_trains() -> None:
    variants = tomllib.loads((FOLDER / "cells.toml").read_text(encoding="utf8"))["grid"]["map"]["variants"]
    stated = {
        each["label"]["method"]: (each["exchange"], each.get("staleness", 0), each.get("local_iterations", 1))
        for each in variants
    }
    with module_beside(FOLDER, "methods") as module:
        rows = module.METHODS
    assert stated == {row.name: (row.exchange, row.method.staleness, row.method.local_steps) for row in rows}


def test_a_message_that_was_played_at_another_size_is_refused(tmp_path: Path) -> None:
    for path in FOLDER.glob("*.csv"):
        shutil.copy(path, tmp_path)
    cells = (tmp_path / "cells.csv").read_text(encoding="utf8")
    (tmp_path / "cells.csv").write_text(cells.replace(",16.0055,", ",8.0,"), encoding="utf8")
    with publishing.figures_program(FOLDER) as figures:
        figures.results(FOLDER)
        with pytest.raises(ResultsError, match="all-reduce bf16 was played with 8"):
            figures.results(tmp_path)
