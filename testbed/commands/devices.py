"""The `devices` and `record` commands: list the emulated devices; measure how long this machine takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from testbed import devices, units
from testbed.commands.console import one_of, print_table, say
from testbed.devices import record as recording
from testbed.devices import this_machine
from testbed.devices.device import Precision
from testbed.errors import UserError

_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")


def list_devices(
    name: Annotated[
        str | None, typer.Argument(help="Device to show in full: its name, or the path of its file.")
    ] = None,
) -> None:
    """List the devices that stages can emulate, or print one as a complete device file."""
    if name is not None:
        shown = devices.load_device(name)
        say(f"# {shown.name}\n{devices.write_device(shown)}".rstrip("\n"))
    else:
        columns = ("device", "memory", "fp32", "bf16 or fp16", "reached", "recorded", "description")
        rows = []
        for device in map(devices.load_device, sorted(devices.device_files())):
            speeds = (device.fp32, device.half)
            memory = units.format_size(device.memory_bytes) if device.memory_bytes else "-"
            peaks = [units.format_flops(speed.peak_flops) if speed else "-" for speed in speeds]
            reached = ", ".join(f"{speed.utilisation:.0%}" for speed in speeds if speed) or "-"
            rows.append((device.name, memory, *peaks, reached, str(len(device.recorded)), device.summary))
        print_table(columns, rows, right=columns[1:6])
        say("python -m testbed devices NAME shows one in full, with sources.")


def record(
    model: Annotated[str, typer.Option(help="A named size, or the id or path of a cached checkpoint.")] = "gpt2-mini",
    sequence_length: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 64,
    sequences: Annotated[int, typer.Option(help="Sequences in a micro-batch.")] = 4,
    precision: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu (one thread) or cuda.")] = "cpu",
    codec: Annotated[
        list[str] | None, typer.Option(help="Also time this codec, and compare with the rule; repeatable.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Device file to add the measurement to; created if missing.")
    ] = None,
    host: Annotated[
        bool, typer.Option("--host", help="Measure and store this machine's own speed, which `plan` uses.")
    ] = False,
) -> None:
    """Measure how long each part of a model takes on this machine, for a device file that stages can emulate."""
    from testbed.sweep.environment import hold_machine

    one_of("precision", precision, _PRECISIONS)
    wanted: Precision = "bf16" if precision == "bf16" else "fp32"
    if host and (output or codec or device != "cpu"):
        raise UserError("--host stores this machine's own speed in its cache: omit -o, --codec and --device")
    if host:
        reached = this_machine.host(wanted, again=True)
        speed = reached.speed(wanted)
        assert speed is not None
        say(f"{reached.summary}: {units.format_flops(speed.effective_flops)} in {wanted} with one thread")
        say(f"stored in {this_machine.host_file()}")
        return
    one_of("device to record on", device, ("cpu", "cuda"))
    if output is not None and output.suffix != ".toml":
        raise UserError(f"-o {output}: a device file must end with .toml")
    if codec and wanted != "fp32":
        raise UserError("--codec: the rule for codecs needs the device's speed in fp32; record with --precision fp32")
    size: Any = {"sequence_length": sequence_length, "sequences": sequences}
    with hold_machine(say):
        measured = recording.record_model(model, **size, precision=wanted, device=device, codecs=codec or ())
    one = measured.recorded
    say(
        f"{measured.machine}: {one.model} in {one.precision}, {one.sequences} x {one.sequence_length} tokens, "
        f"{one.software}"
    )
    parts = {"embedding": one.embedding, "one layer": one.layer, "norm, output layer, loss": one.head}
    rows = [
        (part, *map(units.format_time, (times.forward_ns, times.backward_ns, times.update_ns)), "")
        for part, times in parts.items()
    ]
    headings = ("part", "forward", "backward", "update", "")
    print_table(headings, rows, right=headings[1:4])
    if measured.codecs:
        rates = devices.rates_of(recording.with_recording(None, "", measured))
        columns = ("codec", "direction", "encode", "decode", "encode by rule", "decode by rule", "")
        lines = []
        for times in measured.codecs:
            took = map(units.format_time, (times.encode_ns, times.decode_ns))
            rule = map(units.format_time, times.by_rule(one, rates))
            copied = "with copies to the CPU" if times.copied and device == "cuda" else ""
            lines.append((times.codec, times.direction, *took, *([*rule] or ("none", "none")), copied))
        print_table(columns, lines, right=columns[2:6])
        say("by rule: bytes / bandwidth + operations / rate, both as this recording reached them")
    if output is not None:
        recording.keep_recording(output, measured)
        say(f"stored in {output}; use it with: compute.device = {str(output)!r}")
