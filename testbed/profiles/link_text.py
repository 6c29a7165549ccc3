"""An inline link in place of a profile's name: `link(80Mbit, 10ms)`, `link(20Mbit, 50ms, up.rate=5Mbit)`.

Rate and one-way delay apply to both directions. Optional settings, named by the keys of profile files, change both
directions (`loss=0.1%`, `buffer=50ms`, `jitter=1ms`), one (`up.rate=5Mbit`, `down.seed=7`), or the whole link
(`mtu=1400`). The rest is as in `BASE`, regardless of rate and delay; `buffer_remark` warns of buffers that are too
small.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from testbed import units
from testbed.directions import LINK_DIRECTIONS
from testbed.errors import SpecError
from testbed.profiles import keys
from testbed.profiles.link_profile import LinkProfile

BASE: Final[Mapping[str, Any]] = {
    "layer": "ip",
    "mtu": 1500,
    "congestion_control": "cubic",
    "slow_start_after_idle": False,
    "up": {"buffer": "100ms", "loss": "none", "seed": 1},
    "down": {"buffer": "100ms", "loss": "none", "seed": 2},
}
"""Everything but rate and delay, as in the profile consumer-80mbps."""
FORM = "link(RATE, DELAY) or link(RATE, DELAY, KEY=VALUE, ...), for example link(80Mbit, 10ms, loss=0.1%)"
_CHOSEN = "[chosen] "
_LONGEST = 2000
"""Maximum number of characters of an inline link: enough for every key of both directions."""
_BOTH = tuple(key.name for key in keys.PIPE if key.name != "seed")
"""Keys that may be set for both directions at once. This excludes the seed, because both directions would lose the same
packets."""
_TEXT = re.compile(r"\s*link\s*\((?P<inside>.*)\)\s*", re.DOTALL)
_COMMA = re.compile(r",(?![^{\[]*[}\]])")
"""Matches commas outside tables and lists."""


def is_link_text(name: str) -> bool:
    """Return whether a name is an inline link, well formed or not."""
    return re.match(r"\s*link\s*\(", name) is not None


def link_table(text: str, override: Callable[[Mapping[str, Any], str], dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return the canonical name of an inline link, and its tables as in a profile file.

    Equivalent texts have the same name, which is valid in a file's name. `override` sets one KEY=VALUE in tables.
    SpecError with the expected form for a malformed text.
    """
    if len(text) > _LONGEST:
        raise SpecError(
            f"it has {len(text):,} characters; an inline link has at most {_LONGEST:,}, a file has no limit"
        )
    match = _TEXT.fullmatch(text)
    parts = split_text(match["inside"]) if match else []
    if len(parts) < 2 or not all(parts) or any("=" in part for part in parts[:2]):
        raise SpecError(f"cannot parse it; write {FORM}")
    rate, delay, *changes = parts
    words = [units.write_rate(units.parse_rate(rate)), units.write_time(units.parse_time(delay)), *sorted(changes)]
    stated = f"link({', '.join(words)})"  # canonical, because it is part of a cell
    table: dict[str, Any] = {
        "summary": f"{words[0]} and {words[1]} each way",
        "source": f"{_CHOSEN}{stated}; what it does not state is as in consumer-80mbps.",
        **BASE,
    }
    for side in LINK_DIRECTIONS:
        table[side] = {**BASE[side], "rate": rate, "delay": delay}
    return name_of(["link", *words]), changed(table, changes, override)


def split_text(text: str) -> list[str]:
    """Split at commas, except those inside tables and lists."""
    return [part.strip() for part in _COMMA.split(text)]


def name_of(words: Iterable[str]) -> str:
    """Return a name that is valid in a file's name."""
    return "-".join(re.sub(r"[^\w.%]+", "-", word).strip("-") for word in words)


def changed(
    table: Mapping[str, Any], changes: Iterable[str], override: Callable[[Mapping[str, Any], str], dict[str, Any]]
) -> dict[str, Any]:
    """Return a profile's tables with KEY=VALUE changes of both directions, one, or the link; `override` sets one."""
    for change in changes:
        key = change.partition("=")[0].strip()
        for each in [f"{side}.{change}" for side in LINK_DIRECTIONS] if key in _BOTH else [change]:
            table = override(table, each)
    return dict(table)


def buffer_remark(profiles: Iterable[LinkProfile], links_in_path: int) -> str | None:
    """Return a warning about inline links without a stated buffer whose default is below the bandwidth-delay product of
    a path of `links_in_path` such links; None if there are none. After each loss TCP then has too little in flight to
    fill the link, so it stays below its rate; bbr does not back off at losses.
    """
    small: dict[str, int] = {}
    for profile in profiles:
        unstated = profile.source.startswith(f"{_CHOSEN}link(") and "buffer" not in profile.source
        if not unstated or profile.congestion_control == "bbr":
            continue
        round_trip_ns = links_in_path * profile.round_trip_ns
        if any(pipe.buffer_ns < round_trip_ns for pipe in profile.pipes):
            small[profile.name] = round_trip_ns
    if not small:
        return None
    names, more = ", ".join([*small][:3]), f" and {len(small) - 3} more" if len(small) > 3 else ""
    needed = units.write_time(max(small.values()))
    return (
        f"{names}{more} has no stated buffer; the default {BASE['up']['buffer']} is less than the round trip of "
        f"{needed}, so messages can overflow it and TCP then leaves the link idle: set one, for example "
        f"buffer={needed}"
    )
