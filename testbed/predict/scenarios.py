"""Scenarios of decentralised training: sites that train together, with their links. scenarios.toml lists them.

A site has devices and one access link. The families of scenarios, community-driven and organisational, follow the
survey arXiv 2503.11023.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from pydantic import Field, model_validator

from testbed import units
from testbed.errors import SpecError, UnknownNameError
from testbed.frozen import Frozen
from testbed.predict.churn import Churn

SCENARIOS: Final = Path(__file__).with_name("scenarios.toml")
_Count = Annotated[int, Field(ge=1, strict=True)]


class Sites(Frozen):
    """Identical sites."""

    count: _Count = 1
    device: str
    devices: _Count = 1
    """Number of devices at each site."""
    link: str
    """Its access link: a profile or `link(80Mbit, 10ms)`."""
    within: str | None = None
    """Rate between two of its devices; required if it has several."""
    stays: str | None = None
    """Mean time for which it stays, for cells with churn; None: forever."""
    away: str | None = None
    """Mean time for which it is away."""

    @model_validator(mode="after")
    def _leaves_and_comes_back(self) -> Sites:
        if (self.stays is None) != (self.away is None):
            raise ValueError("a site that leaves must return: state both stays and away, or neither")
        for stated in (self.stays, self.away):
            if stated is not None and units.parse_time(stated) == 0:
                raise ValueError(f"stays is {self.stays} and away {self.away}; state times above 0, or neither")
        return self


class Scenario(Frozen):
    """A row of the table."""

    summary: str
    source: str
    """Source of the numbers; [chosen]: our choice; [second-hand]: quoted by another source."""
    server: str
    """Access link of the server, if there is one."""
    sites: tuple[Sites, ...]

    def devices(self) -> list[SiteDevice]:
        """Return the devices in order. SpecError if several share a site without a rate between them."""
        devices, site = list[SiteDevice](), 0
        for group in self.sites:
            if group.devices > 1 and group.within is None:
                raise SpecError(f"site {site} has {group.devices} devices; state the rate between them with `within`")
            within_bps = 0 if group.within is None else units.parse_rate(group.within)
            churn = None
            if group.stays is not None and group.away is not None:
                churn = Churn(units.parse_time(group.stays) / 1e9, units.parse_time(group.away) / 1e9)
            for _ in range(group.count):
                devices += [SiteDevice(site, group.device, group.link, within_bps, churn)] * group.devices
                site += 1
        return devices


class SiteDevice(NamedTuple):
    """One device and its site."""

    site: int
    device: str
    """Its file in testbed/devices."""
    link: str
    within_bps: int
    """Rate to other devices of its site; 0 if there are none."""
    churn: Churn | None = None
    """Churn of its site; None: it is always present."""


def load_scenarios() -> dict[str, Scenario]:
    """Return the scenarios by name."""
    tables = tomllib.loads(SCENARIOS.read_text(encoding="utf8"))
    return {name: Scenario.model_validate(table) for name, table in tables.items()}


def load_scenario(name: str | Scenario) -> Scenario:
    """Return a scenario by name, or a stated one. UnknownNameError if there is none."""
    if isinstance(name, Scenario):
        return name
    scenarios = load_scenarios()
    if name not in scenarios:
        raise UnknownNameError("scenario", name, scenarios)
    return scenarios[name]
