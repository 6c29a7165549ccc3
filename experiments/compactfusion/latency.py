"""Compute and play how long a request takes over links: `python experiments/compactfusion/latency.py`.

This reads messages.csv, which measure.py writes, and writes latency.csv; with `--play` it writes played.csv. Arms that
latency.csv has already are kept. Two
settings:

digits     the model of measure.py, its messages as they were encoded, computing and coding as fast as DEVICE does
FLUX.1-dev its shape and the published seconds of one device; messages by the codecs' formulas, coding takes no time

`ideal` rows are the critical path over the pipe formula (`testbed/trace/simulate.py`); `virtual` rows were played on
the virtual clock, with TCP: the last of two requests, because in the first one windows open.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas

from testbed import csv_rows
from testbed.codecs.contract import Context
from testbed.codecs.make import make
from testbed.devices.codec_cost import device_codec_ns, rates_of
from testbed.devices.device import load_device
from testbed.diffusion.dit import ROWS, SIZES, TOKENS
from testbed.diffusion.programs import Costs, Part, Program, ProgramName, as_published, trace_of
from testbed.jobs.sampling import Actions, Compute, sent_parts
from testbed.metrics.links import Pipes
from testbed.player.split import step_split
from testbed.player.virtual import OverLinks, guest_lab, play_virtual
from testbed.profiles import LinkProfile, load_profile
from testbed.runtime.frame import HEADER_BYTES
from testbed.trace.simulate import ideal_step_ns

HERE = Path(__file__).resolve().parent
_DIGITS = 7
"""Of numbers in the tables."""
DEVICE = "laptop-cpu"
MBIT = (100, 500, 2000, 10000, 30000)
DELAYS_US = (20, 200, 1000, 10000)
"""From one worker to another: half on each one's link."""
FLUX_MBIT = (1000, 4000, 8000, 12000, 16000, 64000)
FLUX_DELAYS_US = (20, 5000, 20000)
ARMS = ("fp16", "residual 1-bit", "residual 2-bit", "PipeFusion", "DistriFusion")
PLAYED = ("fp16", "residual 2-bit", "residual 1-bit", "PipeFusion")
PLAYED_MBIT, PLAYED_DELAY_US = (80, 200, 500, 2000), 200
FLUX_LAYERS, FLUX_TOKENS, FLUX_WIDTH, FLUX_CHANNELS, FLUX_STEPS = 57, 4096, 3072, 64, 28
FLUX_ROWS = 64


class Row(NamedTuple):
    """A line of latency.csv."""

    setting: str
    arm: str
    workers: int
    steps: int
    rate_mbps: int
    """Of each worker's link, in each direction."""
    delay_us: int
    """One way, between two workers."""
    clock: str
    seconds: float
    """A request."""
    sent_mb: float
    """By a worker on average, payloads and headers of frames."""


class Job(NamedTuple):
    """One way of sampling, and what it costs."""

    setting: str
    arm: str
    program: Program
    costs: Costs

    def row(self, actions: Sequence[Actions], mbit: int, delay_us: int, clock: str, seconds: float) -> Row:
        """Return a line."""
        sent = sum(self.costs.frame_bytes(part) for _, part in sent_parts(actions))
        workers = self.program.workers
        return Row(
            self.setting, self.arm, workers, self.program.steps, mbit, delay_us, clock, seconds, sent / workers / 1e6
        )


def links(mbit: int, delay_us: int) -> LinkProfile:
    """Return every worker's link."""
    return load_profile(f"link({mbit}Mbit, {delay_us / 2:g}us, buffer=1s)")


# ---------------------------------------------------------------------- the two settings
def digits_jobs(messages: Any, images: int, model: str) -> Iterator[Job]:
    """Yield the arms whose messages were measured, and one worker."""
    size, device = SIZES[model], load_device(DEVICE)
    assert device.fp32 is not None
    before, after = size.token_flops
    per_flop = 1e9 * images / device.fp32.effective_flops

    def work_ns(action: Compute) -> int:
        tokens = action.tokens[1] - action.tokens[0]
        match action.task:
            case "project":  # and the modulations, which every worker computes of each image
                return round((tokens * before + 12 * size.width**2) * per_flop)
            case "attend":
                return round(tokens * after * per_flop)
        return 0

    for steps in sorted(set(messages.steps), reverse=True):
        alone = as_published("ring", 1, size.layers, steps, TOKENS, ROWS)
        yield Job("digits", "one worker", alone, Costs(work_ns, lambda part: 0))
    split = messages[messages.arm.isin(ARMS)]
    for (arm, workers, steps), rows in split.groupby(["arm", "workers", "steps"], sort=False):
        first = rows.iloc[0]
        program = as_published(first.program, int(workers), size.layers, int(steps), TOKENS, ROWS)
        sizes = {(row.kind, row.step): round(row.frame_bytes) for row in rows.itertuples()}

        def coded_ns(part: Part, codec: str = first.codec) -> tuple[int, int]:
            shape = (part.tokens[1] - part.tokens[0], images, size.width)
            if part.kind != "keys and values":
                return 0, 0
            encode, decode = device_codec_ns(codec, "forward", shape, rates_of(device))
            return 2 * encode, 2 * decode

        def frame_bytes(part: Part, sizes: Any = sizes) -> int:
            return int(sizes[part.kind, part.step])

        yield Job("digits", str(arm), program, Costs(work_ns, frame_bytes, coded_ns))


def flux_jobs(one_device_s: float) -> Iterator[Job]:
    """Yield the published arms on four workers, and one."""
    step_ns = one_device_s * 1e9 / FLUX_STEPS

    def work_ns(action: Compute) -> int:
        share = {"project": 0.25, "attend": 0.75}.get(action.task, 0.0)  # 3 of a layer's 12 d x d products
        return round(step_ns * share / FLUX_LAYERS * (action.tokens[1] - action.tokens[0]) / FLUX_TOKENS)

    def program(name: ProgramName, workers: int) -> Program:
        return as_published(name, workers, FLUX_LAYERS, FLUX_STEPS, FLUX_TOKENS, FLUX_ROWS)

    yield Job("FLUX.1-dev", "one worker", program("ring", 1), Costs(work_ns, lambda part: 0))
    inner = {"residual 1-bit": "onebit", "residual 2-bit": "twobit"}
    names: dict[str, ProgramName] = {"PipeFusion": "pipefusion", "DistriFusion": "displaced"}
    for arm in ARMS:
        later = _size_of(inner.get(arm, "fp16"))

        def frame_bytes(part: Part, later: Callable[[tuple[int, int]], int] = later) -> int:
            tokens = part.tokens[1] - part.tokens[0]
            if part.kind != "keys and values":
                return HEADER_BYTES + 2 * tokens * (FLUX_WIDTH if part.kind == "hidden" else FLUX_CHANNELS)
            shape = (tokens, FLUX_WIDTH)
            return HEADER_BYTES + 2 * (later(shape) if part.step else _size_of("fp16")(shape))

        yield Job("FLUX.1-dev", arm, program(names.get(arm, "ring"), 4), Costs(work_ns, frame_bytes))


def _size_of(codec: str) -> Callable[[tuple[int, int]], int]:
    size: Callable[[tuple[int, int]], int] = make(codec, Context(0, 0, "forward")).payload_bytes  # type: ignore[attr-defined]
    return size


# ---------------------------------------------------------------------- computed, and played
def ideal_rows(job: Job, mbits: Sequence[int], delays_us: Sequence[int]) -> Iterator[Row]:
    """Yield how long a request takes over links as formulas."""
    actions = job.program.actions()
    trace = trace_of(actions, job.costs, requests=1)
    if job.program.workers == 1:
        yield job.row(actions, 0, 0, "ideal", ideal_step_ns(trace, None, 1) / 1e9)
        return
    for mbit, delay_us in itertools.product(mbits, delays_us):
        pipes = Pipes("star", [links(mbit, delay_us)], job.program.workers)
        yield job.row(actions, mbit, delay_us, "ideal", ideal_step_ns(trace, pipes, 1) / 1e9)


def played_rows(jobs: Sequence[Job], mbits: Sequence[int], delay_us: int) -> Iterator[Row]:
    """Yield how long the second of two requests takes on the virtual clock; errors as from `play_virtual`."""
    asked = [(job, job.program.actions(), mbit) for job, mbit in itertools.product(jobs, mbits)]
    traces = [trace_of(actions, job.costs, requests=2) for job, actions, _ in asked]
    labs = [guest_lab("star", [links(mbit, delay_us)], job.program.workers) for job, _, mbit in asked]
    found = play_virtual(list(map(OverLinks, traces, labs)))
    for (job, actions, mbit), trace, played in zip(asked, traces, found, strict=True):
        yield job.row(actions, mbit, delay_us, "virtual", step_split(trace, played).steps_ns[-1] / 1e9)


def main(asked: argparse.Namespace) -> None:
    """Write latency.csv or played.csv."""
    messages = pandas.read_csv(asked.output / "messages.csv")
    images = int(pandas.read_csv(asked.output / "arms.csv").images.iloc[0])
    jobs = list(digits_jobs(messages, images, "dit-digits-nano" if asked.quick else "dit-digits"))
    most, least = max(messages.steps), min(messages.steps)
    if asked.play:
        arms = PLAYED[1:3] if asked.quick else PLAYED
        chosen = [job for job in jobs if job.arm in arms and job.program.steps == least]
        mbits = PLAYED_MBIT[::3] if asked.quick else PLAYED_MBIT
        rows = [row for job in chosen for row in ideal_rows(job, mbits, (PLAYED_DELAY_US,))]
        rows += [row for job in jobs if job.arm == "one worker" for row in ideal_rows(job, (), ())]
        rows += played_rows(chosen, mbits, PLAYED_DELAY_US)
        csv_rows.write_rows(asked.output / "played.csv", Row._fields, rows, digits=_DIGITS)
        return
    mbits, delays_us = (MBIT[2::3], DELAYS_US[::4]) if asked.quick else (MBIT, DELAYS_US)
    todo = [(job, mbits, delays_us) for job in jobs if job.program.steps == most]
    if not asked.quick:
        published = pandas.read_csv(HERE / "published.csv")
        one_device_s = float(published[published.what == "seconds of one device"].value.iloc[0])
        todo += [(job, FLUX_MBIT, FLUX_DELAYS_US) for job in flux_jobs(one_device_s)]
    table = csv_rows.Table(asked.output / "latency.csv", Row, "setting", "arm", digits=_DIGITS, say=False)
    for job, at, after in todo:
        if (job.setting, job.arm) not in table:
            table.add(ideal_rows(job, at, after))


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, HERE, play={"action": "store_true", "help": "write played.csv instead"})
