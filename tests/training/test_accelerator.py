"""Recipes on another device than the CPU: a simulated one, which refuses what a GPU refuses, and a GPU where one is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from testbed.codecs.catalogue import table
from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.make import make
from testbed.codecs.sparse.positions import Form, LargestInRows, PositionCoding, largest_on
from testbed.codecs.wire.header import DevicePayload
from testbed.codecs.wrap import works_on_devices
from testbed.errors import CapabilityError, CodecError, SpecError
from testbed.jobs.kind import Setting
from testbed.message_key import Direction
from testbed.records import TrainingRecord
from testbed.results import Run, checkpoint_steps
from testbed.spec import ImagesSpec, Recipe, recipe_of
from testbed.sweep import resolve, trainings
from testbed.sweep.resolve import resolve_cell
from testbed.training import accelerator
from testbed.training.alone import AloneJob, train_alone
from testbed.training.kinds import training_of
from tests.nodes.test_stage import TOKENS, a_cell
from tests.simulated_device import THERE, simulated
from tests.small_replicas import a_recipe
from tests.training.test_alone import a_tiny_cell

STEPS = 3
TOLERANCE = 1e-4
"""Largest difference of a loss between devices in the first steps, as a share, without a codec that chooses values."""
CHOOSES = 5e-3
"""The same with a codec that chooses values, or rounds by chance: a difference of 1e-7 may choose another one."""


def able(text: str) -> bool:
    return all(works_on_devices(make(text, Context(0, 0, way))) for way in ("forward", "backward"))


ABLE = [
    *filter(able, (row.example_text for row in table.CODECS.values())),
    *(
        "int4(16)",
        "int1(nearest)",
        "topk(0.3, index)",
        "topk(0.1, bitmap, values=fp32)",
        "ef(topk(0.1))",
        "delta(int4)",
    ),
]


# ---------------------------------------------------------------------- codecs
def test_the_codecs_that_pay_work_on_devices() -> None:
    assert {
        "fp32",
        "bf16",
        "int8",
        "int4",
        "int1",
        "fp8",
        "onebit",
        "topk(share=0.1)",
        "powersgd(rank=64)",
        "subspace",
    } <= set(ABLE)
    for text in ("zstd(int8)", "ef(uniform(0.25))", "topk-shared(0.1)"):
        assert not able(text), text

    class Foreign(type(make("fp32", Context(0, 0, "forward")))):  # type: ignore[misc]
        """A class from elsewhere may use numpy."""

    assert not works_on_devices(Foreign(Context(0, 0, "forward")))


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("text", ABLE)
def test_a_codec_makes_the_bytes_of_the_cpu_and_its_tensors_stay(text: str, direction: Direction) -> None:
    here, there = ([make(text, Context(3, 0, direction)) for _ in range(2)] for _ in range(2))
    draw = torch.Generator().manual_seed(0)
    with simulated() as device:
        for step, shape in enumerate([(2, 5, 24), (2, 5, 24), (3, 40), (0, 3)]):
            key, x = MessageKey("train", step, 0, (1, 2)), torch.randn(shape, generator=draw)
            expected = here[0].encode(x, key)
            payload: Any = there[0].encode(x.to(THERE), key)
            assert isinstance(payload, DevicePayload)
            decoded = there[1].decode(payload, key)
            assert device.copied_values == 0, "no tensor was copied to the CPU"
            assert payload.to_bytes() == bytes(expected)
            assert len(payload) == len(expected)
            assert decoded.device.type == THERE.type
            assert torch.equal(decoded.cpu(), here[1].decode(expected, key))
            device.copied_values = 0


@pytest.mark.parametrize("form", ["bitmap", "index", "smaller"])
@pytest.mark.parametrize(("rows", "width", "kept"), [(3, 5, 2), (2, 300, 7), (1, 70_000, 3), (4, 8, 8), (1, 1, 1)])
def test_positions_are_chosen_and_coded_as_by_numpy(form: Form, rows: int, width: int, kept: int) -> None:
    keys = torch.randint(5, (rows, width), generator=torch.Generator().manual_seed(width)).float()  # many are equal
    coding = PositionCoding(rows, width, kept, form)
    positions = LargestInRows().positions(keys.numpy(), kept)
    assert largest_on(keys, kept).tolist() == positions.tolist()
    by_numpy, by_torch = np.zeros(coding.coded_bytes, np.uint8), torch.zeros(coding.coded_bytes, dtype=torch.uint8)
    coding.write(positions, by_numpy)
    coding.write_on(torch.from_numpy(positions), by_torch)
    assert by_torch.numpy().tolist() == by_numpy.tolist()
    assert coding.read_on(by_torch).tolist() == positions.tolist()
    for spoiled in (torch.full_like(by_torch, 255), torch.zeros_like(by_torch)):
        if kept < width and (form != "index" or kept > 1):
            with pytest.raises(CodecError, match="positions"):
                coding.read_on(spoiled)


# ---------------------------------------------------------------------- trainings
class Trained:
    """A recipe's training in a folder."""

    def __init__(self, recipe: Recipe, folder: Path, **job: Any) -> None:
        tokens = folder / "tokens.npy"
        if not tokens.exists():
            np.save(tokens, np.random.default_rng(1).integers(TOKENS, size=20_000).astype(np.uint16))
        image = isinstance(recipe.workload, ImagesSpec)
        where, vocabulary = (str(folder), 10) if image else (str(tokens), TOKENS)
        into = folder / job.pop("name", "trained")
        stop = job.pop("report", lambda message: None)
        told = AloneJob(recipe=recipe, vocabulary=vocabulary, tokens=where, folder=str(into), **job)
        self.record: TrainingRecord = train_alone(told, stop)
        self.steps = [Run(into).steps(node) for node in range(recipe.nodes)]
        self.losses = [record.loss for record in self.steps[-1] if record.loss is not None]
        self.bytes = [[sent.frame_bytes for sent in record.sent] for node in self.steps for record in node]


def changed(recipe: Recipe, **training: Any) -> Recipe:
    return recipe.model_copy(
        update={"training": recipe.training.model_copy(update={"steps": STEPS, "evaluate_every": 0, **training})}
    )


def pipeline(codec: str, **changes: Any) -> Recipe:
    cell = a_tiny_cell(3, codec, **{name: changes.pop(name) for name in ("recompute",) if name in changes})
    return changed(recipe_of(cell.model_copy(update={"workload": cell.workload.model_copy(update=changes)})))


def replicas(exchange: Any, codec: str, **data: Any) -> Recipe:
    images = ImagesSpec(model="digits-mlp", images="digits", alpha=0.3, batch_size=16)
    return changed(a_recipe(exchange, codec, workers=2, workload=images, evaluate_every=2, **data))


def close(one: list[float], other: list[float], share: float) -> bool:
    return len(one) == len(other) > 0 and all(abs(a / b - 1) <= share for a, b in zip(one, other, strict=True))


PIPELINES: list[tuple[str, dict[str, Any], float, tuple[str, ...]]] = [
    ("fwd=topk(0.2), bwd=ef(topk(0.1))", {}, CHOOSES, ()),
    ("fwd=delta(zstd(int8)), bwd=powersgd(4)", {}, CHOOSES, ("delta(zstd(int8))",)),
    ("fp32", {}, TOLERANCE, ()),
    ("int8", {"recompute": True}, CHOOSES, ()),
    ("subspace(4, bf16)", {}, CHOOSES, ()),
    ("bottleneck(4, maxout, inner=bf16)", {}, CHOOSES, ()),
    ("mapl(4, int8)", {}, CHOOSES, ()),
]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "tiny_models")
@pytest.mark.parametrize(
    ("codec", "changes", "share", "copied"),
    PIPELINES,
    ids=[each[0] for each in PIPELINES],
)
def test_a_pipeline_trains_on_a_device_and_no_tensor_stays_behind(
    codec: str, changes: dict[str, Any], share: float, copied: tuple[str, ...], tmp_path: Path
) -> None:
    recipe = pipeline(codec, **changes)
    here = Trained(recipe, tmp_path, name="here")
    with simulated() as device:
        there = Trained(recipe, tmp_path, name="there")
    assert close(there.losses, here.losses, share), (there.losses, here.losses)
    if "zstd" not in codec:
        assert there.bytes == here.bytes
    on = there.record.trained_on
    assert on is not None
    assert here.record.trained_on is None
    assert on.copied == copied
    if "mapl" not in codec:  # whose matrices are among the headers
        assert (device.copied_values > STEPS * 100) == bool(copied), "only codecs of the CPU get copies, besides norms"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("exchange", "codec", "data"),
    [
        ("all-to-all", "int8", {"staleness": (0, 1)}),
        ("star", "ef(topk(0.1))", {}),
        ("all-reduce", "bf16", {}),
        ("all-gather", "zstd(int8)", {}),
    ],
)
def test_workers_train_on_a_device(exchange: str, codec: str, data: dict[str, Any], tmp_path: Path) -> None:
    recipe = replicas(exchange, codec, **data)
    here = Trained(recipe, tmp_path, name="here")
    with simulated():
        there = Trained(recipe, tmp_path, name="there")
    assert close(there.losses, here.losses, CHOOSES)
    if "zstd" not in codec:
        assert there.bytes == here.bytes


class Killed(BaseException):
    """Not an error: nobody handles it."""


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "tiny_models")
@pytest.mark.parametrize("kind", ["simulated", "bf16", "workers"])
def test_a_resumed_training_is_the_undisturbed_one(kind: str, tmp_path: Path) -> None:
    if kind == "workers":
        recipe = changed(replicas("all-to-all", "ef(topk(0.1))", staleness=(0, 1)), steps=4)
    else:
        codec = "fwd=delta(int4), bwd=ef(topk(0.1))"
        recipe = changed(pipeline(codec, precision="bf16" if kind == "bf16" else "fp32"), steps=4)

    def train(name: str, kill_at: int = 0) -> Trained:
        told: list[str] = []

        def report(message: Any) -> None:
            told.append(str(message))
            if kill_at and len(told) == kill_at:
                raise Killed

        job = {"name": name, "report": report, "checkpoint_every": 2}
        if kind == "bf16":
            return Trained(recipe, tmp_path, **job)
        with simulated():
            return Trained(recipe, tmp_path, **job)

    undisturbed = train("undisturbed")
    with pytest.raises(Killed):
        train("killed", kill_at=4)
    assert checkpoint_steps(tmp_path / ".killed.draft")
    resumed = train("killed")
    assert resumed.record.resumed
    assert resumed.losses == undisturbed.losses
    assert resumed.record.weights == undisturbed.record.weights
    if kind == "bf16":
        again = train("again")
        assert again.record.weights == undisturbed.record.weights, "it repeats to the bit"
        plain = recipe.model_copy(update={"workload": recipe.workload.model_copy(update={"precision": "fp32"})})
        assert Trained(plain, tmp_path, name="plain").losses != undisturbed.losses


# ---------------------------------------------------------------------- what may be asked
def test_the_device_is_part_of_an_id_only_if_it_is_not_the_cpu() -> None:
    recipe = recipe_of(a_cell(2))
    assert "device" not in recipe.training.model_dump(mode="json")
    assert changed(recipe, device="cpu").id == changed(recipe).id
    assert changed(recipe, device="cuda").id != changed(recipe).id
    assert json.loads(changed(recipe, device="cuda").model_dump_json())["training"]["device"] == "cuda"


def test_only_live_stages_and_played_cells_with_stated_durations_train_on_a_gpu() -> None:
    stated: dict[str, Any] = {
        "workload": {
            "model": "gpt2-nano",
            "text": "bundled",
            "sequence_length": 8,
            "batch_size": 4,
            "validation_batches": 1,
        },
        "pipeline": {"stages": 2, "microbatches": 2, "schedule": "1f1b", "in_flight": 2},
        "optimiser": {"learning_rate": 1e-3, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.99, "clip_norm": 1.0},
        "training": {"steps": 2, "warmup_steps": 0, "seed": 0, "evaluate_every": 0, "device": "cuda"},
        "compute": {"mode": "paced", "device": "h200"},
        "codec_cost": "zero",
        "profile": "cable",
        "codec": "int8",
        "topology": "star",
    }
    assert resolve_cell(stated, "netem", "here").training.device == "cuda"
    live = {**stated, "timing": "live", "codec_cost": "host", "compute": {"mode": "calibrated"}}
    assert resolve_cell(live, "netem", "here").compute.mode == "measured"
    with pytest.raises(SpecError, match=r"trains in a guest, which has no GPU; --clock real"):
        resolve_cell({**stated, "timing": "live"}, "netem", "here", clock="virtual")
    stages = resolve_cell(live, "netem", "here")
    with pytest.raises(SpecError, match=r"the workers of a live cell train on the CPU"):
        resolve._check_device(stages.model_copy(update={"data": a_recipe("star", "int8").data}), "here")
    for changes, why in (
        ({"compute": {"mode": "calibrated"}}, "timed on one core"),
        ({"codec_cost": "host"}, "timed on one core"),
    ):
        with pytest.raises(SpecError, match=f"here: training.device is 'cuda', but .*{why}"):
            resolve_cell({**stated, **changes}, "netem", "here")


@pytest.mark.slow
def test_a_gpu_is_set_up_to_repeat() -> None:
    program = """if True:
        import os, torch
        from testbed.training import accelerator
        torch.cuda.is_available = lambda: True
        told = type("Recipe", (), {"training": type("Training", (), {"device": "cuda"})})
        torch.cuda.device_count = lambda: 2
        assert [accelerator.device_of(told, place).index for place in range(4)] == [0, 1, 0, 1]
        kernels, cudnn = torch.backends.cuda, torch.backends.cudnn
        assert kernels.math_sdp_enabled()
        assert not (kernels.flash_sdp_enabled() or kernels.mem_efficient_sdp_enabled() or kernels.cudnn_sdp_enabled())
        assert not (kernels.matmul.allow_tf32 or cudnn.allow_tf32 or cudnn.benchmark)
        assert cudnn.deterministic and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    """
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.usefixtures("tiny_models")
def test_a_machine_without_a_gpu_is_told_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    recipe = changed(recipe_of(a_tiny_cell(2)), device="cuda")
    prepared: list[Any] = []
    with pytest.raises(CapabilityError, match=r"training.device is 'cuda', but .*--device cpu"):
        trainings.train_missing([recipe], tmp_path, prepare=prepared.append, progress=None)  # type: ignore[arg-type]
    assert not prepared
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CapabilityError, match="but torch"):
        training_of(Setting(recipe, TOKENS, ""))


# ---------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.usefixtures("one_thread", "tiny_models")
@pytest.mark.parametrize(("codec", "changes", "share", "copied"), PIPELINES, ids=[each[0] for each in PIPELINES])
def test_a_gpu_learns_as_the_cpu_and_repeats_to_the_bit(
    codec: str, changes: dict[str, Any], share: float, copied: tuple[str, ...], tmp_path: Path
) -> None:
    recipe = changed(pipeline(codec, **changes), steps=20, device="cuda")
    here = Trained(changed(recipe, steps=20, device="cpu"), tmp_path, name="here")
    there, again = (Trained(recipe, tmp_path, name=name) for name in ("there", "again"))
    assert there.losses == again.losses
    assert there.record.weights == again.record.weights
    assert close(there.losses, here.losses, share)
    assert there.record.trained_on is not None
    assert there.record.trained_on.copied == copied
    assert accelerator.device_of(recipe).type == "cuda"


@pytest.mark.gpu
@pytest.mark.usefixtures("one_thread", "tiny_models")
@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"dropout": 0.1}])
def test_bf16_and_dropout_repeat_on_a_gpu(changes: dict[str, Any], tmp_path: Path) -> None:
    recipe = changed(pipeline("int8", **changes), steps=10, device="cuda")
    one, other = (Trained(recipe, tmp_path, name=name) for name in ("one", "other"))
    assert one.record.weights == other.record.weights


@pytest.mark.gpu
@pytest.mark.parametrize("text", ABLE)
def test_a_codec_on_a_gpu_makes_payloads_as_long_as_the_cpus(text: str) -> None:
    here, there = (make(text, Context(3, 0, "forward")) for _ in range(2))
    x, key = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(0)), MessageKey("train", 0, 0, (1, 2, 3, 4))
    payload = there.encode(x.cuda(), key)
    expected = here.encode(x, key)
    assert len(payload) == len(expected)
    difference = there.decode(payload, key).cpu() - here.decode(expected, key)
    assert difference.norm() <= 0.05 * x.norm(), "at most some values on the border of two codes"
