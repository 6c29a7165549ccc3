"""Scenarios of decentralised training: who trains together, over which links. scenarios.toml lists them.

A site has devices and one access link. Their families, community-driven and organisational, are those of the survey
arXiv 2503.11023.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from pydantic import Field, model_validator

from testbed import units
from testbed.errors import SpecError, UnknownNameError
from testbed.frozen import Frozen
from testbed.play.churn import Churn

SCENARIOS: Final = Path(__file__).with_name("scenarios.toml")
_Count = Annotated[int, Field(ge=1, strict=True)]


class Sites(Frozen):
    """Sites that are alike."""

    count: _Count = 1
    device: str
    devices: _Count = 1
    """At each of them."""
    link: str
    """Its access link: a profile or `link(80Mbit, 10ms)`."""
    within: str | None = None
    """Rate between two of its devices; stated where it has several."""
    stays: str | None = None
    """How long it stays on average, where cells ask for churn; None: for ever."""
    away: str | None = None
    """How long it is then away, on average."""

    @model_validator(mode="after")
    def _leaves_and_comes_back(self) -> Sites:
        if (self.stays is None) != (self.away is None):
            raise ValueError("who leaves comes back: state both stays and away, or neither")
        for stated in (self.stays, self.away):
            if stated is not None and units.parse_time(stated) == 0:
                raise ValueError(f"stays is {self.stays} and away {self.away}; state times above 0, or neither")
        return self


class Scenario(Frozen):
    """A row of the table."""

    summary: str
    source: str
    """Where the numbers come from; [chosen]: our choice; [second-hand]: of somebody who read the source."""
    server: str
    """Its access link, where there is a server."""
    sites: tuple[Sites, ...]

    def devices(self) -> list[SiteDevice]:
        """Return the devices in order. SpecError where several share a site and no rate between them is stated."""
        found, site = list[SiteDevice](), 0
        for group in self.sites:
            if group.devices > 1 and group.within is None:
                raise SpecError(f"site {site} has {group.devices} devices; state the rate between them: within")
            within_bps = 0 if group.within is None else units.parse_rate(group.within)
            churn = None
            if group.stays is not None and group.away is not None:
                churn = Churn(units.parse_time(group.stays) / 1e9, units.parse_time(group.away) / 1e9)
            for _ in range(group.count):
                found += [SiteDevice(site, group.device, group.link, within_bps, churn)] * group.devices
                site += 1
        return found


class SiteDevice(NamedTuple):
    """One device, and where it is."""

    site: int
    device: str
    """Its file in testbed/devices."""
    link: str
    within_bps: int
    """To other devices of its site; 0 where there is none."""
    churn: Churn | None = None
    """Of its site; None: it is always there."""


def load_scenarios() -> dict[str, Scenario]:
    """Return the scenarios by name."""
    tables = tomllib.loads(SCENARIOS.read_text(encoding="utf8"))
    return {name: Scenario.model_validate(table) for name, table in tables.items()}


def load_scenario(name: str) -> Scenario:
    """Return one of them. UnknownNameError for another name."""
    found = load_scenarios()
    if name not in found:
        raise UnknownNameError("scenario", name, found)
    return found[name]
