"""`python -m testbed.codecs.check CODEC` prints the table of checks; the exit status is 1 if a check failed.

It is a separate program, so that the command line needs no torch, and torch has one thread.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console
from rich.text import Text

from testbed.codecs.check.apart import Ends
from testbed.codecs.check.subject import subject_of
from testbed.codecs.check.suite import CHECKS, check_codec
from testbed.codecs.check.verdicts import CheckResult
from testbed.errors import TestbedError
from testbed.terminal import Terminal

_STYLES = {"FAIL": "red", "-": "dim"}
_ASKED = {check.name: " ".join((inspect.getdoc(check.ask) or "").split()) for check in CHECKS}
_NAME = max(map(len, _ASKED)) + 2
_VERDICT = 6
_HEAD = _NAME + 2 * _VERDICT


def main(text: str) -> int:
    """Print rows as results arrive, then the number of passed checks."""
    console = Terminal(width=None if sys.stdout.isatty() else 150, highlight=False)
    torch.set_num_threads(1)
    asked = failed = 0
    try:
        subject_of(text, "forward")  # a mistake in the text is told at once
        with Ends([text]) as ends:
            for limit in ends.limits:
                console.print(f"This machine refuses the codec's processes {limit}", markup=False)
            head = "check".ljust(_NAME) + "fwd".ljust(_VERDICT) + "bwd".ljust(_VERDICT) + "what was seen"
            console.print(Text(head, "bold"))
            for row in _rows(check_codec(text, ends)):
                verdicts = [result.verdict for result in row]
                asked += sum(verdict != "-" for verdict in verdicts)
                failed += verdicts.count("FAIL")
                _print(console, row)
    except TestbedError as error:
        print(f"testbed: error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_status
    console.print(f"{text}: {asked - failed} of {asked} checks passed")
    return 1 if failed else 0


def _rows(results: Iterator[CheckResult]) -> Iterator[list[CheckResult]]:
    """Yield both directions of each check.

    Neighbouring checks of one family that do not apply, for the same reason, share a row.
    """
    rows = (list(group) for _, group in itertools.groupby(results, key=lambda result: result.check))
    for family, alike in itertools.groupby(rows, key=_family):
        if family is None:
            yield from alike
            continue
        row, *others = alike
        name = f"{family[0]}, {1 + len(others)} checks" if others else row[0].check
        yield [result._replace(check=name) for result in row]


def _family(row: Sequence[CheckResult]) -> tuple[str, ...] | None:
    """Return the key by which rows are merged; None for a separate row."""
    name, colon, _ = row[0].check.partition(":")
    silent = colon and all(result.verdict == "-" for result in row)
    return (name, *(result.detail for result in row)) if silent else None


def _print(console: Console, row: Sequence[CheckResult]) -> None:
    line = Text(row[0].check.ljust(_NAME))
    for result in row:
        line.append(result.verdict.ljust(_VERDICT), _STYLES.get(result.verdict, ""))
    told = [result for result in row if result.verdict != "-"] or row[:1]
    alike = len({result.detail for result in told}) == 1
    details = [told[0].detail] if alike else [f"{result.direction}: {result.detail}" for result in told]
    if any(result.verdict == "FAIL" for result in row):
        details.append(f"asked: {_ASKED[row[0].check]}")
    wide = max(console.width - _HEAD, 30)
    for part in itertools.chain.from_iterable(Text(detail).wrap(console, wide) for detail in details):
        part.rstrip()
        console.print(line + part)
        line = Text(" " * _HEAD)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m testbed.codecs.check CODEC, for example 'int8' or 'package.module:Class'")
    sys.exit(main(sys.argv[1]))
