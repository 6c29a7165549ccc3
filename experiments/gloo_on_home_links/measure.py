"""Measure what gloo's messages and collectives cost, beside ours: `python experiments/gloo_on_home_links/measure.py`.

gloo runs in the nodes of a lab (`python -m testbed exec`); ours are traces that are played over the same links, both on
the virtual clock; the ideal is the trace over links that are formulas. This writes messages.csv, collectives.csv and
pipelining.csv.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gloo_job import LATE_S, LEAD_S, REPEATS, REST_S
from pipelining_job import MICROBATCHES, STEPS, TOKENS, WIDTH
from rings import ring_rounds

from testbed import csv_rows
from testbed.errors import LabError
from testbed.metrics.links import Pipes
from testbed.net.lab import LabSpec
from testbed.player.virtual import OverLinks, guest_lab, play_virtual
from testbed.profiles import load_profile
from testbed.spec import Topology
from testbed.trace.format import RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace
from testbed.trace.played import Played, PlayedLane
from testbed.trace.simulate import ideal_step_ns, simulate
from testbed.trace.synthetic import pipeline_trace

HERE = Path(__file__).resolve().parent
SIZES = (4096, 16384, 65536, 262144, 1 << 20, 4 << 20, 8 << 20)
"""4 KiB to 8 MiB."""
DELAYS_MS = (0, 25, 100)
RATE_MBPS = 50
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
WHOLE_BYTES = 4 << 20
HOME = "cable"
_LINE = re.compile(r"^\S+ (.*)$")
Item = tuple[str, int, str]
"""What, bytes, and when the receive was posted."""


def exec_in_lab(profile: str, topology: str, nodes: int, *words: str) -> list[list[str]]:
    """Run a script over gloo in the nodes of a lab; returns the lines that each printed. LabError where it fails."""
    with tempfile.TemporaryDirectory(prefix="testbed-gloo-") as out:
        flags = ["--profile", profile, "--topology", topology, "--nodes", str(nodes), "--clock", "virtual", "-o", out]
        command = [sys.executable, "-m", "testbed", "exec", *flags, "--", "torchrun", *words]
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LabError(f"{' '.join(words)} over {profile} ended with {done.returncode}: {done.stdout[-2000:]}")
        texts = [(Path(out) / f"node-{node}.log").read_text(encoding="utf8") for node in range(nodes)]
    return [[match[1] for line in text.splitlines() if (match := _LINE.match(line))] for text in texts]


def gloo_ms(profile: str, topology: str, nodes: int, sizes: Sequence[int], whole: Sequence[Item]) -> dict[Item, float]:
    """Return how long messages of these sizes, and collectives of one size, took over gloo, the last time that each was
    repeated.

    A message: from the send, or, where the receive is late, from that on, until it was received. A collective: from the
    first that began to the last that ended.
    """
    words = (",".join(map(str, sizes)), ",".join(item[0] for item in whole), *(str(item[1]) for item in whole[:1]))
    printed = exec_in_lab(profile, topology, nodes, "gloo_job.py", *words)
    noted = [[json.loads(line) for line in lines if line.startswith("{")] for lines in printed]
    took: dict[Item, float] = {}
    for each in zip(*noted, strict=True):
        first = each[0]
        began = [node["began"] for node in each]
        start = began[1 if first["receive"] == "late" else 0] if first["what"] == "message" else min(began)
        end = each[1]["ended"] if first["what"] == "message" else max(node["ended"] for node in each)
        took[first["what"], first["size"], first["receive"]] = (end - start) / 1e6
    return took


def our_trace(nodes: int, items: Sequence[Item]) -> Trace:
    """Return the same items as a trace, a step each, repeated as gloo's are."""
    lanes = tuple(Lane(node, "all") for node in range(nodes))
    tag = 0
    for what, size, receive in (item for item in items for _ in range(REPEATS)):
        for lane in lanes:
            lane.add(SIGNAL, tag=tag)
            lane.add(WAIT, tag=tag, value=nodes)
            lane.add(WORK, value=round((REST_S + _later_s(lane.node, receive)) * 1e9))
        if what == "message":
            lanes[0].add(SEND, peer=1, tag=tag, value=size)
            lanes[1].add(RECEIVE, peer=0, tag=tag)
        else:
            for lane in lanes:
                rounds = ring_rounds(what, lane.node, nodes, size)
                sent, received = itertools.count(tag), itertools.count(tag)
                for ring in rounds:
                    if ring.sends_to is not None:
                        lane.add(SEND, peer=ring.sends_to, tag=next(sent), value=ring.message_bytes)
                    if ring.receives_from is not None:
                        lane.add(RECEIVE, peer=ring.receives_from, tag=next(received))
        tag += 100
        for lane in lanes:
            lane.end_step()
    return Trace(tuple(f"node-{node}" for node in range(nodes)), ("all",), lanes, {"maker": "gloo_on_home_links"})


def _later_s(node: int, receive: str) -> float:
    return {("early", 0): LEAD_S, ("late", 1): LATE_S}.get((receive, node), 0.0)


def times_ms(trace: Trace, lanes: Sequence[PlayedLane], items: Sequence[Item]) -> dict[Item, float]:
    """Return how long each item took, as `gloo_ms` counts."""
    took = {}
    for number, item in enumerate(items):
        step = (number + 1) * REPEATS - 1
        spans = []
        for lane, times in zip(trace.lanes, lanes, strict=True):
            at = [n for n in range(lane.starts[step], lane.starts[step + 1]) if lane.kind[n] in (SEND, RECEIVE)]
            spans.append((times.begin_ns[at[0]], times.end_ns[at[-1]]) if at else (2**62, 0))
        if item[0] == "message":
            took[item] = (spans[1][1] - spans[item[2] == "late"][0]) / 1e6
        else:
            took[item] = (max(end for _, end in spans) - min(begin for begin, _ in spans)) / 1e6
    return took


def play(traces: Sequence[tuple[Trace, str, Topology]]) -> list[tuple[Played, LabSpec]]:
    """Play traces over networks; returns what was played, and the lab."""
    labs = [guest_lab(topology, [load_profile(name)], len(trace.nodes)) for trace, name, topology in traces]
    asked = [OverLinks(trace, lab) for (trace, _, _), lab in zip(traces, labs, strict=True)]
    return list(zip(play_virtual(asked, guests=2, prove_steady=False), labs, strict=True))


def links_of(lab: LabSpec) -> Pipes:
    """Return a lab's links as formulas."""
    return Pipes(lab.topology, lab.profiles, lab.nodes)


def rows(
    items: Sequence[Item], gloo: dict[Item, float], trace: Trace, played: tuple[Played, LabSpec]
) -> Iterator[tuple[Any, ...]]:
    """Yield (what, bytes, receive, gloo, ours, ideal) of each item; times in milliseconds."""
    lanes, lab = played
    ours = times_ms(trace, lanes.lanes, items)
    ideal = times_ms(trace, simulate(trace, links=links_of(lab)), items)
    for item in items:
        yield (*item, gloo[item], ours[item], ideal[item])


def main(asked: argparse.Namespace) -> None:
    """Measure all of it."""
    sizes = SIZES[:6:3] if asked.quick else SIZES
    items: list[Item] = [("message", size, receive) for size in sizes for receive in ("early", "late")]
    delays = DELAYS_MS[::2] if asked.quick else DELAYS_MS
    lines = [f"link({RATE_MBPS}Mbit, {delay}ms)" for delay in delays]
    counts = (2,) if asked.quick else (2, 4)
    together: list[Item] = [(what, WHOLE_BYTES // (4 if asked.quick else 1), "") for what in COLLECTIVES]
    pipelines = {depth: _pipeline(depth) for depth in (2, 4)}
    traces: list[tuple[Trace, str, Topology]] = [(our_trace(2, items), line, "line") for line in lines]
    traces += [(our_trace(count, together), HOME, "star") for count in counts]
    traces += [(trace, HOME, "star") for trace in pipelines.values()]
    played = play(traces)
    header = ("what", "bytes", "receive", "gloo_ms", "ours_ms", "ideal_ms")
    found = []
    for delay, line, (trace, _, _), done in zip(delays, lines, traces, played, strict=False):
        gloo = gloo_ms(line, "line", 2, sizes, ())
        found += [(delay, *row) for row in rows(items, gloo, trace, done)]
    csv_rows.write_rows(asked.output / "messages.csv", ("delay_ms", *header), found, digits=7)
    found = []
    for count, (trace, _, _), done in zip(counts, traces[len(lines) :], played[len(lines) :], strict=False):
        gloo = gloo_ms(HOME, "star", count, (), together)
        found += [(count, *row) for row in rows(together, gloo, trace, done)]
    csv_rows.write_rows(asked.output / "collectives.csv", ("nodes", *header), found, digits=7)
    printed = exec_in_lab(HOME, "star", 2, "pipelining_job.py")[0]
    steps = [int(line.split()[2]) for line in printed if line.startswith("step ")]
    found = [("PyTorch pipelining, gloo", "", steps[-1] / 1e6, "")]
    for (depth, trace), (done, lab) in zip(pipelines.items(), played[-len(pipelines) :], strict=True):
        ends = [lane.end_ns[-1] for lane in done.lanes]
        before = [lane.end_ns[trace.lanes[n].starts[STEPS - 1] - 1] for n, lane in enumerate(done.lanes)]
        ideal = ideal_step_ns(trace, links_of(lab), STEPS)
        found.append(("testbed", depth, (max(ends) - max(before)) / 1e6, ideal / 1e6))
    csv_rows.write_rows(
        asked.output / "pipelining.csv", ("runtime", "in_flight", "step_ms", "ideal_ms"), found, digits=8
    )


def _pipeline(in_flight: int) -> Trace:
    return pipeline_trace(
        stages=2,
        microbatches=MICROBATCHES,
        steps=STEPS,
        message_bytes=4 * TOKENS * WIDTH,
        forward_ns=0,
        backward_ns=0,
        in_flight=in_flight,
    )


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, HERE)
