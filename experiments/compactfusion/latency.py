"""Compute and play how long a request takes over links: `python experiments/compactfusion/latency.py`.

This reads messages.csv, which measure.py writes, and writes latency.csv; with `--play` it writes played.csv. Arms that
latency.csv has already are kept. Two
settings:

digits     the model of measure.py, its messages as they were encoded, computing and coding as fast as DEVICE does
FLUX.1-dev its shape and the published seconds of one device; messages by the codecs' formulas, coding takes no time

`ideal` rows are the critical path over the pipe formula (`testbed/play/unlinked.py`); `virtual` rows were played on the
virtual clock, with TCP: the last of two requests, because in the first one windows open.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas

from testbed import csv_rows, vm
from testbed.codecs.contract import Context
from testbed.codecs.make import make
from testbed.devices.codec_cost import device_codec_ns, rates_of
from testbed.devices.device import load_device
from testbed.diffusion.dit import ROWS, SIZES, TOKENS
from testbed.diffusion.programs import Costs, Part, Program, ProgramName, trace_of
from testbed.errors import CapabilityError, LabError
from testbed.jobs.sampling import Actions, Compute, sent_parts
from testbed.metrics.links import Pipes
from testbed.net.lab import LabSpec
from testbed.pipeline.frame import HEADER_BYTES
from testbed.play.guests import play_jobs
from testbed.play.job import PlayJob
from testbed.play.played import read_played
from testbed.play.split import step_split
from testbed.play.unlinked import ideal_step_ns
from testbed.profiles import LinkProfile, load_profile

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
PLAYED_MBIT, PLAYED_STEPS, PLAYED_DELAY_US = (80, 200, 500, 2000), 8, 200
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
        yield Job(
            "digits", "one worker", Program("ring", 1, size.layers, steps, TOKENS, ROWS), Costs(work_ns, lambda part: 0)
        )
    for (arm, workers, steps), rows in messages[messages.arm.isin(ARMS)].groupby(
        ["arm", "workers", "steps"], sort=False
    ):
        first = rows.iloc[0]
        program = _program(first.program, int(workers), size.layers, int(steps), TOKENS, ROWS)
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
        return _program(name, workers, FLUX_LAYERS, FLUX_STEPS, FLUX_TOKENS, FLUX_ROWS)

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


def _program(name: ProgramName, workers: int, layers: int, steps: int, tokens: int, rows: int) -> Program:
    return Program(name, workers, layers, steps, tokens, rows, patches=workers if name == "pipefusion" else 1)


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
    """Yield how long the second of two requests takes on the virtual clock. CapabilityError without its kernel."""
    if (kernel := vm.find_clock_kernel()) is None:
        raise CapabilityError("playing on the virtual clock needs a guest kernel: python -m testbed vm --build")
    with tempfile.TemporaryDirectory(prefix="testbed-compactfusion-") as name:
        folder, play, known = Path(name), [], []
        for job, mbit in itertools.product(jobs, mbits):
            actions = job.program.actions()
            trace = trace_of(actions, job.costs, requests=2)
            file = folder / f"{len(play)}.trace"
            trace.write(file)
            lab = LabSpec(
                topology="star",
                profiles=(links(mbit, delay_us),) * job.program.workers,
                nodes=job.program.workers,
                engine="netem",
                engine_reason="all that the guest has",
            )
            play.append(PlayJob(trace=file, lab=lab, output=folder / f"{len(play)}.played"))
            known.append((job, actions, mbit, trace))
        outcomes = play_jobs(play, clock="virtual", folder=folder / "work", kernel=kernel)
        for (job, actions, mbit, trace), outcome in zip(known, outcomes, strict=True):
            if outcome.output is None:
                raise LabError(f"{job.arm} at {mbit} Mbit/s could not be played: {outcome.error}")
            seconds = step_split(trace, read_played(outcome.output)).steps_ns[-1] / 1e9
            yield job.row(actions, mbit, delay_us, "virtual", seconds)


def main(arguments: list[str]) -> int:
    """Write latency.csv or played.csv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE, help="folder with messages.csv, for latency.csv")
    parser.add_argument("--quick", action="store_true", help="a short form, which shows nothing but that it works")
    parser.add_argument("--play", action="store_true", help="write played.csv instead: on the virtual clock")
    asked = parser.parse_args(arguments)
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
        return 0
    mbits, delays_us = (MBIT[2::3], DELAYS_US[::4]) if asked.quick else (MBIT, DELAYS_US)
    todo = [(job, mbits, delays_us) for job in jobs if job.program.steps == most]
    if not asked.quick:
        published = pandas.read_csv(HERE / "published.csv")
        one_device_s = float(published[published.what == "seconds of one device"].value.iloc[0])
        todo += [(job, FLUX_MBIT, FLUX_DELAYS_US) for job in flux_jobs(one_device_s)]
    kept = csv_rows.read_rows(asked.output / "latency.csv")
    made = {tuple(row[:2]) for row in kept}
    for job, at, after in todo:
        if (job.setting, job.arm) not in made:
            kept += ideal_rows(job, at, after)
            csv_rows.write_rows(asked.output / "latency.csv", Row._fields, kept, digits=_DIGITS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
