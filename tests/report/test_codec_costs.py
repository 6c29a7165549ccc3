"""The rate-distortion figure: the best codecs are named, in both panels."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.codecs.bench.measurements import SLOW_BPS, CodecBenchmark, CodecCost
from testbed.report import codec_costs


def measured(codec: str, bits: float, error: float, direction: str = "forward", package: str = "") -> CodecCost:
    what = {"codec": codec, "package": package, "direction": direction, "values": 1000, "bits_per_value": bits}
    numbers = {"encode_s": 1e-3, "decode_s": 3e-3, "payload_bytes": round(bits * 1000 / 8), "relative_error": error}
    return CodecCost.model_validate(what | numbers)


FOUND = CodecBenchmark(
    machine="a machine",
    tensors="some tensors",
    results=tuple(
        measured(codec, bits, error, direction, package)
        for direction in ("forward", "backward")
        for codec, bits, error, package in (
            ("fp32", 32.1, 0.0, ""),
            ("int8", 8.04, 0.009, ""),
            ("int8", 8.04, 0.009, "somebody 1.0"),
            ("topk(0.1)", 2.6, 0.6, ""),
            ("delta-int8", 8.04, 0.007, ""),
        )
    ),
    failed={},
)


@pytest.mark.slow
def test_the_best_codecs_at_their_size_are_named(tmp_path: Path) -> None:
    codec_costs.save_rate_distortion(FOUND, tmp_path / "figure.png")
    svg = (tmp_path / "figure.svg").read_text(encoding="utf8")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert all(label in svg for label in ("fp32", "topk(0.1)", "delta-int8"))
    assert "somebody" not in svg
    assert ">int8" not in svg
    assert "activations X" in svg
    assert "gradients G" in svg
    assert "sparse and low rank" in svg
    assert "in the model" not in svg  # a family that is not there is not in the legend


def test_what_follows_from_a_measurement() -> None:
    one = measured("int8", 8, 0.01)
    assert one.codec_s == pytest.approx(4e-3)
    assert one.bytes_per_s == pytest.approx(1e6)
    assert one.wire_s(SLOW_BPS) == pytest.approx(8000 / 80e6)
    assert one.share_of_wire == pytest.approx(4e-3 / 2e-4)
    saved_s = (16_000 - 8_000) / one.break_even_bps
    assert saved_s == pytest.approx(one.codec_s)  # there, the time that is saved on the wire is the codec's
    assert measured("fp32", 32, 0).break_even_bps == 0
