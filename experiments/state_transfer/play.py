"""Play the transfers over links: `python experiments/state_transfer/play.py`, after encode.py.

This writes transfers.csv: the seconds from the first byte's encoding to the last one's decoding, on the virtual clock,
beside the ideal of the links as formulas. The messages and how long coding takes are those of messages.csv.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import state

from testbed import csv_rows, vm
from testbed.errors import LabError, TestbedError
from testbed.metrics.links import Pipes
from testbed.net.lab import LabSpec
from testbed.play.guests import play_jobs
from testbed.play.job import PlayJob
from testbed.play.played import read_played
from testbed.play.split import step_split
from testbed.play.synthetic import transfer_trace
from testbed.play.unlinked import ideal_step_ns
from testbed.profiles import load_profile

LINKS = {20: "link(20Mbit, 10ms)", 80: "consumer-80mbps"}
"""Mbit/s -> the profile of both ends' links."""
_AT_ONCE = 4
"""Transfers that are played before their rows are kept."""


class Row(NamedTuple):
    """A line of transfers.csv."""

    state: str
    codec: str
    mbps: int
    messages: int
    payload_bytes: int
    encode_s: float
    """Processor time of one core, all messages."""
    decode_s: float
    seconds: float
    """From the first message's encoding to the last one's decoding."""
    ideal_s: float
    """The same over links that do what they say, and nothing else."""
    wire_bytes: float
    """IP packets of both nodes."""


def played(transfers: list[tuple[str, str, int, list[tuple[int, int, int]]]], kernel: vm.GuestKernel) -> list[Row]:
    """Play transfers: (state, codec, Mbit/s, messages as `transfer_trace` takes them). LabError where one fails."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="testbed-transfer-") as place:
        folder, jobs, traces = Path(place), list[PlayJob](), []
        for number, (_, _, mbps, sent) in enumerate(transfers):
            traces.append(transfer_trace(sent))
            traces[-1].write(folder / f"{number}.trace")
            link = load_profile(LINKS[mbps])
            lab = LabSpec(topology="star", profiles=(link,), nodes=2, engine="netem", engine_reason="the guest's only")
            jobs.append(PlayJob(trace=folder / f"{number}.trace", lab=lab, output=folder / f"{number}.played"))
        outcomes = play_jobs(jobs, clock="virtual", folder=folder / "work", kernel=kernel)
        for job, trace, outcome, (name, codec, mbps, sent) in zip(jobs, traces, outcomes, transfers, strict=True):
            if outcome.error is not None:
                raise LabError(f"{name} through {codec} could not be played: {outcome.error}")
            split = step_split(trace, read_played(job.output))
            encode, size, decode = (sum(each) for each in zip(*sent, strict=True))
            ideal_ns = ideal_step_ns(trace, Pipes("star", job.lab.profiles, 2), 1)
            seconds = (encode / 1e9, decode / 1e9, split.step_ns / 1e9, ideal_ns / 1e9)
            rows.append(Row(name, codec, mbps, len(sent), size, *seconds, split.sent_bytes))
    return rows


def main() -> int:
    """Play what messages.csv has and transfers.csv lacks."""
    asked = state.asked(__doc__ or "")
    path = asked.output / "transfers.csv"
    done = {(row["state"], row["codec"], int(row["mbps"])) for row in csv_rows.read_records(path)}
    sent: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for row in csv_rows.read_records(asked.output / "messages.csv"):
        if row["state"] in asked.states:
            numbers = (int(row["encode_ns"]), int(row["payload_bytes"]), int(row["decode_ns"]))
            sent.setdefault((row["state"], row["codec"]), []).append(numbers)
    todo = [(*key, mbps, each) for key, each in sent.items() for mbps in LINKS if (*key, mbps) not in done]
    try:
        if todo and (kernel := vm.find_clock_kernel()) is None:
            raise LabError("there is no kernel with a virtual clock here; build it with: python -m testbed vm --build")
        for first in range(0, len(todo), _AT_ONCE):
            rows = played(todo[first : first + _AT_ONCE], kernel)
            csv_rows.append_rows(path, rows)
            for row in rows:
                print(*row, flush=True)  # noqa: T201
    except TestbedError as error:
        sys.stderr.write(f"testbed: error: {error}\n")
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
