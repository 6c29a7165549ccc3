"""A made-up sweep: two codecs over a shaped and an unshaped network, a failed run, and a cell of an earlier sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed import results
from tests.synthetic import Pipeline, cell, pipe, profile, record_sweep, write_run

HOME = profile("home", pipe(80_000_000, 10_000_000), pipe(80_000_000, 10_000_000))


@pytest.fixture(scope="session")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = results.make_folder(tmp_path_factory.mktemp("results") / "pretended")
    cells = []
    for link in (HOME, profile("unshaped")):
        for codec, payload in (("fp32", 131_072), ("int8", 32_768)):
            what = cell(codec, link)
            if (codec, link.name) == ("int8", "home"):
                write_run(folder, what, Pipeline(link, payload_bytes=payload), failure="stage 1, lost,\n its peer")
            write_run(folder, what, Pipeline(link, payload_bytes=payload, jitter=0.2))
            cells.append(what)
    write_run(folder, cell("bf16", HOME), Pipeline(HOME))  # of an earlier sweep
    return record_sweep(folder, cells)
