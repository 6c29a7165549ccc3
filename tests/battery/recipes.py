"""Part B: small trainings in one process, to the last bit."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from testbed.diffusion import experts, programs
from testbed.diffusion.dit import DitSize, build_dit, start
from testbed.diffusion.workers import Codecs, Workers
from testbed.errors import TestbedError, UserError
from testbed.jobs.decision import Decision
from testbed.jobs.kind import Setting
from testbed.jobs.loop import Loop
from testbed.nodes import arrivals, learners
from testbed.spec import (
    DataParallelSpec,
    ImagesSpec,
    OptimiserSpec,
    PipelineSpec,
    Recipe,
    TextSpec,
    TrainingSpec,
)
from testbed.studies import asynchronous_rounds, federated, stacked, stacked_text
from testbed.training import alone
from testbed.training.workers import ReplicasTraining
from testbed.workloads import models
from tests.battery.entries import Record, digest
from tests.battery.folders import numbers_of, steps_of
from tests.battery.observer import NOTES, hash_of, noted, watching, weights_of

Table = Mapping[str, Any]
NONE: Table = {}
VOCABULARY = 64
EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
OUTER = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
PLAIN = {"learning_rate": 1.0, "momentum": 0.0, "nesterov": False}
PIPELINES: dict[str, dict[str, Any]] = {
    "1 stage": {"stages": 1, "codec": "fp32"},
    "2 stages, gpipe": {"stages": 2, "schedule": "gpipe"},
    "3 stages": {},
    "4 stages": {"stages": 4, "in_flight": 4},
    "in flight 1": {"in_flight": 1},
    "in flight 4, sgd": {"in_flight": 4, "optimiser": {"algorithm": "sgd", "beta2": 0.0}},
    "accumulation": {"accumulation": 2, "microbatches": 2},
    "accumulation, gpipe, recompute": {"accumulation": 2, "microbatches": 2, "schedule": "gpipe", "recompute": True},
    "uneven layers": {"layers": (1, 2, 1)},
    "dropout, recompute": {"workload": {"dropout": 0.2}, "recompute": True},
    "bf16 layers": {"workload": {"precision": "bf16"}},
    "llama": {"workload": {"family": "llama", "model": "llama-tiny"}, "codec": "N(bf16)"},
    "schedule of rates": {
        "optimiser": {"learning_rate_warmup": 2, "learning_rate_decay": "cosine", "learning_rate_floor": 0.1}
    },
    "target": {"training": {"evaluate_every": 1, "target_loss": 4.16}},
    "uncompressed": {"training": {"evaluate_every": 2, "evaluate_uncompressed": True}, "codec": "N(int2)"},
    "sized by data": {"codec": "fwd=N(zstd(int8)), bwd=N(entropy(int8))"},
    "uniform": {"codec": "N(uniform(0.25))"},
    "error feedback": {"codec": "fwd=N(topk(0.2)), bwd=N(ef(topk(0.1)))"},
    "delta": {"codec": "N(delta(int4))", "workload": {"training_sequences": 24}, "training": {"steps": 7}},
    "aqsgd, two epochs": {
        "codec": "fwd=N(aqsgd(int4)), bwd=N(int8)",
        "workload": {"training_sequences": 24},
        "training": {"steps": 7},
    },
    "shared mask": {"codec": "N(mask(share=0.25))"},
    "powersgd": {"codec": "N(powersgd(rank=4))"},
    "subspace": {"codec": "N(subspace(4, bf16, grassmann, every=16))", "training": {"steps": 18}},
    "bottleneck": {"codec": "N(bottleneck(4, maxout, inner=bf16))"},
    "placement": {"codec": "0: fwd=N(int8), bwd=N(bf16); rest: N(delta-int8)"},
    "warm-up of a codec": {"codec": "N(warmup(ef(onebit), 2))"},
}
REPLICAS: dict[str, dict[str, Any]] = {
    "star of 2": {"exchange": "star", "workers": 2},
    "star of 4, shares": {"exchange": "star", "workers": 4, "shares": (1, 2, 3, 2), "staleness": (0, 1, 2, 0)},
    "star, stateful answer": {"exchange": "star", "workers": 3, "answer": "N(ef(topk(0.1)))", "batch_size": 12},
    "star, local steps": {"exchange": "star", "workers": 2, "local_steps": (1, 3), "outer": OUTER, "staleness": 1},
    "all-to-all of 2": {"exchange": "all-to-all", "workers": 2, "codec": "0: N(int8); rest: N(bf16)"},
    "all-to-all of 3": {"exchange": "all-to-all", "workers": 3, "staleness": (0, 3, 1), "batch_size": 12},
    "all-to-all of 4": {"exchange": "all-to-all", "workers": 4, "codec": "N(int4(group=16))", "microbatches": 2},
    "all-reduce of 2": {"exchange": "all-reduce", "workers": 2, "codec": "N(bf16)", "staleness": 1},
    "all-reduce of 4": {"exchange": "all-reduce", "workers": 4, "codec": "N(fp16)", "staleness": (2, 0, 1, 0)},
    "all-gather of 3": {"exchange": "all-gather", "workers": 3, "staleness": (0, 3, 1), "batch_size": 12},
    "all-gather of 4": {"exchange": "all-gather", "workers": 4, "codec": "N(onebit)"},
    "streaming, star": {"exchange": "star", "workers": 2, "fragments": 3, "local_steps": 2, "staleness": (1, 0)},
    "streaming, ring": {
        "exchange": "all-reduce",
        "workers": 2,
        "codec": "N(bf16)",
        "fragments": 3,
        "staleness": (0, 2),
    },
    "streaming, mixing": {"exchange": "all-to-all", "workers": 2, "fragments": 3, "mixing": 0.5, "staleness": 2},
    "frozen moment": {
        "exchange": "all-gather",
        "workers": 2,
        "codec": "N(warmup(ef(onebit), 2))",
        "optimiser": {"frozen_after": 2},
    },
    "images": {"exchange": "star", "workers": 2, "images": "digits-cnn", "shares": (3, 1), "staleness": (1, 0)},
    "images, ring": {"exchange": "all-reduce", "workers": 3, "images": "digits-mlp", "codec": "N(bf16)"},
    "powersgd": {"exchange": "all-to-all", "workers": 2, "codec": "N(powersgd(rank=2))", "training": {"steps": 8}},
}
CHOICES = {
    "star": {2: (2, 2, "N(ef(topk(0.3)))"), 5: (0, 0, "N(ef(topk(0.5, values=fp32)))")},
    "all-to-all": {3: (3, 3, "N(ef(topk(0.02)))"), 8: (1, 0, "N(ef(topk(0.2)))")},
}
"""From which step on another staleness and codec hold, as DeCo-SGD's leader would say."""
ASYNCHRONOUS: dict[str, dict[str, Any]] = {
    "period": {"arrivals": {"period_s": 4e-6}, "staleness": 100},
    "period, some refused": {"arrivals": {"period_s": 4e-6}, "staleness": 1},
    "buffer of 1": {"arrivals": {"buffer": 1}, "staleness": 100, "pace_ns": (1000, 1300, 7000)},
    "buffer of 2, ties": {"arrivals": {"buffer": 2}, "staleness": 100, "pace_ns": (1000, 1000, 2000)},
}
SAMPLED: dict[str, dict[str, Any]] = {
    "ring": {"name": "ring", "workers": 3, "codec": "N(compactfusion(onebit, first=half))"},
    "gather": {"name": "gather", "workers": 3, "codec": "N(compactfusion(lowrank(int4, rank=4), first=byte))"},
    "displaced": {"name": "displaced", "workers": 4, "codec": "N(delta-open(int4, first=half))", "refresh_every": 3},
    "displaced, decoded once": {"name": "displaced", "workers": 3, "warmup": 2, "decode_once": True},
    "pipefusion": {"name": "pipefusion", "workers": 3, "patches": 2, "codec": "fp32", "boundary": "N(int8)"},
    "asyncdiff": {"name": "asyncdiff", "workers": 4, "codec": "fp32", "boundary": "N(bf16)"},
}


def recipes() -> dict[str, Callable[[], Record]]:
    """Return part B."""
    return {name: functools.partial(_watched, make) for name, make in _recipes()}


def _watched(make: Callable[[], Record]) -> Record:
    with watching() as made:
        found = make()
        return {**NOTES.record(), "weights": weights_of(made), **found}


def _recipes() -> Iterator[tuple[str, Callable[[], Record]]]:
    for name, asked in PIPELINES.items():
        yield f"pipeline: {name}", functools.partial(_trained, _pipeline, asked)
    for name, asked in REPLICAS.items():
        yield f"data parallel: {name}", functools.partial(_trained, _replicas, asked)
    for name, asked in ASYNCHRONOUS.items():
        yield f"asynchronous: {name}", functools.partial(_asynchronous, asked)
    for exchange in CHOICES:
        yield f"DeCo: {exchange}", functools.partial(_chosen, exchange)
    for name, asked in SAMPLED.items():
        yield f"sampling: {name}", functools.partial(_sampled, asked)
    for name, schedule in (("late", experts.ExpertSchedule(1, "deep", "low")), ("later", experts.ExpertSchedule(2))):
        yield f"experts: {name}", functools.partial(_experts, schedule)
    yield "pipeline: refused where the network decides", _refused
    yield "FedLuck", _fedluck
    yield "stacked text", _stacked
    yield "federated", _federated


# ------------------------------------------------------------------ recipes
def _recipe(
    codec: str,
    workload: Table,
    pipeline: Table,
    data: DataParallelSpec | None,
    optimiser: Table,
    training: Table,
) -> Recipe:
    text = {"family": "gpt2", "model": "gpt2-tiny", "text": "none", "sequence_length": 8, "validation_batches": 2}
    image = "images" in workload
    adamw = {"learning_rate": 0.02, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "clip_norm": 0.5}
    steps = {"steps": 5, "warmup_steps": 1, "seed": 5, "evaluate_every": 3}
    return Recipe(
        codec=noted(codec),
        workload=ImagesSpec(**workload) if image else TextSpec(**{**text, "batch_size": 8, **workload}),
        pipeline=PipelineSpec(**pipeline),
        data=data,
        optimiser=OptimiserSpec(**{**adamw, **optimiser}),
        training=TrainingSpec(**{**steps, **training}),
    )


def _pipeline(
    *, codec: str = "N(int8)", workload: Table = NONE, optimiser: Table = NONE, training: Table = NONE, **cut: Any
) -> Recipe:
    shape = {"stages": 3, "microbatches": 4, "schedule": "1f1b", "in_flight": 3, **cut}
    return _recipe(codec, workload, shape, None, optimiser, training)


def _replicas(
    *,
    exchange: str,
    workers: int,
    codec: str = "N(ef(topk(0.1)))",
    answer: str = "N(bf16)",
    images: str | None = None,
    batch_size: int = 8,
    microbatches: int = 1,
    fragments: int = 0,
    mixing: float = 0.0,
    optimiser: Table = NONE,
    training: Table = NONE,
    **data: Any,
) -> Recipe:
    streaming = {"streaming": {"fragments": fragments, "mixing": mixing}, "outer": OUTER} if fragments else {}
    asked = {"staleness": 0, "local_steps": 1, **streaming, **data}
    spec = DataParallelSpec(
        workers=workers, exchange=exchange, answer=noted(answer) if exchange == "star" else None, **asked
    )
    workload: dict[str, Any] = {"batch_size": batch_size}
    if images is not None:
        workload = {"model": images, "images": "digits", "alpha": 0.3, "batch_size": 48}
    cut = {"stages": 1, "microbatches": microbatches, "schedule": "gpipe", "in_flight": 1}
    return _recipe(codec, workload, cut, spec, optimiser, training)


def _trained(make: Callable[..., Recipe], asked: Table) -> Record:
    """Train as a sweep does, and read the folder."""
    _make_tiny()
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.npy"
        draw = np.random.default_rng(0)
        # Some words more often than others, so that there is something to learn.
        words = np.minimum(draw.integers(VOCABULARY, size=20_000), draw.integers(VOCABULARY, size=20_000))
        np.save(tokens, words.astype(np.uint16))
        recipe, trained = make(**asked), Path(folder) / "trained"
        vocabulary = VOCABULARY if isinstance(recipe.workload, TextSpec) else 10
        where = str(tokens) if isinstance(recipe.workload, TextSpec) else folder
        job = alone.AloneJob(recipe=recipe, vocabulary=vocabulary, tokens=where, folder=str(trained))
        record = alone.train_alone(job, lambda message: None)
        return {**numbers_of(steps_of(trained)), "record": [record.ended, record.unigram_floor]}


def _refused() -> Record:
    try:
        _trained(_pipeline, {"codec": "adaptive(50)"})
    except TestbedError as error:
        return {"refused": isinstance(error, UserError)}
    raise AssertionError("a codec that goes by its link was trained without one")


def _make_tiny() -> None:
    for family in ("gpt2", "llama"):
        nano = models.SIZES[f"{family}-nano"]
        models.SIZES[f"{family}-tiny"] = dataclasses.replace(nano, layers=4, width=32, inner=128, vocabulary=VOCABULARY)


# ------------------------------------------------------------------ what the network decides
def _asynchronous(asked: Table) -> Record:
    data = {name: value for name, value in asked.items() if name != "pace_ns"}
    recipe = _replicas(
        exchange="star",
        workers=3,
        images="digits-mlp",
        codec="N(ef(topk(0.1)))",
        outer=PLAIN,
        local_steps=2,
        shares=(2, 1, 1),
        training={"steps": 20},
        optimiser={"algorithm": "sgd", "beta1": 0.0, "beta2": 0.0, "clip_norm": 1e9},
        **data,
    )
    told = arrivals.training_of(recipe)
    made = [learners.learner_of(recipe, number, vocabulary=10, tokens="") for number in (0, 0, 1, 2)]
    workers = [arrivals.Rounds(told, number, made[1 + number], recipe.codec) for number in range(3)]
    server = arrivals.Server(told, made[0], [recipe.codec] * 3)
    steps: list[Any] = []

    def watch(step: asynchronous_rounds.ServerStep) -> bool:
        steps.append((step.at_ns, step.applied.used, step.applied.refused, step.received_bytes, step.answered_bytes))
        return len(steps) < 20

    links = asynchronous_rounds.Formula(lambda sender, receiver, size, now_ns: now_ns + 10 + (size >> 10))
    local_ns = asked.get("pace_ns", (1000, 2000, 5000))
    asynchronous_rounds.run_rounds(told.job(), server, workers, links, watch, local_ns=local_ns)
    refused = sum(len(step[2]) for step in steps)
    return {"steps": digest(steps), "evaluated": list(made[0].evaluate()), "refused": refused}


def _chosen(exchange: str) -> Record:
    """Train while a policy changes staleness and codecs."""
    recipe = _replicas(
        exchange=exchange, workers=2, images="digits-mlp", staleness=1, training={"steps": 12, "evaluate_every": 5}
    )
    decisions = [
        Decision(step, (first, second), (1, 1), (noted(codec),) * 2)
        for step, (first, second, codec) in CHOICES[exchange].items()
    ]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"steps-{node}.jsonl" for node in range(recipe.nodes)]
        outputs = [path.open("w", encoding="utf8") for path in paths]
        alone.train_together(ReplicasTraining(Setting(recipe, 10, ""), decisions), outputs)
        for output in outputs:
            output.close()
        return numbers_of(steps_of(Path(folder)))


# ------------------------------------------------------------------ sampling
def _dit(number: int = 0) -> Any:
    made = build_dit(DitSize(layers=4, width=32, heads=2, experts=number), 0).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made


def _sampled(asked: Table) -> Record:
    program = programs.Program(
        asked["name"], asked["workers"], 4, 4, 16, 4, asked.get("warmup", 1), asked.get("patches", 1)
    )
    codec, boundary = asked.get("codec", "N(compactfusion(onebit))"), asked.get("boundary", "fp32")
    codecs = Codecs(noted(codec), noted(boundary), refresh_every=asked.get("refresh_every", 0))
    workers = Workers(_dit(), program, codecs, decode_once=asked.get("decode_once", False))
    found = [workers.sample(*start(8, seed)) for seed in (0, 1)]
    sizes = [sorted((repr(tuple(part)), size) for part, size in each.frame_bytes.items()) for each in found]
    return {"images": digest([hash_of(each.images) for each in found]), "frames": digest(sizes)}


def _experts(schedule: experts.ExpertSchedule) -> Record:
    at, request = Loop.at, start(4 * experts.BLOCK, 0)

    def in_turn(loop: Loop, when_ns: int, call: Callable[..., None], *given: Any, order: int = 0) -> None:
        at(loop, when_ns, call, *given)  # as it was recorded: whoever was woken first, and not the first worker

    with mock.patch.object(Loop, "at", in_turn):
        found = experts.sample_experts(_dit(4), *request, 4, schedule, workers=3, codec=noted("N(fp16)"))
    sizes = sorted((repr(tuple(part)), size) for part, size in found.frame_bytes.items())
    return {"images": hash_of(found.images), "frames": digest(sizes)}


# ------------------------------------------------------------------ experiments' own
def _program(experiment: str, name: str) -> Any:
    """Import a program of an experiment."""
    path = EXPERIMENTS / experiment / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"battery_{experiment}_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def _fedluck() -> Record:
    program = _program("fedluck", "train")
    rows = [
        tuple(program.train(program.Case(program.PUBLISHED, method), "result", 0.4, 0, most_s=12.0))
        for method in (program.FEDLUCK, "FedBuff", "FedLuck, error feedback")
    ]
    return {"rows": [list(map(repr, row)) for row in rows]}


def _stacked() -> Record:
    """Several trainings side by side, whose codec and staleness change on the way."""

    def chosen(step: int) -> stacked_text.Chosen:
        return stacked_text.Chosen("ef(topk(0.05))", 2) if step < 3 else stacked_text.Chosen("ef(topk(0.2))", 1)

    method = stacked_text.TextMethod(
        "ef(topk(0.05))", "values", staleness=2, betas=(0.0, 0.99), workers=2, batch_size=4
    )
    trials = [stacked.Trial(0.004, seed) for seed in range(2)]
    found = stacked_text.train(trials, method, batches=8, evaluate_every=4, choices=chosen, target=0.5)
    return {"evaluated": [list(map(repr, each)) for each in found]}


def _federated() -> Record:
    asked: dict[str, Any] = {
        "model": "digits-mlp",
        "clients": 3,
        "rounds": 4,
        "local_steps": 2,
        "batch_size": 8,
        "learning_rate": 0.2,
    }
    spec = federated.FederatedSpec(**asked, learning_rate_floor=0.5, alpha=0.5, skew=4.0, seed=3)
    rounds = list(federated.Federation(spec).train(lambda number, stepsize: [noted("N(ef(topk(0.1)))")] * 3))
    return {"rounds": [list(map(repr, each)) for each in rounds]}
