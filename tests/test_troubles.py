"""What befalls a command from outside: a full disk, folders that cannot be written, a machine that sleeps.

Elsewhere: two sweeps in one folder in test_cli.py, kill -9 in test_chaos.py, Ctrl-C in sweep/test_sweep.py, too little
memory in runtime/test_host.py, a clock that jumps in player/test_clock_jumps.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from testbed import results
from testbed.commands import codecs
from testbed.errors import StageError
from testbed.metrics import align, measured
from testbed.metrics.worst_step import MUCH_WORSE
from testbed.results import Run
from tests.chaos import PATIENCE_S, Arena, adopting
from tests.commands import for_all_users
from tests.known import known

pytestmark = pytest.mark.slow

NOBODY = "65534"


def _runs(arena: Arena) -> list[Run]:
    home = arena.work / "results" / arena.work.name
    return list(results.runs(home)) if home.is_dir() else []


def _in_mounts(*commands: str) -> list[str]:
    """Run a command in a mount namespace of its own, after these commands of a shell."""
    return ["unshare", "-m", "sh", "-ec", f'{"; ".join(commands)}; exec "$@"', "sh"]


def _is_told(arena: Arena, process: subprocess.Popen[bytes], *words: str) -> None:
    """Check that a command was refused as the user's mistake, in these words."""
    status, said = process.wait(PATIENCE_S), arena.said
    assert status == 2, said
    assert "testbed: error: " in said
    assert "Traceback" not in said
    for word in words:
        assert word in said, said


@pytest.mark.root
@pytest.mark.clock_kernel
@pytest.mark.parametrize("kilobytes", [8, 64, 160])
def test_a_full_disk_is_told_and_the_same_command_completes_when_there_is_space(tmp_path: Path, kilobytes: int) -> None:
    """It is full at another moment each time: the last time runs are finished before."""
    arena = Arena("sweep played", tmp_path)
    (arena.work / "results").mkdir()
    again = (
        f"mount -t tmpfs -o size={kilobytes}k none results",
        '"$@" && exit 9',
        "test $? = 2",
        "mount -o remount,size=64m none results",
    )
    with adopting():
        process = arena.start(before=_in_mounts(*again))
        assert process.wait(PATIENCE_S) == 0, arena.said
        assert arena.residue() == []
    assert "No space left on device" in arena.said
    assert "Traceback" not in arena.said
    assert "a bug in testbed" not in arena.said


@pytest.mark.root
@pytest.mark.clock_kernel
def test_a_folder_that_is_mounted_read_only_is_refused_before_anything_starts(tmp_path: Path) -> None:
    arena = Arena("sweep played", tmp_path)
    (arena.work / "results").mkdir()
    mounts = "mount --bind results results", "mount -o remount,ro,bind results"
    _is_told(arena, arena.start(before=_in_mounts(*mounts)), "cannot write to the folder", "choose another")
    assert list((arena.work / "results").iterdir()) == []


@pytest.mark.root
@pytest.mark.clock_kernel
@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ("work", ("cannot write to the folder", "choose another with --results")),
        ("cache", ("cannot install the guest kernel", "set XDG_CACHE_HOME")),
        ("kernel", ("Permission denied", "it belongs to another user")),
    ],
)
def test_a_folder_of_another_user_is_refused_with_a_way_out(
    open_folder: Path, theirs: str, words: tuple[str, ...]
) -> None:
    arena = Arena("sweep played", open_folder)
    kernel = next((arena.cache / "testbed").glob("guest-kernel-*"))
    kernel.unlink()
    if theirs == "kernel":
        kernel.mkdir(mode=0o700)
    for path in (
        arena.temporary,
        *(path for path in (arena.work, arena.cache / "testbed") if theirs not in path.parts),
    ):
        os.chown(path, int(NOBODY), int(NOBODY))
    before = [*for_all_users(), "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    _is_told(arena, arena.start(before=before), *words)


def test_a_kit_that_is_killed_is_told_and_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = lambda *_, **__: subprocess.Popen(["sh", "-c", "kill -9 $$"])  # noqa: E731
    monkeypatch.setattr(codecs, "start_program", killed)
    with pytest.raises(StageError, match=r"cannot check 'int8': .*SIGKILL"):
        codecs.check("int8")


def _sleep(arena: Arena, seconds: float) -> None:
    """Stop all of a command's processes for a while, as a machine that is suspended does."""
    asleep = arena.processes()
    for pid in asleep:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in asleep:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.root
def test_a_live_run_over_which_the_machine_slept_says_which_step_took_so_long(tmp_path: Path) -> None:
    asleep_s = 6.0
    arena = Arena("sweep live, relay", tmp_path)
    with adopting():
        process = arena.start("--set", "training.steps=40")
        while process.poll() is None and not any(len(run.steps(0)) > 4 for run in _runs(arena)):
            time.sleep(0.02)
        _sleep(arena, asleep_s)
        assert process.wait(PATIENCE_S) == 0, arena.said
        assert arena.residue() == []
    (run,) = _runs(arena)
    steps = measured(align([run.steps(node) for node in range(2)]))
    longest_s, median_s = max(step.seconds for step in steps), sorted(step.seconds for step in steps)[len(steps) // 2]
    assert longest_s > asleep_s - 1
    if longest_s > (MUCH_WORSE + 1) * median_s:
        assert known(known(run.summary).worst).seconds == pytest.approx(longest_s)
        assert "times the median, from" in arena.said


@pytest.mark.clock_kernel
def test_a_played_sweep_over_which_the_machine_slept_is_the_same(tmp_path: Path) -> None:
    outcomes = []
    with adopting():
        for name in ("awake", "asleep"):
            arena = Arena("sweep played", tmp_path / name)
            process = arena.start()
            for _ in range(3 if name == "asleep" else 0):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(3)
                _sleep(arena, 2)
            assert process.wait(PATIENCE_S) == 0, arena.said
            outcomes.append(arena.job.outcome(arena.work, arena.said))
            assert arena.residue() == []
    assert outcomes[0] == outcomes[1]
