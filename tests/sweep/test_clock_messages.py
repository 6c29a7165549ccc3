"""What `testbed sweep` says, and how it ends, where the virtual clock needs something that a machine does not have."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.commands import PLAYED_EXPERIMENT, Command, keep_speed
from tests.vm.test_virtual_clock import FORBID, PTRACE, SECCOMP

WITHOUT_COMPILER = ("sh", "true", "ip", "setarch", "unshare", "mount")


@pytest.fixture
def bare(tmp_path: Path) -> Command:
    """A machine without a compiler, and with an empty cache."""
    (tmp_path / "sweep.toml").write_text(PLAYED_EXPERIMENT, encoding="utf8")
    keep_speed(tmp_path / "cache")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in WITHOUT_COMPILER:
        if tool := shutil.which(name):
            (tools / name).symlink_to(tool)
    return Command(tmp_path, "auto")


def said(command: Command, clock: str, *words: str, status: int = 2, before: Sequence[str] = (), **more: str) -> str:
    """What it says on that machine, in one line."""
    here = {"PATH": str(command.folder / "tools"), "XDG_CACHE_HOME": str(command.folder / "cache"), **more}
    words = words or ("sweep", "sweep.toml")
    return " ".join(command.finish(*words, "--clock", clock, status=status, before=before, **here).split())


@pytest.mark.clock_kernel
def test_the_bundled_kernel_is_used(bare: Command) -> None:
    output = said(bare, "auto", "plan", "sweep.toml", "--engine", "relay", status=0)
    assert "clock virtual: auto: Linux" in output
    assert "bundled with testbed" in output


@pytest.mark.slow
def test_on_a_machine_of_another_kind(bare: Command) -> None:
    assert "x86-64 only" in said(bare, "virtual", status=1, before=["setarch", "i686"])


@pytest.mark.clock_kernel
@pytest.mark.parametrize("clock", ["auto", "virtual"])
def test_an_altered_kernel_is_not_run_and_nothing_is_taken_instead(bare: Command, clock: str) -> None:
    said(bare, "virtual", "plan", "sweep.toml", "--engine", "relay", status=0)
    (linux,) = bare.folder.glob("cache/testbed/guest-kernel-*/linux")
    with linux.open("r+b") as file:
        file.write(b"#!/bin/false\n")
    output = said(bare, clock)
    assert f"{linux} was altered" in output
    assert f"rm -r {linux.parent}" in output
    assert not (bare.folder / "results").exists()
    shutil.rmtree(linux.parent)
    assert "clock virtual" in said(bare, clock, "plan", "sweep.toml", "--engine", "relay", status=0)


@pytest.mark.clock_kernel
def test_where_neither_seccomp_nor_ptrace_is_allowed(bare: Command) -> None:
    forbidden = [sys.executable, "-c", FORBID, f"{PTRACE},{SECCOMP}"]
    assert "neither seccomp filters nor ptrace" in said(bare, "virtual", before=forbidden)


@pytest.mark.clock_kernel
@pytest.mark.root
def test_without_room_for_the_guests_memory(bare: Command) -> None:
    small = bare.folder / "small"
    small.mkdir()
    folders = " ".join(("/dev/shm", "/var/tmp", str(small)))
    script = f'for it in {folders}; do mount -t tmpfs -o size=1m none "$it" || exit 9; done; exec "$@"'
    hidden = ["unshare", "--mount", "sh", "-c", script, "sh"]
    output = said(bare, "virtual", status=2, before=hidden, TMPDIR=str(small))
    assert "no place for" in output
    assert "set TMPDIR to a folder with room" in output
