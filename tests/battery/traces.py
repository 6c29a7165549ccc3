"""Part A, traces of every kind in normal form, and the ideals: how long they take over links that are formulas."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from testbed.trace.format import Trace
from tests.battery import makers
from tests.battery.entries import Record, trace_record

Made = tuple[str, Callable[[], Trace]]
LINKS = {
    "even": "link(10Mbit, 30ms, buffer=60s)",
    "uneven": "link(100Mbit, 5ms, up.rate=20Mbit, buffer=60s)",
    "fast": "link(1Gbit, 1ms, buffer=60s)",
}
HYBRID: dict[str, Any] = {
    "parallelism": "hybrid",
    "scenario": "community",
    "model": "gpt2",
    "precision": "bf16",
    "sequence_length": 128,
    "sequences": 1,
    "replicas": [1, 1, 3, 2],
    "microbatches": [4, 4, 2, 3],
    "codec": "int8",
    "bits": 8,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "star": {},
    "all-to-all": {"exchange": "all-to-all"},
    "pipeline": {"replicas": [5], "microbatches": 4},
    "pipeline, sites": {"scenario": "organisational", "replicas": [6], "microbatches": 4},
    "sites": {"scenario": "organisational", "replicas": [4, 2, 2, 4], "microbatches": 2},
    "whole, sites": {"scenario": "organisational", "replicas": [1] * 6, "microbatches": 1},
    "two, sites": {"scenario": "organisational", "replicas": [3, 6], "microbatches": 2, "exchange": "all-to-all"},
    "answer": {"answer_bits": 16, "site_codec": "fp32"},
    "late": {"staleness": 1},
    "later, all-to-all": {"exchange": "all-to-all", "staleness": 2},
    "late, sites": {"scenario": "organisational", "replicas": [1] * 6, "microbatches": 1, "staleness": 1},
    "late pipelines, sites": {"scenario": "organisational", "replicas": [4, 4], "microbatches": 3, "staleness": 2},
    "rounds": {"rounds": [{}, {"away": [0, 3]}, {"away": [1], "returning": [3, 0]}]},
    "rounds, all-to-all": {"exchange": "all-to-all", "rounds": [{"away": [2]}, {"returning": [2]}]},
    "rounds, sites": {
        "scenario": "organisational",
        "replicas": [1, 1, 6, 4],
        "microbatches": 2,
        "rounds": [{"away": [0]}, {"returning": [0], "away": [2]}],
    },
}
PROGRAMS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "ring": ((1,), (1,)),
    "gather": ((1,), (1,)),
    "displaced": ((1, 2), (1,)),
    "pipefusion": ((1, 2), (1, 3)),
    "asyncdiff": ((1, 2), (1,)),
}
"""Their warm-ups, and patches."""
EXCHANGES = ("star", "all-to-all", "all-reduce", "all-gather")
COSTS: tuple[dict[str, Any], ...] = (
    {"cost": "zero"},
    {"cost": "device", "dilation": 3},
    {"cost": "host"},
    {"cost": "host", "calibrated": True},
)


def _named(what: str, make: Callable[..., Trace], **given: Any) -> Made:
    words = " ".join(f"{name}={value}".replace(" ", "") for name, value in given.items())
    return f"{what}: {words}", functools.partial(make, **given)


def made() -> Iterator[Made]:
    """Yield each trace's name and what makes it."""
    for count in (1, 4):
        yield _named("transfer", makers.transfer, count=count)
    yield from _pipelines()
    yield from _data_parallel()
    for (name, layout), local, (schedule, in_flight), scale in itertools.product(
        LAYOUTS.items(), (1, 2, 3), (("gpipe", None), ("1f1b", None), ("1f1b", 1), ("1f1b", 3)), (1, 7)
    ):
        table = {**HYBRID, **layout, "local_steps": local, "schedule": schedule, "in_flight": in_flight}
        words = f"local={local} schedule={schedule} in_flight={in_flight} scale={scale}"
        yield f"hybrid: {name} {words}", functools.partial(makers.hybrid, table, steps=4, scale=scale)
    for program, workers, steps, coded in itertools.product(PROGRAMS, (1, 2, 3, 4), (2, 4, 5), (False, True)):
        for warmup, patches in itertools.product(*PROGRAMS[program]):
            given = {"name": program, "workers": workers, "warmup": warmup, "patches": patches, "coded": coded}
            yield _named("sampling", makers.sampling, **given, steps=steps)
    for lag, synchronous, skip, workers in itertools.product(
        (0, 1, 2), ("none", "deep", "shallow", "staggered"), ("none", "low", "high"), (2, 3, 4)
    ):
        if lag == 0 and (synchronous, skip) != ("none", "none"):  # all the same
            continue
        given = {"lag": lag, "synchronous": synchronous, "skip": skip, "workers": workers}
        yield _named("experts", makers.expert_sampling, **given)


def _pipelines() -> Iterator[Made]:
    order = itertools.product((1, 2, 3, 4), (1, 4, 6), ("gpipe", "1f1b"), (1, 2, 4), (False, True), (False, True))
    for stages, microbatches, schedule, in_flight, blocking, coded in order:
        if in_flight == 1 or schedule == "1f1b":  # gpipe does not read it
            given = {"stages": stages, "microbatches": microbatches, "schedule": schedule, "in_flight": in_flight}
            yield _named("pipeline shape", makers.pipeline_shape, **given, blocking=blocking, coded=coded)
    shapes = itertools.product((1, 2, 3, 4), (1, 3, 5), (("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("1f1b", 5)), (1, 2))
    for (stages, microbatches, (schedule, in_flight), accumulation), cost in itertools.product(shapes, COSTS):
        given = {"stages": stages, "microbatches": microbatches, "schedule": schedule, "in_flight": in_flight}
        yield _named("pipeline", makers.played_pipeline, **given, accumulation=accumulation, **cost)
    for stages, cost, steps in itertools.product((2, 3), COSTS, (2, 9)):
        given = {"stages": stages, "microbatches": 3, "schedule": "1f1b", "in_flight": 2, "accumulation": 1}
        yield _named("pipeline", makers.played_pipeline, **given, **cost, played_steps=steps)


def _data_parallel() -> Iterator[Made]:
    for exchange, workers, staleness, steps, scale in itertools.product(
        EXCHANGES, (2, 3, 5), (0, 1, 3), (4, 9), (1, 7)
    ):
        given = {"exchange": exchange, "workers": workers, "staleness": staleness, "steps": steps, "scale": scale}
        yield _named("data parallel shape", makers.data_parallel_shape, **given)
    for exchange, local in itertools.product(EXCHANGES, (1, 4)):
        table = {
            "parallelism": "data",
            "model": "gpt2",
            "device": "rtx-3090",
            "precision": "bf16",
            "sequences": 8,
            "sequence_length": 1024,
            "workers": 4,
            "exchange": exchange,
            "staleness": 1,
            "bits": 0.5,
            "answer_bits": 2.0,
            "local_iterations": local,
        }
        yield f"data parallel table: {exchange} local={local}", functools.partial(makers.data_parallel_table, table, 6)
    for exchange, workers in itertools.product(EXCHANGES, (2, 3, 4)):
        each = tuple(range(workers))
        ways: list[dict[str, Any]] = [
            {"staleness": (0,), "local": (1,), "fragments": 1},
            {"staleness": (2,), "local": (1,), "fragments": 1},
            {"staleness": each, "local": (1,), "fragments": 1},
            {"staleness": (1,), "local": tuple(1 + n for n in each), "fragments": 1},
            {"staleness": (0,), "local": (3,), "fragments": 1},
            {"staleness": (0,), "local": (2,), "fragments": 3},
            {"staleness": (2,), "local": (1,), "fragments": 3},
            {"staleness": (0,), "local": (1,), "fragments": 1, "shares": tuple(1 + (n == 0) for n in each)},
            {"staleness": (1,), "local": (1,), "fragments": 1, "first": 3, "end": 9},
            {"staleness": each, "local": (2,), "fragments": 4, "first": 2, "end": 8},
            {"staleness": (1,), "local": (1,), "fragments": 1, "end": 9, "changes": ((3, 3), (6, 0))},
        ]
        for way, cost in itertools.product(ways, COSTS):
            shares = way.get("shares")
            if shares is not None and 12 * workers % sum(shares):
                way = {**way, "shares": (2,) * workers}
            yield _named("data parallel", makers.data_parallel, exchange=exchange, workers=workers, **way, **cost)


def traces() -> dict[str, Callable[[], Record]]:
    """Return part A."""
    return {name: functools.partial(lambda make: trace_record(make()), make) for name, make in made()}


def ideals() -> dict[str, Callable[[], Record]]:
    """Return the ideals of every sixth trace, over no links and over one kind in turn."""
    found = dict[str, Callable[[], Record]]()
    links = itertools.cycle(LINKS.items())
    for (name, make), (called, link) in zip(list(made())[::6], links, strict=False):
        topology = "line" if name.startswith("pipeline") else "star"
        found[f"{name} | no links"] = functools.partial(_ideal, make, topology, None)
        found[f"{name} | {topology}, {called}"] = functools.partial(_ideal, make, topology, link)
    return found


def _ideal(make: Callable[[], Trace], topology: str, link: str | None) -> Record:
    return {"steps_ns": makers.ideal_ns(make(), topology, link)}
