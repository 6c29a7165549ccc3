"""Device files: what is shipped, what is refused, and that what is written reads back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed import devices
from testbed.devices.device import SHIPPED, ComputeDevice, MatrixSpeed, PartTimes, RecordedTimes
from testbed.errors import SpecError, UnknownNameError

FILES = sorted(SHIPPED.glob("*.toml"))
FULL = """
summary = "s"
source = "s"
bandwidth = "1GB/s"

[fp32]
peak = "1TFLOP/s"
format = "fp32"
utilisation = "30%"
utilisation_source = "s"

[[recorded]]
model = "gpt2-mini"
sequence_length = 64
sequences = 4
precision = "fp32"
software = "s"
embedding = { forward = "1us", backward = "2us", update = "3us" }
layer = { forward = "1ms", backward = "2ms", update = "3us" }
head = { forward = "1ms", backward = "2ms", update = "3us" }
"""

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
durations = st.integers(1, 10**12)
parts = st.builds(PartTimes, forward_ns=durations, backward_ns=durations, update_ns=durations)


def speeds(*formats: str) -> st.SearchStrategy[MatrixSpeed]:
    return st.builds(
        MatrixSpeed,
        peak_flops=st.integers(1, 10**16),
        format=st.sampled_from(formats),
        derived=st.none() | texts,
        utilisation=st.floats(1e-6, 1),
        utilisation_source=texts,
    )


known = st.builds(
    ComputeDevice,
    name=st.just("some"),
    summary=texts,
    source=texts,
    memory_bytes=st.none() | st.integers(1, 10**12),
    bandwidth_bytes_per_s=st.integers(1, 10**13),
    fp32=st.none() | speeds("fp32"),
    half=st.none() | speeds("bf16", "fp16"),
    recorded=st.lists(
        st.builds(
            RecordedTimes,
            model=texts,
            sequence_length=st.integers(2, 10**6),
            sequences=st.integers(1, 10**4),
            precision=st.sampled_from(["fp32", "bf16"]),
            software=texts,
            embedding=parts,
            layer=parts,
            head=parts,
        ),
        max_size=3,
    ).map(tuple),
)


@given(known)
def test_what_is_written_reads_back(tmp_path_factory: pytest.TempPathFactory, device: ComputeDevice) -> None:
    path = tmp_path_factory.mktemp("devices") / "some.toml"
    path.write_text(devices.write_device(device), encoding="utf8")
    assert devices.read_device(path) == device


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_file_says_where_every_number_comes_from(path: Path) -> None:
    device = devices.read_device(path)
    assert device == devices.load_device(device.name)
    assert path.read_text(encoding="utf8") == devices.write_device(device)
    assert re.search(r"\b20\d\d\b", device.source)  # data sheets have years
    if device.half is not None:
        assert device.half.peak_flops > device.fp32.peak_flops


def test_own_files_come_first_and_paths_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "devices").mkdir()
    for name in ("mine", "t4"):
        (tmp_path / "devices" / f"{name}.toml").write_text(FULL, encoding="utf8")
    assert devices.load_device("mine").summary == "s"
    assert devices.load_device("t4").summary == "s"
    assert devices.load_device("devices/mine.toml").name == "mine"
    assert set(devices.device_files()) == {path.stem for path in FILES} | {"mine"}
    with pytest.raises(UnknownNameError, match="did you mean 'mine'"):
        devices.load_device("mime")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('bandwidth = "1GB/s"', "", "bandwidth: Field required"),
        ('bandwidth = "1GB/s"', 'bandwith = "1GB/s"', "there is no key 'bandwith'; did you mean 'bandwidth'?"),
        ('peak = "1TFLOP/s"', 'peek = "1TFLOP/s"', "there is no key of fp32 'peek'; did you mean 'peak'?"),
        (
            'peak = "1TFLOP/s"',
            'peak = "1TFLOPS"',
            "fp32.peak: speed '1TFLOPS' has the unit 'TFLOPS'; known units: FLOP/s",
        ),
        ('utilisation = "30%"', 'utilisation = "0%"', "fp32.utilisation: Input should be greater than 0"),
        ('format = "fp32"', 'format = "fp8"', "fp32.format: Input should be 'fp32', 'bf16' or 'fp16', found 'fp8'"),
        ("[[recorded]]", "[recorded]", "recorded must be an array of tables; write [[recorded]]"),
        (
            'forward = "1us"',
            'forwards = "1us"',
            "there is no key of recorded[0].embedding 'forwards'; did you mean 'forward'?",
        ),
        ('forward = "1us"', 'forward = "1"', "recorded[0].embedding.forward: time '1' is not a number with a unit"),
        (
            'forward = "1us"',
            'forward = "0us"',
            "recorded[0].embedding.forward: Input should be greater than or equal to 1",
        ),
        ("sequences = 4", 'sequences = "4"', "recorded[0].sequences: Input should be a valid integer"),
        ('summary = "s"', 'name = "x"\nsummary = "s"', "there is no key 'name'"),
        ('summary = "s"', "summary = s", "is not TOML"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(FULL.replace(old, new, 1), encoding="utf8")
    with pytest.raises(SpecError) as caught:
        devices.read_device(path)
    assert str(caught.value).startswith(f"device {path}: ")
    assert says in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cannot read .*none\.toml: No such file"):
        devices.load_device(str(tmp_path / "none.toml"))
