"""Write a profile as a file that reads back as the same profile: every key stated, every number resolved."""

from __future__ import annotations

from testbed import units
from testbed.directions import LINK_DIRECTIONS
from testbed.frozen import toml_text
from testbed.profiles.keys import BY_JITTER, NONE, UNSHAPED
from testbed.profiles.link_profile import LinkProfile, Pipe
from testbed.profiles.loss import Bernoulli, Loss


def write_profile(profile: LinkProfile) -> str:
    """Write what `loading.read_profile` reads back, except for the name, which is the file's, and for comments."""
    head = {
        "summary": toml_text(profile.summary),
        "source": toml_text(profile.source),
        "layer": toml_text(profile.layer),
        "mtu": str(profile.mtu),
        "congestion_control": toml_text(profile.congestion_control),
        "slow_start_after_idle": _truth(profile.slow_start_after_idle),
    }
    head |= {side: toml_text(UNSHAPED) for side in LINK_DIRECTIONS if profile.pipe(side) is None}
    text = _lines(head)
    for side in LINK_DIRECTIONS:
        if pipe := profile.pipe(side):
            text += f"\n[{side}]\n" + _lines(_pipe(pipe))
    return text


def _pipe(pipe: Pipe) -> dict[str, str]:
    schedule = pipe.schedule
    return {
        "rate": toml_text(units.write_rate(pipe.rate_bps)),
        "delay": toml_text(units.write_time(pipe.delay_ns)),
        "buffer": toml_text(units.write_size(pipe.buffer_bytes))
        + f"  # {units.format_time(pipe.buffer_ns)} at the rate",
        "loss": _loss(pipe.loss) + _in_words(pipe.loss),
        "seed": str(pipe.seed),
        "jitter": _time_or_none(pipe.jitter_ns),
        "reorder": toml_text(BY_JITTER) if pipe.jitter_reorders else _share_or_none(pipe.reorder),
        "duplicate": _share_or_none(pipe.duplicate),
        "slot": _slot(pipe),
        "schedule": "[\n" + "".join(f"  {_change(c)},\n" for c in _changes(pipe)) + "]"
        if schedule
        else toml_text(NONE),
        "repeat": toml_text(units.write_time(schedule.repeat_ns))
        if schedule and schedule.repeat_ns
        else toml_text(NONE),
        "trace": _trace(pipe),
    }


def _changes(pipe: Pipe) -> list[dict[str, str]]:
    return [
        {
            "at": toml_text(units.write_time(change.at_ns)),
            "rate": toml_text(units.write_rate(change.rate_bps)),
            "delay": toml_text(units.write_time(change.delay_ns)),
            "jitter": _time_or_none(change.jitter_ns),
            "loss": _loss(change.loss),
        }
        for change in (pipe.schedule.changes if pipe.schedule else ())
    ]


def _change(entries: dict[str, str]) -> str:
    return "{ " + ", ".join(f"{key} = {value}" for key, value in entries.items()) + " }"


def _loss(loss: Loss | None) -> str:
    if loss is None:
        return toml_text(NONE)
    if isinstance(loss, Bernoulli):
        return toml_text(units.write_fraction(loss.probability))
    shares = loss.model_dump(exclude={"model"})
    return _change(
        {"model": toml_text(loss.model)}
        | {name: toml_text(units.write_fraction(share)) for name, share in shares.items()}
    )


def _in_words(loss: Loss | None) -> str:
    if loss is None or isinstance(loss, Bernoulli):
        return ""
    return f"  # {loss.mean:.3%} lost, {loss.mean_burst:.3g} in a row on average"


def _slot(pipe: Pipe) -> str:
    if pipe.slot is None:
        return toml_text(NONE)
    slot = pipe.slot
    times = {
        "wait": toml_text(units.write_time(slot.wait_ns)),
        "wait_max": toml_text(units.write_time(slot.wait_max_ns)),
    }
    size = toml_text(units.write_size(slot.max_bytes) if slot.max_bytes else NONE)
    return _change({**times, "packets": str(slot.packets), "bytes": size})


def _trace(pipe: Pipe) -> str:
    if pipe.trace is None:
        return toml_text(NONE)
    trace = pipe.trace
    return _change(
        {"file": toml_text(trace.file), "loop": _truth(trace.loop), "offset": toml_text(f"{trace.offset_ms}ms")}
    )


def _time_or_none(ns: int) -> str:
    return toml_text(units.write_time(ns) if ns else NONE)


def _share_or_none(share: float) -> str:
    return toml_text(units.write_fraction(share) if share else NONE)


def _truth(value: bool) -> str:
    return "true" if value else "false"


def _lines(entries: dict[str, str]) -> str:
    return "".join(f"{key} = {value}\n" for key, value in entries.items())
