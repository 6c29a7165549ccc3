"""What a GPU must be able to do, in 25 minutes at most on one H200: `make gpu-checks`.

`python -m tests.gpu_checks` prints a table for each of: the tests marked gpu; the speed of GPT-2 mini and of the 124M
model against one core; how far losses of the first 20 steps are from the CPU's; whether two trainings are the same to
the bit; how long each codec takes on the device, on a core, and by the rule of testbed/devices; and a training of the
124M model (random weights) of 1,000 steps with four codecs, played over three networks. The exit status is 1 if a check
fails; a time fails none.

`--device cpu --quick` runs all of it in a small form, on the CPU in place of the device: for the tests of this program.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from testbed import devices
from testbed.devices.codec_cost import device_codec_ns, rates_of
from testbed.devices.stopwatch import DeviceStopwatch
from testbed.errors import SpecError
from testbed.records import TrainingRecord
from testbed.results import Run, finished_runs, last_sweep
from testbed.spec import OptimiserSpec, PipelineSpec, Recipe, TextSpec, TrainingDevice, TrainingSpec
from testbed.sweep import trainings
from testbed.sweep.controller import prepare
from testbed.sweep.live_session import Tokens
from testbed.training.accelerator import check_device
from testbed.training.alone import AloneJob, train_alone

TOLERANCES = {"fp32": 1e-4, "int8": 5e-3, "topk(0.1)": 5e-3}
"""Largest relative difference of a loss between the devices over the first steps, by codec: of one that chooses values,
or rounds by chance, a sum that differs in its last bit may change a code."""
CODECS = (
    *("fp32", "bf16", "fp8", "int8", "int4(64)", "int1(nearest)", "onebit", "topk(0.1)", "ef(topk(0.1))"),
    *("powersgd(8)", "delta-int8", "uniform(0.25)", "zstd(int8)"),
)
"""The last two work on the CPU only: their times include the copies."""
SWEPT = ("fp32", "int8", "fwd=topk(0.1), bwd=ef(topk(0.1))", "powersgd(32)")
NETWORKS = ("datacenter", "consumer-80mbps", "cable")
SWEEP = """question = "Does the 124M model train on this GPU, with four codecs over three networks?"
engine = "auto"
[cell]
topology = "star"
timing = "played"
codec_cost = "device"
compute = {{ mode = "paced", device = "h200" }}
workload = {{ model = "{model}", text = "bundled", sequence_length = {length}, batch_size = 8, validation_batches = 2 }}
pipeline = {{ stages = 3, microbatches = 4, schedule = "1f1b", in_flight = 3 }}
optimiser = {{ learning_rate = 3e-4, weight_decay = 0.01, beta1 = 0.9, beta2 = 0.999, clip_norm = 1.0 }}
training = {{ steps = {steps}, warmup_steps = 2, seed = 0, evaluate_every = {every} }}
[axes]
profile = {networks}
codec = {codecs}
"""
Row = Sequence[object]


class Outcome(NamedTuple):
    """One training."""

    losses: list[float]
    step_s: float
    """Median of a step's duration, without the first two."""
    record: TrainingRecord


class Checks:
    """Runs the checks on a device, in a folder of results, and counts what fails."""

    def __init__(self, device: TrainingDevice, folder: Path, *, quick: bool) -> None:
        self.device, self.folder, self.quick, self.failures = device, folder, quick, 0
        self._prepared: dict[str, Tokens] = {}
        self._count = 0

    def judged(self, good: bool) -> str:
        """Return a verdict."""
        self.failures += not good
        return "ok" if good else "FAILS"

    def train(self, model: str, codec: str, device: TrainingDevice, steps: int, **workload: Any) -> Outcome:
        """Train a pipeline of three stages in this process."""
        spec = {"sequence_length": 64, "batch_size": 16, "validation_batches": 1, **workload}
        text = TextSpec(family="gpt2", model=model, text="bundled", **spec)
        if model not in self._prepared:
            self._prepared[model] = prepare(text)
        tokens = self._prepared[model]
        recipe = Recipe(
            codec=codec,
            workload=text,
            pipeline=PipelineSpec(stages=3, microbatches=4, schedule="1f1b", in_flight=3),
            optimiser=OptimiserSpec(learning_rate=1e-3, weight_decay=0.01, beta1=0.9, beta2=0.999, clip_norm=1.0),
            training=TrainingSpec(steps=steps, warmup_steps=1, seed=0, evaluate_every=0, device=device),
        )
        self._count += 1
        into = self.folder / f"trained-{self._count}"
        vocabulary, path = tokens.vocabulary, str(tokens.path)
        record = train_alone(AloneJob(recipe=recipe, vocabulary=vocabulary, tokens=path, folder=str(into)))
        last = [each for each in Run(into).steps(2) if each.phase == "train"]
        times = [(each.end_ns - each.start_ns) / 1e9 for each in last]
        return Outcome([each.loss or 0.0 for each in last], statistics.median(times[min(2, len(times) - 1) :]), record)

    # ------------------------------------------------------------------ each check
    def tests(self) -> Iterator[Row]:
        """The tests marked gpu."""
        if self.device == "cpu":
            yield "tests marked gpu", "not run: the device is the CPU"
            return
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests"]
        done = subprocess.run(command, env={**os.environ, "TESTBED_REQUIRE": "gpu"}, capture_output=True, text=True)
        yield (
            "tests marked gpu",
            (done.stdout.strip().splitlines() or ["no output"])[-1],
            self.judged(not done.returncode),
        )

    def speed(self) -> Iterator[Row]:
        """Step time on the device and on one core; three stages in turn."""
        yield "model", "precision", "tokens", "s/step on the device", "s/step on one core", "times"
        large = {"sequence_length": 256, "batch_size": 8}
        cases: list[tuple[str, Literal["fp32", "bf16"], int, int, dict[str, int]]] = [
            ("gpt2-mini", "fp32", 30, 12, {}),
            ("gpt2", "fp32", 20, 2, large),
            ("gpt2", "bf16", 20, 0, large),  # minutes per step on a core without instructions for bf16
        ]
        for model, precision, steps, on_cpu, shape in [("gpt2-nano", "fp32", 3, 3, {})] if self.quick else cases:
            there = self.train(model, "fp32", self.device, steps, precision=precision, **shape)
            row = model, precision, there.record.recipe.workload.batch_tokens, f"{there.step_s:.4f}"
            if not on_cpu:
                yield *row, "not run"
                continue
            here = self.train(model, "fp32", "cpu", on_cpu, precision=precision, **shape)
            yield *row, f"{here.step_s:.3f}", f"{here.step_s / there.step_s:.1f}"

    def losses(self) -> Iterator[Row]:
        """Losses of the first steps against the CPU's; and two trainings against each other."""
        yield "codec", "steps", "largest relative difference", "limit", "", "two trainings"
        model, steps = ("gpt2-nano", 3) if self.quick else ("gpt2-mini", 20)
        for codec, limit in TOLERANCES.items():
            here, there, again = (self.train(model, codec, on, steps) for on in ("cpu", self.device, self.device))
            apart = max(abs(a / b - 1) for a, b in zip(there.losses, here.losses, strict=True))
            same = there.record.weights == again.record.weights and there.losses == again.losses
            yield codec, steps, f"{apart:.2e}", f"{limit:.0e}", self.judged(apart <= limit), self.judged(same)

    def codecs(self) -> Iterator[Row]:
        """Encode and decode of one message."""
        shape, seconds = ((2, 16, 64), 0.0) if self.quick else ((4, 256, 768), 0.5)
        yield (
            "codec, us for " + "x".join(map(str, shape)),
            "way",
            "encode",
            "decode",
            "core",
            "core",
            "rule",
            "rule",
            "where",
        )
        rates = rates_of(devices.load_device("h200"))
        for text in CODECS:
            for way in ("forward", "backward"):
                timed = [DeviceStopwatch(on).codec(text, way, shape, seconds) for on in (self.device, "cpu")]
                took = [f"{each[what] / 1e3:.1f}" for each in timed for what in ("encode_ns", "decode_ns")]
                try:
                    rule = [f"{each / 1e3:.3g}" for each in device_codec_ns(text, way, shape, rates)]
                except SpecError:
                    rule = ["none", "none"]
                yield text, way, *took, *rule, "copied" if timed[0]["copied"] else "on the device"

    def sweep(self) -> Iterator[Row]:
        """The 124M model with four codecs over three networks."""
        codecs, networks = (SWEPT[:2], NETWORKS[:1]) if self.quick else (SWEPT, NETWORKS)
        size = {"model": "gpt2-nano", "length": 32, "steps": 4, "every": 0}
        size = size if self.quick else {"model": "gpt2", "length": 256, "steps": 1000, "every": 250}
        path = self.folder / "gpu" / "sweep.toml"
        path.parent.mkdir()
        path.write_text(SWEEP.format(networks=list(networks), codecs=list(codecs), **size), "utf8")
        results = self.folder / "results"
        flags = ["--device", self.device, "--results", str(results), "--live-checks", "0"]
        began = time.monotonic()
        status = subprocess.run([sys.executable, "-m", "testbed", "sweep", str(path), *flags]).returncode
        yield "sweep", f"{time.monotonic() - began:.0f} s", f"status {status}", self.judged(not status)
        folder = results / "gpu"
        yield "cell", "validation loss", "step in ms"
        for cell in last_sweep(folder).cells if not status else ():
            summary = finished_runs(folder, cell)[0].summary
            assert summary is not None
            yield cell, f"{summary.validation_loss or 0:.4f}", f"{1e3 * (summary.step_s or 0):.4g}"
        for trained in sorted((folder / trainings.FOLDER).glob("*/training.json")):
            record = TrainingRecord.model_validate_json(trained.read_bytes())
            on = "the CPU" if record.trained_on is None else record.trained_on.device
            yield record.recipe.codec, f"{record.seconds:.0f} s", f"on {on}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_checks", description="Checks a GPU.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="in a small form, which says nothing about a GPU")
    parser.add_argument("only", nargs="*", metavar="CHECK", help="tests, speed, losses, codecs, sweep; none: all")
    told = parser.parse_args(arguments)
    if told.device == "cuda":
        check_device()
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-checks-", dir=os.environ.get("GPU_CHECKS_IN")) as folder:
        checks = Checks(told.device, Path(folder), quick=told.quick)
        for name in told.only or ("tests", "speed", "losses", "codecs", "sweep"):
            part_began = time.monotonic()
            print(f"\n{name}: {(getattr(checks, name).__doc__ or '').strip()}")
            for row in getattr(checks, name)():
                print("  " + "  ".join(str(each).ljust(12) for each in row).rstrip(), flush=True)
            print(f"  {time.monotonic() - part_began:.0f} s")
    print(f"\n{checks.failures} checks failed; {(time.monotonic() - began) / 60:.1f} minutes")
    return int(bool(checks.failures))


if __name__ == "__main__":
    sys.exit(main())
