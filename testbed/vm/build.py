"""Build a guest kernel whose clock is virtual: user-mode Linux with time travel, from Debian's kernel source.

time-travel.config says what is in it. Needs a C compiler and a few packages of Debian, but no root. The folder is
filled aside and renamed when it is whole, so that a build that was killed leaves nothing that could be taken for one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from testbed import paths
from testbed.errors import CapabilityError, GuestKernelError
from testbed.process import ROOT, start_program
from testbed.vm.debian import check_machine, download, locked, make_folder, package_version, put_in_place, unpack
from testbed.vm.guest import try_kernel
from testbed.vm.kernel import GuestKernel, find_kernel, seal

CONFIG = Path(__file__).with_name("time-travel.config")
BUILD_COMMAND = "python -m testbed vm --build"

_TOOLS = {  # program -> Debian package
    "gcc": "gcc",
    "make": "make",
    "flex": "flex",
    "bison": "bison",
    "bc": "bc",
    "tar": "tar",
    "xz": "xz-utils",
    "strip": "binutils",
}
_ELSEWHERE = "take a kernel that was built elsewhere: python -m testbed vm --kernel FILE"
_STATIC_PROGRAM = '#include <stdio.h>\nint main(void) { return puts("") < 0; }\n'
_SPACE_BYTES = 1 << 30
"""Seen: 0.16 GB of package, twice for a moment, 0.45 GB of source and 0.1 GB of objects."""

# Most of the source is for other machines and devices; leaving it packed saves a third of the unpacking.
# What describes the configuration (Kconfig, Makefile) is read whole, so it stays.
_UNUSED_FOLDERS = (
    *(
        f"arch/{name}"
        for name in ("alpha", "arc", "arm", "arm64", "csky", "hexagon", "loongarch", "m68k", "microblaze")
    ),
    *(f"arch/{name}" for name in ("mips", "nios2", "openrisc", "parisc", "powerpc", "riscv", "s390", "sh", "sparc")),
    *(
        f"drivers/{name}"
        for name in ("accel", "clk", "gpu", "hwmon", "iio", "infiniband", "media", "mtd", "net/ethernet")
    ),
    *(f"drivers/{name}" for name in ("net/wireless", "pinctrl", "scsi", "staging", "usb", "video")),
    *("arch/xtensa", "fs/btrfs", "fs/xfs", "samples", "sound"),
)
_EXCLUDED = (
    *(f"*/{folder}/*.{ending}" for folder in _UNUSED_FOLDERS for ending in ("[chS]", "dts", "dtsi")),
    *("*/Documentation/*.*", "*/tools/testing/*", "*/tools/perf/*", "*/rust/*.rs"),
)

# Changes to the kernel's source: (file, text that is there once, what it becomes).
# First: the clock is read in units of 256 ns while timers fire at nanoseconds. What the division leaves over is state
# that nothing shows, so a step that begins like another would not take exactly as long.
# The others keep out of the random numbers what differs between machines and folders: the host's chance, which is asked
# for before the kernel knows that its clock is virtual, and the command line, which holds paths. The name and date of
# the build, which go in too, are fixed where it is built, and the date of boot is on the command line.
_CHANGES = (
    ("arch/um/include/linux/time-internal.h", "#define TIMER_MULTIPLIER 256\n", "#define TIMER_MULTIPLIER 1\n"),
    (
        "arch/um/kernel/um_arch.c",
        """\
	if (os_getrandom(rng_seed, sizeof(rng_seed), 0) == sizeof(rng_seed)) {
		add_bootloader_randomness(rng_seed, sizeof(rng_seed));
		memzero_explicit(rng_seed, sizeof(rng_seed));
	}
""",
        "",
    ),
    ("arch/um/kernel/um_arch.c", "	u8 rng_seed[32];\n\n", ""),
    ("drivers/char/random.c", "	_mix_pool_bytes(command_line, strlen(command_line));\n", ""),
)

# In place of the host's getrandom(): on a virtual clock the kernel's random numbers, and with them ports, sequence
# numbers, hashes and the addresses of programs, are the same in every boot. On the real clock they stay the host's.
_RANDOM_HEADER = Path("arch/um/include/asm/archrandom.h")
_RANDOM_CODE = """\
/* SPDX-License-Identifier: GPL-2.0 */
#ifndef __ASM_UM_ARCHRANDOM_H__
#define __ASM_UM_ARCHRANDOM_H__

#include <linux/time-internal.h>

ssize_t os_getrandom(void *buf, size_t len, unsigned int flags);

static inline size_t __must_check arch_get_random_longs(unsigned long *v, size_t max_longs)
{
	static unsigned long state;
	ssize_t ret;
	size_t i;

	if (time_travel_mode != TT_MODE_OFF) { /* splitmix64 */
		for (i = 0; i < max_longs; i++) {
			unsigned long z = (state += 0x9e3779b97f4a7c15UL);

			z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9UL;
			z = (z ^ (z >> 27)) * 0x94d049bb133111ebUL;
			v[i] = z ^ (z >> 31);
		}
		return max_longs;
	}
	ret = os_getrandom(v, max_longs * sizeof(*v), 0);
	return ret < 0 ? 0 : ret / sizeof(*v);
}

static inline size_t __must_check arch_get_random_seed_longs(unsigned long *v, size_t max_longs)
{
	return 0;
}

#endif
"""

_COMPILED_FILES = 620
"""About so many files are compiled: what the progress is a share of."""
_PROGRESS_FILES = 50


def recipe() -> str:
    """Return what identifies how a kernel is built here, apart from source and compiler: a hash of our own inputs."""
    return hashlib.sha256(CONFIG.read_bytes() + (_RANDOM_CODE + repr(_CHANGES)).encode()).hexdigest()[:16]


def clock_folder() -> Path:
    """Return where the kernel with a virtual clock lies: in the user's cache, apart from those that other versions of
    testbed build otherwise.
    """
    return paths.cache_folder() / f"clock-kernel-{recipe()}"


def find_clock_kernel(folder: Path | None = None) -> GuestKernel | None:
    """Return the kernel with a virtual clock in `folder` (default: the user's cache), or None.

    None also for one that is not whole, and for one that another version of testbed built otherwise.
    """
    kernel = find_kernel(folder or clock_folder())
    return kernel if kernel is not None and kernel.recipe == recipe() else None


def virtual_clock() -> str:
    """Say which kernel there is for the virtual clock, after it was tried, or that one can be built here.

    CapabilityError or GuestKernelError, which say what to do, where neither is so.
    """
    if kernel := find_clock_kernel():
        try_kernel(kernel)
        return f"Linux {kernel.version} with time travel, in {kernel.folder}"
    check_machine(_ELSEWHERE)
    _check_tools()
    return "Linux with time travel, which is built first, once"


def build_kernel(folder: Path | None = None, *, say: Callable[[str], None] = print) -> GuestKernel:
    """Return the kernel in `folder` (default: the user's cache), and build it if it is not there and whole.

    A second builder waits for the first. `say` is told about progress, a line at a time. CapabilityError: this
    machine lacks a program or the space. GuestKernelError: it is not x86-64 or has no apt, or a step failed; nothing is
    left then.
    """
    folder = folder or clock_folder()
    if kernel := find_clock_kernel(folder):
        return kernel
    check_machine(_ELSEWHERE)
    _check_tools()
    make_folder(folder.parent)
    with locked(folder.with_name(folder.name + ".lock")):
        if kernel := find_clock_kernel(folder):  # another process built it while this one waited
            return kernel
        for left_behind in folder.parent.glob(
            f"{folder.name}.building-*"
        ):  # by a build that was killed: we hold the lock
            shutil.rmtree(left_behind)
        _check_space(folder.parent)
        with tempfile.TemporaryDirectory(
            prefix=f"{folder.name}.building-", dir=folder.parent, ignore_cleanup_errors=True
        ) as work:
            _build(Path(work), folder, say)
    if kernel := find_clock_kernel(folder):
        return kernel
    raise GuestKernelError(f"the guest kernel in {folder} was changed while it was being put there; build it again")


def newest_source(names: Sequence[str]) -> list[str]:
    """Choose the package with the newest kernel source from the names of packages."""
    versions = [
        (tuple(map(int, match[1].split("."))), match[0]) for name in names if (match := _SOURCE.fullmatch(name))
    ]
    return [max(versions)[1]] if versions else []


_SOURCE = re.compile(r"linux-source-(\d+(?:\.\d+)*)")


def _check_tools() -> None:
    missing = [package for tool, package in _TOOLS.items() if shutil.which(tool) is None]
    if "gcc" not in missing:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                ["gcc", "-static", "-x", "c", "-o", f"{folder}/static", "-"],
                input=_STATIC_PROGRAM.encode(),
                capture_output=True,
            )
        if done.returncode != 0:  # headers, libc.a
            missing.append("libc6-dev")
    elif shutil.which("cc") is None:
        missing.append("libc6-dev")
    if missing:
        sudo = "" if os.geteuid() == 0 else "sudo "
        raise CapabilityError(
            f"to build the guest kernel this machine lacks {', '.join(missing)}; install with: {sudo}apt-get install "
            f"-y {' '.join(missing)}, or {_ELSEWHERE}"
        )


def _check_space(folder: Path) -> None:
    about = os.statvfs(folder)
    if (free := about.f_bavail * about.f_frsize) < _SPACE_BYTES:
        raise CapabilityError(
            f"building the guest kernel takes {_SPACE_BYTES >> 20} MiB for some minutes, and {folder} has "
            f"{free >> 20} MiB free; make room, or set XDG_CACHE_HOME to a folder that has it"
        )


def _build(work: Path, folder: Path, say: Callable[[str], None]) -> None:
    started = time.monotonic()

    def step(text: str) -> None:
        say(f"[{time.monotonic() - started:4.0f} s] {text}")

    step("download the kernel's source, about 165 MB")
    (deb,) = download(work, "linux-source-", newest_source)
    name, version = package_version(deb)
    step(f"unpack {name} {version}")
    unpack(deb, work / "package")
    deb.unlink()
    (archive,) = (work / "package/usr/src").glob("linux-source-*.tar.xz")
    source = work / "source"
    source.mkdir()
    excluded = [f"--exclude={pattern}" for pattern in _EXCLUDED]
    _run(
        ["tar", "--extract", "--use-compress-program=xz -T0", *excluded, "--strip-components=1", "-f", str(archive)],
        source,
    )
    archive.unlink()
    _change(source)
    step("configure")
    make = ["make", "ARCH=um", f"-j{len(os.sched_getaffinity(0))}"]
    _run([*make, f"KCONFIG_ALLCONFIG={CONFIG}", "allnoconfig"], source)
    _check_configuration((source / ".config").read_text("utf-8"))
    step("compile, some minutes")
    compiled = 0

    def count(line: str) -> None:
        nonlocal compiled
        if line.startswith(("  CC  ", "  AS  ")):
            compiled += 1
            if compiled % _PROGRESS_FILES == 0:
                step(f"compile: {compiled} files of about {_COMPILED_FILES}")

    _run([*make, "linux"], source, count)
    fresh = work / "fresh"
    fresh.mkdir()
    _run(["strip", "-o", str(fresh / "linux"), "linux"], source)
    release = (source / "include/config/kernel.release").read_text("utf-8").strip()
    compiler = _run(["gcc", "-dumpfullversion"], source).strip()
    seal(fresh, release, {name: version, "gcc": compiler}, recipe())
    put_in_place(fresh, folder, work)
    step(f"Linux {release} is in {folder}")


def _change(source: Path) -> None:
    """Make the source ours. GuestKernelError where it is not the source that our changes were made for."""
    header = source / _RANDOM_HEADER
    text = _source_text(header)
    if not all(f"{name}(unsigned long *v, size_t max_longs)" in text for name in _RANDOM_FUNCTIONS):
        raise GuestKernelError(f"this kernel source is not as expected: {_RANDOM_HEADER} has other functions")
    header.write_text(_RANDOM_CODE, "utf-8")
    for name, old, new in _CHANGES:
        text = _source_text(source / name)
        if (count := text.count(old)) != 1:
            raise GuestKernelError(
                f"this kernel source is not as expected: {name} has {old.strip()!r} {count} times instead of once"
            )
        (source / name).write_text(text.replace(old, new), "utf-8")


def _source_text(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else ""


_RANDOM_FUNCTIONS = ("arch_get_random_longs", "arch_get_random_seed_longs")


def _check_configuration(found: str) -> None:
    """GuestKernelError unless CONFIG was granted whole: what is lacking, kconfig leaves out without a word."""
    granted = set(found.splitlines())
    asked = [line for line in CONFIG.read_text("utf-8").splitlines() if line.startswith("CONFIG_")]
    refused = [line for line in asked if line not in granted and not line.endswith("=n")]
    if refused:
        raise GuestKernelError(f"this kernel source does not grant {', '.join(refused)} of {CONFIG.name}")


def _run(command: Sequence[str], folder: Path, each_line: Callable[[str], None] | None = None) -> str:
    """Run a step that dies with this process; return its output. GuestKernelError with its last words when it fails."""
    process = start_program(
        "testbed.vm.step",
        *command,
        attempt="build the guest kernel",
        cwd=folder,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(str(line))
            if each_line is not None:
                each_line(str(line))
        status = process.wait()
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        process.stdout.close()
    if status != 0:
        said = "".join(line for line in lines if "rror" in line or "No space" in line)[-1500:] or "".join(lines)[-1500:]
        raise GuestKernelError(f"building the guest kernel: {command[0]} ended with status {status}:\n{said.strip()}")
    return "".join(lines)


def _environment() -> dict[str, str]:
    kept = {key: os.environ[key] for key in ("HOME", "PATH", "TMPDIR", "LD_LIBRARY_PATH") if key in os.environ}
    # Two machines with the same compiler build the same bytes.
    build = {"TIMESTAMP": "2026-01-01", "USER": "testbed", "HOST": "testbed", "VERSION": "1"}
    fixed = {f"KBUILD_BUILD_{name}": value for name, value in build.items()}
    return kept | fixed | {"LC_ALL": "C.UTF-8", "PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    build_kernel()
