"""Soak: random cells of every kind under faults, for long, in one process; and what must not grow meanwhile.

`python -m tests.soak --minutes 60` runs rounds of cells as the command `chaos` does, and prints after each what this
process and its children hold. Nothing may grow from the middle third of the rounds to the last: memory by more than
3 % and 8 MiB, and all else at all. Cells must be right; test_soak.py does the same for a shorter while.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from testbed.commands.console import need_clock_kernel
from testbed.commands.planned import progress_into
from testbed.sweep import chaos, conduct
from testbed.sweep.environment import Means
from tests.commands import outside

PLAYED, LIVE_EVERY = 4, 3
"""Played cells of a round, and in which rounds one of them is also live: every third."""
_FEWEST = 6
"""Rounds that are needed to judge."""
_MEMORY = 1.03, 8.0
"""Factor, and MiB beyond it, by which memory may grow."""


class Holdings(NamedTuple):
    """What this process, and the machine because of it, hold between two rounds."""

    memory_mib: float
    descriptors: int
    threads: int
    processes: int
    """Children, and theirs: the fork server stays, guests and hosts must not."""
    outside: int
    """Network devices, named namespaces and mounts."""
    temporary: int
    shared_memory: int


def holdings(temporary: Path) -> Holdings:
    """Take stock."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    devices, named, mounts = outside()
    return Holdings(
        memory_mib=int(status["VmRSS"].split()[0]) / 1024,
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        threads=int(status["Threads"]),
        processes=len(_descendants(os.getpid())),
        outside=len(devices) + len(named) + len(str(mounts).splitlines()),  # type: ignore[arg-type]
        temporary=len(list(temporary.iterdir())),
        shared_memory=len(list(Path("/dev/shm").iterdir())),
    )


def _descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *_descendants(int(child))]
    return found


def grown(rounds: Sequence[Holdings]) -> list[str]:
    """Return what grew from the middle third to the last, in words."""
    third = len(rounds) // 3
    middle, last = rounds[third : 2 * third], rounds[-third:]
    if not third:
        return [f"{len(rounds)} rounds are too few to judge"]
    words = []
    for name in Holdings._fields:
        before, after = ([getattr(each, name) for each in part] for part in (middle, last))
        if name == "memory_mib":
            before, after = [statistics.median(before) * _MEMORY[0] + _MEMORY[1]], [statistics.median(after)]
        if max(after) > max(before):
            words.append(f"{name}: {max(after):g}, at most {max(before):g} was allowed")
    return words


def soak(seconds: float, seed: int, folder: Path, table: Path | None) -> tuple[list[Holdings], list[str]]:
    """Run rounds until the time is over; return what was held after each, and which cells were wrong."""
    means = Means("netem", "the virtual clock's", "virtual", need_clock_kernel().version)
    temporary, ends = Path(tempfile.gettempdir()), time.monotonic() + seconds
    rounds, wrong, began = list[Holdings](), list[str](), time.monotonic()
    with contextlib.ExitStack() as stack:
        rows = csv.writer(stack.enter_context(table.open("w", buffering=1, newline=""))) if table is not None else None
        if rows is not None:
            rows.writerow(("round", "seconds", "cells", *Holdings._fields))
        while time.monotonic() < ends or len(rounds) < _FEWEST:
            number = len(rounds)
            drawn = list(chaos.draw(1000 * seed + number, PLAYED, int(number % LIVE_EVERY == 0)))
            results = folder / f"round-{number}"
            results.mkdir()
            conduct.make_runs(tuple(each.cell for each in drawn), results, means, progress_into(results))
            judged = [chaos.judge(results, each) for each in drawn]
            wrong += [f"round {number}: {row.words} ({row.timing}): {row.cause}" for row in judged if row.cause]
            shutil.rmtree(results)
            rounds.append(holdings(temporary))
            said = number, round(time.monotonic() - began, 1), len(drawn), *rounds[-1]
            sys.stderr.write(f"{' '.join(map(str, said))}\n")
            if rows is not None:
                rows.writerow(said)
    return rounds, wrong


def main() -> None:
    """Soak, and say what grew."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        for part in ("tmp", "results"):
            (Path(name) / part).mkdir()
        tempfile.tempdir = os.environ["TMPDIR"] = str(Path(name) / "tmp")
        rounds, wrong = soak(60 * asked.minutes, asked.seed, Path(name) / "results", asked.csv)
        tempfile.tempdir = None
    faults = wrong + [f"grew: {words}" for words in grown(rounds)]
    sys.stdout.write("\n".join([*faults, f"{len(rounds)} rounds, {len(faults)} faults"]) + "\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
