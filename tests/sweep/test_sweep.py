"""Whole runs: lab, stage hosts, training, certificates, results. The laws that make the instrument trustworthy."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import SMALL, Command

from testbed import results
from testbed.net.machine.capabilities import resolve_engine
from testbed.results import Run
from testbed.sweep.interrupt import MESSAGE


def _losses(run: Run) -> list[float | None]:
    stages = run.cell.pipeline.stages
    return [step.loss for step in run.steps(stages - 1)]


class Network(NamedTuple):
    stages: int
    profile: str
    topology: str = "star"


_UNSPLIT = Network(1, "datacenter")
_SHAPED = (Network(3, "consumer-80mbps"), Network(3, "lossy-80mbps"))
_MIXED = (Network(3, "cable+wifi+varying-80mbps"), Network(3, "bursty-80mbps+dsl", "line"))


def _check_same_maths(command: Command, *others: Network) -> None:
    """Losses of 30 steps and of the evaluations, bit for bit: on every number of stages, over every network."""
    curves = {}
    for network in (_UNSPLIT, *others):
        fields = (f"pipeline.stages={network.stages}", "training.evaluate_every=15", f"topology={network.topology}")
        command.finish(*command.cell(*fields, steps=30, profile=network.profile))
        run, summary = command.last()
        assert summary.status == "ok"
        assert summary.steps == 30
        assert run.cell.network == network.profile
        assert len(run.lab.links) == network.stages - (network.topology == "line")
        curves[network] = _losses(run)
    first = curves[_UNSPLIT]
    assert len(first) == 32
    assert None not in first
    assert first[-1] < first[0]  # type: ignore[operator]
    for key, curve in curves.items():
        assert curve == first, key


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_network_never_changes_the_maths(command: Command) -> None:
    _check_same_maths(command, Network(2, "datacenter"), Network(3, "datacenter"), *_SHAPED)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_links_of_their_own_and_topologies_never_change_the_maths(command: Command) -> None:
    _check_same_maths(command, *_MIXED)


@pytest.mark.root
@pytest.mark.netem
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_network_never_changes_the_maths_netem(command: Command) -> None:
    _check_same_maths(command, Network(3, "datacenter"), *_SHAPED, *_MIXED)


def _check_bytes(command: Command) -> None:
    """fp32: what the interfaces counted is payload, frame headers and TCP/IP headers, and nothing else."""
    command.finish(*command.cell(steps=6, profile="consumer-80mbps"))
    run, summary = command.last()
    assert summary.compression_ratio == pytest.approx(1, rel=1e-2)
    assert summary.payload_bytes_per_step is not None
    assert summary.header_bytes_per_step is not None
    assert summary.wire_bytes_per_step == pytest.approx(
        summary.payload_bytes_per_step + summary.header_bytes_per_step, rel=1e-2
    )
    assert {socket.congestion_control for step in run.steps(1) for socket in step.sockets} == {"cubic"}


@pytest.mark.root
def test_every_byte_on_the_wire_is_accounted_for(command: Command) -> None:
    _check_bytes(command)


@pytest.mark.root
@pytest.mark.netem
def test_every_byte_on_the_wire_is_accounted_for_netem(command: Command) -> None:
    _check_bytes(command)


@pytest.mark.root
def test_a_run_leaves_records_that_describe_themselves(command: Command) -> None:
    command.finish(*command.cell(steps=4, codec="int8", profile="consumer-80mbps"))
    run, summary = command.last()
    assert summary.engine == run.lab.engine == command.engine == resolve_engine(command.engine)[0]  # type: ignore[arg-type]
    assert {link.shaper for link in run.lab.links} == {command.engine}
    assert run.certificates.before is not None
    assert run.certificates.after is not None
    assert {m.quantity for m in run.certificates.before.measurements} >= {"rtt", "rate", "message"}
    assert summary.ideal_step_s is not None
    assert summary.step_s is not None
    assert 0 < summary.ideal_step_s <= summary.step_s * 1.02
    assert (run.folder / "environment.json").exists()
    samples = list(run.samples())
    steps = [step for stage in range(3) for step in run.steps(stage)]
    assert run.lab.played_at_ns is not None
    assert run.lab.played_at_ns <= samples[0].at_ns <= min(step.start_ns for step in steps)
    assert max(step.end_ns for step in steps) <= samples[-1].at_ns
    assert {one.node for sample in samples for one in sample.sockets} == {"node-0", "node-1", "node-2"}
    for stage in range(
        3
    ):  # what the links carried is what the stage's device counted, until its last step's end at least
        carried = samples[-1].links[f"node-{stage}"]["up"].bytes - samples[0].links[f"node-{stage}"]["up"].bytes
        counted = run.steps(stage)[-1].counters
        assert counted is not None
        assert carried == pytest.approx(counted.sent_bytes, rel=0.02)


@pytest.mark.root
def test_sizes_of_a_certificate_are_those_that_the_run_sends(command: Command) -> None:
    command.finish(*command.cell(steps=3, codec="int8", profile="consumer-80mbps"))
    run, _ = command.last()
    sent = sorted(frame.frame_bytes for stage in range(3) for step in run.steps(stage) for frame in step.sent)
    before, after = (
        {int(one.detail.split()[0]) for one in found.measurements if one.quantity == "message"}
        for found in (run.certificates.before, run.certificates.after)
        if found is not None
    )
    values = 2 * 32 * 64  # sequences of a micro-batch, tokens, width
    assert before == {values, 4 * values}
    assert after == {sent[0]}
    assert sent[-1] < 1.1 * sent[0]


_OWN_CODECS = """
import os, time
from testbed.codecs.dense.cast import Fp32

class Mine(Fp32):
    pass

class Crashes(Fp32):
    def encode(self, tensor, slot):
        if slot.step == 2:
            os.abort()
        return super().encode(tensor, slot)

class Raises(Fp32):
    def decode(self, payload, slot):
        if slot.step == 2:
            raise ValueError("this codec is broken")
        return super().decode(payload, slot)
"""


@pytest.mark.root
def test_a_strangers_codec_runs_and_a_broken_one_fails_with_its_reason(command: Command) -> None:
    (command.folder / "mycodecs.py").write_text(_OWN_CODECS, encoding="utf8")
    command.finish(*command.cell(steps=3, codec="mycodecs:Mine"))
    assert command.last()[1].status == "ok"
    output = command.finish(*command.cell(steps=4, codec="mycodecs:Raises"), status=1)
    assert "this codec is broken" in output
    assert command.last()[1].status == "failed"
    output = command.finish(*command.cell(steps=4, codec="mycodecs:Crashes"), status=1)
    assert "SIGABRT" in output
    assert "Traceback" not in output
    assert command.last()[1].steps == 2


def _wait_for_steps(command: Command, process: subprocess.Popen[str], folder: Path | None = None) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        if any(run.steps(0) for run in results.runs(folder or command.folder / "results" / "run")):
            return
        time.sleep(0.05)
    pytest.fail(f"no step was done: {process.communicate()[0] if process.poll() is not None else 'still running'}")


def _wait_until_nothing_is_left(command: Command) -> float:
    began = time.monotonic()
    while command.left() and time.monotonic() < began + 10:
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.root
def test_a_killed_controller_leaves_nothing(command: Command) -> None:
    process = command.start(*command.cell(steps=500, profile="consumer-80mbps"))
    _wait_for_steps(command, process)
    assert len(command.left()) >= 7  # controller, relay, three hosts, three jobs
    process.kill()
    process.communicate()
    assert _wait_until_nothing_is_left(command) < 2
    assert command.runs()[-1].summary is None


@pytest.mark.root
def test_ctrl_c_once_finishes_the_step_certifies_and_says_how_to_go_on(command: Command) -> None:
    process = command.start(*command.cell(steps=500, profile="consumer-80mbps"))
    _wait_for_steps(command, process)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert MESSAGE in output
    assert "goes on with what is missing" in output
    assert "Traceback" not in output
    assert _wait_until_nothing_is_left(command) < 2
    run, summary = command.last()
    assert summary.status == "interrupted"
    assert summary.ended is None
    assert [len(run.steps(stage)) for stage in range(3)] == [summary.steps] * 3  # all stages ended with the same step
    assert 1 <= summary.steps < 500
    assert run.certificates.after is not None
    assert sum(len(sample.sockets) > 0 for sample in run.samples()) >= 2


@pytest.mark.root
def test_ctrl_c_twice_ends_it_at_once(command: Command) -> None:
    process = command.start(*command.cell("workload.batch_size=64", steps=500, profile="consumer-80mbps"))
    _wait_for_steps(command, process)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 130, output
    assert MESSAGE in output
    assert "Traceback" not in output
    assert _wait_until_nothing_is_left(command) < 2
    run, summary = command.last()
    assert summary.status == "interrupted"
    assert run.certificates.after is None


@pytest.mark.root
def test_a_killed_stage_fails_the_run_and_is_named(command: Command) -> None:
    process = command.start(*command.cell(steps=500, profile="consumer-80mbps"))
    _wait_for_steps(command, process)
    jobs = [pid for pid, line in command.left().items() if "testbed.pipeline.host" in line]
    os.kill(max(jobs), signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "SIGKILL" in output
    assert _wait_until_nothing_is_left(command) < 2
    assert command.last()[1].status == "failed"


@pytest.mark.root
def test_a_sweep_goes_on_past_a_failed_cell_and_the_next_one_does_only_what_is_missing(command: Command) -> None:
    (command.folder / "mycodecs.py").write_text(_OWN_CODECS, encoding="utf8")
    sets = [
        *SMALL,
        "training.steps=4",
        "training.warmup_steps=1",
        "profile=datacenter",
        "pipeline.stages=2",
        "pipeline.in_flight=2",
    ]
    flags = [part for field in [*sets, 'codec=["mycodecs:Raises","int8","fp32"]'] for part in ("--set", field)]
    first = command.finish("sweep", "--engine", command.engine, *flags, status=1)
    assert "this codec is broken" in first
    second = command.finish("sweep", "--engine", command.engine, *flags, status=1)
    assert "2 of 3 cells are finished already" in second
    folder = command.folder / "results" / "default"
    assert (folder / "report.html").stat().st_size > 10_000
    assert sorted((run.folder.parent.name[:4], run.number) for run in results.runs(folder)) == [
        ("fp32", 1),
        ("int8", 1),
        ("myco", 1),
        ("myco", 2),
    ]


def _small_sweep(command: Command, *fields: str) -> list[str]:
    sets = [
        *SMALL,
        "training.steps=6",
        "training.warmup_steps=1",
        "training.evaluate_every=3",
        "pipeline.stages=2",
        *fields,
    ]
    return ["sweep", "--engine", command.engine, *(part for field in sets for part in ("--set", field))]


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_repeated_sweep_has_the_same_losses_bit_for_bit(command: Command) -> None:
    """The quick form of the default experiment: two networks, two codecs, each cell twice."""
    flags = [
        "--quick",
        "--engine",
        command.engine,
        "--repeats",
        "2",
        "--only",
        "codec=fp32",
        "--only",
        "codec=delta-int8",
    ]
    process = command.start("sweep", *flags)
    output, _ = process.communicate(timeout=580)
    assert process.returncode == 0, output
    folder = command.folder / "results" / "default"
    cells = results.last_sweep(folder).cells
    assert len(cells) == 4
    curves: dict[str, list[float | None]] = {}
    for cell_id in cells:
        first, second = results.finished_runs(folder, cell_id)
        assert _losses(first) == _losses(second)
        assert None not in _losses(first)
        curves.setdefault(first.cell.codec, _losses(first))
        assert _losses(first) == curves[first.cell.codec]  # nor does the network change them
    assert curves["fp32"] != curves["delta-int8"]


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_repeats_interleave_and_what_was_interrupted_is_made_again(command: Command) -> None:
    text = (
        'question = "?"\nengine = "auto"\norder = "interleaved"\nrepeats = 2\n'
        + (command.shipped / "default" / "sweep.toml").read_text(encoding="utf8").split("\n", 2)[2]
    )
    (command.folder / "sweep.toml").write_text(text, encoding="utf8")
    sweep = _small_sweep(command, 'codec=["fp32", "int8"]', "profile=datacenter", "training.steps=40")
    process = command.start("sweep", "sweep.toml", *sweep[1:])
    folder = command.folder / "results" / command.folder.name
    _wait_for_steps(command, process, folder)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    output = command.finish("sweep", "sweep.toml", *sweep[1:])
    order = re.findall(r"^\[\d/4\] ([\w-]+) on", output, re.MULTILINE)
    assert len(order) == 4  # the one that was interrupted is among them
    assert set(order[:2]) == set(order[2:]) == {"fp32", "int8"}
    assert all(len(results.finished_runs(folder, cell_id)) == 2 for cell_id in results.last_sweep(folder).cells)
    assert results.last_sweep(folder).order == "interleaved"
    assert "2 of 2 cells are finished already" in command.finish("sweep", "sweep.toml", *sweep[1:])


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_learning_rate_is_chosen_before_the_sweep(command: Command) -> None:
    tune = '[tune]\nfield = "optimiser.learning_rate"\nvalues = [1e-9, 3e-3]\n'
    tune += 'steps = 20\nseeds = [0]\nover = "datacenter"\n'
    text = (command.shipped / "default" / "sweep.toml").read_text(encoding="utf8")
    (command.folder / "sweep.toml").write_text(f"{text}\n{tune}", encoding="utf8")
    flags = ["sweep.toml", *_small_sweep(command, 'codec=["fp32", "int8"]', "profile=consumer-80mbps")[1:]]
    before = command.finish("plan", *flags)
    assert "2 arms x 2 values x 1 seeds = 4 runs of 20 steps" in before
    assert "as chosen after tuning" in before
    output = command.finish("sweep", *flags)
    assert "tuned: fp32: optimiser.learning_rate = 0.003" in output
    folder = command.folder / "results" / command.folder.name
    cells = [results.finished_runs(folder, cell_id)[0].cell for cell_id in results.last_sweep(folder).cells]
    assert [(cell.codec, cell.optimiser.learning_rate, cell.network) for cell in cells] == [
        ("fp32", 3e-3, "consumer-80mbps"),
        ("int8", 3e-3, "consumer-80mbps"),
    ]
    after = command.finish("plan", *flags)
    assert "tuned: int8" in after
    assert "0 runs to make" in after
