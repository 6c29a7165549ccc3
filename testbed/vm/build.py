"""Build a guest kernel whose clock is virtual: user-mode Linux with time travel, from Debian's kernel source.

clock_kernel/ has its configuration (time-travel.config) and our changes (time-travel.patch). Needs a C compiler and a
few packages of Debian, but no root. The same source and tools yield the same bytes for any user, in any folder. The
build uses a temporary folder and renames it once it is complete, so an interrupted build leaves nothing that looks
complete.
"""

from __future__ import annotations

import os
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
from testbed.process import start_program
from testbed.vm.debian import check_machine, check_processor, download, package_version, put_in_place, unpack
from testbed.vm.guest import try_kernel
from testbed.vm.kernel import CONFIG, PATCH, GuestKernel, own_folder, seal
from testbed.vm.kernel_file import SHIPPED_FILE, find_clock_kernel, import_kernel

_TOOLS = {tool: tool for tool in ("gcc", "make", "flex", "bison", "bc", "tar", "patch")} | {
    "xz": "xz-utils",
    "strip": "binutils",
}
"""Required programs, and the Debian package of each."""
_COMPILED_BY = ("gcc", "ld", "ldd")
"""Tools whose versions determine the bytes; ldd prints the C library's."""
_NOT_ASKED = ("RUSTC=none", "BINDGEN=none", "PAHOLE=none")
"""Unused by the build. Their versions would enter the kernel, which contains its own configuration."""
_ELSEWHERE = "omit --build to use the bundled kernel"
_STATIC_PROGRAM = '#include <stdio.h>\nint main(void) { return puts("") < 0; }\n'
_SPACE_BYTES = 1 << 30
"""Measured: 0.16 GB for the package, briefly twice that, 0.45 GB of source and 0.1 GB of objects."""

# Most of the source is for other machines and devices; skipping it saves a third of the unpacking time. Files of the
# configuration (Kconfig, Makefile) are all unpacked, so they are not listed.
_UNUSED_FOLDERS = {
    "arch": "alpha arc arm arm64 csky hexagon loongarch m68k microblaze mips nios2 openrisc parisc powerpc riscv "
    "s390 sh sparc xtensa",
    "drivers": "accel clk gpu hwmon iio infiniband media mtd net/ethernet net/wireless pinctrl scsi staging usb video",
    "fs": "btrfs xfs",
    "": "samples sound",
}
_EXCLUDED = (
    *(
        str(Path("*", above, name, f"*.{ending}"))
        for above, names in _UNUSED_FOLDERS.items()
        for name in names.split()
        for ending in ("[chS]", "dts", "dtsi")
    ),
    *("*/Documentation/*.*", "*/tools/testing/*", "*/tools/perf/*", "*/rust/*.rs"),
)

_COMPILED_FILES = 620
"""Approximate number of files to compile, for the progress messages."""
_PROGRESS_FILES = 50


def virtual_clock() -> str:
    """Boot the kernel of the virtual clock once, and describe it.

    CapabilityError, GuestKernelError or SpecError, with a remedy, if it does not run or was altered.
    """
    check_processor()
    kernel = find_clock_kernel()
    assert kernel is not None
    try_kernel(kernel)
    return f"Linux {kernel.version} with time travel, {kernel.origin}"


def build_kernel(
    folder: Path | None = None, *, say: Callable[[str], None] = print, exactly: bool = False
) -> GuestKernel:
    """Return the kernel in `folder` (default: the user's own), building it unless a complete one is there.

    A second builder waits for the first. `say` receives progress, line by line. `exactly`: only from the source of the
    bundled kernel; otherwise from the newest source if no mirror still has that one. CapabilityError: this machine
    lacks a program, disk space or that source. GuestKernelError: the machine is not x86-64, has no apt, or a step
    failed; nothing is left behind in that case.
    """
    folder = folder or own_folder()
    if kernel := _whole(folder):
        return kernel
    check_machine(_ELSEWHERE)
    _check_tools()
    paths.make_folders(folder.parent)
    with paths.locked(folder.with_name(folder.name + ".lock")):
        if kernel := _whole(folder):  # another process built it while this one waited
            return kernel
        for left_behind in folder.parent.glob(
            f"{folder.name}.building-*"
        ):  # by a build that was killed: we hold the lock
            shutil.rmtree(left_behind)
        _check_space(folder.parent)
        with tempfile.TemporaryDirectory(
            prefix=f"{folder.name}.building-", dir=folder.parent, ignore_cleanup_errors=True
        ) as work:
            _build(Path(work), folder, say, exactly)
    if kernel := _whole(folder):
        return kernel
    raise GuestKernelError(f"the guest kernel in {folder} was changed during its installation; build it again")


def _whole(folder: Path) -> GuestKernel | None:
    kernel = find_clock_kernel(folder)
    return kernel if kernel is not None and kernel.is_whole() else None


def verify_kernel(*, say: Callable[[str], None] = print) -> GuestKernel:
    """Rebuild the bundled kernel in a fresh folder, compare, and return it; the rebuilt one is removed.

    GuestKernelError if the bytes differ. CapabilityError if this machine cannot reproduce them: a tool is missing or
    has another version, or no mirror has the source.
    """
    paths.make_folders(paths.cache_folder())
    with paths.scratch_folder("verifying-", paths.cache_folder()) as work:
        shipped = import_kernel(SHIPPED_FILE, work / "shipped")
        check_machine(_ELSEWHERE)
        _check_tools()
        for tool, version in _tools().items():
            if version != shipped.packages[tool]:
                raise CapabilityError(
                    f"cannot verify the guest kernel here: it was built with {shipped.packages[tool]}, this machine "
                    f"has {version}, and different tools produce different bytes"
                )
        built = build_kernel(Path(work, "built"), say=say, exactly=True)
    if built.sha256 != shipped.sha256:
        raise GuestKernelError(
            f"the guest kernel in {SHIPPED_FILE} does not match its source: its SHA-256 is {shipped.sha256}; a build "
            f"from the same source with the same tools has {built.sha256}"
        )
    return shipped


def _tools() -> dict[str, str]:
    """Return the version line of each tool that determines the bytes."""
    asked = {tool: subprocess.run([tool, "--version"], capture_output=True, text=True) for tool in _COMPILED_BY}
    return {tool: (done.stdout.splitlines() or ["unknown"])[0] for tool, done in asked.items()}


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


def _build(work: Path, folder: Path, say: Callable[[str], None], exactly: bool) -> None:
    started = time.monotonic()

    def step(text: str) -> None:
        say(f"[{time.monotonic() - started:4.0f} s] {text}")

    step("download the kernel's source, about 165 MB")
    deb = download(work, exactly=exactly)
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
    _run(["patch", "--strip=1", "--fuzz=0", "--batch", "--silent", f"--input={PATCH}"], source)
    step("configure")
    make = ["make", "ARCH=um", *_NOT_ASKED, f"-j{len(os.sched_getaffinity(0))}"]
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
    seal(fresh, release, {name: version, **_tools()})
    put_in_place(fresh, folder, work)
    step(f"Linux {release} is in {folder}")


def _check_configuration(found: str) -> None:
    """GuestKernelError unless kconfig accepted all of CONFIG: it drops unknown options silently."""
    granted = set(found.splitlines())
    asked = [line for line in CONFIG.read_text("utf-8").splitlines() if line.startswith("CONFIG_")]
    refused = [line for line in asked if line not in granted and not line.endswith("=n")]
    if refused:
        raise GuestKernelError(f"this kernel source does not accept {', '.join(refused)} of {CONFIG.name}")


def _run(command: Sequence[str], folder: Path, each_line: Callable[[str], None] | None = None) -> str:
    """Run a step that dies with this process; return its output. GuestKernelError with its last output on failure."""
    process = start_program(
        "testbed.vm.step",
        *command,
        attempt="build the guest kernel",
        cwd=folder,
        env=_environment() | {"TMPDIR": str(folder)},
        umask=0o022,
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
    kept = {key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ}
    # The same tools produce the same bytes for any user, in any folder.
    build = {"TIMESTAMP": "2026-01-01", "USER": "testbed", "HOST": "testbed", "VERSION": "1"}
    fixed = {f"KBUILD_BUILD_{name}": value for name, value in build.items()}
    return kept | fixed | {"TZ": "UTC", "LC_ALL": "C.UTF-8"}
