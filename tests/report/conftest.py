"""A made-up sweep: 4 codecs over 3 networks; one run failed, one is not certified, one was cut off and repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed import results
from testbed.report import page
from tests.synthetic import Pipeline, cell, pipe, profile, record_sweep, write_run

CODECS = {"fp32": (65_536, 0.0), "bf16": (32_768, 0.001), "int8": (16_640, 0.02), "delta-int8": (16_640, 0.01)}
LINKS = (
    profile("cable", pipe(20_000_000, 7_000_000), pipe(200_000_000, 7_000_000)),
    profile("home", pipe(80_000_000, 10_000_000), pipe(80_000_000, 10_000_000)),
    profile("unshaped"),
)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave figures out of reports, for tests that look at something else: a report's take five to ten seconds."""
    monkeypatch.setattr(page, "draw_figures", lambda *_, **__: [])


@pytest.fixture(scope="session")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = results.make_folder(tmp_path_factory.mktemp("results") / "pretended")
    cells = []
    for link in LINKS:
        for codec, (payload, error) in CODECS.items():
            what, key = cell(codec, link), (codec, link.name)
            pipeline = Pipeline(link, payload_bytes=payload, raw_bytes=65_536, jitter=0.2)
            if key == ("bf16", "home"):
                results.new_run(folder, what)
            failure = "stage 1: <the loss> is not finite" if key == ("delta-int8", "cable") else None
            verdict = "FAIL" if key == ("int8", "cable") else "PASS"
            write_run(folder, what, pipeline, error=error, verdict=verdict, failure=failure)
            cells.append(what)
    write_run(folder, cell("int8", LINKS[1], steps=5), Pipeline(LINKS[1]))  # of an earlier sweep
    return record_sweep(folder, cells)
