"""What this machine reaches, how that is kept, and which dilation it makes necessary."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from testbed import cli, devices
from testbed.devices import ComputeDevice, record
from testbed.devices.stopwatch import DeviceStopwatch
from testbed.errors import SpecError
from testbed.spec import Cell, Paced
from tests.devices.example_recording import recorded
from tests.synthetic import cell


def paced(forward_ns: int, backward_ns: int, stages: int) -> Cell:
    shape = cell(stages=stages)
    held = Paced(forward_ns=(forward_ns,), backward_ns=(backward_ns,), update_ns=0, source="stated")
    return shape.model_copy(
        update={"compute": held, "workload": shape.workload.model_copy(update={"model": "gpt2-midi"})}
    )


@settings(deadline=None)
@given(st.integers(10**4, 10**9), st.integers(10**4, 10**9), st.integers(1, 8), st.integers(1, 64))
def test_the_dilation_is_the_smallest_that_leaves_half_of_the_cores(
    forward_ns: int, backward_ns: int, stages: int, cores: int
) -> None:
    host, what = devices.load_device("laptop-cpu"), paced(forward_ns, backward_ns, stages)
    needed, duty = devices.needed_dilation(what, host, cores), devices.cores_needed(what, host)
    assert duty / needed <= cores / 2 * (1 + 1e-6)
    assert needed == 1 or duty / (needed - 1) > cores / 2


def test_duty_is_real_time_by_emulated_time() -> None:
    host = devices.load_device("laptop-cpu")
    once = devices.cores_needed(paced(10**7, 10**7, 4), host)
    assert devices.cores_needed(paced(10**6, 10**6, 4), host) == pytest.approx(10 * once)
    faster = host.model_copy(update={"fp32": host.fp32.model_copy(update={"peak_flops": 2 * host.fp32.peak_flops})})
    assert devices.cores_needed(paced(10**7, 10**7, 4), faster) == pytest.approx(once / 2, rel=1e-5)


def test_stages_as_fast_as_this_machine_need_no_dilation() -> None:
    what = paced(1, 1, 4)
    measured = what.model_copy(update={"compute": devices.compute_of("measured", what.workload, what.pipeline, "")})
    assert devices.needed_dilation(measured, devices.load_device("laptop-cpu"), 1) == 1
    assert 1 <= devices.cores_needed(measured, devices.load_device("laptop-cpu")) <= 4


def test_a_dilation_says_what_it_does_not_stretch() -> None:
    assert devices.caveat(1) == ""
    assert "50 ms instead of 200 ms" in devices.caveat(4)
    assert "10 ms instead of 40 ms" in devices.caveat(4)


def test_a_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[str] = []

    def pretend(model: str, **shape: Any) -> record.MachineRecording:
        asked.append(shape["precision"])
        return record.MachineRecording(recorded(model=model, precision=shape["precision"]), "Example CPU", None)

    monkeypatch.setattr(record, "record_model", pretend)
    first = devices.host()
    assert devices.host() == first
    assert asked == ["fp32"]
    second = devices.host("bf16")
    assert asked == ["fp32", "bf16"]
    assert second.fp32 == first.fp32
    assert second.half is not None
    assert len(second.recorded) == 2
    assert devices.host("bf16", again=True) == second
    assert len(asked) == 3
    assert [path.parent for path in tmp_path.rglob("*.toml")] == [tmp_path / "testbed"]
    monkeypatch.setattr(record, "cpu_model", lambda: "Another CPU")
    devices.host()
    assert len(asked) == 4


def test_what_was_reached_gives_back_what_was_recorded() -> None:
    """A new device's speed and the FLOPs give the time of the recording that the speed comes from."""
    found = record.with_recording(None, "new", record.MachineRecording(recorded(), "Example CPU", None))
    what = cell(stages=1)
    workload = what.workload.model_copy(update={"model": "gpt2-mini", "batch_size": 4})
    alone = what.pipeline.model_copy(update={"microbatches": 1})
    by_recording = devices.durations.durations(found, workload, alone)
    by_flops = devices.durations.durations(found.model_copy(update={"recorded": ()}), workload, alone)
    whole = [one.forward_ns[0] + one.backward_ns[0] for one in (by_recording, by_flops)]
    assert whole[1] == pytest.approx(whole[0], abs=2)
    assert by_flops.update_ns[0] == pytest.approx(by_recording.update_ns[0], abs=1)


def test_a_recording_takes_the_place_of_the_same_and_of_no_other(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "mine.toml"
    kept = devices.load_device("t4")
    other = record.MachineRecording(recorded(sequences=8), "Example GPU", 10**9)
    slower = record.MachineRecording(recorded(software="later"), "Example GPU", 10**9)
    for found in (record.MachineRecording(recorded(), "Example GPU", 10**9), other, slower):
        device = record.keep_recording(path, found)
        assert devices.read_device(path) == device
    assert [(r.sequences, r.software) for r in device.recorded] == [(8, "torch"), (4, "later")]
    extended = record.with_recording(kept, "t4", slower)
    assert extended.model_copy(update={"recorded": ()}) == kept
    with pytest.raises(SpecError, match=r"cannot write .*below.toml: File exists"):
        record.keep_recording(path / "below.toml", slower)


class Events:
    """CUDA events of a device that takes 2 ms, and the calls that were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = self.calls = list[str]()

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                calls.append("record")

            def synchronize(self) -> None:
                calls.append("wait for the event")

            def elapsed_time(self, other: Event) -> float:
                assert other is not self
                return 2.0

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait for the device"))


def test_a_device_is_timed_by_its_events_and_the_cpu_by_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events(monkeypatch)

    def work() -> int:
        events.calls.append("work")
        return 7

    assert DeviceStopwatch("cuda").time(work) == (2_000_000, 7)
    assert events.calls == ["wait for the device", "record", "work", "record", "wait for the event"]
    ticks = iter([100, 350])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(ticks))
    assert DeviceStopwatch("cpu").time(lambda: 7) == (250, 7)
    assert len(events.calls) == 5


def test_first_repetitions_do_not_count() -> None:
    taken = iter([900, 900, 900, 1, 2, 3, 4, 5])
    assert DeviceStopwatch("cpu").medians(lambda: {"ns": next(taken)}, seconds=-1) == {"ns": 3}


@pytest.mark.parametrize("text", ["delta-int8", "zstd(int8)"])
def test_a_codec_is_timed_as_in_training(text: str) -> None:
    found = DeviceStopwatch("cpu").codec(text, "forward", (2, 4, 8), 0.0)
    assert {name: found[name] for name in ("codec", "direction")} == {"codec": text, "direction": "forward"}
    assert found["copied"] == (text == "zstd(int8)")
    assert min(found["encode_ns"], found["decode_ns"]) > 0


def test_the_rule_of_a_codec_is_that_of_the_recorded_message() -> None:
    times = {"direction": "forward", "copied": False, "encode_ns": 1, "decode_ns": 1}
    rates = devices.rates_of(devices.load_device("h200"))
    found = record.RecordedCodec(codec="int8", **times).by_rule(recorded(), rates)
    assert found == devices.device_codec_ns("int8", "forward", (4, 64, 256), rates)
    assert record.RecordedCodec(codec="zstd(int8)", **times).by_rule(recorded(), rates) == ()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_codecs_are_timed_with_a_model(tmp_path: Path, device: str) -> None:
    asked = ["record", "--model", "llama-nano", "--sequence-length", "16", "--sequences", "2", "--device", device]
    path = tmp_path / "this.toml"
    done = CliRunner().invoke(cli.make_app(), [*asked, "--codec", "int8", "--codec", "zstd(int8)", "-o", str(path)])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines() if line.startswith(("int8", "zstd"))]
    assert [row[:2] for row in rows] == [
        [name, way] for name in ("int8", "zstd(int8)") for way in ("forward", "backward")
    ]
    assert [row.count("none") for row in rows] == [0, 0, 2, 2]
    assert devices.read_device(path).recorded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "precision"), [("cpu", "fp32"), pytest.param("cuda", "bf16", marks=pytest.mark.gpu)]
)
def test_this_machine_can_be_recorded(tmp_path: Path, device: str, precision: str) -> None:
    path = tmp_path / "this.toml"
    asked = ["record", "--model", "llama-nano", "--sequence-length", "16", "--sequences", "2", "-o", str(path)]
    done = CliRunner().invoke(cli.make_app(), [*asked, "--device", device, "--precision", precision])
    assert done.exit_code == 0, done.output
    found = devices.read_device(path)
    (one,) = found.recorded
    speed = found.speed("bf16" if precision == "bf16" else "fp32")
    assert 1e6 < speed.effective_flops < 1e15
    assert one.layer.backward_ns < 1000 * one.layer.forward_ns
    assert math.isclose(speed.utilisation, 1)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["devices", "t5"], "there is no device 't5'; did you mean 't4'?"),
        (["record", "--precision", "fp8"], "there is no precision 'fp8'"),
        (["record", "--device", "tpu"], "there is no device to record on 'tpu'"),
        (["record", "--model", "gpt3"], "there is no model 'gpt3'"),
        (["record", "--sequence-length", "9999"], "cannot record 4 sequences of 9999 tokens"),
        (["record", "--precision", "bf16", "--codec", "int8"], "--codec: the rule for codecs needs"),
        (["record", "--sequences", "0"], "cannot record 0 sequences"),
        (["record", "-o", "mine.txt"], "a device file must end with .toml"),
    ],
)
def test_bad_input_is_the_users(asked: list[str], says: str) -> None:
    done = CliRunner().invoke(cli.make_app(), asked)
    assert says in str(done.exception)
    assert getattr(done.exception, "exit_status", None) == 2


def test_devices_are_listed_and_shown() -> None:
    listed = CliRunner().invoke(cli.make_app(), ["devices"])
    assert all(name in listed.output for name in devices.device_files())
    shown = CliRunner().invoke(cli.make_app(), ["devices", "t4"])
    assert shown.output == f"# t4\n{devices.write_device(devices.load_device('t4'))}"


def test_a_device_without_a_speed_is_only_what_was_recorded() -> None:
    bare = ComputeDevice(name="bare", summary="s", source="s", bandwidth_bytes_per_s=1, recorded=(recorded(),))
    what = cell(stages=1)
    with pytest.raises(SpecError, match="device bare has no speed in fp32"):
        devices.durations.durations(
            bare, what.workload.model_copy(update={"model": "gpt2-mini", "batch_size": 8}), what.pipeline
        )
