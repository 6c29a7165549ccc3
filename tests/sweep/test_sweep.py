"""Sweeps that are interrupted, killed, or tuned first."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from testbed import results
from testbed.sweep.interrupt import MESSAGE
from tests.commands import Command, losses

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]


def _wait_for_steps(command: Command, process: subprocess.Popen[str], folder: Path | None = None) -> None:
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
    process = command.start(*command.cell(steps=500, profile="consumer-80mbps"))
    _wait_for_steps(command, process)
    assert len(command.left()) >= 7  # controller, relay, three hosts, three jobs
    process.kill()
    process.communicate()
    _check_nothing_is_left(command)
    assert command.runs()[-1].summary is None


def test_ctrl_c_once_ends_the_step_and_what_is_missing_is_made_then(command: Command) -> None:
    """A sweep in which each of two cells runs twice, the cells interleaved, is interrupted in its first run."""
    sweep = [
        "sweep",
        "sweep.toml",
        "--engine",
        command.engine,
        "--set",
        "pipeline.stages=2",
        "--set",
        "training.steps=40",
    ]
    axes = 'codec = ["fp32", "delta-int8"]\nprofile = ["consumer-80mbps"]'
    folder = command.write_experiment('order = "interleaved"\nrepeats = 2', axes)
    process = command.start(*sweep)
    _wait_for_steps(command, process, folder)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert MESSAGE in output
    assert "goes on with what is missing" in output
    assert "Traceback" not in output
    _check_nothing_is_left(command)
    (run,) = results.runs(folder)
    summary = run.summary
    assert summary is not None
    assert summary.status == "interrupted"
    assert summary.ended is None
    assert [len(run.steps(stage)) for stage in range(2)] == [summary.steps] * 2  # both stages ended with the same step
    assert 1 <= summary.steps < 40
    assert run.certificates.after is not None
    assert sum(len(sample.sockets) > 0 for sample in run.samples()) >= 2

    output = command.finish(*sweep)
    order = re.findall(r"^\[\d/4\] ([\w-]+) on", output, re.MULTILINE)
    assert len(order) == 4  # the one that was interrupted is among them
    assert set(order[:2]) == set(order[2:]) == {"fp32", "delta-int8"}
    last = results.last_sweep(folder)
    assert last.order == "interleaved"
    curves = {}
    for cell_id in last.cells:
        first, second = results.finished_runs(folder, cell_id)
        assert losses(first) == losses(second)  # bit for bit
        assert None not in losses(first)
        curves[first.cell.codec] = losses(first)
    assert curves["fp32"] != curves["delta-int8"]
    assert "2 of 2 cells are finished already" in command.finish(*sweep)


def test_ctrl_c_twice_ends_it_at_once(command: Command) -> None:
    process = command.start(
        *command.cell("workload.batch_size=64", "pipeline.stages=2", steps=500, profile="consumer-80mbps")
    )
    _wait_for_steps(command, process)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 130, output
    assert MESSAGE in output
    assert "Traceback" not in output
    _check_nothing_is_left(command)
    run, summary = command.last()
    assert summary.status == "interrupted"
    assert run.certificates.after is None


def test_a_killed_stage_fails_the_run_and_is_named(command: Command) -> None:
    process = command.start(*command.cell("pipeline.stages=2", steps=500))
    _wait_for_steps(command, process)
    jobs = [pid for pid, line in command.left().items() if "testbed.pipeline.host" in line]
    os.kill(max(jobs), signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "SIGKILL" in output
    _check_nothing_is_left(command)
    assert command.last()[1].status == "failed"


def test_a_learning_rate_is_chosen_before_the_sweep(command: Command) -> None:
    tune = 'field = "optimiser.learning_rate"\nvalues = [1e-9, 3e-3]\nsteps = 20\nseeds = [0]\nquick = true'
    axes = 'codec = ["fp32", "int8"]\nprofile = ["consumer-80mbps"]'
    folder = command.write_experiment("", f"{axes}\n[tune]\n{tune}")
    small = ["--set", "pipeline.stages=2", "--set", "training.steps=6", "--set", "training.evaluate_every=3"]
    flags = ["sweep.toml", "--engine", command.engine, *small]
    before = command.finish("plan", *flags)
    assert "2 arms x 2 values x 1 seeds = 4 runs of 20 steps" in before
    assert "as chosen after tuning" in before
    output = command.finish("sweep", *flags)
    assert "tuned: fp32: optimiser.learning_rate = 0.003" in output
    cells = [results.finished_runs(folder, cell_id)[0].cell for cell_id in results.last_sweep(folder).cells]
    assert [(cell.codec, cell.optimiser.learning_rate, cell.network) for cell in cells] == [
        ("fp32", 3e-3, "consumer-80mbps"),
        ("int8", 3e-3, "consumer-80mbps"),
    ]
    after = command.finish("plan", *flags)
    assert "tuned: int8" in after
    assert "0 runs to make" in after
