"""A training that is killed and resumed from a checkpoint is the undisturbed one: numbers, bytes and weights."""

from __future__ import annotations

import itertools
import json
import shutil
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch import Tensor

from testbed.codecs.catalogue import table as codecs
from testbed.codecs.contract import Context, MessageKey, Payload
from testbed.codecs.make import make
from testbed.errors import SpecError
from testbed.jobs.actions import Encode
from testbed.jobs.kind import Setting
from testbed.jobs.loop import NodeLane
from testbed.nodes.boundary import Boundary
from testbed.nodes.bucket import Bucket
from testbed.results import checkpoint_steps
from testbed.spec import AlignedSpec, LowRankSpec, OuterSpec, Recipe, StreamingSpec
from testbed.training import checkpoints
from testbed.training.alone import train_together
from testbed.training.checkpoints import Checkpoints
from testbed.training.kinds import KindTraining, Training
from tests.jobs.recording import job_recipe
from tests.jobs.test_a_strangers_job import block
from tests.jobs.test_context import recipe as context_recipe
from tests.small_replicas import DIGITS, EXCHANGES, SmallTraining, a_recipe
from tests.training.test_alone import a_tiny_cell, toy_of

pytestmark = pytest.mark.usefixtures("one_thread", "tiny_models")
EVERY, STEPS = 2, 7
MOMENTS = (0.35, 0.7, 0.99)
"""Shares of all actions after which a training is killed: after one, two and three checkpoints."""
Kind = Callable[[], Training]


class Killed(BaseException):
    """Not an error: nobody handles it."""


class Outcome(NamedTuple):
    """What must not depend on an interruption."""

    records: list[list[dict[str, Any]]]
    """By place, without times."""
    payloads: dict[Any, int]
    """Checksum of every payload that was encoded, by place and key."""
    weights: tuple[str | None, ...]
    actions: int
    resumed: tuple[int, ...]

    def same(self, other: Outcome) -> bool:
        """Whether it equals an undisturbed outcome; its payloads are those since the last checkpoint."""
        payloads = self.payloads.items() <= other.payloads.items()
        return payloads and self._replace(payloads={}, actions=0, resumed=()) == other._replace(
            payloads={}, actions=0, resumed=()
        )


class Watching:
    """Notes payloads, and kills the training after so many actions."""

    def __init__(self, kill_after: float = float("inf")) -> None:
        self.payloads: dict[Any, int] = {}
        self.actions, self._kill_after = 0, kill_after

    def did(self, lane: NodeLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        self.actions += 1
        if isinstance(action, Encode):
            self.payloads[lane.node, action.key] = zlib.crc32(bytes(value.payload))
        if self.actions >= self._kill_after:
            raise Killed


def run(kind: Kind, folder: Path, *, every: int | None = EVERY, kill_after: float = float("inf")) -> Outcome:
    """Train in a folder, from its newest checkpoint if there is one."""
    folder.mkdir(exist_ok=True)
    training, watching = kind(), Watching(kill_after)
    kept = None if every is None else Checkpoints(folder, every, training.recipe)
    with ExitStack() as stack:
        names = [folder / f"steps-{place}.jsonl" for place in range(len(training.job.places))]
        outputs = [stack.enter_context(name.open("a")) for name in names]
        trained = train_together(training, outputs, observers=[watching], checkpoints=kept)
    records = [[_without_times(json.loads(line)) for line in name.read_text().splitlines()] for name in names]
    return Outcome(records, watching.payloads, trained.weights, watching.actions, kept.resumed if kept else ())


def _without_times(of: Any) -> Any:
    if isinstance(of, list):
        return [_without_times(each) for each in of]
    if isinstance(of, dict):
        return {name: _without_times(each) for name, each in of.items() if not name.endswith("_ns")}
    return of


def killed_and_resumed(kind: Kind, folder: Path, undisturbed: Outcome, share: float) -> Outcome:
    """Kill a training after a share of its actions, and again after as many steps as it then makes in a checkpoint."""
    with pytest.raises(Killed):
        run(kind, folder, kill_after=share * undisturbed.actions)
    assert checkpoint_steps(folder), "it had checkpoints"
    return run(kind, folder)


def check(kind: Kind, folder: Path) -> None:
    """Kill at every moment."""
    undisturbed = run(kind, folder / "undisturbed", every=None)
    for share in MOMENTS:
        found = killed_and_resumed(kind, folder / f"{share}", undisturbed, share)
        assert found.same(undisturbed), f"killed after {share:.0%}, resumed at {found.resumed}"
        shutil.rmtree(folder / f"{share}")


# ---------------------------------------------------------------------- kinds
def pipeline(codec: str, stages: int = 3, **changes: Any) -> Training:
    cell = a_tiny_cell(stages, codec, **{"steps": STEPS, "evaluate_every": 3, **changes})
    return toy_of(cell, partial(make, cell.codec))


def replicas(
    exchange: Any, codec: str, frozen_after: int | None = None, muon: bool = False, **changes: Any
) -> Training:
    recipe = a_recipe(exchange, codec, **{"workers": 3, "steps": STEPS, "evaluate_every": 3, **changes})
    algorithm = "muon" if muon else recipe.optimiser.algorithm
    optimiser = recipe.optimiser.model_copy(update={"frozen_after": frozen_after, "algorithm": algorithm})
    return SmallTraining(recipe.model_copy(update={"optimiser": optimiser}))


PIPELINE_CODECS = [
    *(row.example_text for row in codecs.CODECS.values() if not row.measures),
    *("ef(lowrank(2))", "fwd=aqsgd(int4), bwd=int8", "bottleneck(4, maxout, inner=bf16)", "0: int8; 1: delta-int8"),
    "subspace(4, keep=reparametrised)",
]
OUTER = OuterSpec(learning_rate=0.7, momentum=0.9, nesterov=True)
STREAMED = StreamingSpec(fragments=2, mixing=0.5)
ORDERS: dict[str, dict[str, Any]] = {
    "at once": {},
    "stale": {"staleness": 2},
    "some stale": {"staleness": (0, 2, 1)},
    "local steps": {"local_steps": 3, "outer": OUTER},
    "streamed": {"local_steps": 2, "outer": OUTER, "streaming": STREAMED, "staleness": 1},
}
MEMORIES = [
    "ef(topk(0.05, values=fp32))",
    "ef(powersgd(2))",
    "ef21(topk(0.1))",
    "dgc(topk(0.05))",
    "warmup(ef(int1), 3)",
]


@pytest.mark.slow
@pytest.mark.parametrize("codec", PIPELINE_CODECS)
def test_a_pipeline_with_every_codec(codec: str, tmp_path: Path) -> None:
    check(partial(pipeline, codec), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "gpipe", "recompute": True},
        {"accumulation": 2},
        {"family": "llama", "dropout": 0.2},
        {"evaluate_uncompressed": True},
        {"evaluate_every": 2},
        {"stages": 1},
    ],
    ids=str,
)
def test_a_pipeline_of_every_form(changes: dict[str, Any], tmp_path: Path) -> None:
    check(partial(pipeline, "delta-int8", **changes), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_workers_with_every_exchange_and_order(exchange: str, order: str, tmp_path: Path) -> None:
    for number, codec in enumerate(["bf16"] if exchange == "all-reduce" else MEMORIES):
        (tmp_path / str(number)).mkdir()
        check(partial(replicas, exchange, codec, **ORDERS[order]), tmp_path / str(number))


@pytest.mark.slow
def test_a_pipeline_whose_basis_moves(tmp_path: Path) -> None:
    """While gradients are sampled, between a new basis and its use, and after that."""
    kind = partial(pipeline, "subspace(4, keep=grassmann, every=16)", steps=24, evaluate_every=0)
    undisturbed = run(kind, tmp_path / "undisturbed", every=None)
    for every in (13, 16, 18):
        with pytest.raises(Killed):
            run(kind, tmp_path / str(every), every=every, kill_after=(every + 1.5) / 24 * undisturbed.actions)
        found = run(kind, tmp_path / str(every), every=every)
        assert found.resumed == (every,)
        assert found.same(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "changes"),
    [
        ("star", {"answer": "delta-int8"}),
        ("star", {"answer": "ef(topk(0.05))", "staleness": 1}),
        ("all-to-all", {"codec": "0: int8; 1: delta-int8; rest: fp32", "staleness": 1}),
        ("all-gather", {"workload": DIGITS, "shares": (2, 1, 1)}),
        ("all-reduce", {"sgd": True, "microbatches": 2}),
        ("all-to-all", {"evaluate_every": 2}),
        ("all-to-all", {"frozen_after": 3}),
        ("all-to-all", {"muon": True, "local_steps": 2, "outer": OUTER}),
        ("all-reduce", {"aligned": AlignedSpec(share=0.1), "codec": "fp32"}),
        ("all-reduce", {"aligned": AlignedSpec(share=0.1, directions=2), "staleness": 2}),
        ("all-reduce", {"low_rank": LowRankSpec(rank=4, refresh=3), "codec": "fp32"}),
        ("star", {"low_rank": LowRankSpec(rank=30, refresh=2), "local_steps": 2, "outer": OUTER}),
        ("pairs", {"codec": "bf16", "workers": 4, "local_steps": 2, "outer": OUTER}),
        ("all-to-all", {"staleness": (2, 0, 1), "look_ahead": True}),
    ],
    ids=str,
)
def test_workers_with_other_recipes(exchange: str, changes: dict[str, Any], tmp_path: Path) -> None:
    changes = {"codec": "bf16" if exchange == "all-reduce" else "ef(int1)", **changes}
    check(partial(replicas, exchange, **changes), tmp_path)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "tokens.npy"
    np.save(path, np.random.default_rng(1).integers(0, 4096, 40_000, dtype=np.uint16))
    return str(path)


def of_a_table(recipe: Recipe, tokens: str) -> Training:
    longer = recipe.training.model_copy(update={"steps": STEPS})
    return KindTraining(Setting(recipe.model_copy(update={"training": longer}), 4096, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("job", [{}, {"exchange": "chain"}, {"subspace": 4.0}, {"validation_batches": 2}], ids=str)
def test_nodes_that_share_a_context(job: dict[str, Any], tokens: str, tmp_path: Path) -> None:
    check(partial(of_a_table, context_recipe(codec="delta-int8", weights="ef(int4)", **job), tokens), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "delta-int8"])
def test_stages_that_decode(codec: str, tokens: str, tmp_path: Path) -> None:
    table = {"kind": "decode", "stages": 2, "prompt": 4, "tokens": 3}
    text = {"sequence_length": 24, "batch_size": 2, "validation_batches": 2}
    check(partial(of_a_table, job_recipe(table, codec, steps=STEPS, **text), tokens), tmp_path)


def test_a_strangers_job_that_says_what_it_keeps(tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/jobs.md; without its `keeps` it is refused before it begins."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in (("says", block("python")), ("silent", block("python").replace("keeps =", "other ="))):
        (tmp_path / f"stranger_{name}.py").write_text(text, encoding="utf8")
    recipes = {
        name: job_recipe({"kind": f"stranger_{name}:SplitLearning", "clients": 2}, "delta-int8", steps=STEPS)
        for name in ("says", "silent")
    }
    check(partial(of_a_table, recipes["says"], tokens), tmp_path)
    with pytest.raises(SpecError, match=r"stranger_silent\.Half in a checkpoint"):
        run(partial(of_a_table, recipes["silent"], tokens), tmp_path / "silent")


# ---------------------------------------------------------------------- what makes it so
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [partial(pipeline, "delta-int8"), *(partial(replicas, "star", codec) for codec in MEMORIES)],
    ids=lambda kind: kind.args[-1],
)
def test_without_the_codecs_memory_it_would_differ(kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The control: these tests notice a state that is missing."""
    undisturbed = run(kind, tmp_path / "undisturbed", every=None)
    with pytest.raises(Killed):
        run(kind, tmp_path / "killed", kill_after=0.99 * undisturbed.actions)
    monkeypatch.setattr(Boundary, "keeps", ())
    monkeypatch.setattr(Bucket, "load", lambda bucket, state: None)
    assert not run(kind, tmp_path / "killed").same(undisturbed)


def test_killed_again_and_again_it_still_ends_the_same(tmp_path: Path) -> None:
    kind = partial(replicas, "all-to-all", "ef(powersgd(2))", **ORDERS["some stale"])
    undisturbed = run(kind, tmp_path / "undisturbed", every=None)
    for _ in range(2):
        with pytest.raises(Killed):
            run(kind, tmp_path / "killed", kill_after=0.5 * undisturbed.actions)
    found = run(kind, tmp_path / "killed")
    assert len(found.resumed) == 2
    assert found.same(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("writes", range(1, 4))
def test_killed_while_it_writes_a_checkpoint_it_has_the_one_before(
    writes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before the first file, between two, and before the name is there."""
    kind = partial(pipeline, "delta-int8", 2)
    undisturbed, calls, write = (
        run(kind, tmp_path / "undisturbed", every=None),
        itertools.count(1),
        checkpoints.write_tagged,
    )

    def killed(*of: Any) -> None:
        if next(calls) == 3 + writes:  # two nodes and the rest, once
            raise Killed
        write(*of)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_tagged", killed)
        with pytest.raises(Killed):
            run(kind, tmp_path / "killed")
    assert checkpoint_steps(tmp_path / "killed") == [EVERY]
    found = run(kind, tmp_path / "killed")
    assert found.resumed == (EVERY,)
    assert found.same(undisturbed)


@pytest.mark.slow
def test_two_are_kept_and_an_altered_one_is_not_used(tmp_path: Path) -> None:
    kind = partial(pipeline, "delta-int8", 2)
    undisturbed = run(kind, tmp_path / "undisturbed", every=None)
    with pytest.raises(Killed):
        run(kind, tmp_path / "killed", kill_after=0.99 * undisturbed.actions)
    assert checkpoint_steps(tmp_path / "killed") == [4, 6]
    with (tmp_path / "killed" / "checkpoint-6" / "node-0.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    found = run(kind, tmp_path / "killed")
    assert found.resumed == (4,)
    assert found.same(undisturbed)


class Silent:
    """A stranger's codec that does not say whether it remembers; `keeps` says that it does not."""

    def __init__(self, context: Context) -> None:
        self.inner = make("fp32", context)

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        return self.inner.encode(tensor, key)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        return self.inner.decode(payload, key)


class Stateless(Silent):
    keeps = ()


@pytest.mark.slow
def test_a_strangers_codec_that_does_not_say_what_it_remembers_is_refused_at_once(tmp_path: Path) -> None:
    cell, watching = a_tiny_cell(2, steps=STEPS), Watching()
    kept = Checkpoints(tmp_path, EVERY, toy_of(cell, Silent).recipe)
    with pytest.raises(SpecError, match=r"Silent in a checkpoint.*remove training\.checkpoint_every"):
        train_together(toy_of(cell, Silent), [], observers=[watching], checkpoints=kept)
    assert not watching.actions
    check(lambda: toy_of(cell, Stateless), tmp_path)
