"""Make docs/reliability.md: python -m tests.reliability JUNIT.xml ...

The promises and their tests are in reliability.toml, the results in the JUnit files of runs (pytest --junitxml), and
what was fuzzed in fuzz/record.json. A test that is in several files counts as in the last one that did not skip it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tests.fuzz.engine import CORPUS, SLOWEST_S
from tests.fuzz.parsers import PARSERS
from tests.fuzz.record import read_record

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reliability.md"
_OPENING = """# Reliability

What testbed promises, the tests that hold it to that, and their last results. This page is made by
`python -m tests.reliability JUNIT.xml ...`, from `tests/reliability.toml` and the results of a run
(`TESTBED_PART=all make test ARGS=--junitxml=JUNIT.xml`).
"""
_FUZZED = f"""## Fuzzing

`python -m tests.fuzz PARSER --seconds N` feeds a parser changed valid files, and bytes and texts of any kind: drawn by
hypothesis, or, with `--guided`, by atheris, which keeps what reaches new lines of testbed. An input may be refused with
a documented error. Another error, over {SLOWEST_S:g} s of processor time, or more than 1 GiB of memory is a find, which
is mended and kept as a regression test (`tests/fuzz/corpus/`). Each further run adds other inputs to this table;
`make test` draws a hundred inputs of each parser.
"""


class Outcome(NamedTuple):
    """The result of one test case."""

    result: str
    """passed, failed or skipped."""
    day: str


def promises() -> list[tuple[str, list[str]]]:
    """Return what is promised, each with the paths of its tests."""
    table = tomllib.loads((ROOT / "tests/reliability.toml").read_text(encoding="utf8"))
    return [(each["says"], each["tests"]) for each in table["promise"]]


def collect(paths: Iterable[str]) -> list[str]:
    """Return the ids of all cases of these tests, as pytest collects them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *sorted(set(paths))]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if said.returncode != 0:
        sys.exit(f"pytest cannot collect these tests:\n{said.stdout}{said.stderr}")
    return [line for line in said.stdout.splitlines() if "::" in line]


def key_of(case: str) -> tuple[str, str]:
    """Return how a JUnit file names a case: its module, with dots, and the rest."""
    path, _, name = case.partition("::")
    return path.removesuffix(".py").replace("/", "."), name


def read_junit(paths: Sequence[Path]) -> dict[tuple[str, str], Outcome]:
    """Return the outcomes of the cases of some runs."""
    outcomes: dict[tuple[str, str], Outcome] = {}
    for path in paths:
        for suite in ElementTree.parse(path).iter("testsuite"):
            day = suite.get("timestamp", "")[:10]
            for case in suite.iter("testcase"):
                key = case.get("classname", ""), case.get("name", "")
                found = {child.tag for child in case}
                result = "failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"
                if result != "skipped" or key not in outcomes:
                    outcomes[key] = Outcome(result, day)
    return outcomes


def promise_rows(cases: Sequence[str], outcomes: Mapping[tuple[str, str], Outcome]) -> list[str]:
    """Return a row of the table for each promise: how many cases it has, and what became of them."""
    rows = []
    for says, paths in promises():
        own = [
            case for case in cases if any(case == path or case.startswith((f"{path}::", f"{path}[")) for path in paths)
        ]
        known = [outcomes.get(key_of(case), Outcome("not run", "")) for case in own]
        counts = Counter(outcome.result for outcome in known)
        told = ", ".join(
            f"{counts[result]} {result}" for result in ("passed", "failed", "skipped", "not run") if counts[result]
        )
        days = sorted({outcome.day for outcome in known if outcome.result in ("passed", "failed")})
        tests = ", ".join(f"[{Path(path).stem}](../{path.partition('::')[0]})" for path in paths)
        rows.append(f"| {says} | {tests} | {len(own)} | {told} | {days[-1] if days else ''} |")
    return rows


def fuzz_rows() -> list[str]:
    """Return a row of the table for each parser."""
    record, rows = read_record(), []
    for name, parser in PARSERS.items():
        done = record.get(name, {})
        kept = len(list((CORPUS / name).glob("*.bin")))
        minutes = " | ".join(f"{done.get(key, 0) / 60:.1f}" for key in ("cpu_s", "guided_s"))
        rows.append(
            f"| {name} | {parser.what} | {done.get('executions', 0):,} | {minutes} | {kept} | {done.get('last', '')} |"
        )
    return rows


def page(promised: Sequence[str]) -> str:
    """Return the text of the page."""
    lines = [
        *(_OPENING, "| promise | tests | cases | result | date |", "|---|---|---:|---|---|", *promised, ""),
        *(
            _FUZZED,
            "| parser | reads | inputs | CPU min, drawn | CPU min, guided | finds, mended | last |",
            "|---|---|---:|---:|---:|---:|---|",
        ),
        *(*fuzz_rows(), ""),
    ]
    return "\n".join(lines)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument(
        "junit", nargs="*", type=Path, help="without any, only the table of what was fuzzed is made anew"
    )
    if files := asked.parse_args().junit:
        cases = collect(path for _, paths in promises() for path in paths)
        promised = promise_rows(cases, read_junit(files))
    else:
        lines = PAGE.read_text(encoding="utf8").partition("\n## ")[0].splitlines()
        promised = [line for line in lines if line.startswith("| ")][1:]
    PAGE.write_text(page(promised), encoding="utf8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
