"""The pages in a real browser, from disk: they sort, filter, link and say values, on wide and narrow screens."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.image import imread

from testbed import results
from testbed.report import page as page_of_report
from testbed.report.index import write_index
from testbed.report.page import write_report
from testbed.spec import Cell
from tests.browser import Browser, browsing
from tests.known import known
from tests.synthetic import Pipeline, cell, pipe, profile, record_sweep, write_run

pytestmark = pytest.mark.slow

TABLE = "document.querySelector('table.grown')"
ROWS = f"[...{TABLE}.tBodies[0].rows].filter((row) => !row.hidden).map((row) => [...row.cells].map((c) => c.innerText))"


@pytest.fixture(scope="module")
def page(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser") / "results"
    shutil.copytree(experiment, folder / "pretended")
    report = write_report(folder / "pretended", folder / "pretended" / "report.html", folder / "index.html")
    write_index(folder)
    return report


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        reason = "there is no chromium on PATH to look at the report with"
        if "chromium" in os.environ.get("TESTBED_REQUIRE", ""):
            pytest.fail(reason)
        pytest.skip(reason)
    with browsing(program, tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """Nothing may have been said by the end of a test."""
    chromium.said.clear()
    yield chromium
    assert chromium.said == []


def column(browser: Browser, at: int) -> list[str]:
    return [row[at].split("\n")[0] for row in browser.run(ROWS) if len(row) > at]


def cell_id(experiment: Path, codec: str, network: str) -> str:
    (cell_id,) = {path.parent.name for path in experiment.glob(f"{codec}-{network}-*/run-*")} & set(
        results.last_sweep(experiment).cells
    )
    return cell_id


def test_a_click_on_a_heading_sorts_and_says_so(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    as_written = column(browser, 2)
    orders = []
    for _ in range(3):
        browser.run(f"{TABLE}.tHead.rows[0].cells[2].querySelector('button').click()")
        said = browser.run(f"{TABLE}.tHead.rows[0].cells[2].getAttribute('aria-sort')")
        orders.append((said, [float(text) for text in column(browser, 2) if text[0].isdigit()]))
    assert [said for said, _ in orders] == ["ascending", "descending", "none"]
    assert orders[0][1] == sorted(orders[0][1])
    assert orders[1][1] == sorted(orders[1][1], reverse=True)
    assert column(browser, 2) == as_written
    # The run that failed has no number: it stands last either way, and is not lost.
    assert len(browser.run(ROWS)) == 12
    browser.run(f"{TABLE}.tHead.rows[0].cells[2].querySelector('button').click()")
    assert "stage 1" in " ".join(browser.run(ROWS)[-1])


def test_headings_are_reached_and_pressed_by_keyboard(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    browser.run(f"{TABLE}.tHead.rows[0].cells[1].querySelector('button').focus()")
    browser.press("Tab")
    assert browser.run("document.activeElement.closest('th').cellIndex") == 2
    browser.press("Enter")
    assert browser.run(f"{TABLE}.tHead.rows[0].cells[2].getAttribute('aria-sort')") == "ascending"


def test_filters_leave_what_was_asked_for_and_the_address_keeps_it(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    browser.run(
        "{ const s = document.querySelectorAll('.filters select')[0]; s.value = 'home';"
        " s.dispatchEvent(new Event('input')); }"
    )
    assert set(column(browser, 0)) == {"home"}
    browser.run(
        "{ const q = document.querySelector('.filters input'); q.value = 'INT8'; q.dispatchEvent(new Event('input')); }"
    )
    assert column(browser, 1) == ["int8", "delta-int8"]
    assert browser.run("document.querySelector('.filters output').textContent").startswith("2 of 12 rows")
    kept = browser.run("location.href")
    browser.open(kept)
    assert column(browser, 1) == ["int8", "delta-int8"]
    assert browser.run("document.querySelector('.filters input').value") == "INT8"


def test_a_cell_has_an_address_in_the_table_and_a_page(browser: Browser, page: Path) -> None:
    wanted = cell_id(page.parent, "int8", "home")
    browser.open(f"{page.as_uri()}#cell={wanted}")
    box = browser.run(
        f"(() => {{ const b = document.getElementById('cell={wanted}').getBoundingClientRect();"
        " return [b.top, b.bottom]; })()"
    )
    assert -1 < box[0] < box[1] <= 900
    assert browser.run("document.querySelector(':target').cells[1].innerText") == "int8"
    browser.run("document.querySelector(':target a').click()")
    browser.open((page.parent / "cells" / f"{wanted}.html").as_uri())
    assert browser.run("document.querySelector('h1').textContent") == "int8 over home"
    assert browser.run("document.querySelectorAll('svg.gantt[role=img] rect').length") > 40
    assert f"--cell {wanted} --again" in browser.run("document.querySelector('#again + pre').textContent")
    back = browser.run("document.querySelector('header a').href")
    assert back == f"{page.as_uri()}#cell={wanted}"


def test_a_mark_says_its_value_where_the_mouse_rests(browser: Browser, page: Path) -> None:
    for address, figure in ((page, "#step-time"), (next((page.parent / "cells").glob("int8-home*")), "#step + figure")):
        browser.open(address.as_uri())
        browser.run(f"document.querySelector('{figure}').scrollIntoView({{block: 'center'}})")
        x, y, title = browser.run(
            f"(() => {{ const m = document.querySelector('{figure} .wide .mark'), b = m.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2, m.querySelector('title').textContent]; })()"
        )
        browser.move(x, y)
        assert browser.run(f"document.querySelector('{figure} .value').textContent") == title
        assert " ms" in title


@pytest.mark.parametrize("dark", [False, True])
def test_pages_fit_a_telephone_and_both_schemes(browser: Browser, page: Path, tmp_path: Path, *, dark: bool) -> None:
    index = page.parent.parent / "index.html"
    for number, address in enumerate((page, index, *sorted((page.parent / "cells").glob("*.html"))[:2])):
        browser.open(address.as_uri(), width=390, dark=dark)
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), address
        picture = tmp_path / f"{number}.png"
        browser.picture(picture)
        corner = imread(picture)[2, 2, :3]
        assert (corner.mean() < 0.3) == dark
        ink = browser.run("getComputedStyle(document.body).color.match(/\\d+/g).slice(0, 3).map(Number)")
        assert abs(sum(ink) / 765 - corner.mean()) > 0.5, "text and paper are too alike"


def test_figures_show_their_colours(browser: Browser, page: Path, tmp_path: Path) -> None:
    browser.open(f"{page.as_uri()}#step-time")
    browser.picture(tmp_path / "figure.png")
    pixels = (255 * imread(tmp_path / "figure.png")[..., :3] + 0.5).astype(int).reshape(-1, 3)
    assert (0x00, 0x72, 0xB2) in {tuple(pixel) for pixel in pixels}, "no bar in bf16's colour"


def test_the_index_links_every_report(browser: Browser, page: Path) -> None:
    browser.open((page.parent.parent / "index.html").as_uri())
    assert browser.run("document.querySelector('tbody a').href") == page.as_uri()
    assert browser.run(ROWS)[0][2:7] == ["11", "12", "10", "4", "3"]
    browser.open(page.as_uri())
    assert browser.run("document.querySelector('header a').href") == (page.parent.parent / "index.html").as_uri()


def _many(folder: Path, networks: int) -> None:
    """Write runs of 8 codecs over so many links; those of one codec have the same records."""
    cells: list[Cell] = []
    for payload in range(8):
        made: results.Run | None = None
        codec = f"topk(0.{payload + 1})" if payload else "fp32"
        for number in range(networks):
            link = profile(f"link-{number}", pipe(1_000_000 * (10 + number), 0), pipe(80_000_000, 0))
            what: Cell = cell(codec, link, steps=4)
            if made is None:
                made = write_run(folder, what, Pipeline(link, payload_bytes=65_536 // (payload + 1)))
                summary = known(made.summary)
            else:
                run = results.new_run(folder, what)
                for path in made.folder.iterdir():
                    if path.name != "cell.json":
                        shutil.copy(path, run.folder)
                run.finish(summary.model_copy(update={"cell_id": what.id}))
            cells.append(what)
    record_sweep(folder, cells)


def test_five_hundred_cells_are_a_page_that_opens(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_of_report, "_MOST_NETWORKS", 2)  # in figures; the table has all
    monkeypatch.setattr(page_of_report, "_INSIDE", 0)
    folder = results.make_folder(tmp_path / "many")
    _many(folder, 63)
    report = write_report(folder, folder / "report.html")
    # What decides how long it takes to open; the time itself says how busy the machine is.
    assert report.stat().st_size < 2_500_000
    browser.open(report.as_uri())
    assert browser.run("document.querySelectorAll('*').length") < 30_000
    assert len(browser.run(ROWS)) == 504
    assert browser.run("document.querySelectorAll('figure img[loading=lazy]').length") > 0
    assert len(list((folder / "cells").glob("*.html"))) == 504
    browser.run(f"{TABLE}.tHead.rows[0].cells[2].querySelector('button').click()")
    steps = [float(text) for text in column(browser, 2)]
    assert steps == sorted(steps)
