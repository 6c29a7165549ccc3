"""Sample over links with each program, play its trace, and compute its ideal: `python
experiments/compactfusion/live.py`.

Live workers are processes that sample images and send them over TCP (`testbed.diffusion.live`), in a guest whose clock
is virtual; the same messages are played from the program's trace in a guest too, and computed over links as formulas.
This writes live.csv. What is in the output folder already is kept: remove the CSV to begin anew.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from testbed import csv_rows, vm
from testbed.diffusion.dit import ROWS, TOKENS, Dit
from testbed.diffusion.experts import BLOCK, ExpertProgram, ExpertSchedule
from testbed.diffusion.inside import LiveSampling
from testbed.diffusion.live import LiveSampled, sample_live
from testbed.diffusion.pretrain import load_dit
from testbed.diffusion.programs import Costs, Program, ProgramName, trace_of
from testbed.errors import CapabilityError, LabError
from testbed.jobs.sampling import sent_parts
from testbed.metrics.links import Pipes
from testbed.net.lab import LabSpec
from testbed.play.guests import play_jobs
from testbed.play.job import PlayJob
from testbed.play.played import Played, read_played
from testbed.play.trace import Trace
from testbed.play.unlinked import ideal_step_ns, step_ends
from testbed.profiles import load_profile
from testbed.vm.kernel import GuestKernel

HERE = Path(__file__).resolve().parent
_DIGITS = 7
"""Of numbers in the table."""
WORKERS, STEPS, IMAGES, WORK_NS = 4, 2, 4 * BLOCK, 1_000_000
"""`WORK_NS`: how long each computation takes on the emulated device."""
_REQUESTS = 2
"""That are played: in the first one TCP's windows open, as they do live."""
LINKS = ("link(2Mbit, 20ms)", "link(2Mbit, 20ms, buffer=2s)")
"""Every worker's. Where no buffer is stated it holds 100 ms."""
NAMES: dict[str, ProgramName] = {
    "ring": "ring",
    "all-gather": "gather",
    "DistriFusion": "displaced",
    "PipeFusion": "pipefusion",
    "AsyncDiff": "asyncdiff",
}
SCHEDULES = {"experts, synchronous": ExpertSchedule(0), "experts, DICE": ExpertSchedule(1, "deep", "low")}


class Row(NamedTuple):
    """A line of live.csv."""

    program: str
    link: str
    workers: int
    steps: int
    message_bytes: float
    """Of a frame, on average."""
    ideal_s: float
    played_s: float
    """A first request, as `live_s`."""
    live_s: float
    warm_s: float
    """The second of two played requests."""
    retransmitted: float
    """Of all bytes that played sockets sent in the first request, how large a share went over again."""


def samplings(model: str, link: str, dit: Dit, images: int) -> Iterator[tuple[str, LiveSampling]]:
    """Yield the programs that a model is for, with fp16 messages."""
    lab = LabSpec(
        topology="star",
        profiles=(load_profile(link),) * WORKERS,
        nodes=WORKERS,
        engine="netem",
        engine_reason="all that the guest has",
    )
    programs: dict[str, Program | ExpertProgram] = (
        {name: ExpertProgram(of, WORKERS, dit.size.layers, STEPS) for name, of in SCHEDULES.items()}
        if "moe" in model
        else {
            arm: Program(
                name, WORKERS, dit.size.layers, STEPS, TOKENS, ROWS, patches=WORKERS if name == "pipefusion" else 1
            )
            for arm, name in NAMES.items()
            if dit.size.layers >= WORKERS or name not in ("pipefusion", "asyncdiff")
        }
    )
    for name, program in programs.items():
        yield (
            name,
            LiveSampling(lab=lab, program=program, images=images, codec="fp16", boundary="fp16", work_ns=WORK_NS),
        )


def played(
    asked: Sequence[LiveSampling], found: Sequence[LiveSampled], kernel: GuestKernel
) -> list[tuple[list[float], Played]]:
    """Play two requests of each sampling's trace; returns the seconds of both, and what was played."""
    with tempfile.TemporaryDirectory(prefix="testbed-compactfusion-") as name:
        folder, jobs, traces = Path(name), list[PlayJob](), list[Trace]()
        for of, live in zip(asked, found, strict=True):
            traces.append(_trace(of, live, _REQUESTS))
            file = folder / f"{len(jobs)}.trace"
            traces[-1].write(file)
            jobs.append(PlayJob(trace=file, lab=of.lab, output=folder / f"{len(jobs)}.played"))
        outcomes, told = play_jobs(jobs, clock="virtual", folder=folder / "work", kernel=kernel), []
        for trace, outcome in zip(traces, outcomes, strict=True):
            if outcome.output is None:
                raise LabError(f"could not be played: {outcome.error}")
            of_trace = read_played(outcome.output)
            ends = step_ends(trace, of_trace.lanes, _REQUESTS)
            told.append(([(after - before) / 1e9 for before, after in pairwise([0, *ends])], of_trace))
        return told


def _trace(of: LiveSampling, live: LiveSampled, requests: int) -> Trace:
    costs = Costs(lambda action: WORK_NS, live.frame_bytes.__getitem__)
    return trace_of(of.program.actions(), costs, requests=requests)


def rows_of(dit: Dit, link: str, wanted: Sequence[tuple[str, LiveSampling]], kernel: GuestKernel) -> Iterator[Row]:
    """Yield a row for each program."""
    names, asked = zip(*wanted, strict=True)
    found = sample_live(dit, asked, kernel)
    for name, of, live, (seconds, told) in zip(names, asked, found, played(asked, found, kernel), strict=True):
        ideal_ns = ideal_step_ns(_trace(of, live, 1), Pipes("star", list(of.lab.profiles), WORKERS), 1)
        sizes = [live.frame_bytes[part] for _, part in sent_parts(of.program.actions())]
        again, sent = (
            sum(getattr(state, field) for state in told.sockets[0]) for field in ("bytes_retransmitted", "bytes_sent")
        )
        yield Row(
            name, link, WORKERS, STEPS, sum(sizes) / len(sizes), ideal_ns / 1e9, seconds[0], live.took_ns / 1e9,
            seconds[1], again / sent,
        )  # fmt: skip


def main(arguments: list[str]) -> int:
    """Write live.csv."""
    asked = csv_rows.asked_of(arguments, __doc__, HERE)
    if (kernel := vm.find_clock_kernel()) is None:
        raise CapabilityError("sampling on the virtual clock needs a guest kernel: python -m testbed vm --build")
    torch.set_num_threads(1)
    asked.output.mkdir(parents=True, exist_ok=True)
    models = ("dit-digits-nano",) if asked.quick else ("dit-digits-moe", "dit-digits")
    rows = csv_rows.read_rows(asked.output / "live.csv")
    made = {tuple(row[:2]) for row in rows}
    for model in models:
        dit = load_dit(model)
        for link in LINKS[-1:] if asked.quick else LINKS:
            wanted = list(samplings(model, link, dit, 4 if asked.quick else IMAGES))[: 1 if asked.quick else None]
            if all((name, link) in made for name, _ in wanted):
                continue
            for row in rows_of(dit, link, wanted, kernel):
                print(*csv_rows.shortened(row, _DIGITS), flush=True)  # noqa: T201
                rows.append(row)
            csv_rows.write_rows(asked.output / "live.csv", Row._fields, rows, digits=_DIGITS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
