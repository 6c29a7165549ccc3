"""Describes a job and its links for the simulator ns-3, and plays descriptions there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from testbed.metrics.wires import HEADER_BYTES
from testbed.net.kernel.netem_plan import plan_netem
from testbed.profiles import Bernoulli, LinkProfile, Pipe
from testbed.spec import Topology, link_count
from testbed.trace.format import RECEIVE, Trace

PLAYER: Final = Path(__file__).with_name("play_in_ns3.py")
LINUX: Final[dict[str, Any]] = {
    "algorithm": "TcpLinuxReno",
    "recovery": "TcpPrrRecovery",
    "initial_window": 10,
    "segments_per_ack": 2,
    "delayed_ack_ms": 40,
    "rto_min_ms": 200,
    "clock_ms": 1,
    "sack": True,
}
"""Settings of ns-3's TCP that come nearest to Linux's: window of 10 segments at first, acknowledgement of every second
segment or after 40 ms, at least 200 ms before a retransmission by timer, proportional rate reduction."""


def describe(
    trace: Trace, topology: Topology, profile: LinkProfile, *, seed: int = 1, steps: int | None = None, **tcp: Any
) -> dict[str, Any]:
    """Describe the first `steps` steps of a trace (None: all) over links of one profile; `tcp` changes LINUX.

    The profile's directions have one delay and, at most, independent losses; its rate counts IP packets.
    """
    up, down = profile.up, profile.down
    assert up is not None
    assert down is not None
    assert (profile.layer, up.delay_ns, up.jitter_ns, down.jitter_ns) == ("ip", down.delay_ns, 0, 0)
    link = {"delay_ns": up.delay_ns, "up": _way(up, profile.mtu), "down": _way(down, profile.mtu)}
    return {
        "nodes": len(trace.nodes),
        "topology": topology,
        "mtu": profile.mtu,
        "seed": seed,
        "tcp": {**LINUX, "segment_bytes": profile.mtu - HEADER_BYTES, **tcp},
        "links": [link] * link_count(topology, len(trace.nodes)),
        "lanes": [
            {
                "node": lane.node,
                "steps": [
                    [(o.kind, o.peer, o.tag, 0 if o.kind == RECEIVE else o.value) for o in lane.operations(step)]
                    for step in range(trace.steps if steps is None else steps)
                ],
            }
            for lane in trace.lanes
        ],
    }


def _way(pipe: Pipe, mtu: int) -> dict[str, Any]:
    """Describe a direction. Netem's limit has the packets on their way too, a queue of ns-3 only those that wait."""
    assert pipe.loss is None or isinstance(pipe.loss, Bernoulli)
    on_the_way = -(-pipe.rate_bps * pipe.delay_ns // (8_000_000_000 * mtu))
    queue = plan_netem(pipe, mtu=mtu, layer="ip").limit_packets - on_the_way - 1
    return {"rate_bps": pipe.rate_bps, "queue_packets": max(1, queue), "loss": pipe.mean_loss}


def play_in_ns3(python: str, descriptions: Sequence[dict[str, Any]], timeout_s: float = 600) -> list[dict[str, Any]]:
    """Play descriptions with the `ns3` of this Python; returns what play_in_ns3.py prints of each."""
    told = "".join(json.dumps(description) + "\n" for description in descriptions)
    done = subprocess.run(
        [python, str(PLAYER)], input=told, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == len(descriptions), f"ns-3 ended with status {done.returncode}: {done.stderr[-2000:]}"
    return results
