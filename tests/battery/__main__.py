"""The battery: what must not change while testbed is told otherwise.

python -m tests.battery record [PART ...] [-k TEXT]     writes tests/battery/hashes/PART.json
python -m tests.battery compare [PART ...] [-k TEXT]    prints what differs from them; status 1 where anything does

A       some 1,700 traces of every kind in normal form (`entries.normal_form`). Seconds; no torch, no guest
ideals  how long some of them take over no links, and over links that are formulas
B       some 60 small trainings in one process: payloads, decoded values, codecs' states, losses, weights. 30 s
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.battery import entries, traces
from tests.battery.entries import Entries, Record

ROOT = Path(__file__).resolve().parents[2]


def _recipes() -> Entries:
    from tests.battery import recipes  # with torch

    return recipes.recipes()


PARTS: dict[str, Callable[[], Entries]] = {"A": traces.traces, "ideals": traces.ideals, "B": _recipes}
_KEPT = {"A": False, "ideals": False, "B": True}
"""Whether finished entries are kept, so that one that was interrupted goes on where it was."""


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.battery", description=__doc__)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; none: all")
    parser.add_argument("-k", metavar="TEXT", default="", help="only entries whose names have it")
    parser.add_argument("--kept", type=Path, default=ROOT / "results" / "battery", help="where finished entries are")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # who trains insists
    if unknown := set(asked.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    different = 0
    for part in asked.parts or PARTS:
        began = time.monotonic()
        known = entries.recorded(part) if (entries.HASHES / f"{part}.json").exists() else {}
        wanted = {name: make for name, make in PARTS[part]().items() if asked.k in name}
        found = finished(part, wanted, asked.kept)
        if asked.what == "record":
            entries.write(part, {**known, **found} if asked.k else found)
            said = "recorded"
        else:
            before = {name: record for name, record in known.items() if asked.k in name}
            failed = report(part, before, found)
            different += failed
            said = f"{failed} differ"
        print(f"{part}: {len(found)} entries, {said}, {time.monotonic() - began:.1f} s", flush=True)
    return 1 if different else 0


def finished(part: str, wanted: Entries, folder: Path) -> dict[str, Record]:
    """Make all entries, but those that were made of the same sources before."""
    if not _KEPT[part]:
        return {name: make() for name, make in wanted.items()}
    kept = folder / _sources() / f"{part}.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    done = dict(json.loads(line) for line in kept.read_text(encoding="utf8").splitlines()) if kept.exists() else {}
    with kept.open("a", encoding="utf8") as output:
        for name, make in wanted.items():
            if name not in done:
                began = time.monotonic()
                done[name] = make()
                output.write(json.dumps([name, done[name]]) + "\n")
                output.flush()
                print(f"  {name} ({time.monotonic() - began:.1f} s)", flush=True)
    return {name: done[name] for name in wanted}


def report(part: str, before: dict[str, Record], after: dict[str, Record]) -> int:
    """Print what differs; returns how many entries do."""
    count = 0
    for name in sorted(before.keys() | after.keys()):
        if name not in after or name not in before:
            words = ["is gone" if name in before else "is new"]
        else:
            words = list(entries.differences(before[name], after[name]))
        for each in words:
            print(f"{part} {name}: {each}")
        count += bool(words)
    return count


def _sources() -> str:
    """Return a hash of all that an entry depends on here."""
    found = hashlib.sha256()
    for path in sorted(
        [*(ROOT / "testbed").rglob("*"), *(ROOT / "tests").glob("*.py"), *ROOT.glob("tests/battery/*.py")]
    ):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
