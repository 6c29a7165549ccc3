"""The machine that runs are made on: hold it alone while measuring, and describe it and its software in
environment.json.

What is described is read, never guessed; what cannot be read is None.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import testbed
from testbed import paths, results

_PACKAGES = ("torch", "transformers", "datasets", "tokenizers", "numpy", "pyroute2", "scapy", "pydantic")


def hold_machine() -> AbstractContextManager[None]:
    """Hold the machine while one measures: two measurements at once would spoil each other's numbers.

    UserError when another testbed holds it.
    """
    folder = results.make_folder(paths.cache_folder(), "set XDG_CACHE_HOME to a folder of yours")
    busy = "another testbed is measuring on this machine; two at once would spoil each other's numbers"
    return results.locked(folder / "machine.lock", busy)


def hold_folder(folder: Path) -> AbstractContextManager[None]:
    """Hold a result folder while runs are made in it. UserError when another testbed holds it."""
    busy = f"another testbed makes runs in {folder}; wait for it, or choose another folder with --results"
    return results.locked(folder / ".lock", busy)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf8").strip()
    except OSError:
        return None


def _field(path: str, name: str) -> str | None:
    for line in (_read(path) or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Ask git about testbed's own checkout; None for an installed package or where git is missing."""
    folder = Path(testbed.__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None
    command = ["git", "-c", f"safe.directory={folder}", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def describe_machine() -> dict[str, Any]:
    """Describe the machine and software at this moment."""
    changed = _git("status", "--porcelain")
    memory = _field("/proc/meminfo", "MemTotal")
    return {
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "testbed": testbed.__version__,
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changed_files": None if changed is None else len(changed.splitlines()),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in _PACKAGES},
        "kernel": platform.release(),
        "machine": platform.machine(),
        "guest_kernel": os.environ.get("TESTBED_GUEST") == "1",
        "cpu_model": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(memory.split()[0]) * 1024 if memory else None,
        "load_average": list(os.getloadavg()),
        "clock_source": _read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "psched": _read("/proc/net/psched"),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
    }
