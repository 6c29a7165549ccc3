"""Fuzz parsers, and record what was done: python -m tests.fuzz PARSER ... --seconds N [--guided].

N is processor time per parser; `all` stands for every parser. record.json keeps executions, time and finds; another run
continues with other inputs and adds to it. docs/reliability.md shows it. Finds are kept in corpus/PARSER/: mend them,
and leave the file, which is then a regression test.

--guided: coverage of testbed's modules guides the inputs, by atheris (pip install atheris, in an environment of its own
that has testbed's packages too). Inputs that reached new lines are kept in results/fuzz/PARSER/.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.fuzz.engine import fuzz
from tests.fuzz.parsers import PARSERS
from tests.fuzz.record import read_count, write_count

_SLICE_S = 20.0
"""Processor time after which the record is written."""


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("parsers", nargs="+", choices=[*PARSERS, "all"])
    asked.add_argument("--seconds", type=float, required=True, help="processor time per parser")
    asked.add_argument("--guided", action="store_true", help="by coverage, with atheris")
    flags = asked.parse_args()
    for name in PARSERS if "all" in flags.parsers else flags.parsers:
        before = set(read_count(name).finds)
        if flags.guided:  # a process each: atheris ends it
            subprocess.run([sys.executable, "-m", "tests.fuzz.guided", name, str(int(flags.seconds))], check=True)
            count = read_count(name)
        else:
            count = read_count(name)
            until_s = count.cpu_s + flags.seconds
            while count.cpu_s < until_s:
                fuzz(name, count, seconds=min(_SLICE_S, until_s - count.cpu_s))
                write_count(name, count)
        new = "; ".join(sorted(set(count.finds) - before)) or "nothing"
        print(
            f"{name}: {count.executions:,} inputs, {count.cpu_s + count.guided_s:.0f} s, found now: {new}", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
