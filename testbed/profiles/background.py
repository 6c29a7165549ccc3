"""Background flows of a link: the traffic of another machine behind the same access link, e.g. `1 cubic up`.

`testbed.net.background` sends them. Their forms, in which N is a number of flows:

N ALGORITHM up|down   greedy TCP flows with this congestion control
web up|down           a TCP connection that sends objects with pauses between them
call [RATE] up|down   UDP at a constant rate, the packets of each 20 ms together

Sources of the numbers. Objects: a bounded Pareto distribution of shape 1.1, that of the large files of SURGE (Barford
and Crovella, SIGMETRICS 1998), from 100 kB to 2 MB; pauses: exponential, 2 s on average [chosen]. Call: 2.6 Mbit/s,
what Zoom asks for to send 720p in a group.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

from pydantic import Field

from testbed import units
from testbed.directions import LinkDirection
from testbed.errors import SpecError
from testbed.frozen import Frozen
from testbed.profiles.ranges import CongestionControl, PeriodNs, RateBps

FORM: Final = "'1 cubic up', 'web down' or 'call 3Mbit up'"
CALL_BPS: Final = 2_600_000
CALL_NS: Final = 20_000_000
WEB_PAUSE_NS: Final = 2_000_000_000
WEB_BYTES: Final = (100_000, 2_000_000)
WEB_SHAPE: Final = 1.1
_MOST_FLOWS: Final = 100
_TEXT: Final = re.compile(
    r"\s*(?:(?P<flows>[1-9]\d{0,8})\s+(?P<algorithm>\S+)|(?P<kind>web|call(?:\s+(?P<rate>\S+))?))\s+(?P<way>up|down)\s*",
    re.ASCII,
)
_MORE: Final = re.compile(r"\+(?!\s*(?:\d+\s+\w+|web|call(?:\s+\w+)?)\s+(?:up|down)\b)")
"""Matches a + between two profiles, but not between two flows of one profile."""


class BackgroundFlow(Frozen):
    """Flows of one kind in one direction of a link."""

    kind: Literal["greedy", "web", "call"]
    way: LinkDirection
    flows: int = Field(ge=1, le=_MOST_FLOWS)
    congestion_control: CongestionControl | None
    """Of greedy flows and of web; None: UDP."""
    rate_bps: RateBps | None
    """Of a call: bits per second of UDP payload; None: as fast as TCP decides."""
    pause_ns: PeriodNs | None
    """Between the packets of a call, and on average between the objects of web; None: no pauses."""

    @property
    def text(self) -> str:
        """The flow in the form of a file."""
        if self.kind == "greedy":
            return f"{self.flows} {self.congestion_control} {self.way}"
        rate = f" {units.write_rate(self.rate_bps)}" if self.rate_bps else ""
        return f"{self.kind}{rate} {self.way}"


def split_networks(text: str) -> list[str]:
    """Split `A+B+C` into profiles, without splitting `A, background=1 cubic up + web down`."""
    return _MORE.split(text)


def read_background(value: object) -> list[dict[str, Any]] | None:
    """Read flows from a list of texts, or from one text with + between flows; None for 'none'. SpecError."""
    texts = value.split("+") if isinstance(value, str) else value
    if texts == ["none"]:
        return None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise SpecError(f"background must be a list of flows such as {FORM}, or 'none'; found {value!r}")
    return [_read_flow(text) for text in texts]


def _read_flow(text: str) -> dict[str, Any]:
    if (match := _TEXT.fullmatch(text)) is None:
        raise SpecError(f"background: {text!r} is not a flow; write {FORM}")
    flow: dict[str, Any] = {"flows": 1, "congestion_control": None, "rate_bps": None, "pause_ns": None}
    flow["way"] = match["way"]
    if match["flows"]:
        return flow | {"kind": "greedy", "flows": int(match["flows"]), "congestion_control": match["algorithm"]}
    if match["kind"] == "web":
        return flow | {"kind": "web", "congestion_control": "cubic", "pause_ns": WEB_PAUSE_NS}
    rate_bps = units.parse_rate(match["rate"]) if match["rate"] else CALL_BPS
    return flow | {"kind": "call", "rate_bps": rate_bps, "pause_ns": CALL_NS}
