"""Parts C and D: cells that are played, and cells that are live on the virtual clock, through the command line.

What is measured on this machine elsewhere, durations for `calibrated` cells, is made up here (`_write_calibration`).
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from testbed import results
from testbed.records import Calibration, MessageCosts, ReplicaCosts, WorkerMaths
from testbed.spec import Recipe, recipe_of
from testbed.sweep import conduct, plan
from tests.battery import folders
from tests.battery.entries import Record
from tests.battery.makers import stage_costs, took

ROOT = Path(__file__).resolve().parents[2]
CELL: dict[str, Any] = {
    "topology": "star",
    "timing": "played",
    "codec_cost": "zero",
    "compute": {"mode": "paced", "forward": "5ms", "backward": "9ms", "update": "1ms"},
    "workload": {
        "model": "gpt2-nano",
        "text": "bundled",
        "sequence_length": 32,
        "batch_size": 8,
        "validation_batches": 1,
    },
    "optimiser": {"learning_rate": 1e-3, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.99, "clip_norm": 1.0},
    "training": {"steps": 8, "warmup_steps": 1, "seed": 0, "evaluate_every": 4},
}
PIPELINE = {"pipeline": {"stages": 3, "microbatches": 4, "schedule": "1f1b", "in_flight": 4}}
WORKERS = {"workload": {"batch_size": 12, "sequence_length": 8}, "codec_cost": "zero"}
OUTER = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
PLAIN = {"learning_rate": 1.0, "momentum": 0.0, "nesterov": False}
SPARSE = "ef(topk(0.1))"
SLOW = "link(20Mbit, 15ms)"


def _data(exchange: str, workers: int = 3, **more: Any) -> dict[str, Any]:
    answer = {"answer": "bf16"} if exchange == "star" else {}
    stated = {"workers": workers, "exchange": exchange, "staleness": 1, "local_steps": 1, **answer, **more}
    return {**WORKERS, "data": stated}


Sweep = tuple[dict[str, Any], dict[str, list[Any]]]
"""What its cells have, and what varies."""
PLAYED: dict[str, Sweep] = {
    "star": (PIPELINE, {"profile": ["datacenter", "consumer-80mbps", "cable", SLOW], "codec": ["fp32", "int8"]}),
    "line, gpipe, device": (
        {
            "topology": "line",
            "codec_cost": "device",
            "compute": {"mode": "paced", "device": "rtx-3060"},
            "pipeline": {"stages": 3, "microbatches": 4, "schedule": "gpipe", "in_flight": 4},
        },
        {"profile": ["link(50Mbit, 5ms)", ["cable", "lte"]], "codec": ["fwd=int8, bwd=bf16"]},
    ),
    "calibrated": (
        {**PIPELINE, "compute": {"mode": "calibrated"}, "codec_cost": "host"},
        {"profile": ["consumer-80mbps", "consumer-80mbps-bbr"], "codec": ["fp32", "delta-int8"]},
    ),
    "steps": (PIPELINE, {"profile": [SLOW, "consumer-10mbps"], "codec": ["bf16"], "played_steps": [3, 60]}),
    "chance": (
        PIPELINE,
        {
            "profile": [
                "link(20Mbit, 10ms, loss=1%)",
                "link(20Mbit, 10ms, jitter=2ms)",
                "lte-trace",
                "reordering-80mbps",
            ],
            "codec": ["int8"],
        },
    ),
    "varying": (
        PIPELINE,
        {"profile": ["varying-80mbps", "bursty-80mbps"], "codec": ["fp32"], "played_steps": [60]},
    ),
    "transport": (
        {"pipeline": {"stages": 2, "microbatches": 2, "schedule": "1f1b", "in_flight": 2}},
        {
            "profile": [
                "consumer-80mbps-bbr",
                "consumer-80mbps-idle",
                "link(20Mbit, 10ms, buffer=20ms)",
                "office-uplink",
            ],
            "codec": ["fp32"],
        },
    ),
    "dilated": (
        {
            **PIPELINE,
            "codec_cost": "device",
            "compute": {"mode": "paced", "device": "rtx-3090", "dilation": 10},
        },
        {"profile": ["cable", "consumer-80mbps"], "codec": ["int8"]},
    ),
    "budget": (
        {**PIPELINE, "training": {"steps": 20, "budget_s": 0.9}},
        {"profile": ["cable"], "codec": ["fp32", "int8"]},
    ),
    "data, star": (
        _data("star"),
        {"profile": [SLOW, "link(50Mbit, 5ms, up.rate=10Mbit)"], "codec": [SPARSE], "data.staleness": [0, 2]},
    ),
    "data, all-to-all": (_data("all-to-all"), {"profile": [SLOW], "codec": [SPARSE], "data.staleness": [0, 1]}),
    "data, all-reduce": (
        {
            **_data("all-reduce"),
            "codec_cost": "device",
            "compute": {"mode": "paced", "device": "t4"},
        },
        {"profile": [SLOW], "codec": ["bf16"], "data.staleness": [0, 1]},
    ),
    "data, all-gather": (
        _data("all-gather", streaming={"fragments": 3, "mixing": 0.5}, outer=OUTER, local_steps=2),
        {"profile": [SLOW], "codec": ["int8"], "data.staleness": [0, 2]},
    ),
    "data, calibrated": (
        {**_data("star", 2), "compute": {"mode": "calibrated"}, "codec_cost": "host"},
        {"profile": [SLOW], "codec": [SPARSE], "data.staleness": [1]},
    ),
    "data, chance": (_data("star", 2), {"profile": ["link(20Mbit, 15ms, loss=0.5%)"], "codec": [SPARSE]}),
}
_LIVE = {"timing": "live", "codec_cost": "zero"}
LIVE: dict[str, Sweep] = {
    "live pipeline": (
        {**_LIVE, "pipeline": {"stages": 2, "microbatches": 4, "schedule": "1f1b", "in_flight": 3}},
        {"profile": ["cable"], "codec": ["int8", "adaptive(5)"]},
    ),
    "live data, star": ({**_data("star", 2), **_LIVE}, {"profile": [SLOW], "codec": [SPARSE]}),
    "live data, all-to-all": ({**_data("all-to-all"), **_LIVE}, {"profile": [SLOW], "codec": ["int8"]}),
    "live data, ring": ({**_data("all-reduce"), **_LIVE}, {"profile": [SLOW], "codec": ["bf16"]}),
    "live data, asynchronous": (
        {
            **_data("star", staleness=9, outer=PLAIN, arrivals={"buffer": 2}),
            **_LIVE,
            "compute": {"mode": "paced", "forward": ["5ms", "8ms", "30ms"], "backward": "9ms", "update": "1ms"},
        },
        {"profile": [SLOW], "codec": [SPARSE]},
    ),
    "live data, period": (
        {**_data("star", 2, staleness=9, outer=PLAIN, arrivals={"period_s": 0.2}), **_LIVE},
        {"profile": [SLOW], "codec": [SPARSE]},
    ),
    "live data, DeCo": (
        {
            **_data("all-to-all", 2, deco={"every": 3, "noise": "exp", "noise_weight": 1.0}),
            **_LIVE,
            "training": {"steps": 12},
        },
        {"profile": [SLOW], "codec": [SPARSE]},
    ),
}


def played(folder: Path) -> dict[str, Callable[[], Record]]:
    """Return part C; results go to `folder`."""
    return _entries(PLAYED, folder, _played_record)


def live(folder: Path) -> dict[str, Callable[[], Record]]:
    """Return part D; results go to `folder`."""
    return _entries(LIVE, folder, _live_record)


def _entries(
    sweeps: Mapping[str, Sweep], folder: Path, record: Callable[[Path], Record]
) -> dict[str, Callable[[], Record]]:
    """Return an entry for each cell: its runs, side by side."""
    found: dict[str, Callable[[], Record]] = {}
    for name, (fields, axes) in sweeps.items():
        runs = functools.cache(functools.partial(_swept, name, fields, axes, folder))
        for number, values in enumerate(itertools.product(*axes.values())):
            found[f"{name}: {' | '.join(map(str, values))}"] = functools.partial(_of_runs, runs, number, record)
    return found


def _of_runs(runs: Callable[[], list[list[Path]]], number: int, record: Callable[[Path], Record]) -> Record:
    each = [record(run) for run in runs()[number]]
    return each[0] if len(each) == 1 else {name: [one[name] for one in each] for name in each[0]}


def _played_record(run: Path) -> Record:
    nodes = folders.steps_of(run)
    return {
        **folders.numbers_of(nodes),
        **folders.summary_of(run),
        "ends_ns": folders.ends_of(nodes),
        "times": folders.times_of(nodes),
        "counted": folders.counted_of(nodes),
    }


def _live_record(run: Path) -> Record:
    nodes = folders.steps_of(run)
    said, ends = folders.summary_of(run), folders.ends_of(nodes)
    return {
        **folders.numbers_of(nodes),
        "summary": said["summary"][:3],
        "ideal": said["ideal"],
        "near_ns": [after - before for before, after in itertools.pairwise([0, *ends])],
    }


# ------------------------------------------------------------------ the command line
def _swept(name: str, fields: Mapping[str, Any], axes: Mapping[str, list[Any]], folder: Path) -> list[list[Path]]:
    """Sweep, or go on where it ended; returns the folders of each cell's runs, in the order of the axes."""
    home = folder / name.replace(", ", "-").replace(" ", "-")
    cell = _write_experiment(home, fields, axes)
    command = [sys.executable, "-m", "testbed", "sweep", str(home / "sweep.toml"), "--clock", "virtual", "--no-report"]
    command += ["--results", str(home)]
    if cell["codec_cost"] == "host":
        command += ["--calibration", str(_write_calibration(home))]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    made = next(path.parent for path in home.rglob("sweep.json"))
    cells = results.last_sweep(made).cells
    return [
        [run.folder for run in sorted(results.finished_runs(made, each), key=lambda run: run.number)] for each in cells
    ]


def _write_experiment(home: Path, fields: Mapping[str, Any], axes: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Write a sweep's file into its folder; returns what its cells have."""
    home.mkdir(parents=True, exist_ok=True)
    cell = {**CELL, **fields}
    for table in ("workload", "training"):
        cell[table] = {**CELL[table], **fields.get(table, {})}
    text = ['question = "Does anything change?"', 'engine = "auto"', "live_checks = 0"]
    text += [f"cell.{key} = {_toml(value)}" for key, value in cell.items()]
    text += [f'axes."{key}" = {_toml(value)}' for key, value in axes.items()]
    (home / "sweep.toml").write_text("\n".join(text) + "\n", encoding="utf8")
    return cell


def _write_calibration(home: Path) -> Path:
    """Make up the durations of a sweep's recipes."""
    asked = plan.load_experiment(str(home / "sweep.toml"))
    agenda = conduct.make_agenda(asked, "netem", plan.Choice(False, []), home / "none", clock="virtual")
    recipes = [recipe_of(cell) for cell in agenda.cells]
    made = Calibration(
        taken_at="2026-01-01T00:00:00+00:00",
        machine={},
        recipes={
            recipe.id: tuple(stage_costs(stage, recipe.pipeline.stages) for stage in range(recipe.pipeline.stages))
            for recipe in recipes
            if recipe.data is None
        },
        replicas={recipe.id: _replica_costs(recipe) for recipe in recipes if recipe.data is not None},
    )
    results.write_json(home / "calibration.json", made)
    return home / "calibration.json"


def _replica_costs(recipe: Recipe) -> ReplicaCosts:
    assert recipe.data is not None
    maths = [
        WorkerMaths(local_step=took(10**8, "local", n), close=took(10**6, "close", n), update=took(10**7, "update", n))
        for n in range(recipe.data.workers)
    ]
    messages = [
        MessageCosts(encode=(took(10**6, "encode", n),), decode=(took(10**6, "decode", n),))
        for n in range(recipe.nodes)
    ]
    return ReplicaCosts(workers=tuple(maths), messages=tuple(messages))


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    return json.dumps(value)
