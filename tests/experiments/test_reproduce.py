"""`reproduce` runs an experiment's steps in order, keeps what is finished, and says what these results show."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import SpecError
from testbed.report.claims import Claim, read_claims, write_claims
from testbed.sweep import reproduction
from testbed.sweep.reproduction import load_reproduction
from tests.commands import PLAYED_EXPERIMENT, Command

STEPS = """
[[step]]
run = "count.py --output {output} --to 10"
quick = "count.py --output {output} --to 2"
takes = "90s"

[[step]]
run = "figures.py --results {results} --output {output}"
"""
COUNT = """
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--output", type=pathlib.Path)
parser.add_argument("--to", type=int)
asked = parser.parse_args()
with (asked.output / "counted.csv").open("a") as file:
    file.write(f"{asked.to}\\n")
"""
FIGURES = """
import pathlib, sys
from testbed.report import publishing
from testbed.report.claims import Claim
results, output = publishing.folders("counting", "counts")
counted = (output / "counted.csv").read_text().split()
if "13" in counted:
    sys.exit(int(counted[-1]))
row = Claim(
    claim="it counts beyond 5", source="ours", ours=counted[-1], interval="exact", grade="A",
    verdict="holds" if int(counted[-1]) > 5 else "fails", why=f"counted {len(counted)} times", command="-",
)
publishing.publish(output, {"counts": ", ".join(counted)}, [row])
"""


@pytest.fixture
def counting(command: Command) -> Path:
    """An experiment of two programs, with a claim that is committed as failed."""
    folder = command.folder / "experiments" / "counting"
    folder.mkdir(parents=True)
    for name, text in (("reproduce.toml", STEPS), ("count.py", COUNT), ("figures.py", FIGURES)):
        (folder / name).write_text(text, encoding="utf8")
    claim = Claim(
        claim="it counts beyond 5",
        source="ours",
        ours="3",
        interval="exact",
        grade="A",
        verdict="fails",
        why="-",
        command="-",
    )
    write_claims(folder / "claims.csv", [claim])
    return folder


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_verdicts_are_those_of_the_results_and_finished_programs_are_kept(command: Command, counting: Path) -> None:
    before = _files(counting)
    said = command.finish("reproduce", "counting")
    assert "holds (committed: fails): it counts beyond 5 [ours; here 10 (exact)]" in said
    assert "counted 1 times" in said
    assert max(map(len, said.splitlines())) < 500, "a line over an experiment is as long as a page, in a file too"
    said = command.finish("reproduce", "counting")
    assert "count.py: done before" in said
    assert "counted 1 times" in said
    assert "counted 2 times" in command.finish("reproduce", "counting", "--again")
    (counting / "count.py").write_text(COUNT + "\n# changed", encoding="utf8")
    assert "counted 3 times" in command.finish("reproduce", "counting")
    (counting / "count.py").write_text(COUNT, encoding="utf8")

    said = command.finish("reproduce", "counting", "--quick")  # a claim that fails is a result
    assert "fails: it counts beyond 5 [ours; here 2 (exact)]" in said
    assert "short form" in said
    drawn = [command.folder / "results" / Path(name, "drawn") for name in ("counting", "quick/counting")]
    assert [read_claims(folder / "claims.csv")[0].verdict for folder in drawn] == ["holds", "fails"]
    assert _files(counting) == before

    listed = command.finish("reproduce", "--list", "counting")
    (line,) = [line for line in listed.splitlines() if line.startswith("counting")]
    assert "1 fails" in line
    assert "1 holds" in line
    assert "count.py" in line, "it was changed back after it had run"
    command.finish("reproduce", "counting")
    listed = command.finish("reproduce", "--list", "counting")
    assert "nothing" in next(line for line in listed.splitlines() if line.startswith("counting"))


@pytest.mark.slow
def test_a_step_that_fails_ends_it_with_status_1_or_its_user_s_2(command: Command, counting: Path) -> None:
    drawn = command.folder / "results" / "counting" / "drawn"
    command.finish("reproduce", "counting")
    for status, ended in (("7", 1), ("2", 2)):
        (drawn / "counted.csv").write_text(f"13\n{status}\n", encoding="utf8")
        said = command.finish("reproduce", "counting", status=ended)
        assert "failed: a step of counting" in said
        assert not (drawn / "claims.csv").exists()  # no verdict is left of other results
    assert "did you mean 'counting'" in command.finish("reproduce", "countin", status=2)
    (counting / "reproduce.toml").write_text('[[step]]\nrun = "other.py"\n', encoding="utf8")
    assert "neither 'testbed' nor a .toml or .py" in command.finish("reproduce", "counting", status=2)


@pytest.mark.slow
def test_short_forms_run_side_by_side_and_are_told_in_order(command: Command, counting: Path) -> None:
    for name in ("adding", "dividing"):
        shutil.copytree(counting, counting.with_name(name))
    command.finish("reproduce", "adding", "--quick")
    said = command.finish("reproduce", "dividing", "counting", "adding", "--quick")
    rules = [line.split()[0] for line in said.splitlines() if "\u2500" in line]
    assert rules == ["adding", "counting", "dividing"]
    assert said.count("this was the short form") == 3
    assert said.count("count.py: done before") == 1, "what is finished is kept"
    (command.folder / "results" / "quick" / "counting" / "drawn" / "counted.csv").write_text("13\n2\n", encoding="utf8")
    said = command.finish("reproduce", "counting", "adding", "--quick", status=2)
    assert "failed: a step of counting; the same command resumes there" in said
    assert said.count("this was the short form") == 1


@pytest.mark.slow
@pytest.mark.clock_kernel
def test_a_sweep_is_a_step(command: Command) -> None:
    folder = command.folder / "experiments" / "small"
    folder.mkdir(parents=True)
    text = PLAYED_EXPERIMENT + "[quick]\naxes.profile = ['datacenter']\n"
    (folder / "sweep.toml").write_text(text, encoding="utf8")
    said = command.finish("reproduce", "small", "--quick")
    assert "no claim was judged" in said
    assert list((command.folder / "results" / "quick" / "small").glob("*/run-1/summary.json"))
    assert not (command.folder / "results" / "small").exists()
    assert "1 of 1 cells are already finished" in command.finish("reproduce", "small", "--quick")


_PARTS = st.sampled_from(["figures.py", "testbed", "{", "}", "{output}", "'", "{x}", "a.b"])


@given(st.text(max_size=30) | st.lists(_PARTS).map(" ".join))
def test_any_step_is_a_command_or_a_message(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "steps"
    folder.mkdir(exist_ok=True)
    (folder / "figures.py").touch()
    places = {"results": "r", "output": "o"}
    table = reproduction.StepTable(run=text)
    try:
        step = reproduction._step(table, folder, places, "reproduce.toml", quick=False)
    except SpecError as error:
        assert "reproduce.toml" in str(error)  # noqa: PT017
    else:
        assert step.words[0] in ("testbed", "figures.py")
        assert step.command(Path("results"), quick=True)
    shutil.rmtree(folder)


def test_every_experiment_has_steps_that_can_be_read(tmp_path: Path) -> None:
    for name in reproduction.reproducible():
        for quick in (False, True):
            experiment = load_reproduction(name, tmp_path, quick=quick)
            assert experiment.steps
            assert experiment.output != experiment.folder
            assert (reproduction.QUICK in experiment.results.relative_to(tmp_path).parts) == quick
