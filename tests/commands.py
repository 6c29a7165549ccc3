"""The command line in a folder of its own, for tests that run it from end to end."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from testbed import paths, results
from testbed.records import Summary
from testbed.results import Run
from testbed.vm.guest import GUEST_VARIABLE
from tests import forked
from tests.forked import Program, Started
from tests.known import known

PATIENCE_S = 880
"""Limit of a command that hangs, on a machine that others use too; shorter than pytest's, which shows less."""
STATED_COMPUTE = ("compute.mode=paced", "compute.forward=2ms", "compute.backward=4ms")
"""Stated, so that nothing is calibrated."""
SMALL = [
    "workload.model=gpt2-nano",
    "workload.sequence_length=32",
    "workload.batch_size=8",
    "workload.validation_batches=1",
    *STATED_COMPUTE,
]

EXPERIMENT = """
question = "Are the laws kept?"
engine = "auto"
{head}
[cell]
topology = "star"
compute = {compute}
timing = "live"
workload = {{ model = "gpt2-nano", text = "bundled", sequence_length = 32, batch_size = 8, validation_batches = 1 }}
pipeline = {{ stages = 3, microbatches = 4, schedule = "1f1b", in_flight = 4 }}
optimiser = {{ learning_rate = 1e-3, weight_decay = 0.01, beta1 = 0.9, beta2 = 0.999, clip_norm = 1.0 }}
training = {{ steps = 12, warmup_steps = 1, seed = 0, evaluate_every = 6 }}

[axes]
{axes}
"""
"""A small sweep, to be filled in. gpt2-nano, 12 steps, 3 stages."""

PACED = '{ mode = "paced", forward = "2ms", backward = "4ms" }'
"""Stated durations, so that nothing is calibrated."""

PLAYED_EXPERIMENT = EXPERIMENT.format(
    head="live_checks = 0",
    compute='{ mode = "paced", forward = "20ms", backward = "40ms" }',
    axes="""
profile = ["datacenter", "consumer-80mbps"]
codec = ["fp32"]
timing = ["played"]
codec_cost = ["zero"]
"pipeline.stages" = [2]
"training.steps" = [3]
""",
)
"""A small sweep that is played: two networks, 3 steps, durations that are stated."""


def for_all_users() -> list[str]:
    """Return what a command begins with in whose world any user reaches this Python and this checkout, which may lie in
    root's home.
    """
    needed = [Path(sys.base_prefix).resolve(), Command.shipped.parent]
    closed = {each for path in needed for each in path.parents if not each.stat().st_mode & stat.S_IXOTH}
    if not closed:
        return []
    (home,) = closed
    world = [f"mount --rbind {home} /mnt", f"mount -t tmpfs -o mode=755 none {home}"]
    for path in needed:
        if path.is_relative_to(home):
            world += [f"mkdir -p {path}", f"mount --rbind /mnt/{path.relative_to(home)} {path}"]
    return ["unshare", "--mount", "sh", "-c", f'{" && ".join(world)} && exec "$@"', "sh"]


def sets(*fields: str) -> list[str]:
    """Return the flags that state these fields."""
    return [part for field in fields for part in ("--set", field)]


OVERLAPPED = """
question = "?"
[cell]
parallelism = "data"
model = {family = "gpt2", layers = 1, width = 64, heads=1, key_heads=1, inner = 256, context = 128, vocabulary = 1024}
device = "rtx-3090"
precision = "bf16"
sequence_length = 128
sequences = 1
workers = 2
exchange = "star"
bits = 32
topology = "star"
links = "link(20Mbit, 50ms, buffer=2s)"
[grid.one]
variants = [{ steps = 14 }, { steps = 40 }]
"""
"""A prediction of two cells whose steps overlap on a link: they neither repeat nor settle."""

STATED = ["--no-report", "--live-checks", "0", *sets("codec_cost=zero", *STATED_COMPUTE)]
"""Flags of a played sweep whose durations do not matter: nothing is calibrated, nothing run live beside it, and no
report drawn."""


class Command:
    """Run `python -m testbed ...` in a folder of its own; all its processes carry a mark in their environment."""

    shipped = Path(__file__).resolve().parents[1] / "experiments"

    def __init__(self, folder: Path, engine: str) -> None:
        self.folder, self.engine, self.mark = folder, engine, f"TESTBED_TEST_MARK={uuid.uuid4().hex}"

    def start(self, *arguments: str, before: Sequence[str] = (), **environment: str) -> Started:
        """Start it as a fork; by the program `before` if there is one, or in a guest, where a process with all that
        forks need loaded would hold more memory mappings than the host allows, as a program of its own.
        """
        if before or os.environ.get(GUEST_VARIABLE):
            return subprocess.Popen(
                [*before, sys.executable, "-m", "testbed", *arguments],
                cwd=self.folder,
                env=self.environment(**environment),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        return Program(["-m", "testbed", *arguments], cwd=self.folder, env=self.environment(**environment), merged=True)

    def environment(self, **more: str) -> dict[str, str]:
        name, _, value = self.mark.partition("=")
        # This checkout, not an installed package.
        path = os.pathsep.join([str(self.folder), str(self.shipped.parent), *sys.path[:1]])
        return {**os.environ, **more, name: value, "PYTHONPATH": path}

    @classmethod
    @contextlib.contextmanager
    def standing(cls, folder: Path, engine: str) -> Iterator[Command]:
        """A command in `folder`. Nothing may be left of what it did outside."""
        before = outside()
        command = cls(folder, engine)
        yield command
        for pid in command.left():  # of a test that failed: the next one must not suffer
            os.kill(pid, signal.SIGKILL)
        assert outside() == before

    def cell(self, *fields: str, steps: int, codec: str = "fp32", profile: str = "datacenter") -> list[str]:
        stated = sets(*SMALL, *fields, f"training.steps={steps}", "training.warmup_steps=1")
        return ["run", "--timing", "live", "--engine", self.engine, "--codec", codec, "--profile", profile, *stated]

    def finish(self, *arguments: str, status: int = 0, before: Sequence[str] = (), **environment: str) -> str:
        """Run it to its end, which must have this status, and must leave nothing behind; what it said."""
        process = self.start(*arguments, before=before, **environment)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == status, output
        assert self.left() == {}
        return output

    def write_experiment(self, head: str, axes: str, compute: str = PACED) -> Path:
        """Put EXPERIMENT into this folder as sweep.toml; where its results will be."""
        (self.folder / "sweep.toml").write_text(
            EXPERIMENT.format(head=head, axes=axes, compute=compute), encoding="utf8"
        )
        return self.folder / "results" / self.folder.name

    def left(self) -> dict[int, str]:
        """Processes that carry the mark, with their command lines."""
        lines = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                marked = self.mark.encode() in (process / "environ").read_bytes()
                if marked or (process / "cwd").readlink().is_relative_to(self.folder):
                    lines[int(process.name)] = forked.command_line(int(process.name))
            except OSError:
                continue
        return lines

    def runs(self) -> list[Run]:
        return sorted(results.runs(self.folder / "results" / "run"), key=lambda run: run.folder.stat().st_ctime)

    def last(self) -> tuple[Run, Summary]:
        run = self.runs()[-1]
        return run, known(run.summary)


def run_testbed(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m testbed ...` in a folder to its end."""
    return forked.run(["-m", "testbed", *arguments], cwd=folder, env={**os.environ, **environment})


def program(path: Path, *arguments: str) -> str:
    """Run one of the experiments' programs with this checkout's package; what it said."""
    environment = {**os.environ, "PYTHONPATH": str(Command.shipped.parent), "OMP_NUM_THREADS": "1"}
    done = forked.run([str(path), *arguments], env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def module_beside(experiment: Path, name: str) -> Iterator[ModuleType]:
    """Import a module of an experiment's programs for a while."""
    sys.path.insert(0, str(experiment))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(experiment))
        sys.modules.pop(name, None)


def draw(experiment: Path, home: Path, output: Path) -> str:
    """Draw the figures of an experiment from the results in `home`; what was said."""
    return program(experiment / "figures.py", "--results", str(home), "--output", str(output))


def wire_is_explained(summary: Summary) -> bool:
    """Whether what crossed the wire is payload, headers and what was sent again, within 1 %."""
    payload, headers = known(summary.payload_bytes_per_step), known(summary.header_bytes_per_step)
    explained = payload + headers + (summary.retransmitted_bytes_per_step or 0)
    return summary.wire_bytes_per_step == pytest.approx(explained, rel=1e-2)


def losses(run: Run) -> list[float | None]:
    """The losses of all steps and evaluations of a run."""
    return [step.loss for step in run.steps(run.cell.pipeline.stages - 1)]


def keep_speed(cache: Path) -> None:
    """Give a cache of its own what is known of this machine's speed: else it is measured again, for ten seconds."""
    kept = cache / "testbed"
    kept.mkdir(parents=True, exist_ok=True)
    for speed in paths.cache_folder().glob("host-*.toml"):
        shutil.copy(speed, kept)


def outside() -> tuple[object, ...]:
    """What a lab could leave behind in the machine."""
    devices = sorted(path.name for path in Path("/sys/class/net").iterdir())
    named = sorted(path.name for path in Path("/run/netns").glob("*"))
    return devices, named, Path("/proc/self/mountinfo").read_text(encoding="utf8")
