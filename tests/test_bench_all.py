"""`bench all` writes what it measured, `bench compare` compares two such files, and a damaged one is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from testbed.codecs.bench.measurements import CodecBenchmark, CodecCost
from testbed.commands import bench_all
from testbed.commands.bench_all import Benchmarks, ratio_words, read_benchmarks
from testbed.errors import SpecError, StageError
from testbed.process import run_program
from testbed.report.link_accuracy import VIRTUAL_HEADINGS
from testbed.results import write_json
from tests import forked

ROWS = {"plan default, s": (2.0, 4.0, 3.0), "--help, s": (1.0,)}
FILE = Benchmarks(format=1, machine={"cpu_model": "A", "cores": 2}, rows=ROWS)
VALUES = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=5)


def _bench(*arguments: object) -> Any:
    from testbed.cli import make_app

    return CliRunner().invoke(make_app("bench"), ["bench", *map(str, arguments)])


def _forked(folder: Path, *arguments: str) -> Any:
    return forked.run(["-m", "testbed", "bench", *arguments], env=dict(os.environ), cwd=folder)


def _written(path: Path, **changed: object) -> Path:
    path.write_text(json.dumps({**FILE.model_dump(), **changed}), encoding="utf8")
    return path


# ---------------------------------------------------------------------- comparing
@given(VALUES, VALUES)
def test_a_ratio_is_that_of_the_medians_and_lies_within_its_spread(first: list[float], second: list[float]) -> None:
    one, other, words = ratio_words(first, second)
    assert float(one) == pytest.approx(median(first), rel=1e-5)
    assert float(other) == pytest.approx(median(second), rel=1e-5)
    middle, low, high = (float(word.strip("()")) for word in words.split() if word != "to")
    assert low <= middle <= high
    assert middle == pytest.approx(median(second) / median(first), rel=1e-2, abs=1e-3)


def test_rows_of_one_file_and_other_machines_are_named(tmp_path: Path) -> None:
    first = _written(tmp_path / "first.json")
    other = {"machine": {"cpu_model": "B", "cores": 2}, "rows": {"plan default, s": [6.0, 6.3], "links: x, ms": [1.0]}}
    told = _bench("compare", first, _written(tmp_path / "second.json", **other))
    assert told.exit_code == 0
    lines = told.stdout.splitlines()
    assert lines[0] == "cpu_model: A in the first, B in the second"
    assert lines[1].split("  ")[0] == "what", "equal facts are not named"
    assert lines[2].split()[-6:] == ["3", "6.15", "2.050", "(1.500", "to", "3.150)"]
    assert [line.rpartition("  ")[2] for line in lines[3:]] == ["only in the first", "only in the second"]


# ---------------------------------------------------------------------- reading
def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_json(tmp_path / "file.json", FILE)
    assert read_benchmarks(tmp_path / "file.json") == FILE


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"format": 2}, "format Input should be 1"),
        ({"format": 2, "rows": [["plan", 1.0]]}, "format Input should be 1"),
        ({"rows": {"plan, s": []}}, "rows"),
        ({"rows": {"plan, s": [0.0]}}, "greater than 0"),
        ({"rows": {"plan, s": [float("nan")]}}, "rows"),
        ({"rows": {"plan, s": [float("inf")]}}, "finite"),
        ({"more": 1}, "more"),
    ],
)
def test_another_format_and_impossible_values_are_refused(changed: dict[str, Any], names: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=names) as error:
        read_benchmarks(_written(tmp_path / "file.json", **changed))
    assert str(tmp_path / "file.json") in str(error.value)
    assert "measure again" in str(error.value)


@pytest.mark.slow
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    content = bytearray(FILE.model_dump_json().encode())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at : data.draw(st.integers(at, len(content)))] = data.draw(st.binary(max_size=8))
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_bytes(content)
    told = _bench("compare", path, path)
    assert told.exit_code == 0 or (isinstance(told.exception, SpecError) and told.exception.exit_status == 2)
    assert told.exception is None or len(str(told.exception)) < 600, "the file is not quoted"


def test_a_damaged_file_and_a_missing_one_end_the_command_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_bytes(FILE.model_dump_json().encode()[:-9])
    for name in ("cut.json", "none.json"):
        told = _forked(tmp_path, "compare", name, name)
        assert told.returncode == 2
        assert f"cannot read {name} as a file of this version's bench all" in told.stderr


# ---------------------------------------------------------------------- measuring
COST = CodecCost(
    codec="int8", direction="forward", values=8, encode_s=0.25, decode_s=0.5, payload_bytes=9, bits_per_value=9.0,
    relative_error=0.01,
)  # fmt: skip


def test_every_repetition_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run(module: str, *arguments: str, cwd: Path, **options: Any) -> list[str]:
        """Write what a benchmark would; run a program that does nothing, which takes some time of a processor."""
        ran.append(arguments)
        if "clock" in arguments:
            row = ("80Mbit", "25ms", "up", "rtt", "64 bytes", "ms", "50.1", "50.125", "+0.05")
            (cwd / "clock").write_text("\n".join(map(",".join, (VIRTUAL_HEADINGS, row))), encoding="utf8")
        elif "codecs" in arguments:
            write_json(cwd / "codecs", CodecBenchmark(machine="", tensors="", results=(COST,), failed={}))
        lines = run_program("testbed.closing", cwd=cwd, **options)
        if "codecs" in arguments:
            raise StageError("a verdict of FAIL, which has its file all the same")
        return lines

    monkeypatch.setattr(bench_all, "run_program", run)
    told = _bench("all", "--quick", "--repeats", 2, "--json", tmp_path / "new" / "file.json")
    assert told.exit_code == 0, told.output
    found = read_benchmarks(tmp_path / "new" / "file.json")
    assert all(len(values) == 2 for values in found.rows.values())
    assert found.rows["codecs: int8, forward, s"] == (0.75, 0.75)
    assert found.rows["clock: 80Mbit, 25ms, up, rtt, 64 bytes, ms"] == (50.125, 50.125)
    assert len(ran) == 2 * bench_all._QUICK
    for command in bench_all._COMMANDS[: bench_all._QUICK]:
        assert min(found.rows[f"{command}, processor s"]) > 0
        assert min(found.rows[f"{command}, s"]) > 0.01
    assert {"cpu_model", "cores", "kernel", "load_average", "taken_at"} <= found.machine.keys()


@pytest.mark.slow
@pytest.mark.clock_kernel
def test_the_short_form(tmp_path: Path) -> None:
    told = _forked(tmp_path, "all", "--quick", "--json", "file.json")
    assert told.returncode == 0, told.stderr
    found = read_benchmarks(tmp_path / "file.json")
    assert {name.split()[0] for name in found.rows} >= {"--help,", "bench", "codecs:", "clock:"}
    told = _forked(tmp_path, "compare", "file.json", "file.json")
    assert told.stdout.count("1.000 (1.000 to 1.000)") == len(found.rows)
