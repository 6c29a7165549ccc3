"""local_steps_or_codec: what is played is what was trained."""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from testbed.errors import ResultsError
from testbed.report import experiments
from tests.commands import Command

FOLDER = Command.shipped / "local_steps_or_codec"


def test_every_method_is_played_as_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from methods import METHODS

    monkeypatch.delitem(sys.modules, "methods")
    stated = {
        each["label"]["method"]: (
            each["exchange"],
            each.get("staleness", 0),
            each.get("local_iterations", 1),
        )
        for each in tomllib.loads((FOLDER / "cells.toml").read_text(encoding="utf8"))["grid"]["map"]["variants"]
    }
    assert stated == {row.name: (row.exchange, row.method.staleness, row.method.local_steps) for row in METHODS}


def test_a_message_that_was_played_at_another_size_is_refused(tmp_path: Path) -> None:
    for path in FOLDER.glob("*.csv"):
        shutil.copy(path, tmp_path)
    cells = (tmp_path / "cells.csv").read_text(encoding="utf8")
    (tmp_path / "cells.csv").write_text(cells.replace(",16.0055,", ",8.0,"), encoding="utf8")
    with experiments.figures_program(FOLDER) as figures:
        figures.results(FOLDER)
        with pytest.raises(ResultsError, match="all-reduce bf16 was played with 8"):
            figures.results(tmp_path)
