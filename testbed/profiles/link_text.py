"""A link written as a text where a profile is named: `link(80Mbit, 10ms)`, `link(20Mbit, 50ms, up.rate=5Mbit)`.

Rate and one-way delay are those of both directions. What may follow changes both (`loss=0.1%`, `buffer=50ms`,
`jitter=1ms`), one (`up.rate=5Mbit`, `down.seed=7`), or the link as a whole (`mtu=1400`): the keys of profile files.
What is not stated is as in `BASE`, whatever rate and delay are: `buffer_remark` says where its buffer is too small.
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
_BOTH = tuple(key.name for key in keys.PIPE if key.name != "seed")
"""Keys that may be stated for both directions at once. Two directions of one seed would lose the same packets."""
_TEXT = re.compile(r"\s*link\s*\((?P<inside>.*)\)\s*", re.DOTALL)
_COMMA = re.compile(r",(?![^{\[]*[}\]])")
"""Not those inside a table or a list."""


def is_link_text(name: str) -> bool:
    """Whether a name is a link's text, well formed or not."""
    return re.match(r"\s*link\s*\(", name) is not None


def link_table(text: str, override: Callable[[Mapping[str, Any], str], dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return the name of the link that a text means, and its tables as a profile file would hold them.

    Two texts that state the same have the same name, which can be part of a file's. `override` puts one KEY=VALUE into
    tables. SpecError, which shows the form, for a text that is not of it.
    """
    match = _TEXT.fullmatch(text)
    parts = [part.strip() for part in _COMMA.split(match["inside"])] if match else []
    if len(parts) < 2 or not all(parts) or any("=" in part for part in parts[:2]):
        raise SpecError(f"it is not of the form {FORM}")
    rate, delay, *changes = parts
    words = [units.write_rate(units.parse_rate(rate)), units.write_time(units.parse_time(delay)), *sorted(changes)]
    stated = f"link({', '.join(words)})"  # the same for every way to write it: it is part of a cell
    table: dict[str, Any] = {
        "summary": f"{words[0]} and {words[1]} each way",
        "source": f"{_CHOSEN}{stated}; what it does not state is as in consumer-80mbps.",
        **BASE,
    }
    for side in LINK_DIRECTIONS:
        table[side] = {**BASE[side], "rate": rate, "delay": delay}
    for change in changes:
        key = change.partition("=")[0].strip()
        for each in [f"{side}.{change}" for side in LINK_DIRECTIONS] if key in _BOTH else [change]:
            table = override(table, each)
    return "-".join(("link", *(re.sub(r"[^\w.%]+", "-", word).strip("-") for word in words))), table


def buffer_remark(profiles: Iterable[LinkProfile], links_in_path: int) -> str | None:
    """Say which links, of those that are texts, state no buffer and have one that is smaller than their rate times the
    round trip over a path of `links_in_path` such links; None where there is none. Every loss then leaves TCP with less
    under way than fills the link, so it stays below its rate; bbr does not back off at losses.
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
        f"no buffer is stated for {names}{more}; it is {BASE['up']['buffer']}, less than the round trip of {needed}: "
        f"messages can overflow it, and TCP then leaves the link idle: state one, for example buffer={needed}"
    )
