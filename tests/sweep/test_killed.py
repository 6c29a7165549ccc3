"""Kill -9 at any moment of a played sweep leaves no process, no mount and no file, and the next sweep completes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from testbed import results, vm
from tests.commands import PLAYED_EXPERIMENT, Command, keep_speed, outside
from tests.forked import Started, command_line
from tests.known import known

MOMENTS = int(os.environ.get("TESTBED_KILLS", "3"))
"""How many moments are tried: each takes a minute."""
pytestmark = [pytest.mark.slow, pytest.mark.clock_kernel, pytest.mark.timeout(600)]

VICTIMS = ("the program", "the guest", "a program of ours")
EARLIEST_S = 0.1
"""A moment before which no victim is looked for in vain."""
_PR_SET_CHILD_SUBREAPER = 36


class Undisturbed(NamedTuple):
    """A sweep that nobody killed."""

    cache: Path
    seconds: float
    steps: dict[str, str]


def start(folder: Path, cache: Path) -> Started:
    (folder / "sweep.toml").write_text(PLAYED_EXPERIMENT, encoding="utf8")
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    command = Command(folder, "auto")
    surroundings = {"XDG_CACHE_HOME": str(cache), "TMPDIR": str(temporary)}
    return command.start("sweep", "sweep.toml", "--no-report", "--clock", "virtual", **surroundings)


def steps_of(folder: Path) -> dict[str, str]:
    """Return what the finished runs of a sweep recorded, by cell and stage."""
    home = folder / "results" / folder.name
    done = [run for run in results.runs(home) if run.summary is not None and run.summary.status == "ok"]
    return {
        f"{run.folder.parent.name} {path.name}": path.read_text()
        for run in done
        for path in sorted(run.folder.glob("steps-*"))
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    kernel = known(vm.find_clock_kernel())
    cache, folder = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("sweep")
    (cache / "testbed").mkdir()
    (cache / "testbed" / kernel.folder.name).symlink_to(kernel.folder)
    keep_speed(cache)
    began = time.monotonic()
    with start(folder, cache) as process:
        said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    return Undisturbed(cache, time.monotonic() - began, steps_of(folder))


@pytest.fixture
def adopting() -> Iterator[None]:
    """Make this process the parent of whatever loses its own, so that nothing that was started gets out of sight."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def descendants(of: int) -> dict[int, str]:
    """Return the processes that `of` and its children have started and that run, with their command lines."""
    parents, lines = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                parents[int(folder.name)] = int(fields[1])
                lines[int(folder.name)] = command_line(int(folder.name))
    found: dict[int, str] = {}
    while more := {pid: lines[pid] for pid, up in parents.items() if (up == of or up in found) and pid not in found}:
        found |= more
    return found


def left(before: set[int]) -> dict[int, str]:
    """Wait until nothing runs any more that this process has started since; return what still does after 10 s."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not (running := {pid: line for pid, line in descendants(os.getpid()).items() if pid not in before}):
            break
        time.sleep(0.05)
    return running


def temporary_names(folder: Path) -> list[str]:
    """Return what has no lasting name in a folder and in all folders in it. A lock stays."""
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.name != ".lock")
    return [str(name) for name in names if name.suffix == ".part" or any(part.startswith(".") for part in name.parts)]


def kill_at(process: Started, moment_s: float, victim: str, chance: random.Random) -> int | None:
    """Kill a victim of this kind `moment_s` from now, or as soon as there is one; returns its pid, or None."""
    time.sleep(moment_s)
    while process.poll() is None:
        below = descendants(process.pid)
        guests = [pid for pid, line in below.items() if "clock-kernel-" in line and "/linux" in line]
        choice = {VICTIMS[0]: [process.pid], VICTIMS[1]: guests, VICTIMS[2]: sorted(below)}[victim]
        if choice:
            chosen = chance.choice(choice)
            with contextlib.suppress(ProcessLookupError):
                os.kill(chosen, signal.SIGKILL)
                return chosen
        time.sleep(0.005)
    return None


@pytest.mark.parametrize("seed", range(MOMENTS))
@pytest.mark.usefixtures("adopting")
def test_kill(tmp_path: Path, undisturbed: Undisturbed, seed: int) -> None:
    chance = random.Random(seed)
    # The undisturbed sweep certified its links too, which the cache keeps: a later one takes two thirds as long.
    moment_s, victim = chance.uniform(0.1, 0.7) * undisturbed.seconds, VICTIMS[seed % len(VICTIMS)]
    mounted, before = outside(), set(descendants(os.getpid()))
    kept = temporary_names(undisturbed.cache)
    process = start(tmp_path, undisturbed.cache)
    chosen = None
    while chosen is None:  # sooner, where the sweep or all such victims were done before
        assert moment_s > EARLIEST_S, f"seed {seed}: {victim} was never found"
        chosen = kill_at(process, moment_s, victim, chance)
        said, _ = process.communicate(timeout=200)
        print(
            f"seed {seed}: at {moment_s:.2f} s: killed {victim}: {chosen}; status {process.returncode}: {said[-500:]}"
        )
        if chosen is None:
            shutil.rmtree(tmp_path / "results")
            moment_s /= 2
            process = start(tmp_path, undisturbed.cache)
    assert left(before) == {}
    assert outside() == mounted
    assert [path for path in (tmp_path / "tmp").iterdir() if not path.name.startswith("torchinductor_")] == []
    assert {path.name for path in tmp_path.iterdir()} <= {"results", "sweep.toml", "tmp"}

    with start(tmp_path, undisturbed.cache) as again:
        said, _ = again.communicate(timeout=200)
    assert again.returncode == 0, said
    assert steps_of(tmp_path) == undisturbed.steps
    assert temporary_names(tmp_path / "results") == []
    assert temporary_names(undisturbed.cache) == kept
    assert left(before) == {}
