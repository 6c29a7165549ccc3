"""Cells of data parallel training: what a file may say, and what is refused with a word on what to do."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from testbed.errors import SpecError, UnknownNameError
from testbed.jobs.kind import Setting
from testbed.policies.deco import MOST_STALENESS
from testbed.spec import Cell, ImagesSpec, Paced, recipe_of
from testbed.sweep.bounded_steps import expected_messages
from testbed.sweep.resolve import resolve_cell
from testbed.training.workers import ReplicasTraining
from tests.commands import Command
from tests.known import known

FIELDS: dict[str, Any] = {
    "codec": "ef(topk(0.01))",
    "profile": "link(80Mbit, 10ms)",
    "topology": "star",
    "codec_cost": "zero",
    "compute": {"mode": "paced", "forward": "10ms", "backward": "20ms"},
    "workload": {
        "model": "gpt2-nano",
        "text": "bundled",
        "sequence_length": 32,
        "batch_size": 8,
        "validation_batches": 1,
    },
    "data": {"workers": 4, "exchange": "star", "answer": "fp32", "staleness": 1, "local_steps": 1},
    "optimiser": {"learning_rate": 1e-3, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.95, "clip_norm": 1.0},
    "training": {"steps": 4, "warmup_steps": 0, "seed": 0, "evaluate_every": 0},
}
IMAGES = {"model": "digits-cnn", "images": "digits", "batch_size": 8}
DECO = {"every": 20, "noise": "exp", "noise_weight": 1.0}
OUTER = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
GATHER = {"exchange": "all-gather", "answer": None}
REDUCE = {"exchange": "all-reduce", "answer": None}
FROZEN = {"optimiser": {**FIELDS["optimiser"], "frozen_after": 2}}
ON_DEVICE = {"mode": "paced", "device": "rtx-3090"}


def a_cell(data: dict[str, Any] | None = None, **changes: Any) -> Cell:
    fields = {**FIELDS, **changes, "data": {**FIELDS["data"], **(data or {})}}
    fields["data"] = {name: value for name, value in fields["data"].items() if value is not None}
    return resolve_cell(fields, "netem", "it", "virtual")


def test_a_cell_has_workers_and_a_server() -> None:
    cell = a_cell()
    assert (cell.nodes, len(cell.links), cell.cycle) == (5, 5, 2)
    assert cell.node_names == ("worker 0", "worker 1", "worker 2", "worker 3", "server")
    assert cell.pipeline.stages == 1
    assert recipe_of(cell).data == cell.data
    assert cell.id != a_cell({"staleness": 2}).id
    everyone = a_cell(GATHER)
    assert (everyone.nodes, everyone.node_names[-1]) == (4, "worker 3")
    assert Cell.model_validate_json(cell.model_dump_json()) == cell


def test_numbers_and_codecs_may_differ_between_workers() -> None:
    cell = a_cell(
        {"staleness": [0, 1, 2, 3], "local_steps": [1, 2, 3, 4], "outer": OUTER, "shares": [5, 1, 1, 1]},
        codec="0: fp32; rest: topk(0.1)",
        compute={"mode": "paced", "forward": ["1ms", "2ms", "3ms", "4ms"], "backward": "20ms"},
    )
    assert [known(cell.data).staleness_of(worker) for worker in range(4)] == [0, 1, 2, 3]
    assert cell.codec == "0: fp32; rest: topk(0.1)"


def test_a_cell_may_learn_images() -> None:
    skewed, mixed = (a_cell({"shares": [5, 1, 1, 1]}, workload=IMAGES | more) for more in ({"alpha": 0.1}, {}))
    assert isinstance(skewed.workload, ImagesSpec)
    assert (skewed.workload.alpha, skewed.workload.batch_tokens) == (0.1, 8)
    assert skewed.id != mixed.id
    for cell in (skewed, mixed, a_cell()):
        assert Cell.model_validate_json(cell.model_dump_json()) == cell
        assert recipe_of(cell).workload == cell.workload
    values = 38_282  # the network's parameters
    assert expected_messages(a_cell(codec="fp32", workload=IMAGES)) == (4 * values,)
    once, twice = (
        a_cell(workload=IMAGES | {"batch_size": size}, compute={"mode": "paced", "device": "t4"}).compute
        for size in (8, 16)
    )
    assert isinstance(once, Paced)
    assert isinstance(twice, Paced)
    assert twice.forward_ns[0] == pytest.approx(2 * once.forward_ns[0], abs=2)
    assert (twice.update_ns, "from FLOPs" in twice.source) == (once.update_ns, True)


@pytest.mark.parametrize(
    ("workload", "says"),
    [
        ("digits", "workload: Input should be an? .*, found 'digits'"),
        ({**IMAGES, "text": "bundled"}, "workload: it has both text, .* and images, .*; state only one of them"),
        ({**IMAGES, "sequence_length": 8}, r"no key 'workload.sequence_length'; known here: model, batch_size, prec"),
        ({**IMAGES, "apha": 1}, r"no key 'workload.apha' \(did you mean 'workload.alpha'\?\)"),
        ({**IMAGES, "alpha": 0}, "workload.alpha: .* greater than 0, found 0"),
        ({**IMAGES, "precision": "bf16"}, "workload.precision: .*fp32.*, found 'bf16'"),
        ({**IMAGES, "batch_size": 6}, "cannot be cut into 4 equal"),
        ({**IMAGES, "images": "digit"}, r"workload.images: unknown images 'digit'; use 'digits'"),
        ({**IMAGES, "model": "digits-cmn"}, "digits-cnn"),
        ({**IMAGES, "model": "gpt2-nano"}, "there is no network 'gpt2-nano'"),
        ({**FIELDS["workload"], "alpha": 1}, r"no key 'workload.alpha'; known here: .*sequence_length"),
    ],
)
def test_a_workload_that_is_none_is_refused(workload: Any, says: str) -> None:
    with pytest.raises((SpecError, UnknownNameError), match=says):
        a_cell(workload=workload)


def test_a_pipeline_learns_no_images() -> None:
    fields = {name: value for name, value in FIELDS.items() if name != "data"}
    pipeline = {"stages": 2, "microbatches": 2, "schedule": "gpipe", "in_flight": 2}
    with pytest.raises(SpecError, match=r"workload.images is 'digits'.*add a table data"):
        resolve_cell({**fields, "workload": IMAGES, "pipeline": pipeline}, "netem", "it", "virtual")


def test_where_fragments_take_turns_steps_come_in_cycles_of_them_and_messages_are_of_one() -> None:
    whole = a_cell({"outer": OUTER})
    streamed = a_cell({"outer": OUTER, "streaming": {"fragments": 3}})
    assert (whole.cycle, streamed.cycle) == (2, 6)
    for ours, theirs in zip(expected_messages(streamed), expected_messages(whole), strict=True):
        assert 3 * ours == pytest.approx(theirs, rel=1e-3)
    assert Cell.model_validate_json(streamed.model_dump_json()) == streamed
    assert "streaming" not in whole.model_dump_json()


def test_live_it_is_the_same_on_either_clock() -> None:
    """On the real clock a message is made within its step's time, so codecs cost nothing there either, or what they
    cost.
    """
    virtual = a_cell(timing="live")
    for ring, codec in ((REDUCE, "bf16"), (GATHER, FIELDS["codec"])):
        assert a_cell(ring, codec=codec, timing="live").clock == "virtual"
    real = resolve_cell({**FIELDS, "timing": "live"}, "relay", "it", "real")
    assert real == virtual.model_copy(update={"clock": "real", "engine": "relay"})
    sparse, dense = expected_messages(real)
    assert dense > 10 * sparse


def test_live_codecs_cost_what_they_cost_on_either_clock() -> None:
    for cost, compute in (("host", FIELDS["compute"]), ("device", ON_DEVICE)):
        fields = {"codec_cost": cost, "compute": compute}
        live, played = a_cell(timing="live", **fields), a_cell(**fields)
        assert live == played.model_copy(update={"timing": "live"})
        assert (live.codec_cost, live.clock) == (cost, "virtual")
    real = resolve_cell({**FIELDS, "timing": "live", "codec_cost": "host"}, "relay", "it", "real")
    assert (real.codec_cost, real.clock) == ("host", "real")
    with pytest.raises(SpecError, match=r"real clock, codecs.*'host' or 'zero'; or run it on the virtual clock"):
        resolve_cell({**FIELDS, "timing": "live", "codec_cost": "device", "compute": ON_DEVICE}, "relay", "it", "real")


def test_agreed_rows_have_costs_on_a_device() -> None:
    assert a_cell(
        {**REDUCE, "aligned": {"share": 0.1}}, codec="bf16", codec_cost="device", compute=ON_DEVICE
    ).codec_rates


def test_deco_s_connections_hold_as_much_as_its_largest_staleness() -> None:
    cell = a_cell({"deco": DECO, "staleness": 0}, timing="live", codec="topk(0.1)")
    training = ReplicasTraining(Setting(recipe_of(cell), 4096, ""))
    assert training.most_frames > MOST_STALENESS


@pytest.mark.parametrize("codec", ["0: int8; 1: bf16; rest: int4", "2: fp32; rest: int8"])
def test_rules_of_a_context_job_are_for_layers_of_which_there_may_be_more_than_nodes(codec: str) -> None:
    """They were canonicalised over the places: layer 2 had the codec of layer 1, or was refused."""
    table = tomllib.loads((Command.shipped / "context_parallel" / "sweep.toml").read_text())["cell"]
    fields = {**table, "codec": codec, "profile": "cable", "job": {**table["job"], "nodes": 2}}
    assert resolve_cell(fields, "netem", "it", "virtual").codec == codec


KEPT = {**FIELDS["training"], "checkpoint_every": 5}
KEPT_LIVE = {"timing": "live", "training": KEPT}


@pytest.mark.parametrize(
    ("data", "changes", "says"),
    [
        ({"answer": None}, {}, "the codec of the server.*is required"),
        ({"exchange": "all-to-all"}, {}, "allowed only there"),
        (REDUCE, {}, "partial sums are encoded at every hop"),
        (REDUCE, {"codec": "0: fp32; rest: bf16"}, "partial sums"),
        (
            {**REDUCE, "exchange": "pairs", "outer": OUTER, "staleness": 0},
            {},
            "which sends weights, but codec .* does more than round",
        ),
        ({**REDUCE, "aligned": {"share": 0}}, {}, "greater than 0, found 0"),
        ({}, {"codec": "subspace(8)"}, "needs activations or adapts"),
        ({"answer": "adaptive(5)"}, {}, "adapts to its link"),
        ({"local_steps": 4}, {}, "state the optimiser applied to them"),
        ({"staleness": [1, 2]}, {}, "staleness has 2 numbers for 4 workers"),
        ({"outer": {**OUTER, "momentum": 0}}, {}, "nothing to look ahead along"),
        ({"workers": 3}, {}, "cannot be cut into 3 equal"),
        ({}, {"pipeline": {"stages": 2}}, "remove the pipeline table"),
        ({}, {"codec_cost": "device"}, "compute names no device"),
        ({}, {"codec_cost": "device", "compute": ON_DEVICE, "codec": "zstd(int8)"}, "it: cannot say what zstd"),
        ({}, {"compute": {"mode": "calibrated"}, "timing": "live"}, "compute.mode = 'paced'"),
        ({}, {"played_steps": 2}, "remove played_steps"),
        ({**GATHER, "deco": DECO}, {"timing": "live"}, "'star' or 'all-to-all'"),
        ({**GATHER, "arrivals": {"period_s": 1}, "outer": OUTER}, {}, "a star whose server"),
        ({}, {"timing": "live", "training": {**FIELDS["training"], "target_loss": 5.0}}, "target_loss"),
        ({}, {"topology": "line"}, "set 'star'"),
        ({"arrivals": {"period_s": 1.5}}, {}, "whose server applies weight changes"),
        ({"arrivals": {"period_s": 1.5}, "outer": OUTER}, {}, "cannot be played"),
        ({"arrivals": {"period_s": 1.5}, "outer": OUTER, "answer": "topk(0.1)"}, {}, "answers with weights"),
        ({"arrivals": {"period_s": 1.5, "buffer": 2}, "outer": OUTER}, {}, "state exactly one of them"),
        ({"arrivals": {"buffer": 5}, "outer": OUTER}, {}, "there are only 4 workers"),
        ({"arrivals": {"period_s": 1, "grace_s": 1}, "outer": OUTER}, {}, "begins when a buffer is full"),
        ({"arrivals": {"period_s": 1.5}, "outer": OUTER}, KEPT_LIVE, "no step that all end together"),
        ({}, {**KEPT_LIVE, "training": {**KEPT, "budget_s": 9.0}}, "budget_s"),
        ({"streaming": {"fragments": 2}}, {}, "neither arrivals nor deco"),
        ({"look_ahead": True, "staleness": 0}, {}, "state a staleness and remove outer"),
        ({"look_ahead": True, "staleness": 1, "outer": OUTER}, {}, "state a staleness and remove outer"),
        ({"streaming": {"fragments": 2}, "outer": OUTER, "staleness": 2}, {}, "streaming.fragments 2"),
        ({}, {"codec": "7: fp32; rest: bf16"}, "has a rule for boundary 7"),
        ({}, {"optimiser": {**FIELDS["optimiser"], "algorithm": "sgd"}}, "state beta2 = 0"),
        ({"staleness": 1}, FROZEN, "requires data parallel training"),
        ({"outer": OUTER}, FROZEN, "without data.outer"),
    ],
)
def test_what_cannot_be_done_is_refused(data: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        a_cell(data, **changes)
