"""The benchmark of codecs on a small file of tensors: it prints what was sent, and names a codec that fails."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from testbed.codecs.bench import measure, peers
from testbed.codecs.bench.measurements import BENCHED, CodecBenchmark, CodecCost
from testbed.codecs.catalogue.codec_spec import parse_codec
from testbed.codecs.check.subject import subject_of
from testbed.codecs.wire.header import header_bytes
from testbed.report import codec_costs
from testbed.results import read_json
from tests import forked

SHAPE = (2, 16, 64)

pytestmark = pytest.mark.slow  # it measures


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    about = {"model": "a model", "text": "no", "steps": 3, "loss": 4.5}
    draw = np.random.default_rng(0)
    tensors = {way: draw.standard_normal((3, *SHAPE), np.float32) for way in ("forward", "backward")}
    path = tmp_path / "testbed" / "boundary-tensors-1.npz"
    path.parent.mkdir()
    np.savez(path, about=np.array(json.dumps(about)), **tensors)
    return path


def test_results_are_those_of_the_tensors(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure.main([str(saved), "fp32", "int8", "topk(0.1)"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {(one.codec, one.direction): one for one in map(CodecCost.model_validate, lines) if not one.package}
    assert len(found) == 6
    values = int(np.prod(SHAPE))
    header = header_bytes(3)
    assert found["fp32", "forward"].relative_error == 0
    assert found["fp32", "forward"].payload_bytes == header + 4 * values
    assert found["int8", "backward"].payload_bytes == header + values + 4 * values // 64
    assert found["int8", "backward"].bits_per_value == pytest.approx(
        8 * found["int8", "backward"].payload_bytes / values
    )
    assert 0.001 < found["int8", "forward"].relative_error < 0.02
    assert 0.5 < found["topk(0.1)", "forward"].relative_error < 1
    assert all(one.encode_s > 0 and one.decode_s > 0 for one in found.values())


def test_a_codec_in_the_model_is_measured_with_its_layers(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure.main([str(saved), "subspace(8, fp32)", "bottleneck(8, int8)"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {(one.codec, one.direction): one for one in map(CodecCost.model_validate, lines) if not one.package}
    assert len(found) == 4
    assert all(one.layers_s is not None and 0 < one.layers_s < one.codec_s for one in found.values())
    coordinates = header_bytes(3) + 4 * int(np.prod(SHAPE)) // 8
    assert {one.payload_bytes for (name, _), one in found.items() if name == "subspace(8, fp32)"} == {coordinates}
    error = found["subspace(8, fp32)", "forward"].relative_error
    assert error is not None
    assert error < 1e-5
    assert found["bottleneck(8, int8)", "forward"].relative_error is None
    benchmark = CodecBenchmark(machine="", tensors="", results=tuple(found.values()), failed={})
    assert [row[3] for row in codec_costs.cost_rows(benchmark)].count("-") == 3
    assert not codec_costs.draw_rate_distortion(benchmark).figure.axes[0].texts


def test_a_codec_that_fails_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, **{way: np.full((2, *SHAPE), np.nan, np.float32) for way in ("forward", "backward")})
    measure.main([str(path), "int8"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if "failed" in line]
    assert [line["direction"] for line in lines] == ["forward", "backward"]
    assert all("NaN" in line["failed"] for line in lines)


def test_the_error_is_over_all_messages() -> None:
    x = [torch.ones(1, 4, 8), torch.zeros(1, 4, 8)]
    subject = subject_of("bf16", "forward")
    found = measure.fidelity(subject.fresh(), subject.fresh(), x)
    assert found.relative_error == found.token_error == 0
    assert found.bits_per_value == 8 * (header_bytes(3) + 64) / 32


def test_all_that_is_benchmarked_can_be_made() -> None:
    assert len(set(BENCHED)) == len(BENCHED)
    for text in BENCHED:
        assert parse_codec(text).text == text


def test_peers_are_those_that_work_here() -> None:
    for peer in peers.installed():
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
        decoded = peer.make().decode(peer.make().encode(x, peers.KEY), peers.KEY)
        assert float((decoded - x).norm() / x.norm()) < 0.05


def test_the_command(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    page = tmp_path / "pages" / "codecs.md"
    command = ["-m", "testbed", "bench", "codecs", "int8", "-o", str(target), "--page", str(page)]
    command += ["--figure", str(tmp_path / "drawn")]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = forked.run(command, env=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "int8" in done.stdout
    assert "a model" in done.stdout
    found = read_json(target, CodecBenchmark)
    assert {(one.codec, one.direction) for one in found.results if not one.package} == {
        ("int8", "forward"),
        ("int8", "backward"),
    }
    assert (tmp_path / "drawn.png").is_file()
    assert (tmp_path / "drawn.svg").is_file()
    lines = page.read_text(encoding="utf8").splitlines()
    assert "![Bits per value against error](../drawn.png)" in lines
    assert {line.split(" | ")[1] for line in lines if line.startswith("| int8 |")} >= {"X", "G"}


def test_labels_of_the_figure_cover_no_point_and_no_label() -> None:
    """Of codecs that lie close together, on a line and in a heap."""
    shown = [
        CodecCost(
            codec="x", direction="forward", values=100, encode_s=1e-3, decode_s=1e-3, payload_bytes=100,
            bits_per_value=bits, relative_error=error,
        )
        for bits, error in [
            *((2 + 0.15 * k, 0.1 * 0.99**k) for k in range(8)),
            *((8 + 0.2 * k, 0.01 * 0.85**k) for k in range(6)),
        ]
    ]  # fmt: skip
    figure = Figure(figsize=(5, 5))
    panel = figure.subplots()
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlim(0.2, 40)
    panel.set_ylim(1e-5, 6)
    codec_costs._points(panel, shown)
    renderer = FigureCanvasAgg(figure).get_renderer()
    labels = [text.get_window_extent(renderer) for text in panel.texts]
    assert len(labels) >= 5
    assert not any(first.overlaps(second) for first, second in itertools.combinations(labels, 2))
    points = panel.transData.transform([(one.bits_per_value, one.relative_error) for one in shown])
    assert not any(label.contains(x, y) for label in labels for x, y in points)
