"""Data parallel cells through the command line: played over links, and live where ratio and staleness follow them."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import testbed
from testbed import results
from testbed.metrics.ideal import recorded_steps_s
from testbed.metrics.steps import align
from testbed.metrics.wires import HEADER_BYTES
from testbed.records import Calibration, StepRecord
from testbed.replay.worker_steps import replica_step
from testbed.replay.workers import node_times, worker_coding_ns
from testbed.results import Run
from tests.commands import Command
from tests.known import known

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

EXPERIMENT = """
question = "Does it go through?"
engine = "auto"
live_checks = 0

[cell]
topology = "star"
codec_cost = "{cost}"
compute = {{ {compute} }}
workload = {{ {workload} }}
optimiser = {{ learning_rate = 1e-3, weight_decay = 0.0, beta1 = 0.9, beta2 = 0.95, clip_norm = 1.0 }}
training = {{ steps = {steps}, warmup_steps = 1, seed = 0, evaluate_every = 0 }}

[cell.data]
workers = 2
{exchange}
staleness = 1
local_steps = 1
{more}

[axes]
codec = ["{codec}"]
profile = ["{profile}"]
timing = {timings}
"""


TEXT = 'model = "gpt2-nano", text = "bundled", sequence_length = 16, batch_size = 4, validation_batches = 1'
DIGITS = 'model = "digits-cnn", images = "digits", alpha = 0.3, batch_size = 16'
ARRIVALS = """exchange = "star"
answer = "bf16"
arrivals = { period_s = 0.5 }
outer = { learning_rate = 1.0, momentum = 0.0, nesterov = false }"""


KILLED = """
[[cell.fault]]
node = 1
at = "3s"
kill = true
"""


PACED = 'mode = "paced", forward = "40ms", backward = "80ms", update = "5ms"'


def swept(folder: Path, *timings: str, clock: str = "virtual", **fields: Any) -> list[Run]:
    """Return the run of a cell of each timing."""
    folder.mkdir(exist_ok=True)
    stated = {"workload": TEXT, "more": "", "codec": "ef(topk(0.1))", "exchange": 'exchange = "all-to-all"'}
    stated |= {"cost": "zero", "compute": PACED, **fields}
    (folder / "sweep.toml").write_text(EXPERIMENT.format(timings=json.dumps(timings), **stated), encoding="utf8")
    with Command.standing(folder, "auto") as command:
        command.finish("sweep", "sweep.toml", "--clock", clock)
    made = folder / "results" / folder.name
    runs = [run for cell_id in results.last_sweep(made).cells for run in results.finished_runs(made, cell_id)]
    assert len(runs) == len(timings)
    return sorted(runs, key=lambda run: timings.index(run.cell.timing))


def steps_of(run: Run) -> list[list[StepRecord]]:
    return run.all_steps()


def losses_of(run: Run) -> list[float | None]:
    return [step.loss for step in align(steps_of(run))]


@pytest.mark.clock_kernel
def test_a_ring_is_live_what_it_is_played_and_has_a_report(tmp_path: Path) -> None:
    ring = {"exchange": 'exchange = "all-reduce"', "codec": "bf16"}
    played, live = swept(tmp_path, "played", "live", steps=8, profile="link(20Mbit, 20ms)", **ring)
    summary = known(played.summary)
    assert losses_of(live) == losses_of(played)
    assert known(live.summary).step_s == pytest.approx(summary.step_s, rel=0.01)
    for records in steps_of(live):  # what its sockets say to have sent is what its interface counted
        last = records[-1]
        sent = sum(socket.bytes_sent + HEADER_BYTES * socket.segments_out for socket in last.sockets)
        assert known(last.counters).sent_bytes == pytest.approx(sent, rel=0.005)
    assert known(summary.ideal_step_s) <= known(summary.step_s) * (1 + 1e-6)
    assert (summary.certificate, summary.ended) == ("PASS", "steps")
    assert summary.validation_loss is not None
    assert (tmp_path / "results" / tmp_path.name / "report.html").stat().st_size > 10_000


@pytest.mark.clock_kernel
@pytest.mark.parametrize(
    ("cost", "exchange", "compute"),
    [
        ("device", 'exchange = "all-to-all"', 'mode = "paced", device = "t4"'),
        ("host", 'exchange = "star"\nanswer = "bf16"', 'mode = "paced", forward = "40ms", backward = "80ms"'),
    ],
)
def test_codecs_cost_live_what_they_cost_played(cost: str, exchange: str, compute: str, tmp_path: Path) -> None:
    # Nothing is dropped: where a queue overflows, steps hang on who is first by a packet.
    means = {"cost": cost, "exchange": exchange, "compute": compute, "profile": "link(20Mbit, 20ms, buffer=4s)"}
    played, live = swept(tmp_path, "played", "live", steps=6, **means)
    assert losses_of(live) == losses_of(played)
    for node in range(played.cell.nodes):  # a server may decode a message while the next is on its way
        took = [
            sorted(
                (a.kind, a.microbatch, a.encoded_ns - a.computed_ns, a.decoded_ns - a.input_ns if node < 2 else 0)
                for record in run.steps(node)
                for a in record.actions
            )
            for run in (played, live)
        ]
        assert took[0] == took[1]
        assert any(encodes_ns for _, _, encodes_ns, _ in took[0])
        assert any(decodes_ns for _, _, _, decodes_ns in took[0]) == (node < 2)
    whole_s = [sum(step.seconds for step in align(steps_of(run))) for run in (played, live)]
    assert whole_s[1] == pytest.approx(whole_s[0], rel=0.03)
    assert known(live.summary).efficiency is not None


@pytest.mark.clock_kernel
def test_images_are_learned_alike_played_and_live_and_their_accuracy_is_shown(tmp_path: Path) -> None:
    star = {"exchange": 'exchange = "star"\nanswer = "fp32"', "codec": "fp32", "workload": DIGITS}
    means = {"steps": 8, "profile": "link(20Mbit, 20ms)", **star}
    played, live = swept(tmp_path / "first", "played", "live", **means)
    (again,) = swept(tmp_path / "again", "played", **means)
    assert losses_of(live) == losses_of(played)
    assert (again.cell, again.summary) == (played.cell, played.summary)
    accuracy = known(known(played.summary).validation_accuracy)
    assert 0 < accuracy < 1
    assert known(live.summary).validation_accuracy == accuracy
    frame = testbed.load(tmp_path / "first" / "results" / "first")
    assert set(frame.validation_accuracy) == {accuracy}
    page = (tmp_path / "first" / "results" / "first" / "report.html").read_text(encoding="utf8")
    assert page.count(f"{accuracy:.4f}") >= 2  # a row of the table each
    assert "of test images" in page


@pytest.mark.clock_kernel
def test_played_it_takes_what_this_machine_takes(tmp_path: Path) -> None:
    means = {"cost": "host", "compute": 'mode = "calibrated"', "profile": "link(1Gbit, 1ms)"}
    (run,) = swept(tmp_path, "played", steps=4, **means)
    made = tmp_path / "results" / tmp_path.name
    (costs,) = results.read_json(made / "calibration.json", Calibration).replicas.values()
    for node, worker in enumerate(costs.workers):
        encode_ns = costs.messages[node].encode[0].ns
        decodes_ns = [sender.decode[0].ns for sender in costs.messages]
        for action in [action for record in run.steps(node) for action in record.actions]:
            works_ns = worker.local_step.ns + worker.close.ns if action.kind == "L" else worker.update.ns
            assert action.computed_ns - action.decoded_ns == works_ns
            # A message is decoded when it comes: the first ones while the last is still on the way.
            least_ns, most_ns = (0, 0) if action.kind == "L" else (decodes_ns[-1], sum(decodes_ns))
            assert least_ns <= action.decoded_ns - action.input_ns <= most_ns
            assert action.encoded_ns - action.computed_ns == (encode_ns if action.kind == "L" else 0)
    summary = known(run.summary)
    assert known(summary.split).codec_s > 0
    judged = known(replica_step(run.cell, steps_of(run), 0))
    assert known(run.certificates.before).step == judged.said
    stated = node_times(run.cell, costs)
    coding_ns = worker_coding_ns(known(run.cell.data), known(stated[0].coding)[0])
    worked_ns = sum(stated[0].local_ns) + stated[0].update_ns + coding_ns
    assert worked_ns / 1e9 < judged.seconds
    # Of four steps the last cycle is judged, and all but the warm-up count; the last applies all that is left.
    steps_s = known(recorded_steps_s(run.cell, steps_of(run), 0))
    assert judged.seconds == pytest.approx(fmean(steps_s[-run.cell.cycle :]), rel=1e-3)
    assert summary.ideal_step_s == pytest.approx(fmean(steps_s[1:]))
    assert "encode its message" in (made / "cells" / f"{run.cell.id}.html").read_text(encoding="utf8")


@pytest.mark.root
@pytest.mark.parametrize("workload", [pytest.param(TEXT, id="text"), pytest.param(DIGITS, id="images")])
def test_live_on_the_real_clock_it_trains_as_without_a_network(workload: str, tmp_path: Path) -> None:
    means = {"steps": 4, "profile": "link(20Mbit, 20ms)", "workload": workload}
    live, played = swept(tmp_path, "live", "played", clock="real", **means)
    assert losses_of(live) == losses_of(played)
    sizes = [
        [frame.payload_bytes for records in steps_of(run) for record in records for frame in record.sent]
        for run in (live, played)
    ]
    assert sizes[0] == sizes[1]
    assert known(live.certificates.before).bound is not None
    assert live.certificates.after is not None


@pytest.mark.clock_kernel
@pytest.mark.parametrize(
    ("more", "workload"),
    [
        pytest.param('deco = { every = 2, noise = "exp", noise_weight = 1.0 }', TEXT, id="choices"),
        pytest.param(ARRIVALS, TEXT, id="arrivals"),
        pytest.param(ARRIVALS.replace("0.5", "0.2"), DIGITS, id="arrivals of images"),
        pytest.param(f"{ARRIVALS}{KILLED}", TEXT, id="arrivals without a killed worker"),
    ],
)
def test_live_runs_repeat_to_the_last_bit_and_nanosecond(more: str, workload: str, tmp_path: Path) -> None:
    stated = {"exchange": "", "workload": workload} if "exchange" in more else {}
    means = {"steps": 8, "profile": "link(5Mbit, 20ms)", "more": more, **stated}
    run, other = (run for name in ("first", "another") for run in swept(tmp_path / name, "live", **means))
    first, another = steps_of(run), steps_of(other)
    assert first == another
    if KILLED in more:
        assert known(run.summary).lost == {
            "worker 1": f"the process of worker 1 was killed by SIGKILL after {len(first[1])} recorded steps, "
            "as stated: node 1: killed at 3 s"
        }
        assert len(first[1]) < len(first[0])
    if "deco" in more:
        sizes = {frame.frame_bytes for record in first[0] for frame in record.sent}
        assert len(sizes) > 2  # a first ratio, a chosen one, and what tells of it
    else:
        applied = {record.step for record in first[-1] if record.received}
        assert 0 < len(applied) < 8  # the network decided in which steps
