"""Fuzzes one parser with inputs that coverage guides: python -m tests.fuzz.guided PARSER SECONDS."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["testbed"]):
    from tests.fuzz import engine
    from tests.fuzz.parsers import PARSERS
    from tests.fuzz.record import read_count, write_count

KEPT = Path(__file__).parents[2] / "results/fuzz"
_SLICE_S = 10.0


def main(name: str, seconds: int) -> None:
    """Run until so much processor time is used; write the record meanwhile, because atheris ends the process."""
    parser, count, folder = PARSERS[name], read_count(name), KEPT / name
    folder.mkdir(parents=True, exist_ok=True)
    for number, example in enumerate(parser.examples()):
        (folder / f"example-{number}").write_bytes(example)
    before_s, began, written = count.guided_s, time.process_time(), time.process_time()

    def one(raw: bytes) -> None:
        nonlocal written
        count.executions += 1
        try:
            engine.check(parser, raw)
        except Exception as error:
            engine.keep_find(name, raw, error, count)
        now = time.process_time()
        if now - written > _SLICE_S or now - began > seconds:
            written, count.guided_s = now, before_s + now - began
            write_count(name, count)
            if now - began > seconds:
                os._exit(0)  # an exception would count as one of the parser

    limits = engine.limited()
    limits.__enter__()  # for the rest of the process
    flags = [
        f"-max_len={engine.LARGEST_BYTES}",
        "-rss_limit_mb=0",
        "-timeout=600",
        f"-artifact_prefix={folder}/",
        "-print_final_stats=0",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *flags, str(folder)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
