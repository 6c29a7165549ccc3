"""What `[cell.compute]` means: durations that are stated, recorded, or follow from FLOPs; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed import devices
from testbed.devices import flops
from testbed.devices.durations import durations
from testbed.errors import SpecError
from testbed.spec import Measured, Paced, PipelineSpec, TextSpec
from testbed.workloads import models
from tests.devices.example_recording import recorded
from tests.specs import text_spec

MS = 1_000_000


def workload(model: str = "gpt2-mini", **changes: Any) -> TextSpec:
    return text_spec(model, **{"batch_size": 16, **changes})


def pipeline(stages: int = 3, microbatches: int = 4, **changes: Any) -> PipelineSpec:
    return PipelineSpec(stages=stages, microbatches=microbatches, schedule="1f1b", in_flight=4, **changes)


def compute(asked: Any, **changes: Any) -> Measured | Paced:
    return devices.compute_of(asked, workload(), pipeline(**changes), "some.toml")


def test_measured_is_a_word_or_a_table() -> None:
    assert compute("measured") == compute({"mode": "measured"}) == Measured()


def test_stated_durations_are_taken_as_they_are() -> None:
    found = compute(
        {"mode": "paced", "forward": "40ms", "backward": ["80ms", "70ms", "90ms"], "update": "5ms", "dilation": 4}
    )
    assert found == Paced(
        forward_ns=(40 * MS,), backward_ns=(80 * MS, 70 * MS, 90 * MS), update_ns=5 * MS, source="stated", dilation=4
    )
    assert compute({"mode": "paced", "forward": "1ms", "backward": "2ms"}).model_dump(
        include={"update_ns", "dilation"}
    ) == {
        "update_ns": 0,
        "dilation": 1,
    }


def test_a_devices_durations_say_where_they_come_from() -> None:
    found = compute({"mode": "paced", "device": "t4"})
    assert isinstance(found, Paced)
    assert len(found.forward_ns) == 3
    assert found.update_ns > 0
    assert found.source == "t4: from FLOPs at 29% of 8.1 TFLOP/s in fp32"
    stated = compute({"mode": "paced", "device": "t4", "update": "0ms"})
    assert (stated.forward_ns, stated.update_ns) == (found.forward_ns, 0)
    assert stated.source.endswith("; update stated")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("paced", "it must be 'calibrated', 'measured' or a table with a mode, found 'paced'"),
        (3, "it must be 'calibrated', 'measured' or a table with a mode, found 3"),
        ({}, "mode must be 'calibrated', 'measured' or 'paced', found None"),
        ({"mode": "real"}, "mode must be 'calibrated', 'measured' or 'paced', found 'real'"),
        (
            {"mode": "measured", "dilation": 2},
            "mode 'measured' does not accept dilation; remove them, or use mode 'paced'",
        ),
        ({"mode": "paced"}, "needs either forward and backward, or a device; found neither"),
        (
            {"mode": "paced", "device": "t4", "forward": "1ms"},
            "needs either forward and backward, or a device; found both",
        ),
        ({"mode": "paced", "forward": "1ms"}, "forward is set without backward; set both"),
        ({"mode": "paced", "backward": "1ms"}, "backward is set without forward; set both"),
        ({"mode": "paced", "forwards": "1ms"}, "there is no key of compute 'forwards'; did you mean 'forward'?"),
        ({"mode": "paced", "forward": 40, "backward": "1ms"}, "forward: time 40 is not a number with a unit"),
        ({"mode": "paced", "forward": "1ms", "backward": "0ms"}, "backward is 0ms; it must be at least 1ns"),
        (
            {"mode": "paced", "forward": ["1ms", "2ms"], "backward": "1ms"},
            "forward has 2 durations for 3 stages; set one for all, or one per stage",
        ),
        ({"mode": "paced", "forward": [], "backward": "1ms"}, "forward has 0 durations for 3 stages"),
        ({"mode": "paced", "device": 4}, "device must be a name or the path of a file, found 4"),
        ({"mode": "paced", "device": "t5"}, "there is no device 't5'; did you mean 't4'?"),
        ({"mode": "paced", "device": "none.toml"}, "cannot read none.toml"),
        *(
            (
                {"mode": "paced", "device": "t4", "dilation": wrong},
                f"dilation must be a whole number from 1 to 1000, found {wrong}",
            )
            for wrong in (0, 1.5, True, 1001)
        ),
        ({"mode": "paced", "device": "t4", "update": "soon"}, "update: time 'soon' is not a number with a unit"),
    ],
)
def test_what_does_not_fit_is_named(asked: Any, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        compute(asked)
    assert str(caught.value).startswith("some.toml: compute: ")
    assert says in str(caught.value)


def test_a_device_that_cannot_compute_so_is_refused() -> None:
    with pytest.raises(
        SpecError, match="has no speed in bf16, and no recording of gpt2-mini at that precision with 4 x 64 tokens"
    ):
        devices.compute_of(
            {"mode": "paced", "device": "laptop-cpu"}, workload(precision="bf16"), pipeline(), "some.toml"
        )


@given(
    st.sampled_from(["gpt2-mini", "gpt2-midi", "llama-mini"]), st.integers(1, 4), st.booleans(), st.sampled_from([1, 2])
)
def test_flops_take_their_time_at_the_devices_speed(
    model: str, stages: int, recompute: bool, accumulation: int
) -> None:
    device, size = devices.load_device("rtx-3060"), models.model_size(model)
    shape = pipeline(stages, 4, recompute=recompute, accumulation=accumulation)
    found = durations(device, workload(model), shape)
    sequences = 16 // (4 * accumulation)
    for stage, own in enumerate(models.split_layers(size.layers, stages)):
        needed = flops.stage(size, own, sequence_length=64, sequences=sequences) / device.fp32.effective_flops * 1e9
        assert found.forward_ns[stage] == pytest.approx(needed, abs=1)
        assert found.backward_ns[stage] == pytest.approx(needed * (3 if recompute else 2), abs=2)


def test_half_precision_and_recordings_are_taken_where_they_fit() -> None:
    device = devices.load_device("t4").model_copy(update={"recorded": (recorded(),)})
    assert (
        durations(device, workload(precision="bf16"), pipeline()).source
        == "t4: from FLOPs at 29% of 65 TFLOP/s in fp16"
    )
    for other in (workload(sequence_length=32), workload(batch_size=32), workload("gpt2-midi")):
        assert "from FLOPs" in durations(device, other, pipeline()).source


def test_a_recording_is_the_sum_of_its_parts() -> None:
    device = devices.load_device("t4").model_copy(update={"recorded": (recorded(),)})
    found = durations(device, workload(), pipeline(layers=(1, 2, 1)))
    assert found.source == "t4: recorded with torch"
    assert found.forward_ns == (1 + 10, 20, 10 + 100)
    assert found.backward_ns == (2 + 20, 40, 20 + 200)
    assert found.update_ns == (4 + 40, 80, 40 + 400)
    assert durations(device, workload(), pipeline(1)).forward_ns == (1 + 40 + 100,)
    again = durations(device, workload(), pipeline(layers=(1, 2, 1), recompute=True))
    assert again.backward_ns == tuple(map(sum, zip(found.forward_ns, found.backward_ns, strict=True)))


def test_a_file_of_ones_own_is_a_device(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        devices.write_device(devices.load_device("t4").model_copy(update={"recorded": (recorded(),)})), encoding="utf8"
    )
    found = compute({"mode": "paced", "device": str(path)}, layers=(2, 1, 1))
    assert isinstance(found, Paced)
    assert found.update_ns == 440  # the slowest stage's
    assert found.source == "mine: recorded with torch"
