"""Link profiles in tables: a profile in one row, and the README of a folder of profiles, generated from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from testbed.profiles import keys, rate_trace, trace_sources
from testbed.profiles.keys import ProfileKey
from testbed.profiles.link_profile import LinkProfile, Pipe
from testbed.profiles.loading import read_profile
from testbed.profiles.timeline import TRACE_STEP_MS

_TEMPLATE = Path(__file__).with_name("profiles_page.md.j2")


class ProfileLine(NamedTuple):
    """A profile's row in a table. Rates in Mbit/s, times in ms, shares in percent; '-' for an unshaped direction."""

    name: str
    up: str
    down: str
    rtt: str
    """Round-trip time of a small packet on an idle link: both delays."""
    loss: str
    varies: str
    tcp: str
    summary: str


def profile_line(profile: LinkProfile) -> ProfileLine:
    """Summarise a profile as one row of a table."""
    pipes = profile.pipes
    kinds = {"schedule" if pipe.schedule else "trace" for pipe in pipes if pipe.varies}
    return ProfileLine(
        name=profile.name,
        up=_megabits(profile.up),
        down=_megabits(profile.down),
        rtt=f"{profile.round_trip_ns / 1e6:.6g}" if pipes else "-",
        loss=f"{max(pipe.mean_loss for pipe in pipes) * 100:.2g}" if pipes else "-",
        varies=", ".join(sorted(kinds)) or "-",
        tcp=profile.congestion_control + (", idle" if profile.slow_start_after_idle else ""),
        summary=profile.summary,
    )


def _megabits(pipe: Pipe | None) -> str:
    return f"{pipe.rate_bps / 1e6:.6g}" if pipe else "-"


def draw_profiles_page(folder: Path) -> str:
    """Generate the README of a folder of profiles. SpecError for a profile that cannot be read."""
    profiles = [read_profile(path) for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem)]
    sources: dict[str, list[str]] = {}
    for profile in profiles:
        sources.setdefault(profile.source, []).append(profile.name)
    return fill_template(
        _TEMPLATE,
        profiles=profiles,
        sources=sources,
        profile_table=_profile_table,
        key_table=_key_table,
        keys=keys,
        made=_made(folder),
        step_ms=TRACE_STEP_MS,
        packet_bytes=rate_trace.OPPORTUNITY_BYTES,
    )


def fill_template(path: Path, **known: Any) -> str:
    """Fill a page's template; an unknown name is an error."""
    text = path.read_text(encoding="utf8")
    template = jinja2.Template(text, undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True)
    return str(template.render(known))


def _table(*rows: tuple[str, ...]) -> str:
    head, *body = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    rule = " | ".join("---" for _ in rows[0])
    return "\n".join(f"| {row} |" for row in (head, rule, *body))


def _key_table(known: tuple[ProfileKey, ...]) -> str:
    return _table(
        ("key", "looks like", "means"),
        *((f"`{key.name}`" + ("" if key.required else " (optional)"), key.form, key.meaning) for key in known),
    )


def _profile_table(profiles: list[LinkProfile]) -> str:
    lines = map(profile_line, profiles)
    return _table(
        (
            "profile",
            "up Mbit/s",
            "down Mbit/s",
            "RTT ms",
            "loss %",
            "varies",
            "TCP",
            "buffer up, down ms",
            "description",
        ),
        *((*line[:7], _buffers(profile), line.summary) for profile, line in zip(profiles, lines, strict=True)),
    )


def _buffers(profile: LinkProfile) -> str:
    return ", ".join(f"{pipe.buffer_ns / 1e6:.4g}" if pipe else "-" for pipe in (profile.up, profile.down))


def _made(folder: Path) -> str:
    rows = []
    for file, recipe in trace_sources.read_recipes(folder / "traces").items():
        times = rate_trace.read_trace(folder / "traces" / file).times
        length, mean = f"{times[-1] / 1000:g} s", f"{rate_trace.mean_rate_bps(times) / 1e6:.2f}"
        rows.append((f"`traces/{file}`", length, mean, f"`{recipe.command(f'{folder.name}/traces/{file}')}`"))
    return _table(("trace", "length", "mean Mbit/s", "made by"), *rows) if rows else "This folder has none."
