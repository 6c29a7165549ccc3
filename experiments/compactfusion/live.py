"""Sample over links with each program, play its trace, and compute its ideal: `python
experiments/compactfusion/live.py`.

Live workers are processes that sample images and send them over TCP (`testbed.diffusion.over_links`), in a guest whose
clock is virtual; the same messages are played from the program's trace in a guest too, and computed over links as
formulas. This writes live.csv. What is in the output folder already is kept: remove the CSV to begin anew.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from testbed import csv_rows
from testbed.diffusion.dit import ROWS, TOKENS, Dit
from testbed.diffusion.experts import BLOCK, ExpertProgram, ExpertSchedule
from testbed.diffusion.over_links import LiveSampled, sample_live
from testbed.diffusion.pretrain import load_dit
from testbed.diffusion.programs import Costs, Program, ProgramName, as_published, trace_of
from testbed.diffusion.sample_in_guest import LiveSampling
from testbed.jobs.sampling import sent_parts
from testbed.metrics.links import Pipes
from testbed.player.virtual import OverLinks, guest_lab, need_kernel, play_virtual
from testbed.profiles import load_profile
from testbed.trace.format import Trace
from testbed.trace.played import Played
from testbed.trace.simulate import ideal_step_ns, step_ends
from testbed.vm.kernel import GuestKernel

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
    lab = guest_lab("star", [load_profile(link)] * WORKERS, WORKERS)
    programs: dict[str, Program | ExpertProgram] = (
        {name: ExpertProgram(of, WORKERS, dit.size.layers, STEPS) for name, of in SCHEDULES.items()}
        if "moe" in model
        else {
            arm: as_published(name, WORKERS, dit.size.layers, STEPS, TOKENS, ROWS)
            for arm, name in NAMES.items()
            if dit.size.layers >= WORKERS or name not in ("pipefusion", "asyncdiff")
        }
    )
    for name, program in programs.items():
        of = LiveSampling(lab=lab, program=program, images=images, codec="fp16", boundary="fp16", work_ns=WORK_NS)
        yield name, of


def played(asked: Sequence[LiveSampling], found: Sequence[LiveSampled]) -> Iterator[tuple[list[float], Played]]:
    """Play two requests of each sampling's trace; yield the seconds of both, and what was played."""
    traces = [_trace(of, live, _REQUESTS) for of, live in zip(asked, found, strict=True)]
    told = play_virtual([OverLinks(trace, of.lab) for trace, of in zip(traces, asked, strict=True)])
    for trace, of_trace in zip(traces, told, strict=True):
        ends = step_ends(trace, of_trace.lanes, _REQUESTS)
        yield [(after - before) / 1e9 for before, after in pairwise([0, *ends])], of_trace


def _trace(of: LiveSampling, live: LiveSampled, requests: int) -> Trace:
    costs = Costs(lambda action: WORK_NS, live.frame_bytes.__getitem__)
    return trace_of(of.program.actions(), costs, requests=requests)


def rows_of(dit: Dit, link: str, wanted: Sequence[tuple[str, LiveSampling]], kernel: GuestKernel) -> Iterator[Row]:
    """Yield a row for each program."""
    names, asked = zip(*wanted, strict=True)
    found = sample_live(dit, asked, kernel)
    for name, of, live, (seconds, told) in zip(names, asked, found, played(asked, found), strict=True):
        ideal_ns = ideal_step_ns(_trace(of, live, 1), Pipes("star", list(of.lab.profiles), WORKERS), 1)
        sizes = [live.frame_bytes[part] for _, part in sent_parts(of.program.actions())]
        again, sent = (
            sum(getattr(state, field) for state in told.sockets[0]) for field in ("bytes_retransmitted", "bytes_sent")
        )
        yield Row(
            name, link, WORKERS, STEPS, sum(sizes) / len(sizes), ideal_ns / 1e9, seconds[0], live.took_ns / 1e9,
            seconds[1], again / sent,
        )  # fmt: skip


def main(asked: argparse.Namespace) -> None:
    """Write live.csv."""
    kernel = need_kernel()
    models = ("dit-digits-nano",) if asked.quick else ("dit-digits-moe", "dit-digits")
    table = csv_rows.Table(asked.output / "live.csv", Row, "program", "link", digits=_DIGITS)
    for model in models:
        dit = load_dit(model)
        for link in LINKS[-1:] if asked.quick else LINKS:
            wanted = list(samplings(model, link, dit, 4 if asked.quick else IMAGES))[: 1 if asked.quick else None]
            if not all((name, link) in table for name, _ in wanted):
                table.add(rows_of(dit, link, wanted, kernel))


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, __file__)
