"""Building a kernel with stand-ins for apt and the compiler leaves a whole kernel on the disk, or nothing.

A bundled kernel that its source does not produce is detected.
"""

from __future__ import annotations

import hashlib
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
from testbed.vm import build, debian
from tests import forked

ROOT = Path(vm.__file__).parents[2]
PATCH = """What it is for.

--- a/time.c
+++ b/time.c
@@ -1,3 +1,3 @@
 before
-old
+new
 after
"""
TOOLS = {
    "apt-get": """
        case "$*" in
          *--print-uris*) echo "'http://mirror.example/debian/dists/bookworm/InRelease' x 0" ;;
          *download*) case "$*" in *.2=*) [ -n "$PINNED" ] || { echo "version not found" >&2; exit 100; } ;; esac
            echo "$*" > "$HERE/downloaded"; touch linux-source.deb ;;
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
            cat time.c > linux; [ -z "$LUCK" ] || echo "$LUCK" >> linux
            mkdir -p include/config; echo 7.10.3 > include/config/kernel.release ;;
        esac""",
    "gcc": 'case "$*" in --version) echo "gcc $GCC"; echo more ;; *) [ -z "$NO_LIBC" ] ;; esac',
    "ld": "echo ld 2.40",
    "ldd": "echo ldd 2.36",
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
    for name in ("sh", "tar", "patch", "xz", "cat", "cp", "mv", "sleep", "mkdir", "touch", "grep"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    unused = tmp_path / "linux-source-7.10" / "sound" / "unused.c"
    unused.parent.mkdir(parents=True)
    unused.write_text("")
    (tmp_path / "patch").write_text(PATCH)
    monkeypatch.setattr(build, "PATCH", tmp_path / "patch")
    pack_source(tmp_path, "before\nold\nafter\n")
    # What a step is told of the environment is fixed, so the stand-ins are told here.
    unset = dict.fromkeys(("BROKEN", "NO_LIBC", "LUCK"), "")
    values = {"HERE": str(tmp_path), "REFUSED": "nothing at all", "GCC": "12.2.0", "PINNED": "yes", **unset}
    monkeypatch.setattr(build, "_environment", lambda: {**os.environ, "PYTHONPATH": str(ROOT)})
    for name, value in {**values, "PATH": str(tools)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pack_source(folder: Path, code: str) -> None:
    (folder / "linux-source-7.10" / "time.c").write_text(code)
    subprocess.run(["tar", "-cJf", "source.tar.xz", "linux-source-7.10"], cwd=folder, check=True)


def test_a_built_kernel_is_whole_and_is_not_built_again(cache: Path) -> None:
    said: list[str] = []
    kernel = build.build_kernel(cache / "kernel", say=said.append)
    assert kernel == build.find_clock_kernel(cache / "kernel")
    assert kernel.version == "7.10.3"
    tools = {"gcc": "gcc 12.2.0", "ld": "ld 2.40", "ldd": "ldd 2.36"}
    assert kernel.packages == {"linux-source-7.10": "7.10.3-1", **tools}
    assert "=".join(debian.SOURCE) in (cache.parent / "downloaded").read_text()
    assert kernel.linux.read_text() == "before\nnew\nafter\n"
    assert [line.partition("] ")[2].split()[0] for line in said] == [
        "download", "unpack", "configure", "compile,", "Linux",
    ]  # fmt: skip
    assert build.build_kernel(cache / "kernel", say=said.append) == kernel
    assert len(said) == 5
    assert sorted(path.name for path in cache.iterdir()) == ["kernel", "kernel.lock"]


@pytest.mark.slow
def test_what_a_killed_build_left_and_a_kernel_from_another_recipe_are_replaced(cache: Path) -> None:
    kernel = build.build_kernel(cache / "kernel", say=lambda _: None)
    manifest = kernel.folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace(vm.kernel.recipe(), "0" * 16))
    (cache / "kernel.building-abc").mkdir()
    assert build.find_clock_kernel(cache / "kernel") is None
    assert build.build_kernel(cache / "kernel", say=lambda _: None) == kernel
    assert sorted(path.name for path in cache.iterdir()) == ["kernel", "kernel.lock"]


@pytest.mark.slow
def test_an_altered_kernel_is_built_again(cache: Path) -> None:
    kernel = build.build_kernel(cache / "kernel", say=lambda _: None)
    kernel.linux.write_text("something else")
    assert build.build_kernel(cache / "kernel", say=lambda _: None).is_whole()


def test_without_its_own_source_a_build_takes_the_newest(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PINNED", "")
    build.build_kernel(cache / "kernel", say=lambda _: None)
    assert (cache.parent / "downloaded").read_text().split()[-1] == "linux-source-7.10"


@pytest.fixture
def shipped(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with what the stand-ins build, in place of the bundled kernel."""
    file = cache.parent / "shipped.tar.xz"
    vm.export_kernel(build.build_kernel(cache.parent / "first", say=lambda _: None), file)
    monkeypatch.setattr(build, "SHIPPED_FILE", file)
    return file


@pytest.mark.slow
def test_a_kernel_that_is_what_its_source_makes_is_verified(cache: Path, shipped: Path) -> None:
    said: list[str] = []
    assert vm.verify_kernel(say=said.append).sha256 == hashlib.sha256(b"before\nnew\nafter\n").hexdigest()
    assert any("compile" in line for line in said)
    assert list(cache.rglob("*")) == [cache / "testbed"]


@pytest.mark.slow
def test_a_kernel_that_is_not_what_its_source_makes(
    cache: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUCK", "another byte")
    with pytest.raises(GuestKernelError, match=r"shipped.* does not match its source: its SHA-256 is \w{64}; a build"):
        vm.verify_kernel(say=lambda _: None)
    assert list(cache.rglob("*")) == [cache / "testbed"]


@pytest.mark.slow
def test_with_another_compiler_nothing_is_built_and_nothing_said_of_the_bytes(
    cache: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GCC", "13.1.0")
    (cache.parent / "downloaded").unlink()
    with pytest.raises(CapabilityError, match=r"cannot verify .* built with gcc 12\.2\.0, this machine has gcc 13"):
        vm.verify_kernel(say=lambda _: None)
    assert not (cache.parent / "downloaded").exists()


@pytest.mark.slow
def test_without_the_source_of_the_kernel_nothing_is_verified(
    cache: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PINNED", "")
    with pytest.raises(CapabilityError, match=rf"cannot get {'='.join(debian.SOURCE)} .*snapshot\.debian\.org"):
        vm.verify_kernel(say=lambda _: None)


def left_of_a_failure(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir()]


def test_a_configuration_that_is_not_granted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSED", "TIME_TRAVEL")
    with pytest.raises(GuestKernelError, match="does not accept CONFIG_UML_TIME_TRAVEL_SUPPORT=y"):
        build.build_kernel(cache / "kernel", say=lambda _: None)
    assert left_of_a_failure(cache) == ["kernel.lock"]


def test_a_compilation_that_fails_says_why(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN", "No space left on device")
    with pytest.raises(
        GuestKernelError, match=r"(?s)make ended with status 2.*main\.c: error: No space left on device"
    ):
        build.build_kernel(cache / "kernel", say=lambda _: None)
    assert left_of_a_failure(cache) == ["kernel.lock"]


def test_a_source_without_the_text_that_is_changed(cache: Path) -> None:
    pack_source(cache.parent, "before\nelse\nafter\n")
    with pytest.raises(GuestKernelError, match=r"(?s)patch ended with status 1.*time\.c"):
        build.build_kernel(cache / "kernel", say=lambda _: None)
    assert left_of_a_failure(cache) == ["kernel.lock"]


@pytest.mark.parametrize("tool", sorted(build._TOOLS))
def test_a_program_that_is_missing_is_named_with_the_command_that_installs_it(cache: Path, tool: str) -> None:
    (cache.parent / "tools" / tool).unlink(missing_ok=True)
    with pytest.raises(
        CapabilityError,
        match=rf"lacks .*apt-get install -y .*{build._TOOLS[tool]}.*omit --build to use",
    ):
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
    with pytest.raises(GuestKernelError, match=r"no apt-get.*omit --build to use"):
        build.build_kernel(cache / "kernel")


Vm = Callable[..., tuple[int, str]]


@pytest.fixture
def command(cache: Path) -> Vm:
    def run(*arguments: str) -> tuple[int, str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)}
        done = forked.run(["-m", "testbed", "vm", *arguments], env=environment, cwd=cache.parent)
        return done.returncode, " ".join(done.stderr.split())

    return run


@pytest.mark.slow
def test_a_builder_that_is_killed_leaves_no_compiler(cache: Path) -> None:
    pids = cache.parent / "pids"
    (cache.parent / "tools" / "patch").unlink()  # the builder has the real patch, and no real source
    (cache.parent / "tools" / "patch").symlink_to(cache.parent / "tools" / "bc")
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


@pytest.mark.slow
def test_the_commands_messages(command: Vm) -> None:
    status, said = command()
    assert (status, "nothing to do" in said) == (2, True)
    status, said = command("--kernel", "nowhere.tar.xz")
    assert (status, "cannot read" in said) == (2, True)
    status, said = command("--verify", "--", "true")
    assert (status, "--verify needs --build" in said) == (2, True)
    status, said = command("--verify", "--build")
    assert (status, "cannot verify the guest kernel here: it was built with" in said) == (2, True)
