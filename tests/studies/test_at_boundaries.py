"""What codecs make of the tensors at a model's boundaries: laws of the numbers, and that nothing is measured twice."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from testbed.studies import at_boundaries
from testbed.workloads import real_tensors

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS: tuple[at_boundaries.Text, ...] = ("bundled", "repeated")
CODECS = ("fp32", "bf16", "zstd(bf16)", "zstd(bf16, 1, whole)", "int4(group=64)")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    assert at_boundaries.main(folder, {}, CODECS, TEXTS, ["--quick"]) == 0
    return folder


def test_a_lossless_codec_errs_as_what_it_packs(measured: Path) -> None:
    names = ("text", "boundary", "direction", "codec")
    found = {tuple(row[name] for name in names): row for row in rows(measured / at_boundaries.CODECS)}
    places = {key[:3] for key in found}
    assert places == {(text, boundary, way) for text in TEXTS for boundary in "12" for way in ("forward", "backward")}
    for place in places:
        errors = {codec: float(found[*place, codec]["error"]) for codec in CODECS}
        bits = {codec: float(found[*place, codec]["bits"]) for codec in CODECS}
        assert errors["fp32"] == 0 < errors["bf16"] < errors["int4(group=64)"]
        assert errors["bf16"] == errors["zstd(bf16)"] == errors["zstd(bf16, 1, whole)"]
        assert bits["zstd(bf16)"] < bits["bf16"] < bits["fp32"]
    for boundary in "12":  # what is sent twice is packed, however random the model
        whole = {text: float(found[text, boundary, "forward", "zstd(bf16)"]["bits"]) for text in TEXTS}
        assert whole["repeated"] < whole["bundled"]


def test_random_tensors_have_no_outliers_and_outliers_are_found(measured: Path) -> None:
    for row in rows(measured / at_boundaries.TENSORS):
        assert 2.5 < float(row["kurtosis"]) < 5
        assert float(row["channel_ratio"]) < 3
    x = torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(0))
    plain = at_boundaries._outliers([x])
    channel, token = x.clone(), x.clone()
    channel[:, :, 5] *= 30
    token[0, 3] *= 30
    values, kurtosis, channel_ratio, top_channels, token_ratio = at_boundaries._outliers([channel])
    assert values == x.numel()
    assert kurtosis > 10 * plain[1]
    assert 15 < channel_ratio < 60
    assert top_channels > 0.8 > 0.05 > plain[3]
    assert token_ratio < 5 < 15 < at_boundaries._outliers([token])[4] < 60


def test_what_was_measured_is_kept_and_what_is_missing_measured_again(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {name: (measured / name).read_bytes() for name in (at_boundaries.CODECS, at_boundaries.TENSORS)}
    lines = whole[at_boundaries.CODECS].splitlines(keepends=True)
    (measured / at_boundaries.CODECS).write_bytes(b"".join(lines[:-1]))
    assert at_boundaries.main(measured, {}, CODECS, TEXTS, ["--quick"]) == 0
    assert {name: (measured / name).read_bytes() for name in whole} == whole
    monkeypatch.setattr(at_boundaries, "_tensors", lambda *asked: pytest.fail("measured again"))
    assert at_boundaries.main(measured, {}, CODECS, TEXTS, ["--quick"]) == 0


def test_what_crosses_a_boundary_does_not_depend_on_the_other_boundaries() -> None:
    losses, sent = [], []
    for stages in (2, 3):
        chain, data = real_tensors.chain_of("gpt2-nano", stages)
        steps = [chain.step(data.train(step, 0, 1), 1e-3) for step in range(2)]
        losses.append([loss for loss, _ in steps])
        sent.append([crossings[-1] for _, crossings in steps])
    assert losses[0] == losses[1]
    for two, three in zip(*sent, strict=True):  # three layers: both have a boundary after the second
        assert torch.equal(two.forward, three.forward)
        assert torch.equal(two.backward, three.backward)
