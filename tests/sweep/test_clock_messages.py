"""What `testbed sweep` says, and how it ends, where the virtual clock needs something that a machine does not have."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from testbed import vm
from tests.commands import PLAYED_EXPERIMENT, Command, keep_speed
from tests.vm.test_virtual_clock import FORBID, PTRACE, SECCOMP

COMMAND = ("sweep", "sweep.toml", "--clock")
WITHOUT_COMPILER = ("sh", "ip", "tar", "xz", "apt-get", "apt-cache", "dpkg-deb", "setarch", "unshare", "mount")


@pytest.fixture
def bare(tmp_path: Path) -> Command:
    """A machine without a compiler, and with an empty cache."""
    (tmp_path / "sweep.toml").write_text(PLAYED_EXPERIMENT, encoding="utf8")
    keep_speed(tmp_path / "cache")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in WITHOUT_COMPILER:
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    return Command(tmp_path, "auto")


def surroundings(command: Command) -> dict[str, str]:
    return {"PATH": str(command.folder / "tools"), "XDG_CACHE_HOME": str(command.folder / "cache")}


def one_line(text: str) -> str:
    return " ".join(text.split())


def keep_kernel(command: Command) -> Path:
    kernel = vm.find_clock_kernel()
    assert kernel is not None
    return Path(shutil.copytree(kernel.folder, command.folder / "cache" / "testbed" / kernel.folder.name))


def test_without_kernel_and_compiler(bare: Command) -> None:
    said = one_line(bare.finish(*COMMAND, "virtual", status=2, **surroundings(bare)))
    assert "lacks gcc" in said
    assert "apt-get install -y gcc" in said
    assert "Traceback" not in said
    assert not (bare.folder / "results").exists()


@pytest.mark.root
@pytest.mark.slow
def test_without_kernel_and_compiler_auto_takes_the_real_clock_and_says_why(bare: Command) -> None:
    said = one_line(bare.finish("plan", *COMMAND[1:], "auto", "--engine", "relay", **surroundings(bare)))
    assert (
        "clock real: auto: the virtual clock is not possible here: to build the guest kernel this machine lacks" in said
    )


def test_on_a_machine_of_another_kind(bare: Command) -> None:
    said = one_line(bare.finish(*COMMAND, "virtual", before=["setarch", "i686"], status=1, **surroundings(bare)))
    assert "x86-64 only" in said


@pytest.mark.clock_kernel
def test_an_altered_kernel_is_not_run(bare: Command) -> None:
    with (keep_kernel(bare) / "linux").open("r+b") as file:
        file.write(b"#!/bin/false\n")
    said = one_line(bare.finish(*COMMAND, "virtual", status=2, **surroundings(bare)))
    assert "lacks gcc" in said


@pytest.mark.clock_kernel
def test_where_neither_seccomp_nor_ptrace_is_allowed(bare: Command) -> None:
    keep_kernel(bare)
    forbidden = [sys.executable, "-c", FORBID, f"{PTRACE},{SECCOMP}"]
    said = one_line(bare.finish(*COMMAND, "virtual", before=forbidden, status=2, **surroundings(bare)))
    assert "neither seccomp filters nor ptrace" in said


@pytest.mark.clock_kernel
@pytest.mark.root
def test_without_room_for_the_guests_memory(bare: Command) -> None:
    keep_kernel(bare)
    small = bare.folder / "small"
    small.mkdir()
    folders = " ".join(("/dev/shm", "/var/tmp", str(small)))
    script = f'for it in {folders}; do mount -t tmpfs -o size=1m none "$it" || exit 9; done; exec "$@"'
    said = one_line(
        bare.finish(
            *COMMAND,
            "virtual",
            before=["unshare", "--mount", "sh", "-c", script, "sh"],
            status=1,
            **surroundings(bare),
            TMPDIR=str(small),
        )
    )
    assert "no place for" in said
    assert "set TMPDIR to a folder with room" in said
