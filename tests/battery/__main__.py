"""The battery: what must not change while testbed is told otherwise. Recorded in November 2026, at commit 3336264.

python -m tests.battery record [PART ...] [-k TEXT]     writes hashes/PART.json
python -m tests.battery compare [PART ...] [-k TEXT]    prints what differs from it; status 1 where anything does

A       1,949 traces of every kind, 1,542 of them different, in normal form (`entries.normal_form`): 4 s, no guest.
        `trace` is what is done; `labels` what nodes and operations are called. test_battery.py compares it in every run
ideals  the steps of 325 of these without links, and over links that are formulas: 2 s
B       62 small trainings in one process: payloads, decoded values, codecs' states, losses, norms, weights: 30 s.
        Floats round otherwise on another processor or torch (hashes/machine.json)
C       44 played cells, to the nanosecond, in a guest: `ends_ns` are the ends of steps, `times` all times of records,
        `counted` what interfaces and sockets counted; several runs where links draw: 5 min
D       8 live cells on the virtual clock, `near_ns` within 1 us, numbers and bytes exactly; results of before: 5 min

What parts B to D have finished is kept under results/battery/, by the sources that it was made with, so that a command
which was interrupted goes on where it was; -k picks entries by a part of their names; another --kept makes all anew.

How testbed is called is in makers.py (A), recipes.py (B) and sweeps.py (C, D: the command line). These change with
testbed. The cases, and what is hashed, do not: a difference is one of testbed's, and is either mended or listed.

Differences that came when a job became one program; these entries were recorded anew, and no others:
- A: 198 of 1,949, `trace` and `labels`. Star and all-to-all whose codecs take time decode each message as it comes.
- ideals: 216 of 650. Links carry packets in the loop, and stars decode on arrival: pipelines are shorter by up to
  0.008 %, data parallel 23 %, sampling 15 %, experts 12 %, hybrid jobs 45 %; in sum nothing is longer.
  19 once more, by 0.016 % at most: a message fills up the last packet of the one before it in its connection as long as
  that may still wait behind another connection's.
- B: 9 of 62. `midway` of seven with staleness: evaluations before the last have applied what live runs have by then.
  `weights` of "asynchronous: buffer of 1": the maths of a round comes at its beginning, so that of rounds that nobody
  waits for any more has been done; of "pipeline: refused where the network decides": later stages are not built.
- C: `ideal` of 42 of 44, as above: ideal steps within 0.4 %, lte-trace 1 %; "all-gather | 2" 46 % longer; there are
  some for all-to-all, where one certificate that failed now passes. `midway` of 7, as in B.
  "data, calibrated": a server that decodes on arrival answers 0.86 ms earlier, and then flows compete otherwise for
  one link: the median step is 1.3 % longer. "data, chance": two of three runs in the other order.
  "varying: bursty-80mbps": what the guest loads changes which packets are lost; steps 0.7 % shorter.
- C, later: "data, star" of 50/10 Mbit/s, whose queues overflow, and the two cells with loss above: other packets are
  lost where the guest loads other code or lies in another folder; medians +0.03 and -0.13 %.
- B, later: "sampling: asyncdiff": its first late step computes on the stage's input, and not on its output.
- C, later: "consumer-80mbps-bbr" with fp32 and delta-int8: no steps are proved to repeat. The ends of steps are as
  before; times within the last step of fp32 are not, so what had been proved was not so.
- D, later: `steps` of "old results: asynchronous": a step's loss is the mean over workers, no longer the last one's.
- D, later: `sizes` of "period" and "DeCo": two messages of one moment arrive in the other order, in old code too.
- D: `near_ns` of 8. All places now begin at the same nanosecond; each began 1 to 2 us after the one before. Pipelines,
  the ring and an asynchronous period are apart by 8 us at most. Elsewhere other packets are first where flows meet,
  and all that follows changes: a step of the star by up to 13 %, of all-to-all 29 %, of an asynchronous buffer 19 %;
  all steps together by 5 %, 5 % and 2 %. With places set apart as they were, and all-to-all in the order of peers
  (instead of from the next one on, as in played traces), these are as before within 1 us.
  DeCo chooses by what it measures: a step by up to 34 %, all together 4 %, its last loss 8.18025 (was 8.18039). Of two
  places the first no longer says its number when it connects; those 4 bytes took one of the ten packets of its first
  window, so step 1 ends 1.1 ms sooner. With them, and places 1,018 ns apart as they were, all steps but the last end
  as before within 24 ns, the last within 0.5 us, and the losses are the same bit for bit.
  `sizes`: notes count in frames, and not in payloads; `names` and `sizes`: the order of a step's messages.
  `ideal`: where there was none.
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

from tests.battery import entries, old, sweeps, traces
from tests.battery.entries import Entries, Record

ROOT = Path(__file__).resolve().parents[2]


def _recipes() -> Entries:
    from tests.battery import recipes  # with torch

    return recipes.recipes()


PARTS: dict[str, Callable[[Path], Entries]] = {
    "A": lambda folder: traces.traces(),
    "ideals": lambda folder: traces.ideals(),
    "B": lambda folder: _recipes(),
    "C": lambda folder: sweeps.played(folder / "C"),
    "D": lambda folder: {**sweeps.live(folder / "D"), **old.old_results(folder / "old")},
}
"""Given where results may lie."""
_KEPT = ("B", "C", "D")
"""Parts whose finished entries are kept, so that one that was interrupted goes on where it was."""


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.battery", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; none: all")
    parser.add_argument("-k", metavar="TEXT", default="", help="only entries whose names have it")
    parser.add_argument("--kept", type=Path, default=ROOT / "results" / "battery", help="where finished entries are")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # who trains insists
    if unknown := set(asked.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    different, folder = 0, asked.kept / _sources()
    for part in asked.parts or PARTS:
        began = time.monotonic()
        known = entries.recorded(part) if (entries.HASHES / f"{part}.json").exists() else {}
        wanted = {name: make for name, make in PARTS[part](folder).items() if asked.k in name}
        found = finished(part, wanted, folder)
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
    if part not in _KEPT:
        return {name: make() for name, make in wanted.items()}
    kept = folder / f"{part}.jsonl"
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
