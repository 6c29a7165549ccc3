"""Files and words that are wrong in every way end in one message and exit status 2, not in "a bug in testbed"."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testbed.codecs import make
from testbed.codecs.catalogue import formula, placement
from testbed.codecs.contract import Context
from testbed.errors import SpecError, UserError, explained
from testbed.frozen import parse_toml, toml_text
from testbed.profiles import load_profile, rate_trace, trace_sources
from tests.commands import PLAYED_EXPERIMENT, run_testbed

LONG = "a" * 20_000
DIGITS = "9" * 5_000


def _refused(folder: Path, *words: str, message: str = "") -> None:
    done = run_testbed(*words, folder=folder, OMP_NUM_THREADS="1")
    said = done.stdout + done.stderr
    assert "bug in testbed" not in said
    assert "Traceback" not in said
    assert done.returncode == 2, said
    assert message in " ".join(done.stderr.split())


EXPERIMENTS = {
    "a date as steps": ("steps = 12", "steps = 2026-11-25", "is a date"),
    "a date as the question": ('"Are the laws kept?"', "2026-11-25", "is a date"),
    "a time on an axis": ('["fp32"]', "[07:32:00]", "is a date or a time"),
    "5,000 digits": ("[3]", f"[{DIGITS}]", "thousands of digits"),
    "100 digits": ("[3]", f"[{DIGITS[:100]}]", "64 bits"),
    "5,000 brackets": ('["fp32"]', "[" * 5_000 + "]" * 5_000, "levels deep"),
    "100 brackets": ('["fp32"]', "[" * 100 + "]" * 100, "levels deep"),
    "5,000 dots": ('topology = "star"', f"{'a.' * 5_000}a = 1", "levels deep"),
    "a NUL": ('"bundled"', r'"bund\u0000led"', "NUL"),
    "a NUL in a key": ('topology = "star"', r'"topo\u0000logy" = "star"', "NUL"),
    "a text of 20,000 characters": ('"bundled"', f'"{LONG}"', ""),
    "a model of 20,000 characters": ('"gpt2-nano"', f'"{LONG}"', ""),
    "a profile of 20,000 characters": ('"datacenter"', f'"{LONG}.toml"', ""),
    "a device of 20,000 characters": ('forward = "20ms", backward = "40ms"', f'device = "{LONG}.toml"', ""),
    "a codec of 20,000 characters": ('["fp32"]', f'["{LONG}"]', "20,000 characters"),
    "boundary 10^2999": ('["fp32"]', f'["{DIGITS[:3000]}: fp32"]', "are not a range"),
    "a duration of 5,000 digits": ('"20ms"', f'"{DIGITS}ms"', "is not a number with a unit"),
    "a duration of 10^20 s": ('"20ms"', '"100000000000000000000s"', "forward"),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_an_experiment_file(tmp_path: Path, change: tuple[str, str, str]) -> None:
    before, after, message = change
    text = PLAYED_EXPERIMENT.replace("{{", "{").replace("}}", "}")
    assert before in text
    (tmp_path / "sweep.toml").write_text(text.replace(before, after), encoding="utf8")
    _refused(tmp_path, "plan", "sweep.toml", message=message)


def test_an_experiment_file_without_end(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").symlink_to("/dev/zero")
    _refused(tmp_path, "plan", "sweep.toml", message="too large")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--set", "training.steps=2026-11-25"],
        ["plan", "--set", f"training.steps={DIGITS}"],
        ["plan", "--set", f"training.steps={'[' * 5_000}"],
        ["plan", "--set", f"{'a.' * 5_000}b=1"],
        ["plan", LONG],
        ["plan", f"{LONG}.toml"],
        ["profiles", LONG],
        ["profiles", f"{LONG}.toml"],
        ["profiles", "cable", "--set", "up.rate=2026-11-25"],
        ["profiles", f"link(80Mbit, 10ms{', mtu=1400' * 20_000})"],
        ["devices", f"{LONG}.toml"],
        ["codecs", "show", LONG],
        ["trace", "show", LONG],
        ["report", LONG],
        ["run", "--codec", f"{'ef(' * 9}fp32{')' * 9}"],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_a_command_line(tmp_path: Path, words: list[str]) -> None:
    _refused(tmp_path, *words)


@pytest.mark.parametrize("question", ["[/x]", "[bold]", ":warning:", "\\u001b[31mred"])
def test_a_question_is_printed_as_it_is(tmp_path: Path, question: str) -> None:
    (tmp_path / "sweep.toml").write_text(PLAYED_EXPERIMENT.replace("Are the laws kept?", question), encoding="utf8")
    done = run_testbed("plan", "sweep.toml", "--clock", "real", "--engine", "relay", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert question.replace("\\u001b", "\\x1b") in done.stdout


@pytest.mark.parametrize("times", ["0 1e308", "1e308 2", "-1e308 1e308", "0 1e300", "0 86400001"])
def test_times_of_a_csv_that_no_trace_can_have(tmp_path: Path, times: str) -> None:
    rows = "".join(f"{time},1\n" for time in times.split())
    (tmp_path / "rates.csv").write_text(f"t,r\n{rows}", encoding="utf8")
    flags = ["--time-column", "t", "--rate-column", "r", "--time-unit", "s", "--rate-unit", "Mbit/s", "-o", "x.trace"]
    _refused(tmp_path, "rate-trace", "convert", "rates.csv", *flags)


def test_a_trace_of_a_day_is_the_longest() -> None:
    assert rate_trace.trace_from_rates([(86_400_000, 12)])[-1] == 86_400_000
    with pytest.raises(SpecError, match="the limit is 24"):
        rate_trace.trace_from_rates([(86_400_000, 12), (1, 12)])
    with pytest.raises(SpecError, match="hours"):
        trace_sources.trace_from_csv(
            "t,r\n0,0\n1e300,0\n", "rates", time_column="t", rate_column="r", time_unit="us", rate_unit="bit/s"
        )


def test_codecs_inside_each_other_are_few_enough_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 of them took 8.7 s: a closed loop holds two of what it wraps, and a low-rank factor's formula asks twice."""

    def nested(outer: str, depth: int) -> str:
        return f"{outer * depth}topk(0.1){')' * depth}"

    evaluated = made = 0
    evaluate, build = formula.evaluate, make.build_codec

    def counted_evaluate(*arguments: Any) -> float:
        nonlocal evaluated
        evaluated += 1
        return evaluate(*arguments)

    def counted_build(*arguments: Any) -> Any:
        nonlocal made
        made += 1
        return build(*arguments)

    monkeypatch.setattr(formula, "evaluate", counted_evaluate)
    monkeypatch.setattr(make, "build_codec", counted_build)
    deepest = 7  # and topk inside
    for outer in ("ef(", "lowrank(inner=", "delta("):
        text = nested(outer, deepest)
        assert placement.parse_placement(text).over(2).nominal_bits > 0
        make.make(text, Context(0, 0, "forward"))
        with pytest.raises(SpecError, match="nested more than 8 deep"):
            placement.parse_placement(nested(outer, deepest + 1))
    assert evaluated < 5_000
    assert made < 1_000


def test_a_link_of_every_key_is_short_enough() -> None:
    both = [
        f"{way}.{change}" for way in ("up", "down") for change in ("buffer=50ms", "loss=0.1%", "seed=7", "jitter=1ms")
    ]
    assert load_profile(f"link(80Mbit, 10ms, {', '.join(both)}, mtu=1400)").mtu == 1400


@pytest.mark.parametrize("text", ["plain", "\x7f\x80\x9b31m\u202e", '\x1b[31m\n\t\\"'])
def test_a_toml_text_is_read_back_and_holds_no_control_character(text: str) -> None:
    written = toml_text(text)
    assert parse_toml(f"value = {written}") == {"value": text}
    assert written.isprintable()


# ---------------------------------------------------------------------- a full disk
def test_a_full_disk_is_said(tmp_path: Path) -> None:
    for name in ("made.trace", "rates"):
        (tmp_path / name).symlink_to("/dev/full")
    flags = ["--seed", "1", "--seconds", "600", "--mean-rate", "12Mbit", "-o", "made.trace"]
    _refused(tmp_path, "rate-trace", "generate", "cellular", *flags, message="No space left on device")


@pytest.mark.slow
def test_a_full_disk_while_figures_are_drawn(tmp_path: Path) -> None:
    program = tmp_path / "figures.py"
    program.write_text(
        "from matplotlib.figure import Figure\n"
        "from testbed.report import publishing\n"
        "def blocks(folder):\n    return {}\n"
        "def draw(folder):\n    figure = Figure()\n    figure.add_subplot().plot([1, 2])\n    return figure\n"
        "FIGURES = {'drawn': draw}\n"
        "publishing.run(globals())\n",
        encoding="utf8",
    )
    (tmp_path / "images").mkdir()
    for suffix in ("svg", "png"):
        (tmp_path / "images" / f"drawn.{suffix}").symlink_to("/dev/full")
        (tmp_path / f"drawn.{suffix}").symlink_to("/dev/full")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(program), "--output", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "No space left on device; free some space" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_the_system_says_is_explained_and_bugs_are_not() -> None:
    for number in (28, 122, 27, 30, 36):
        told = explained(OSError(number, os.strerror(number), "x" * 20_000))
        assert isinstance(told, UserError)
        assert len(str(told)) < 400
    assert explained(OSError(9, "Bad file descriptor")) is None
    assert explained(ValueError("a bug")) is None


@pytest.mark.root
@pytest.mark.slow
def test_a_sweep_on_a_full_disk_says_so_and_goes_on_later(tmp_path: Path) -> None:
    """A file system of 64 kB holds no training."""
    (tmp_path / "sweep.toml").write_text(PLAYED_EXPERIMENT, encoding="utf8")
    (tmp_path / "results").mkdir()
    words = "sweep sweep.toml --no-report --live-checks 0"
    script = 'mount -t tmpfs -o size=64k none results && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-m", "testbed", *words.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert "No space left on device" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "bug in testbed" not in done.stdout + done.stderr
