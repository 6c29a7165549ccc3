"""Write a profile as a file that reads back as the same profile, with every key set and every number resolved."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from testbed import units
from testbed.directions import LINK_DIRECTIONS
from testbed.frozen import toml_text
from testbed.profiles.keys import BY_JITTER, NONE, PIPE, UNSHAPED, names
from testbed.profiles.link_profile import Change, LinkProfile, Pipe
from testbed.profiles.loss import GilbertElliott


def write_profile(profile: LinkProfile) -> str:
    """Return text that `loading.read_profile` reads back, except for the name, which is the file's, and comments."""
    whole = ("summary", "source", "layer", "mtu", "congestion_control", "slow_start_after_idle")
    head = {name: getattr(profile, name) for name in whole}
    head |= {"background": [flow.text for flow in profile.background]} if profile.background else {}
    text = _lines(head | {side: UNSHAPED for side in LINK_DIRECTIONS if profile.pipe(side) is None})
    for side in LINK_DIRECTIONS:
        if pipe := profile.pipe(side):
            remarks = {"buffer": f"{units.format_time(pipe.buffer_ns)} at the rate"}
            if isinstance(pipe.loss, GilbertElliott):
                remarks["loss"] = f"{pipe.loss.mean:.3%} lost, {pipe.loss.mean_burst:.3g} in a row on average"
            text += f"\n[{side}]\n" + _lines(_pipe(pipe), remarks)
    return text


def _pipe(pipe: Pipe) -> dict[str, Any]:
    schedule, slot, trace = pipe.schedule, pipe.slot, pipe.trace
    values = _varying(pipe) | {
        "buffer": units.write_size(pipe.buffer_bytes),
        "seed": pipe.seed,
        "reorder": BY_JITTER if pipe.jitter_reorders else _share(pipe.reorder),
        "duplicate": _share(pipe.duplicate),
        "queue": pipe.queue or NONE,
        "slot": slot
        and {
            "wait": units.write_time(slot.wait_ns),
            "wait_max": units.write_time(slot.wait_max_ns),
            "packets": slot.packets,
            "bytes": units.write_size(slot.max_bytes) if slot.max_bytes else NONE,
        },
        "schedule": schedule and [{"at": units.write_time(c.at_ns)} | _varying(c) for c in schedule.changes],
        "repeat": units.write_time(schedule.repeat_ns) if schedule and schedule.repeat_ns else NONE,
        "trace": trace and {"file": trace.file, "loop": trace.loop, "offset": f"{trace.offset_ms}ms"},
    }
    return {name: values[name] for name in names(PIPE)}


def _varying(numbers: Pipe | Change) -> dict[str, Any]:
    loss = numbers.loss
    return {
        "rate": units.write_rate(numbers.rate_bps),
        "delay": units.write_time(numbers.delay_ns),
        "jitter": units.write_time(numbers.jitter_ns) if numbers.jitter_ns else NONE,
        "loss": {name: part if name == "model" else units.write_fraction(part) for name, part in loss}
        if isinstance(loss, GilbertElliott)
        else _share(loss.probability if loss else 0),
    }


def _share(share: float) -> str:
    return units.write_fraction(share) if share else NONE


def _lines(entries: Mapping[str, Any], remarks: Mapping[str, str] = MappingProxyType({})) -> str:
    return "".join(
        f"{key} = {toml_value(value)}" + (f"  # {remarks[key]}" if key in remarks else "") + "\n"
        for key, value in entries.items()
    )


def toml_value(value: Any) -> str:
    """Write a value in TOML, tables in line; None as "none"."""
    match value:
        case bool() | int():
            return str(value).lower()
        case dict():
            return "{ " + ", ".join(f"{key} = {toml_value(inner)}" for key, inner in value.items()) + " }"
        case list():
            return "[\n" + "".join(f"  {toml_value(inner)},\n" for inner in value) + "]"
    return toml_text(value or NONE)
