from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from matplotlib.image import imread

from testbed.report import write_report

QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--enable-logging=stderr", "--v=0", "--window-size=1200,4500",
)  # fmt: skip


@pytest.mark.slow
def test_the_page_renders_without_a_word_on_the_console(experiment: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        reason = "there is no chromium on PATH to render the report with"
        if "chromium" in os.environ.get("TESTBED_REQUIRE", ""):
            pytest.fail(reason)
        pytest.skip(reason)
    page, picture = write_report(experiment, tmp_path / "report.html"), tmp_path / "page.png"
    places = (f"--user-data-dir={tmp_path / 'browser'}", f"--screenshot={picture}", page.as_uri())
    done = subprocess.run([browser, *QUIET, *places], capture_output=True, text=True, timeout=120, check=True)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert said == []
    pixels = imread(picture)
    assert pixels.shape[:2] == (4500, 1200)
    for part in (pixels[:1500], pixels[1500:3000], pixels[3000:]):
        assert part[..., :3].std() > 0.02
    colours = {tuple(int(255 * v + 0.5) for v in pixel) for pixel in pixels[::3, ::3, :3].reshape(-1, 3)}
    assert (0x00, 0x72, 0xB2) in colours, "no bar in bf16's colour"
