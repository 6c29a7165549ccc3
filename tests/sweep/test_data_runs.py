"""Data parallel cells through the command line: played over links, and live where ratio and staleness follow them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testbed import results
from testbed.results import Run
from tests.commands import Command

pytestmark = [pytest.mark.slow, pytest.mark.clock_kernel, pytest.mark.timeout(1200)]

EXPERIMENT = """
question = "Does it go through?"
engine = "auto"
live_checks = 0

[cell]
topology = "star"
timing = "{timing}"
codec_cost = "zero"
compute = {{ mode = "paced", forward = "40ms", backward = "80ms", update = "5ms" }}
workload = {{ model = "gpt2-nano", text = "bundled", sequence_length = 16, batch_size = 4, validation_batches = 1 }}
optimiser = {{ learning_rate = 1e-3, weight_decay = 0.0, beta1 = 0.9, beta2 = 0.95, clip_norm = 1.0 }}
training = {{ steps = {steps}, warmup_steps = 1, seed = 0, evaluate_every = 0 }}

[cell.data]
workers = 2
{exchange}
staleness = 1
local_steps = 1
{more}

[axes]
codec = ["ef(topk(0.1))"]
profile = ["{profile}"]
"""


def swept(command: Command, **fields: Any) -> list[Run]:
    text = EXPERIMENT.format(**{"more": "", "exchange": 'exchange = "all-to-all"', **fields})
    (command.folder / "sweep.toml").write_text(text, encoding="utf8")
    command.finish("sweep", "sweep.toml", "--clock", "virtual", within_s=590)
    folder = command.folder / "results" / command.folder.name
    (cell_id,) = results.last_sweep(folder).cells
    return sorted(results.finished_runs(folder, cell_id), key=lambda run: run.number)


def seen(run: Run) -> list[Any]:
    """All that a run's records hold, its moments counted from its beginning."""
    nodes = [[json.loads(record.model_dump_json()) for record in run.steps(node)] for node in range(run.cell.nodes)]
    zero = min(records[0]["start_ns"] for records in nodes)

    def plain(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: plain(each, key) for key, each in value.items()}
        if isinstance(value, list):
            return [plain(each, name) for each in value]
        return value - zero if name.endswith("_ns") and isinstance(value, int) else value

    return [plain(records) for records in nodes]


def test_played_it_has_a_loss_a_step_and_a_report(tmp_path: Path) -> None:
    with Command.standing(tmp_path, "netem") as command:
        (run,) = swept(command, timing="played", steps=6, profile="link(20Mbit, 20ms)")
        summary = run.summary
        assert summary is not None
        assert summary.step_s is not None
        assert summary.ideal_step_s is not None
        assert summary.ideal_step_s <= summary.step_s * (1 + 1e-6)
        assert (summary.certificate, summary.ended) == ("PASS", "steps")
        assert summary.validation_loss is not None
        assert (tmp_path / "results" / tmp_path.name / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    "more",
    [
        pytest.param('deco = { every = 2, noise = "exp", noise_weight = 1.0 }', id="choices"),
        pytest.param(
            'exchange = "star"\nanswer = "bf16"\narrivals = { period_s = 0.5 }\n'
            "outer = { learning_rate = 1.0, momentum = 0.0, nesterov = false }",
            id="arrivals",
        ),
    ],
)
def test_live_runs_repeat_to_the_last_bit_and_nanosecond(more: str, tmp_path: Path) -> None:
    """A link that varies has a seed for each of three runs; this one draws nothing, so all of them are one."""
    with Command.standing(tmp_path, "netem") as command:
        exchange = {"exchange": ""} if "arrivals" in more else {}
        runs = swept(command, timing="live", steps=8, profile="varying-80mbps", more=more, **exchange)
        first, *others = map(seen, runs)
        assert len(others) == 2
        assert others == [first, first]
        if "deco" in more:
            sizes = {frame["payload_bytes"] for record in first[0] for frame in record["sent"]}
            assert len(sizes) > 2  # a first ratio, a chosen one, and what tells of it
        else:
            applied = {record["step"] for record in first[-1] if record["received"]}
            assert 0 < len(applied) < 8  # the network decided in which steps
