"""Labs that tests build: every engine, all links shaped, none, or some; in both topologies."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed import profiles, spec
from testbed.net.lab import LabSpec

ENGINES = [
    pytest.param(("consumer-80mbps",), "relay", id="relay", marks=pytest.mark.root),
    pytest.param(("consumer-80mbps",), "netem", id="netem", marks=pytest.mark.netem),
    pytest.param(("datacenter",), "relay", id="unshaped", marks=pytest.mark.root),
    pytest.param(("consumer-80mbps", "datacenter", "cable"), "relay", id="mixed-relay", marks=pytest.mark.root),
    pytest.param(("consumer-80mbps", "datacenter", "cable"), "netem", id="mixed-netem", marks=pytest.mark.netem),
]
CASES = pytest.mark.parametrize(("names", "engine"), ENGINES)
SHAPES = pytest.mark.parametrize("shape", ["star", "line"])


def lab_spec(
    names: tuple[str, ...], engine: spec.Engine, shape: str = "star", nodes: int = 3, **changes: object
) -> LabSpec:
    """The first `nodes - 1` profiles for a line."""
    agreeing = {"mtu": 1500, "slow_start_after_idle": False, **changes}
    each = [profiles.load_profile(name).model_copy(update=agreeing) for name in names]
    links = each if len(each) == 1 else each[: spec.link_count(shape, nodes)]  # type: ignore[arg-type]
    return LabSpec.model_validate(
        {"topology": shape, "profiles": tuple(links), "nodes": nodes, "engine": engine, "engine_reason": "test"}
    )


def on_a_virtual_clock() -> bool:
    """Whether this kernel's time stands still while programs compute. What waits by looking at the clock never ends."""
    return "time-travel=" in Path("/proc/cmdline").read_text(encoding="utf8")
