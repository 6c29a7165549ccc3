"""Encode states message by message: `python experiments/state_transfer/encode.py`.

This writes messages.csv: how long each message is, and the processor time of its encoding and decoding on one core of
this machine, medians of `REPEATS`. play.py sends these messages. Times want a machine that does nothing else.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import NamedTuple

import state

from testbed import csv_rows
from testbed.errors import TestbedError

REPEATS = 5


class Row(NamedTuple):
    """A line of messages.csv."""

    state: str
    codec: str
    message: int
    values: int
    payload_bytes: int
    encode_ns: int
    decode_ns: int


def encoded(of: state.State, codec: str) -> list[Row]:
    """Encode and decode each message; the first repeat, in which memory is had, does not count."""
    line, rows = state.Line(codec), []
    for number, (_, part, base) in enumerate(state.messages(of)):
        encode, decode, size = list[int](), list[int](), 0
        for _ in range(1 + REPEATS):
            sender, receiver = line.ends(number, part, base)
            begin = time.process_time_ns()
            payload = sender.encode(part, state.KEY)
            middle = time.process_time_ns()
            receiver.decode(payload, state.KEY)
            decode.append(time.process_time_ns() - middle)
            encode.append(middle - begin)
            size = memoryview(payload).nbytes
        times = (round(statistics.median(each[1:])) for each in (encode, decode))
        rows.append(Row(of.name, codec, number, part.numel(), size, *times))
    return rows


def main() -> int:
    """Go through the models and their codecs; what is in the table is kept."""
    asked = state.asked(__doc__ or "")
    path = asked.output / "messages.csv"
    done = {(row["state"], row["codec"]) for row in csv_rows.read_records(path)}
    try:
        for name in asked.states:
            if todo := [codec for codec in state.STATES[name].arms if (name, codec) not in done]:
                of = state.state_of(name)
                for codec in todo:
                    rows = encoded(of, codec)
                    csv_rows.append_rows(path, rows)
                    spent = (sum(row.encode_ns for row in rows) / 1e9, sum(row.decode_ns for row in rows) / 1e9)
                    print(name, codec, sum(row.payload_bytes for row in rows), *spent, flush=True)  # noqa: T201
    except TestbedError as error:
        sys.stderr.write(f"testbed: error: {error}\n")
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
