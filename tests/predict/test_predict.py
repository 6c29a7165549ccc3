"""Predicted experiments: what their files ask for, what is computed of them, and that they play."""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path

import pytest
import torch

from testbed.codecs.catalogue.codec_spec import FRAMING_BYTES, parse_codec
from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.make import make
from testbed.devices import load_device
from testbed.errors import SpecError, UnknownNameError
from testbed.message_key import Direction
from testbed.predict import cells
from testbed.predict.data_parallel_shapes import DataParallelShape
from testbed.predict.hybrid_shapes import HybridShape
from testbed.predict.shapes import codec_bytes, resolve_shape
from testbed.profiles import LinkProfile
from testbed.report import predicted
from testbed.report.publishing import blocks_of, claims_of, figures_program
from testbed.vm import find_clock_kernel
from tests.commands import OVERLAPPED
from tests.known import known
from tests.trace.test_trace_commands import run_command

FILE = """
question = "?"
[cell]
model = "gpt2"
device = "rtx-3090"
precision = "bf16"
sequence_length = 128
sequences = 1
microbatches = 3
stages = 3
schedule = "gpipe"
codec = "int8"
[grid.one]
axes.links = ["link(100Mbit, 1ms, buffer=60s)", "link(1Gbit, 1ms, buffer=60s)"]
variants = [{ codec = "fp32" }, { sends = "blocking" }]
[grid.two]
cell.play = false
cell.links = { rates = ["60Mbit", "350Mbit"], delay = "5ms", seed = 3 }
variants = [{ microbatches = 2 }, { microbatches = 4 }]
quick.cell.stages = 2
"""


JOB = {**tomllib.loads(FILE)["cell"], "sequences": 2, "stages": 2, "schedule": "1f1b"}


def planned_of(folder: Path, text: str = FILE, *, quick: bool = False) -> list[cells.Planned]:
    """The cells of a file with this text."""
    (path := folder / cells.FILE).write_text(text)
    return cells.plan_cells(str(path), quick=quick)


def test_a_shape_is_what_flops_bytes_and_the_codec_say() -> None:
    shape = resolve_shape(JOB, "it")
    speed = known(load_device("rtx-3090").speed("bf16"))
    tokens, width = 2 * 128, 768
    products = 6 * 12 * width**2 * 2 * tokens + 6 * 4 * 128 * tokens * width
    head = 2 * width * 50257 * tokens
    assert shape.forward_ns[0] == pytest.approx(products / speed.effective_flops * 1e9, rel=1e-6)
    assert shape.forward_ns[1] == pytest.approx((products + head) / speed.effective_flops * 1e9, rel=1e-6)
    assert all(b == pytest.approx(2 * f, abs=2) for f, b in zip(shape.forward_ns, shape.backward_ns, strict=True))
    bits = parse_codec("int8").bits("forward", (2, 128, width))
    assert shape.message_bytes[0] == pytest.approx(bits * tokens * width / 8, abs=1)
    assert (shape.encode_ns, shape.tokens) == ((0, 0), 3 * tokens)
    costly = resolve_shape(JOB | {"codec_cost": "device", "compute": 2, "recompute": True}, "it")
    assert min(costly.encode_ns + costly.decode_ns) > 0
    assert costly.forward_ns[0] == pytest.approx(2 * shape.forward_ns[0], abs=2)
    assert costly.backward_ns[0] == pytest.approx(6 * shape.forward_ns[0], abs=4)


@pytest.mark.parametrize("shape", [(1, 16, 256), (1, 512, 512), (3, 40, 100)], ids=str)
@pytest.mark.parametrize("text", ["lowrank(int4, 4)", "lowrank(int4, 16)", "haar(int4)", "topk(0.05)", "topk(0.01)"])
def test_a_message_is_as_long_as_the_codec_makes_it(text: str, shape: tuple[int, int, int]) -> None:
    x, key = torch.randn(shape, generator=torch.Generator().manual_seed(1)), MessageKey("train", 0, 0, (0,))
    ways: tuple[Direction, ...] = ("forward", "backward")
    made = [len(make(text, Context(0, 0, way)).encode(x, key)) for way in ways]
    framing = FRAMING_BYTES * len([*parse_codec(text).parts()])
    said = codec_bytes(text, shape)
    assert all(0 <= long - short <= framing for long, short in zip(made, said, strict=True)), (made, said)


def test_the_ideal_over_a_link_that_varies_is_that_of_the_rate_when_a_step_begins(tmp_path: Path) -> None:
    """It used to be that of the rate with which the link was stated."""
    text = FILE[: FILE.index("[grid")] + '\n[grid.one]\naxes.links = ["starlink", "{}"]\n'.format(
        "link(10.39Mbit, 27ms, buffer=1s, layer=ip, down.rate=73.3Mbit)"
    )
    varying, constant = (each.cell for each in planned_of(tmp_path, text))
    served = 15_200_000_000
    then_ns, constant_ns = (cells.compute_ideal(cell, [served])["ideal_ns"] for cell in (varying, constant))
    assert then_ns == pytest.approx(constant_ns, rel=1e-5), "a constant link takes whole nanoseconds for a packet"
    assert cells.compute_ideal(varying, [0])["ideal_ns"] < cells.compute_ideal(varying, [served])["ideal_ns"]


def test_the_ideal_counts_a_link_that_a_site_shares_and_the_formula_does_not(tmp_path: Path) -> None:
    one = '\n[grid.one]\ncell.topology = "star"\ncell.links = "link(10Gbit, 0ms)"\n'
    one += 'variants = [{{}}, {{ sites = [{{ nodes = [0], profile = "{}" }}] }}]\n'
    alone, shared = planned_of(tmp_path, FILE[: FILE.index("[grid")] + one.format("starlink"))
    ideals = [
        [cells.compute_ideal(each.cell, [at])["ideal_ns"] for at in (0, 15_200_000_000)] for each in (alone, shared)
    ]
    assert ideals[0][0] == ideals[0][1]
    assert ideals[1][0] != ideals[1][1], "the site's link varies"
    assert ideals[1][0] > ideals[0][0]


def test_a_stated_payload_counts_per_token() -> None:
    job = {name: value for name, value in JOB.items() if name != "codec"}
    assert resolve_shape(job | {"payload": {"forward": 322, "backward": 0.5}}, "it").message_bytes == (82432, 128)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"codec": None}, "state either a codec, or the bytes per token"),
        ({"payload": {"forward": 1, "backward": 1}}, "state either a codec, or the bytes per token"),
        ({"stages": 13}, "cannot split a model of 12 layers into 13 stages"),
        ({"device": "rtx-9090"}, "rtx-9090"),
        ({"schedule": "pipedream"}, "schedule"),
        ({"codec": "zstd"}, "zstd"),
        ({"model": {"family": "gpt2"}}, "model"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_makes_no_job_is_refused_with_its_place(change: dict[str, object], said: str) -> None:
    with pytest.raises((SpecError, UnknownNameError), match=said):
        resolve_shape(JOB | change, "it")


def test_a_file_makes_the_cells_of_its_grids(tmp_path: Path) -> None:
    planned = planned_of(tmp_path)
    assert [each.grid for each in planned] == ["one"] * 4 + ["two"] * 2
    assert len({each.cell.id for each in planned}) == 6
    fp32, blocking = planned[0].cell.shape, planned[1].cell.shape
    assert fp32.message_bytes[0] > 3.9 * blocking.message_bytes[0]
    assert (fp32.blocking, blocking.blocking) == (False, True)
    drawn = planned[-1].cell.profiles
    assert len(drawn) == 2
    assert all(60_000_000 <= profile.up.rate_bps <= 350_000_000 for profile in drawn if profile.up)
    assert drawn == planned[-2].cell.profiles
    assert [each.grid for each in planned_of(tmp_path, quick=True)] == ["two"] * 2


def test_a_cell_is_the_same_under_another_name_and_another_where_a_number_differs(tmp_path: Path) -> None:
    changed = FILE.replace("grid.one", "grid.first").replace("microbatches = 4", "microbatches = 5")
    ids, again = ([each.cell.id for each in planned_of(tmp_path, text)] for text in (FILE, changed))
    assert again[:5] == ids[:5]
    assert again[5] != ids[5]


SCENARIO = FILE.split("[grid.one]")[0].replace('device = "rtx-3090"\n', "").replace("stages = 3\n", "")
SCENARIO += 'parallelism = "hybrid"\nscenario = "community"\nbits = 1\n{}[grid.one]\n'
SCENARIO += "variants = [{{ replicas = [3] }}, {{ replicas = [1, 2] }}]\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FILE.replace("[grid.two]", "[grids.two]"), "grids"),
        (FILE.replace("[cell]", '[cell]\nparallelism = "tensor"'), "tensor"),
        (FILE.replace("cell.play", "cell.plays"), "plays"),
        (
            FILE.replace("one]\naxes", 'one]\ncell.topology = "star"\ncell'),
            "2 links for a star of 3 nodes; state 1 or 3",
        ),
        (SCENARIO.format('links = "datacenter"\n'), "the scenario determines the links"),
        (SCENARIO.format('duplex = "inbound"\n'), "inbound, which needs uplinks of one rate"),
    ],
)
def test_a_slip_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises((SpecError, UnknownNameError), match=said):
        planned_of(tmp_path, text)


def test_a_hybrid_s_links_are_those_of_its_scenario(tmp_path: Path) -> None:
    one, two = (each.cell for each in planned_of(tmp_path, SCENARIO.format("")))
    assert one.shape.nodes == 3
    assert (two.shape.nodes, len(two.profiles)) == (4, 4)
    assert two.topology == "star"


@pytest.mark.slow
def test_every_shipped_file_makes_cells() -> None:
    for name in cells.cell_files():
        assert cells.plan_cells(name)
        assert cells.plan_cells(name, quick=True), name


@pytest.mark.slow
@pytest.mark.clock_kernel
def test_what_is_played_is_near_its_ideal_and_is_played_once(tmp_path: Path) -> None:
    """Nothing else is on the links: what is left above the ideal is TCP's."""
    kernel = known(find_clock_kernel())
    planned, said = planned_of(tmp_path), list[str]()
    cells.play_missing(planned, tmp_path / "results", kernel, say=said.append)
    assert said[0] == "6 cells to play"
    frame = cells.predictions(planned, tmp_path / "results")
    played = frame[frame.grid == "one"]
    assert ((played.step_s / played.ideal_s - 1).abs() < 0.03).all()
    assert (played.step_s > played.no_network_s).all()
    assert frame[frame.grid == "two"].step_s.isna().all()
    assert cells.predictions(planned[-2:], tmp_path / "results").step_s.dtype == float
    assert (played.wire_bytes_per_step > played.payload_bytes_per_step).all()
    cells.play_missing(planned, tmp_path / "results", kernel, say=said.append)
    assert said[-1] == "0 cells to play"


@pytest.mark.clock_kernel
def test_steps_that_neither_repeat_nor_settle_are_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP's windows still grow in the first steps: their mean is more than what a step takes."""
    planned = planned_of(tmp_path, OVERLAPPED)
    monkeypatch.setenv("COLUMNS", "200")
    said = run_command("predict", tmp_path / cells.FILE, "--results", tmp_path / "results")
    few, many = cells.predictions(planned, tmp_path / "results" / tmp_path.name).itertuples()
    assert (few.repeats, few.unsettled, many.repeats, many.unsettled) == (False, True, True, False)
    assert few.step_s > 1.02 * many.step_s
    assert many.step_s == pytest.approx(many.ideal_s, rel=0.01)
    assert "13 steps, drifting by" in said
    assert "steps that repeat to the nanosecond" in said
    assert "1 of these cells are not settled" in said


@pytest.mark.slow
@pytest.mark.clock_kernel
@pytest.mark.parametrize("name", sorted(cells.cell_files()))
def test_the_quick_form_of_every_shipped_file_is_explained(name: str, tmp_path: Path) -> None:
    kernel = known(find_clock_kernel())
    planned = cells.plan_cells(name, quick=True)
    cells.play_missing(planned, tmp_path, kernel, say=lambda text: None)
    frame = cells.predictions(planned, tmp_path)
    assert len(frame) == len(planned)
    # With so few packets in a message one packet counts. Lost packets and slow starts only ever make a step longer.
    share = frame.step_s / frame.ideal_s - 1
    assert share.notna().any()
    assert (share.dropna() > -0.1).all()
    if "exchanged_bytes" in frame:  # a hybrid's formula is a floor
        assert (frame.formula_s <= frame.step_s).all()
    undisturbed = [
        not any(_disturbed(profile, each.cell.scale) for profile in each.cell.profiles) and not _shares(each.cell.shape)
        for each in planned
    ]
    assert (share[undisturbed].dropna() < 0.1).all()
    folder = cells.cell_files()[name].parent
    if (folder / "train.py").is_file():
        return  # what it trains and what it plays go together: tests/experiments has its short form, whole
    for path in folder.glob("*.csv"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    frame.to_csv(tmp_path / predicted.FILE, index=False)
    with figures_program(folder) as figures:
        assert claims_of(vars(figures), tmp_path)
        assert blocks_of(vars(figures), tmp_path)


def _disturbed(profile: LinkProfile, scale: int) -> bool:
    """Say whether packets are dropped: by the link, its queue, or a buffer of few packets of a scaled link."""
    drops = any(
        pipe.mean_loss or pipe.queue not in (None, "fifo") or (scale > 1 and pipe.buffer_bytes // scale < 32 * 1514)
        for pipe in profile.pipes
    )
    return drops or profile.background is not None or profile.slow_start_after_idle


def _shares(shape: object) -> bool:
    """Say whether several send to one: TCP's flows share a link worse than packets that come in turn."""
    return isinstance(shape, HybridShape) or (
        isinstance(shape, DataParallelShape) and shape.exchange == "all-to-all" and shape.workers > 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data_parallel_time", "latency_and_loss", "sites"])
def test_nothing_that_was_played_is_faster_than_its_ideal(name: str) -> None:
    """Sites share links in every way: replicas of several, behind links of 10 Mbit/s to 10 Gbit/s."""
    with (cells.cell_files()[name].parent / "cells.csv").open(encoding="utf8") as file:
        played = {row["cell"]: float(row["step_s"]) for row in csv.DictReader(file) if row["step_s"]}
    planned = {each.cell.id: each.cell for each in cells.plan_cells(name) if each.cell.id in played}
    assert len(planned) >= 10
    for cell_id in list(planned)[:: 1 + len(planned) // 40]:
        ideal_ns = known(cells.compute_ideal(planned[cell_id])["ideal_ns"])
        assert ideal_ns / 1e9 <= played[cell_id] * (1 + 5e-6)  # six digits were kept
