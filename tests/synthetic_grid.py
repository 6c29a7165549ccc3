"""A pretended sweep over a grid of links: two devices, three codecs, six links of the grid and one that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed import results
from testbed.profiles import load_profile
from testbed.spec import Paced
from tests.synthetic import Pipeline, cell, record_sweep, write_run

SIZES = {"fp32": 65_536, "int8": 16_640, "bf16": 32_768}
RATES, DELAYS = ("5Mbit", "80Mbit", "1Gbit"), ("1ms", "50ms")


def _device(name: str, forward_ns: int) -> Paced:
    return Paced(forward_ns=(forward_ns,), backward_ns=(2 * forward_ns,), update_ns=0, source=f"{name}: from FLOPs")


def write_grid(folder: Path) -> Path:
    """Write the results; one run, int8 over the slowest link of the slow device, is not certified."""
    results.make_folder(folder)
    cells = []
    for name, forward_ns in (("quick", 200_000), ("slow", 60_000_000)):
        compute = _device(name, forward_ns)
        for link in (*(f"link({rate}, {delay})" for rate in RATES for delay in DELAYS), "link(80Mbit, 1ms, mtu=1400)"):
            profile = load_profile(link)
            for codec, payload in SIZES.items():
                what = cell(codec, profile, compute=compute, steps=4)
                durations: dict[str, Any] = {
                    "forward_ns": forward_ns,
                    "backward_ns": 2 * forward_ns,
                    "codec_ns": 1000,
                    "update_ns": 0,
                }
                pipeline = Pipeline(profile, payload_bytes=payload, raw_bytes=65_536, **durations)
                bad = (name, link, codec) == ("slow", "link(5Mbit, 50ms)", "int8")
                write_run(folder, what, pipeline, verdict="FAIL" if bad else "PASS")
                cells.append(what)
    return record_sweep(folder, cells, question="Where?")
