"""Building a kernel with stand-ins for apt and the compiler leaves a whole kernel on the disk, or nothing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed import vm
from testbed.errors import CapabilityError, GuestKernelError
from testbed.vm import build
from tests import forked

ROOT = Path(vm.__file__).parents[2]
HEADER = """
static size_t arch_get_random_longs(unsigned long *v, size_t max_longs) { return os_getrandom(); }
static size_t arch_get_random_seed_longs(unsigned long *v, size_t max_longs) { return 0; }
"""
TOOLS = {
    "apt-get": """
        case "$*" in
          *--print-uris*) echo "'http://mirror.example/debian/dists/bookworm/InRelease' x 0" ;;
          *download*) echo "$*" > "$HERE/downloaded"; touch linux-source.deb ;;
        esac""",
    "apt-cache": "echo linux-source; echo linux-source-6.19; echo linux-source-7.2; echo linux-source-7.10",
    "dpkg-deb": """
        case "$1" in
          --show) echo "linux-source-7.10 7.10.3-1" ;;
          --extract) mkdir -p "$3/usr/src"; cp "$HERE/source.tar.xz" "$3/usr/src/linux-source-7.10.tar.xz" ;;
        esac""",
    "make": """
        case "$*" in
          *allnoconfig*) for word; do
              case "$word" in KCONFIG_ALLCONFIG=*) grep -v "$REFUSED" "${word#*=}" > .config; esac
            done ;;
          *) echo "  CC      main.o"; [ -z "$BROKEN" ] || { echo "main.c: error: $BROKEN"; exit 2; }
            cat arch/um/include/asm/archrandom.h arch/um/include/linux/time-internal.h > linux
            mkdir -p include/config; echo 7.10.3 > include/config/kernel.release ;;
        esac""",
    "gcc": '[ -z "$NO_LIBC" ] || exit 1; case "$*" in *-dumpfullversion*) echo 12.2.0 ;; esac',
    "strip": 'cp "$3" "$2"',
    "flex": "",
    "bison": "",
    "bc": "",
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of a machine on which everything is a stand-in."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in TOOLS.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    for name in ("sh", "tar", "xz", "cat", "cp", "mv", "sleep", "mkdir", "touch", "grep"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    header = tmp_path / "linux-source-7.10" / build._RANDOM_HEADER
    header.parent.mkdir(parents=True)
    header.write_text(HEADER)
    for name, old, _ in build._CHANGES:
        path = tmp_path / "linux-source-7.10" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"before\n{old}after\n")
    unused = tmp_path / "linux-source-7.10" / "sound" / "unused.c"
    unused.parent.mkdir()
    unused.write_text("")
    subprocess.run(["tar", "-cJf", "source.tar.xz", "linux-source-7.10"], cwd=tmp_path, check=True)
    # What a step is told of the environment is fixed, so the stand-ins are told here.
    values = {"HERE": str(tmp_path), "REFUSED": "nothing at all", "BROKEN": "", "NO_LIBC": ""}
    monkeypatch.setattr(build, "_environment", lambda: {**os.environ, "PYTHONPATH": str(ROOT)})
    for name, value in {**values, "PATH": str(tools)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return tmp_path / "cache"


def test_a_built_kernel_is_whole_and_is_not_built_again(cache: Path) -> None:
    said: list[str] = []
    kernel = build.build_kernel(cache / "kernel", say=said.append)
    assert kernel == build.find_clock_kernel(cache / "kernel")
    assert kernel.version == "7.10.3"
    assert kernel.packages == {"linux-source-7.10": "7.10.3-1", "gcc": "12.2.0"}
    assert "linux-source-7.10" in (cache.parent / "downloaded").read_text()
    assert "time_travel_mode != TT_MODE_OFF" in kernel.linux.read_text()
    assert "TIMER_MULTIPLIER 1\n" in kernel.linux.read_text()
    assert [line.partition("] ")[2].split()[0] for line in said] == [
        "download", "unpack", "configure", "compile,", "Linux",
    ]  # fmt: skip
    assert build.build_kernel(cache / "kernel", say=said.append) == kernel
    assert len(said) == 5
    assert sorted(path.name for path in cache.iterdir()) == ["kernel", "kernel.lock"]


def test_what_a_killed_build_left_and_a_kernel_from_another_recipe_are_replaced(cache: Path) -> None:
    kernel = build.build_kernel(cache / "kernel", say=lambda _: None)
    manifest = kernel.folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace(build.recipe(), "0" * 16))
    (cache / "kernel.building-abc").mkdir()
    assert build.find_clock_kernel(cache / "kernel") is None
    assert build.build_kernel(cache / "kernel", say=lambda _: None) == kernel
    assert sorted(path.name for path in cache.iterdir()) == ["kernel", "kernel.lock"]


def left_of_a_failure(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir()]


def test_a_configuration_that_is_not_granted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSED", "TIME_TRAVEL")
    with pytest.raises(GuestKernelError, match="does not grant CONFIG_UML_TIME_TRAVEL_SUPPORT=y"):
        build.build_kernel(cache / "kernel", say=lambda _: None)
    assert left_of_a_failure(cache) == ["kernel.lock"]


def test_a_compilation_that_fails_says_why(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN", "No space left on device")
    with pytest.raises(
        GuestKernelError, match=r"(?s)make ended with status 2.*main\.c: error: No space left on device"
    ):
        build.build_kernel(cache / "kernel", say=lambda _: None)
    assert left_of_a_failure(cache) == ["kernel.lock"]


def test_a_source_with_another_header(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_RANDOM_HEADER", Path("elsewhere.h"))
    with pytest.raises(GuestKernelError, match=r"not as expected: elsewhere\.h"):
        build.build_kernel(cache / "kernel", say=lambda _: None)


@pytest.mark.parametrize("number", range(len(build._CHANGES)))
def test_a_source_without_the_text_that_is_changed(cache: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    changes = list(build._CHANGES)
    name, old, new = changes[number]
    changes[number] = (name, old + "more", new)
    monkeypatch.setattr(build, "_CHANGES", changes)
    with pytest.raises(GuestKernelError, match=rf"(?s){name} has .* 0 times instead of once"):
        build.build_kernel(cache / "kernel", say=lambda _: None)
    assert left_of_a_failure(cache) == ["kernel.lock"]


@pytest.mark.parametrize("tool", sorted(build._TOOLS))
def test_a_program_that_is_missing_is_named_with_the_command_that_installs_it(cache: Path, tool: str) -> None:
    (cache.parent / "tools" / tool).unlink(missing_ok=True)
    with pytest.raises(CapabilityError, match=rf"lacks .*apt-get install -y .*{build._TOOLS[tool]}.*vm --kernel FILE"):
        build.build_kernel(cache / "kernel")
    assert not cache.exists()


def test_a_compiler_without_a_static_c_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_LIBC", "yes")
    with pytest.raises(CapabilityError, match="apt-get install -y libc6-dev,"):
        build.build_kernel(cache / "kernel")


def test_a_disk_without_room(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = os.statvfs("/")
    full = os.statvfs_result((about.f_bsize, about.f_frsize, about.f_blocks, 9, 9, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(CapabilityError, match=r"takes 1024 MiB.*has 0 MiB free; make room, or set XDG_CACHE_HOME"):
        build.build_kernel(cache / "kernel")
    assert left_of_a_failure(cache) == ["kernel.lock"]


def test_a_machine_of_another_kind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(GuestKernelError, match=r"x86-64 only.*aarch64"):
        build.build_kernel(cache / "kernel")
    assert not cache.exists()


def test_a_machine_without_apt(cache: Path) -> None:
    (cache.parent / "tools" / "apt-get").unlink()
    with pytest.raises(GuestKernelError, match=r"no apt-get.*vm --kernel FILE"):
        build.build_kernel(cache / "kernel")


Vm = Callable[..., tuple[int, str]]


@pytest.fixture
def command(cache: Path) -> Vm:
    def run(*arguments: str) -> tuple[int, str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)}
        done = forked.run(["-m", "testbed", "vm", *arguments], env=environment, cwd=cache.parent)
        return done.returncode, " ".join(done.stderr.split())

    return run


def test_a_builder_that_is_killed_leaves_no_compiler(cache: Path) -> None:
    pids = cache.parent / "pids"
    make = cache.parent / "tools" / "make"
    make.write_text(f"#!/bin/sh\nsleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait\n")
    builder = subprocess.Popen(
        [sys.executable, "-m", "testbed", "vm", "--build"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)},
        cwd=cache.parent,
        stdout=subprocess.DEVNULL,
    )
    try:
        assert within(30, pids.exists)
    finally:
        builder.kill()
        builder.wait()
    started = pids.read_text().split()
    assert len(started) == 2
    assert within(5, lambda: not any(Path("/proc", pid).exists() for pid in started))


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Wait until `condition` holds, but not for longer; return whether it does."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_the_commands_messages_without_a_kernel(command: Vm) -> None:
    status, said = command("--virtual-clock", "--", "true")
    assert (status, "python -m testbed vm --build" in said) == (2, True)
    status, said = command()
    assert (status, "nothing to do" in said) == (2, True)
    status, said = command("--kernel", "nowhere.tar.xz")
    assert (status, "cannot read" in said) == (2, True)
