"""Sweeps that are interrupted, killed, or tuned first."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from testbed import results
from testbed.sweep.interrupt import MESSAGE
from tests.commands import Command, losses, sets
from tests.forked import Started
from tests.known import known

pytestmark = [pytest.mark.root, pytest.mark.slow]


def _wait_for_steps(command: Command, process: Started, folder: Path | None = None) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        if any(run.steps(0) for run in results.runs(folder or command.folder / "results" / "run")):
            return
        time.sleep(0.05)
    pytest.fail(f"no step was done: {process.communicate()[0] if process.poll() is not None else 'still running'}")


def _check_nothing_is_left(command: Command) -> None:
    deadline = time.monotonic() + 10
    while command.left() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert command.left() == {}


def test_a_killed_controller_leaves_nothing(command: Command) -> None:
    process = command.start(*command.cell("pipeline.stages=2", steps=500, profile="consumer-80mbps"))
    _wait_for_steps(command, process)
    assert len(command.left()) >= 6  # controller, relay, two hosts, two jobs
    process.kill()
    process.communicate()
    _check_nothing_is_left(command)
    assert command.runs()[-1].summary is None


def test_ctrl_c_once_ends_the_step_and_what_is_missing_is_made_then(command: Command) -> None:
    """A sweep of two cells is interrupted in its first run."""
    small = sets("pipeline.stages=2", "training.steps=40")
    sweep = ["sweep", "sweep.toml", "--no-report", "--engine", command.engine, *small]
    folder = command.write_experiment("", 'codec = ["fp32", "delta-int8"]\nprofile = ["consumer-80mbps"]')
    process = command.start(*sweep)
    _wait_for_steps(command, process, folder)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert MESSAGE in output
    assert "resumes the unfinished work" in output
    assert "Traceback" not in output
    _check_nothing_is_left(command)
    (run,) = results.runs(folder)
    summary = known(run.summary)
    assert summary.status == "interrupted"
    assert summary.ended is None
    assert [len(run.steps(stage)) for stage in range(2)] == [summary.steps] * 2  # both stages ended with the same step
    assert 1 <= summary.steps < 40
    assert run.certificates.after is not None
    assert sum(len(sample.sockets) > 0 for sample in run.samples()) >= 2

    output = command.finish(*sweep)
    made = re.findall(r"^\[\d/2\] ([\w-]+) on", output, re.MULTILINE)
    assert made == ["fp32", "delta-int8"]  # the one that was interrupted is among them
    for cell_id in results.last_sweep(folder).cells:
        (done,) = results.finished_runs(folder, cell_id)
        assert known(done.summary).steps == 40
        assert None not in losses(done)
    assert "0 runs to make" in command.finish("plan", "sweep.toml", "--engine", command.engine, *small)


def test_ctrl_c_twice_ends_it_at_once(command: Command) -> None:
    process = command.start(
        *command.cell("workload.batch_size=64", "pipeline.stages=2", steps=500, profile="consumer-80mbps")
    )
    _wait_for_steps(command, process)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert MESSAGE in output
    assert "Traceback" not in output
    _check_nothing_is_left(command)
    run, summary = command.last()
    assert summary.status == "interrupted"
    assert run.certificates.after is None


def test_a_learning_rate_is_chosen_before_the_sweep(command: Command) -> None:
    tune = 'field = "optimiser.learning_rate"\nvalues = [1e-9, 3e-3]\nsteps = 6\nseeds = [0]\nquick = true'
    axes = 'codec = ["int8"]\nprofile = ["consumer-80mbps"]'
    folder = command.write_experiment("", f"{axes}\n[tune]\n{tune}")
    small = sets("pipeline.stages=1", "training.steps=4", "training.evaluate_every=2")
    flags = ["sweep.toml", "--engine", command.engine, *small]
    before = command.finish("plan", *flags)
    assert "1 arms x 2 values x 1 seeds = 2 runs of 6 steps" in before
    assert "as chosen after tuning" in before
    output = command.finish("sweep", "--no-report", *flags)
    assert "tuned: int8: optimiser.learning_rate = 0.003" in output
    (cell_id,) = results.last_sweep(folder).cells
    cell = results.finished_runs(folder, cell_id)[0].cell
    assert (cell.codec, cell.optimiser.learning_rate, cell.network) == ("int8", 3e-3, "consumer-80mbps")
    after = command.finish("plan", *flags)
    assert "tuned: int8" in after
    assert "0 runs to make" in after
