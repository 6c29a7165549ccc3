"""The command line in a folder of its own, for tests that run it from end to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from testbed import results
from testbed.records import Summary
from testbed.results import Run

SMALL = [
    "workload.model=gpt2-nano",
    "workload.sequence_length=32",
    "workload.batch_size=8",
    "workload.validation_batches=1",
]


class Command:
    """`python -m testbed ...` in a folder of its own; every process that it starts carries a mark in its environment."""

    shipped = Path(__file__).resolve().parents[1] / "experiments"

    def __init__(self, folder: Path, engine: str) -> None:
        self.folder, self.engine, self.mark = folder, engine, f"TESTBED_TEST_MARK={uuid.uuid4().hex}"

    def start(self, *arguments: str, before: Sequence[str] = (), **environment: str) -> subprocess.Popen[str]:
        """`before`: a program that starts it."""
        name, _, value = self.mark.partition("=")
        path = os.pathsep.join(
            [str(self.folder), str(self.shipped.parent), *sys.path[:1]]
        )  # this checkout, not an installed one
        return subprocess.Popen(
            [*before, sys.executable, "-m", "testbed", *arguments],
            cwd=self.folder,
            env={**os.environ, **environment, name: value, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # A shell starts background jobs with SIGINT ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def cell(self, *fields: str, steps: int, codec: str = "fp32", profile: str = "datacenter") -> list[str]:
        sets = [
            part
            for field in (*SMALL, *fields, f"training.steps={steps}", "training.warmup_steps=1")
            for part in ("--set", field)
        ]
        return ["run", "--engine", self.engine, "--codec", codec, "--profile", profile, *sets]

    def finish(self, *arguments: str, status: int = 0, before: Sequence[str] = (), **environment: str) -> str:
        process = self.start(*arguments, before=before, **environment)
        output, _ = process.communicate(timeout=170)
        assert process.returncode == status, output
        assert self.left() == {}
        return output

    def left(self) -> dict[int, str]:
        """Processes that carry the mark, with their command lines."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (process / "environ").read_bytes():
                    found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def runs(self) -> list[Run]:
        return sorted(results.runs(self.folder / "results" / "run"), key=lambda run: run.folder.stat().st_ctime)

    def last(self) -> tuple[Run, Summary]:
        run = self.runs()[-1]
        summary = run.summary
        assert summary is not None
        return run, summary


def outside() -> tuple[object, ...]:
    """What a lab could leave behind in the machine."""
    devices = sorted(path.name for path in Path("/sys/class/net").iterdir())
    named = sorted(path.name for path in Path("/run/netns").glob("*"))
    return devices, named, Path("/proc/self/mountinfo").read_text(encoding="utf8")
