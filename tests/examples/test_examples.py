"""The examples run as their pages say, and what the pages claim is so."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from testbed import profiles
from testbed.exec.order import RESULT, ExecResult
from testbed.process import ROOT

FOLDER = ROOT / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
PATIENCE_S = 600
MODEL_BYTES = 4 * (256 * 512 + 512 + 512 * 10 + 10)
"""The classifier of the examples ddp, diloco and hivemind, in float32."""

pytestmark = pytest.mark.timeout(2 * PATIENCE_S)  # two runs, beside other work
guest = pytest.mark.usefixtures("_of_this_checkout")


@pytest.fixture
def _of_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)


def page(name: str) -> str:
    return (FOLDER / name / "README.md").read_text(encoding="utf8")


def command(name: str) -> list[str]:
    """The command of an example's page."""
    joined = page(name).replace("\\\n", " ")
    found = re.search(r"^python -m testbed exec .*$", joined, re.MULTILINE)
    assert found is not None, f"{name}'s page has no command"
    return shlex.split(found[0])


def run(name: str, folder: Path, time: int = 0) -> tuple[str, ExecResult]:
    """Run an example as its page says, in a copy of its folder. Returns what all nodes printed, and the result."""
    place, out = folder / f"{name}-{time}", folder / f"out-{time}"
    shutil.copytree(FOLDER / name, place)
    words = [sys.executable, *command(name)[1:4], "-o", str(out), *command(name)[4:]]
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    printed = "\n".join(line.split("| ", 1)[1] for line in done.stdout.splitlines() if re.match(r"node-\d.*\| ", line))
    return printed, ExecResult.model_validate_json((out / RESULT).read_text())


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_has_a_page_with_its_command_output_cost_and_picture(name: str) -> None:
    text = page(name)
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert pictures
    assert all((FOLDER / name / picture).stat().st_size < 200_000 for picture in pictures)
    assert command(name)[:4] == ["python", "-m", "testbed", "exec"]
    assert re.search(r"^node-\d +\d+\.\d{3} \| ", text, re.MULTILINE)
    assert re.search(r"\d+ s and \d+\.\d GB on 2 cores", text)
    assert f"({name}/README.md)" in (FOLDER / "README.md").read_text(encoding="utf8")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_knows_nothing_of_testbed(name: str) -> None:
    scripts = [path for path in (FOLDER / name).iterdir() if path.suffix in {".py", ".sh"}]
    assert scripts
    assert not any("testbed" in path.read_text(encoding="utf8").lower() for path in scripts)


@guest
@pytest.mark.slow
@pytest.mark.clock_kernel
@pytest.mark.parametrize(("name", "steps"), [("ddp", 12), ("fsdp2", 8), ("pipelining", 10)])
def test_steps_take_the_same_time_in_every_run_and_as_long_as_the_page_says(
    tmp_path: Path, name: str, steps: int
) -> None:
    """Runs agree to the microsecond that the scripts print, and losses too: one machine, one arithmetic.

    The page was written on another machine, where other files were there and were not: what programs look for while
    they start moves them by microseconds, and with that who is first where two are ready.
    """
    once, again = (sorted(re.findall(r"^.* step .*$", run(name, tmp_path, time)[0], re.MULTILINE)) for time in (0, 1))
    assert len(once) == 2 * steps
    assert once == again
    (claimed,) = re.findall(rf"^node-.* step {steps - 1} .*?([\d.]+) ms$", page(name), re.MULTILINE)[-1:]
    assert last_ms(once, steps) == [pytest.approx(float(claimed), rel=1e-4)] * 2


def last_ms(lines: list[str], steps: int) -> list[float]:
    return [float(ms[1]) for line in lines if (ms := re.search(rf" step {steps - 1} .*?([\d.]+) ms$", line))]


@guest
@pytest.mark.slow
@pytest.mark.clock_kernel
def test_tcp_gets_the_rate_and_the_delay_of_its_links(tmp_path: Path) -> None:
    printed, _ = run("tcp", tmp_path)
    cable = profiles.load_profile("cable")
    up, down = cable.pipe("up"), cable.pipe("down")
    assert up is not None
    assert down is not None
    rate = re.search(r"([\d.]+) Mbit/s", printed)
    trip = re.search(r"median ([\d.]+) ms, longest ([\d.]+)", printed)
    assert rate is not None
    assert trip is not None
    assert 0.9 * up.rate_bps < 1e6 * float(rate[1]) < up.rate_bps * 1448 / 1500
    assert 2e-6 * (up.delay_ns + down.delay_ns) <= float(trip[1])
    assert float(trip[2]) < 1.01 * float(trip[1])


@guest
@pytest.mark.slow
@pytest.mark.clock_kernel
@pytest.mark.torchft
def test_diloco_averages_once_in_20_steps(tmp_path: Path) -> None:
    printed, result = run("diloco", tmp_path)
    losses = re.findall(r"worker (\d) round (\d) with 2 workers loss ([\d.]+)", printed)
    assert sorted((worker, number) for worker, number, _ in losses) == [(w, r) for w in "01" for r in "01234"]
    assert float(losses[-1][2]) < 0.5 * float(losses[0][2])
    for source, target in ((1, 2), (2, 1)):
        (talk,) = [each for each in result.talks if (each.source, each.target) == (source, target)]
        # A ring of two sends a model per round; the first round also sends what a worker starts from.
        assert 5 * MODEL_BYTES < talk.payload_bytes < 9 * MODEL_BYTES


@guest
@pytest.mark.slow
@pytest.mark.clock_kernel
@pytest.mark.hivemind
def test_three_homes_reach_every_epoch_together(tmp_path: Path) -> None:
    printed, _ = run("hivemind", tmp_path)
    assert sorted(re.findall(r"epoch (\d) peers 3 ", printed)) == sorted("123" * 3)


@guest
@pytest.mark.slow
@pytest.mark.clock_kernel
@pytest.mark.flower
def test_federated_averaging_learns_from_both_clients(tmp_path: Path) -> None:
    printed, _ = run("flower", tmp_path)
    losses = [float(loss) for loss in re.findall(r"^.*round \d loss ([\d.]+)", printed, re.MULTILINE)]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3
    assert len(re.findall("Received 2 results and 0 failures", printed)) == 3


@guest
@pytest.mark.slow
@pytest.mark.clock_kernel
@pytest.mark.skipif(not list(Path("/usr/lib/postgresql").glob("*/bin")), reason="PostgreSQL is not installed")
def test_a_commit_to_a_replica_costs_a_round_trip(tmp_path: Path) -> None:
    printed, _ = run("postgres", tmp_path)
    cable = profiles.load_profile("cable")
    up, down = cable.pipe("up"), cable.pipe("down")
    assert up is not None
    assert down is not None
    took = {mode: int(ns) for mode, ns in re.findall(r"synchronous_commit = (\w+): (\d+) ns for 20 commits", printed)}
    trip_ns = 2 * (up.delay_ns + down.delay_ns)
    assert took["local"] < trip_ns < took["remote_write"] / 20 < 2 * trip_ns
