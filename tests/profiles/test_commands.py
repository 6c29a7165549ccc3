"""`testbed profiles` and `testbed rate-trace`, as a user sees them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from testbed import profiles
from testbed.cli import make_app
from testbed.errors import SpecError, UserError
from testbed.profiles import rate_trace, trace_sources


def _run(*arguments: str) -> str:
    done = CliRunner().invoke(make_app(), arguments)
    if isinstance(done.exception, UserError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split()) if arguments[0] == "rate-trace" else done.output


def test_one_profile_is_shown_as_a_file_that_reads_back(tmp_path: Path) -> None:
    (tmp_path / "cable.toml").write_text(_run("profiles", "cable", "--set", "up.rate=40Mbit"), encoding="utf8")
    assert profiles.read_profile(tmp_path / "cable.toml") == profiles.load_profile("cable", ["up.rate=40Mbit"])


def test_set_without_a_name_says_what_to_write() -> None:
    with pytest.raises(UserError, match="name it: python -m testbed profiles NAME --set"):
        _run("profiles", "--set", "up.rate=40Mbit")


def test_a_generated_trace_is_written_and_told(tmp_path: Path) -> None:
    file = tmp_path / "a.trace"
    recipe = trace_sources.checked_recipe("here", kind="cellular", seed=5, seconds=20, mean_rate="6Mbit")
    told = _run(*recipe.command(str(file)).split()[3:])
    assert rate_trace.read_trace(file).times == recipe.make()
    assert f"a.trace: 20 s, {len(recipe.make()):,} packets of 1500 bytes, 6 Mbit/s on average; slowest second" in told
    assert _run("rate-trace", "show", str(file)) == told


def test_a_csv_file_is_converted(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("\ufefftime,down\n0,12\n1,36\n2,0\n", encoding="utf8")
    columns = ("--time-column", "time", "--rate-column", "down", "--time-unit", "s", "--rate-unit", "Mbit/s")
    told = _run("rate-trace", "convert", str(tmp_path / "log.csv"), *columns, "-o", str(tmp_path / "log.trace"))
    assert rate_trace.read_trace(tmp_path / "log.trace").times == rate_trace.trace_from_rates(
        [(1000, 12_000_000), (1000, 36_000_000)]
    )
    assert "2 s, 4,000 packets of 1500 bytes, 24 Mbit/s on average; slowest second 12 Mbit/s, fastest 36 Mbit/s" in told
    with pytest.raises(SpecError, match=r"cannot read nowhere\.csv: No such file"):
        _run("rate-trace", "convert", "nowhere.csv", *columns, "-o", str(tmp_path / "x"))


def test_what_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cannot read the trace .*none: No such file"):
        _run("rate-trace", "show", str(tmp_path / "none"))
    recipe = trace_sources.checked_recipe("here", kind="constant", seed=5, seconds=1, mean_rate="6Mbit")
    with pytest.raises(UserError, match=r"cannot write the trace to .*: No such file or directory"):
        _run(*recipe.command(str(tmp_path / "no" / "folder")).split()[3:])
