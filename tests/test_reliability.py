"""docs/reliability.md says what is promised, what a run gave, and what was fuzzed."""

from __future__ import annotations

from pathlib import Path

from tests import reliability
from tests.reliability import PAGE, ROOT, Outcome

JUNIT = """<testsuites><testsuite timestamp="{day}T10:00:00">
<testcase classname="tests.a.test_b" name="test_one[x]"/>
<testcase classname="tests.a.test_b" name="test_two">{second}</testcase>
</testsuite></testsuites>"""


def test_outcomes_of_several_runs_are_one(tmp_path: Path) -> None:
    first, second = tmp_path / "1.xml", tmp_path / "2.xml"
    first.write_text(JUNIT.format(day="2026-11-25", second='<failure message="no"/>'), encoding="utf8")
    second.write_text(JUNIT.format(day="2026-11-26", second='<skipped message="no root"/>'), encoding="utf8")
    key = reliability.key_of("tests/a/test_b.py::test_two")
    assert reliability.read_junit([first, second])[key] == Outcome("failed", "2026-11-25")
    assert reliability.read_junit([second, first])[key] == Outcome("failed", "2026-11-25")
    assert reliability.read_junit([second])[key] == Outcome("skipped", "2026-11-26")
    assert reliability.read_junit([first])["tests.a.test_b", "test_one[x]"] == Outcome("passed", "2026-11-25")


def test_a_failure_is_told_and_a_test_that_was_not_run_too() -> None:
    says, paths = reliability.promises()[0]
    cases = [f"{paths[0]}::test_{number}" for number in range(3)]
    outcomes = {
        reliability.key_of(cases[0]): Outcome("passed", "2026-11-25"),
        reliability.key_of(cases[1]): Outcome("failed", "2026-11-24"),
    }
    row = reliability.promise_rows(cases, outcomes)[0]
    assert row.startswith(f"| {says} |")
    assert "| 3 | 1 passed, 1 failed, 1 not run | 2026-11-25 |" in row


def test_every_promise_has_tests() -> None:
    for says, paths in reliability.promises():
        assert paths, says
        for path in paths:
            assert (ROOT / path.partition("::")[0]).is_file(), f"{says}: there is no {path}"


def test_the_page_is_of_these_promises_and_of_what_was_fuzzed() -> None:
    text = PAGE.read_text(encoding="utf8")
    for says, _ in reliability.promises():
        assert f"| {says} |" in text, "python -m tests.reliability makes the page anew"
    for row in reliability.fuzz_rows():
        assert row in text, "python -m tests.reliability makes the page anew"
