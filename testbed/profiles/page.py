"""The README of a folder of profiles, in Markdown, drawn from its files."""

from __future__ import annotations

from pathlib import Path

import jinja2

from testbed.profiles import generate, keys, trace
from testbed.profiles.files import read_profile
from testbed.profiles.keys import Key
from testbed.profiles.line import line
from testbed.profiles.model import LinkProfile
from testbed.profiles.timeline import TRACE_STEP_MS

_TEMPLATE = Path(__file__).with_name("page.md.j2")


def page(folder: Path) -> str:
    """The README of the profiles in a folder. SpecError where one of them cannot be read."""
    profiles = [read_profile(path) for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem)]
    sources: dict[str, list[str]] = {}
    for profile in profiles:
        sources.setdefault(profile.source, []).append(profile.name)
    return (
        jinja2.Environment(
            undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True, autoescape=False
        )
        .from_string(_TEMPLATE.read_text(encoding="utf8"))
        .render(
            profiles=profiles,
            sources=sources,
            profile_table=_profile_table,
            key_table=_key_table,
            keys=keys,
            made=_made(folder),
            step_ms=TRACE_STEP_MS,
            packet_bytes=trace.OPPORTUNITY_BYTES,
        )
    )


def _table(*rows: tuple[str, ...]) -> str:
    head, *body = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    rule = " | ".join("---" for _ in rows[0])
    return "\n".join(f"| {row} |" for row in (head, rule, *body))


def _key_table(known: tuple[Key, ...]) -> str:
    return _table(
        ("key", "looks like", "means"),
        *((f"`{key.name}`" + ("" if key.required else " (optional)"), key.form, key.meaning) for key in known),
    )


def _profile_table(profiles: list[LinkProfile]) -> str:
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
            "what it is",
        ),
        *((*found[:7], _buffers(profile), found.summary) for profile in profiles for found in [line(profile)]),
    )


def _buffers(profile: LinkProfile) -> str:
    return ", ".join(f"{pipe.buffer_ns / 1e6:.4g}" if pipe else "-" for pipe in (profile.up, profile.down))


def _made(folder: Path) -> str:
    rows = []
    for file, recipe in generate.recipes(folder / "traces").items():
        times = trace.read(folder / "traces" / file).times
        rows.append(
            (
                f"`traces/{file}`",
                f"{times[-1] / 1000:g} s",
                f"{trace.mean_rate_bps(times) / 1e6:.2f}",
                recipe.command(f"{folder.name}/traces/{file}"),
            )
        )
    table = _table(("trace", "length", "mean Mbit/s", "made by"), *((*row[:3], f"`{row[3]}`") for row in rows))
    return table if rows else "There is none here."
