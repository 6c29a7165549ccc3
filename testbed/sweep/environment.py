"""The machine of the runs: locks it while measuring, and describes it and its software in environment.json.

Every described value is read, never guessed; a value that cannot be read is None.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import testbed
from testbed import paths, results
from testbed.records import Calibration
from testbed.spec import Clock, Engine
from testbed.sweep.executor import Cluster


class Means(NamedTuple):
    """The engine and clock of the runs, with reasons; and the source of their durations."""

    engine: Engine
    """Engine of runs on the real clock."""
    engine_reason: str
    clock: Clock
    """Clock of played runs, and of live ones whose codecs cost nothing."""
    clock_reason: str
    calibration: Calibration | None = None
    """Durations supplied by the user instead of this machine's."""
    recalibrate: bool = False
    """Whether to measure all durations again."""
    cluster: Cluster | None = None
    """Where played runs are made; None: on this machine."""


_PACKAGES = ("torch", "transformers", "datasets", "tokenizers", "numpy", "pyroute2", "scapy", "pydantic")


def hold_machine(note: Callable[[str], None] | None = None) -> AbstractContextManager[None]:
    """Lock the machine for a measurement: two at once would distort each other.

    If another testbed holds the lock, tell `note` and wait for it; without `note`, UserError.
    """
    folder = results.make_folder(paths.cache_folder(), "set XDG_CACHE_HOME to a folder of yours")
    busy = "another testbed is measuring on this machine, and two at once distort each other; "
    return paths.locked(folder / "machine.lock", busy + ("waiting for it" if note else "wait for it"), note)


def hold_folder(folder: Path) -> AbstractContextManager[None]:
    """Lock a result folder while runs are made in it. UserError if another testbed holds the lock."""
    busy = f"another testbed is making runs in {folder}; wait for it, or choose another folder with --results"
    return paths.locked(folder / ".lock", busy)


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
    """Run git in testbed's own checkout; None for an installed package, or without git."""
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
    """Describe the machine and its software now."""
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
