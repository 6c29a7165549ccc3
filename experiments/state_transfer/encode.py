"""Encode states message by message: `python experiments/state_transfer/encode.py`.

This writes messages.csv: how long each message is, and the processor time of its encoding and decoding on one core of
this machine, medians of `REPEATS`. play.py sends these messages. Times want a machine that does nothing else.
"""

import argparse
import statistics
import time
from typing import NamedTuple

import state

from testbed import csv_rows

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


def main(asked: argparse.Namespace) -> None:
    """Go through the models and their codecs; what is in the table is kept."""
    table = csv_rows.Table(asked.output / "messages.csv", Row, "state", "codec", say=False)
    for name in state.names(asked):
        if todo := [codec for codec in state.STATES[name].arms if (name, codec) not in table]:
            of = state.state_of(name)
            for codec in todo:
                rows = encoded(of, codec)
                table.add(rows)
                spent = (sum(row.encode_ns for row in rows) / 1e9, sum(row.decode_ns for row in rows) / 1e9)
                print(name, codec, sum(row.payload_bytes for row in rows), *spent, flush=True)  # noqa: T201


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, state.HERE)
