"""Sample digits with experts on two workers and DICE's schedules: `python experiments/dice/measure.py`.

This writes runs.csv, a row for each schedule, number of steps and seed, and latency.csv: how long a request takes over
links as formulas, with these messages. The model is trained once a machine, in minutes: `python -m
testbed.diffusion.pretrain dit-digits-moe`. What is in the output folder already is kept: remove the CSVs to begin anew.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from testbed import csv_rows
from testbed.devices.device import load_device
from testbed.diffusion import quality
from testbed.diffusion.dit import SIZES, TOKENS, TOP, start
from testbed.diffusion.experts import ExpertProgram, ExpertSchedule, expert_trace, sample_experts
from testbed.diffusion.pretrain import load_dit
from testbed.metrics.links import Pipes
from testbed.profiles import load_profile
from testbed.trace.simulate import ideal_step_ns

_DIGITS = 6
"""Of numbers in the tables."""
MODEL, DEVICE, WORKERS, IMAGES = "dit-digits-moe", "laptop-cpu", 2, 128
SEEDS, STEPS = (0, 1, 2, 3, 4), (28, 8)
MBIT, DELAYS_US = (100, 300, 1000, 2000, 4000, 8000, 16000, 64000), (20, 500)
SCHEDULES = {
    "synchronous": ExpertSchedule(0),
    "displaced": ExpertSchedule(2),
    "interweaved": ExpertSchedule(1),
    "interweaved, deep layers synchronous": ExpertSchedule(1, "deep"),
    "interweaved, shallow layers synchronous": ExpertSchedule(1, "shallow"),
    "interweaved, every second layer synchronous": ExpertSchedule(1, "staggered"),
    "interweaved, low scores skipped": ExpertSchedule(1, skip="low"),
    "interweaved, high scores skipped": ExpertSchedule(1, skip="high"),
    "DICE": ExpertSchedule(1, "deep", "low"),
    "interweaved, stale router weights": ExpertSchedule(1, scores="stale"),
}
"""DICE is the whole of the paper: interweaved, deep layers synchronous, low scores skipped in every second step."""


class Row(NamedTuple):
    """A line of runs.csv."""

    schedule: str
    steps: int
    seed: int
    images: int
    relative_l2: float
    """To the unsplit sampler's images of the same noise."""
    psnr_db: float
    frechet_unsplit: float
    frechet_real: float
    sent_mb: float
    """By a worker on average: frames."""


class Latency(NamedTuple):
    """A line of latency.csv."""

    schedule: str
    steps: int
    rate_mbps: int
    """Of each worker's link, in each direction; 0: messages take no time."""
    delay_us: int
    """One way, between two workers."""
    seconds: float


def latencies(
    name: str, steps: int, frame_bytes: dict[Any, int], size: Any, images: int, mbits: Sequence[int]
) -> Iterator[Latency]:
    """Yield how long a request takes. Experts are thought to be used alike."""
    device = load_device(DEVICE)
    assert device.fp32 is not None
    tokens, per_flop = TOKENS * images / WORKERS, 1e9 / device.fp32.effective_flops
    square = 2 * size.width**2
    own = tokens * (8 * square + 4 * TOKENS * size.width) + images / WORKERS * 6 * square
    costs = round(own * per_flop), round(tokens * TOP * 4 * square * per_flop), frame_bytes
    schedule = SCHEDULES[name]
    trace = expert_trace(ExpertProgram(schedule, WORKERS, size.layers, steps), *costs)
    yield Latency(name, steps, 0, 0, ideal_step_ns(trace, None, 1) / 1e9)
    for mbit in mbits:
        for delay_us in DELAYS_US:
            link = load_profile(f"link({mbit}Mbit, {delay_us / 2:g}us, buffer=1s)")
            yield Latency(name, steps, mbit, delay_us, ideal_step_ns(trace, Pipes("star", [link], WORKERS), 1) / 1e9)


def main(asked: argparse.Namespace) -> None:
    """Write the CSVs."""
    name, seeds, every, images, mbits = MODEL, SEEDS, STEPS, IMAGES, MBIT
    if asked.quick:
        name, seeds, every, images, mbits = "dit-digits-moe-nano", (0, 1), (4,), 32, MBIT[2:4]
    model = load_dit(name)
    judge = quality.Judge()
    rows = csv_rows.Table(asked.output / "runs.csv", Row, digits=_DIGITS)
    times = csv_rows.Table(asked.output / "latency.csv", Latency, "schedule", "steps", digits=_DIGITS, say=False)
    for steps in every:
        todo = {each: of for each, of in SCHEDULES.items() if (each, steps) not in times}
        if not todo:
            continue
        references = {
            seed: sample_experts(model, *start(images, seed), steps, SCHEDULES["synchronous"]).images for seed in seeds
        }
        for schedule, of in todo.items():
            made = []
            for seed in seeds:
                found = sample_experts(model, *start(images, seed), steps, of, workers=WORKERS, codec="fp16")
                sent_mb = sum(found.frame_bytes.values()) / WORKERS / 1e6
                made.append(Row(schedule, steps, seed, images, *judge(found.images, references[seed]), sent_mb))
            rows.add(made)
            times.add(latencies(schedule, steps, found.frame_bytes, SIZES[name], images, mbits))


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, __file__)
