"""Play failures: `python experiments/cost_of_failures/play.py`.

outages.csv    what an outage of a home costs a job, at several moments of a step
drawn.csv      trainings with drawn outages
transfers.csv  a checkpoint to another home, and a state that a new peer fetches
beside.csv     states that are sent beside the training
histories.csv  trainings with lost peers: lost steps, fetched states, repeated steps, checkpoints
"""

import argparse
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import failures

from testbed import csv_rows
from testbed.faults import LinkFault, read_faults, with_faults
from testbed.metrics.links import Pipes
from testbed.net.lab import LabSpec
from testbed.player.split import repeated
from testbed.player.virtual import OverLinks, play_virtual
from testbed.trace.format import RECEIVE, SEND, Lane, Trace
from testbed.trace.simulate import ideal_step_ns, step_ends

LINKS = ("cable", "consumer-80mbps", "dsl")
OUTAGES_S = (10, 60)
SPREAD = tuple(2 ** (part / 6) for part in range(6))
"""Outages last up to twice as long: TCP's timer doubles, so that costs depend on the logarithm of the length."""
_SETTLED_STEPS = {"pipeline": 5, "data": 1}
"""After three and a half times the length of an outage, before the next one."""
LIMITED = "cubic, timer up to 5 s"
SEEDS = 6
_FAILING = "node-1"
_PACKETS = 20_000
"""Packets of a state that is played alone."""


class Outage(NamedTuple):
    """A line of outages.csv."""

    job: str
    codec: str
    link: str
    control: str
    scale: int
    """Rates, buffers and messages are divided by this."""
    number: int
    outage_s: float
    step_s: float
    """Undisturbed."""
    cost_s: float
    """How much later the next outage's steps begin."""


class Drawn(NamedTuple):
    """A line of drawn.csv."""

    codec: str
    link: str
    mtbf: str
    least_s: int
    seed: int
    outages_s: float
    """Sum of those that began before the end."""
    undisturbed_s: float
    played_s: float


class Transfer(NamedTuple):
    """A line of transfers.csv."""

    job: str
    link: str
    state: str
    what: str
    megabytes: float
    seconds: float
    ideal_s: float
    """Over links as formulas."""


class Beside(NamedTuple):
    """A line of beside.csv."""

    codec: str
    link: str
    step_s: float
    beside_s: float
    """A step while states are sent."""
    bytes_per_s: float
    """Of each stage's state, meanwhile."""


class History(NamedTuple):
    """A line of histories.csv."""

    job: str
    codec: str
    link: str
    state: str
    mtbf: str
    every: int
    seed: int
    failures: int
    useful_s: float
    simulated_s: float
    played_s: float


def ends(asked: Sequence[tuple[Trace, LabSpec]]) -> list[list[float]]:
    """Play traces, and return when their steps end, in seconds."""
    found = play_virtual([OverLinks(*each) for each in asked], prove_steady=False)
    both = zip(asked, found, strict=True)
    return [[ns / 1e9 for ns in step_ends(trace, each.lanes, each.steps)] for (trace, _), each in both]


def faulty(lab: LabSpec, *rows: dict[str, Any]) -> tuple[LabSpec, list[LinkFault]]:
    """Return a lab with outages of one home, and these."""
    links = {f"node-{node}": profile for node, profile in enumerate(lab.profiles)}
    every = read_faults([{"link": _FAILING, "outage": True, **row} for row in rows], links, "played") or ()
    own = [fault for fault in every if isinstance(fault, LinkFault)]
    profiles = tuple(with_faults(profile, name, tuple(own)) for name, profile in links.items())
    return lab.model_copy(update={"profiles": profiles}), own


def outages(table: csv_rows.Table, quick: bool) -> None:
    """Play trainings with an outage now and then, each of them after steps have settled."""
    arms = [("pipeline", codec, LINKS[0], "cubic", 0) for codec in ("bf16", "int8")]
    arms += [("pipeline", "int8", LINKS[0], control, 0) for control in ("bbr", LIMITED)]
    arms += [("data", codec, LINKS[0], "cubic", 0) for codec in ("bf16", "SparseLoCo")]
    for job, codec, link, control, scale in arms[:1] if quick else [*arms, ("pipeline", "int8", LINKS[0], "cubic", 1)]:
        cell = failures.cell_of(job, codec, link).cell
        short, scale = quick or scale == 1, scale or cell.scale
        lengths = [least_s * part for least_s in OUTAGES_S[: 1 if short else None] for part in SPREAD]
        if (job, codec, link, control, scale, len(lengths) - 1) in table:
            continue
        one = cell.shape.trace(1, scale)
        lab = failures.lab(failures.profile_of(link, control.split(",")[0]), cell.shape.nodes, scale)
        lab = lab.model_copy(update={"tcp_rto_max_ms": 5000 if control == LIMITED else None})
        (plain,) = ends([(repeated(one, 8), lab)])
        step_s = (plain[-1] - plain[0]) / (len(plain) - 1)
        begins, at_s = [], plain[0]
        for length in lengths:
            begins.append(at_s := at_s + _SETTLED_STEPS[job] * step_s)
            at_s += 3.5 * length + step_s
        rows = [{"at": f"{at:.9f}s", "for": f"{each:.9f}s"} for at, each in zip(begins, lengths, strict=True)]
        (found,) = ends([(repeated(one, math.ceil(at_s / step_s)), faulty(lab, *rows)[0])])
        spans = [(end, end - begin) for begin, end in pairwise(found)]
        for number, length in enumerate(lengths):
            until = begins[number + 1] if number + 1 < len(begins) else math.inf
            cost_s = sum(span - step_s for end, span in spans if begins[number] <= end < until)
            table.add([Outage(job, codec, link, control, scale, number, length, step_s, cost_s)])


def drawn(table: csv_rows.Table, quick: bool) -> None:
    """Play trainings of three times the mean time between outages, whose lengths are those of `outages`."""
    arms = [(codec, LINKS[0], "10 min", OUTAGES_S[-1]) for codec in ("bf16", "int8")]
    for codec, link, mtbf, least_s in arms[:1] if quick else arms:
        todo = [seed for seed in range(1 if quick else SEEDS) if (codec, link, mtbf, least_s, seed) not in table]
        if not todo:
            continue
        cell, mtbf_s = failures.cell_of("pipeline", codec, link).cell, failures.MTBFS_S[mtbf]
        one = cell.shape.trace(1, cell.scale)
        lab = failures.lab(failures.profile_of(link), cell.shape.nodes, cell.scale)
        (plain,) = ends([(repeated(one, 8), lab)])
        step_s = (plain[-1] - plain[0]) / (len(plain) - 1)
        steps = math.ceil((1 if quick else 3) * mtbf_s / step_s)
        undisturbed_s = plain[0] + (steps - 1) * step_s
        labs = []
        for seed in todo:
            each = {"mtbf": f"{len(SPREAD) * mtbf_s}s", "until": f"{2 * undisturbed_s:.0f}s"}
            lengths = [f"{least_s * part:.9f}s" for part in SPREAD]
            rows = [{**each, "for": length, "seed": 10 * seed + at} for at, length in enumerate(lengths)]
            labs.append(faulty(lab, *rows))
        trace = repeated(one, steps)
        for seed, (_, faults), found in zip(todo, labs, ends([(trace, lab) for lab, _ in labs]), strict=True):
            lost_s = sum(fault.for_ns for fault in faults if fault.at_ns / 1e9 < found[-1]) / 1e9
            table.add([Drawn(codec, link, mtbf, least_s, seed, lost_s, undisturbed_s, found[-1])])


def transfers(table: csv_rows.Table, quick: bool) -> None:
    """Play every transfer of a state."""
    every = [(job, link, state) for job in failures.BYTES_PER_PARAMETER for link in LINKS for state in failures.STATES]
    for job, link, state in [("pipeline", LINKS[0], state) for state in ("fp32", "int8")] if quick else every:
        for what in ("checkpoint", "recovery"):
            if (job, link, state, what) in table or (job == "data" and what == "checkpoint"):
                continue
            size = failures.state_bytes(job, state, recovery=what == "recovery")
            scale = size // (_PACKETS // (10 if quick else 1) * 1448)
            nodes = failures.cell_of(job, "bf16", link).cell.shape.nodes
            lab = failures.lab(failures.profile_of(link), nodes, scale)
            trace = failures.transfer(nodes, failures.exchange(job, state, scale, recovery=what == "recovery"))
            ((end,),) = ends([(trace, lab)])
            ideal_ns = ideal_step_ns(trace, Pipes("star", lab.profiles, nodes), 1)
            table.add([Transfer(job, link, state, what, size / 1e6, end, ideal_ns / 1e9)])


def with_states(trace: Trace, chunk: int, chunks: int) -> Trace:
    """Return a pipeline's trace in which both stages also send each other chunks of their states, in own lanes.

    Each sends its next chunk when the other's has come.
    """
    first = 1 + max(tag for lane in trace.lanes for tag in lane.tag)
    lanes = [Lane(node, "state") for node in range(2)]
    for lane in lanes:
        for tag in range(first, first + chunks):
            lane.add(SEND, 0, 1 - lane.node, tag, chunk)
            lane.add(RECEIVE, 0, 1 - lane.node, tag)
        lane.starts.extend([len(lane)] * trace.steps)
    return Trace(trace.nodes, trace.labels, (*trace.lanes, *lanes), trace.about)


def beside(table: csv_rows.Table, quick: bool) -> None:
    """Play steps beside which states are sent, in chunks as large as the messages of the training."""
    steps = 12
    arms = [(codec, link) for codec in ("bf16", "int8", "int4(group=64)") for link in LINKS]
    for codec, link in arms[:1] if quick else arms:
        if (codec, link) in table:
            continue
        cell = failures.cell_of("pipeline", codec, link).cell
        lab = failures.lab(failures.profile_of(link), 2, cell.scale)
        chunk = -(-cell.shape.message_bytes[0] // cell.scale)
        plain = cell.shape.trace(steps, cell.scale)
        pair = [OverLinks(each, lab) for each in (plain, with_states(plain, chunk, 40 * steps))]
        alone, loaded = play_virtual(pair, prove_steady=False)
        stops = [start - 1 for start in plain.lanes[0].starts[2:]]
        begins, lasts = ([each.lanes[0].end_ns[stop] for each in (alone, loaded)] for stop in (stops[0], stops[-1]))
        alone_s, loaded_s = ((last - begin) / 1e9 for begin, last in zip(begins, lasts, strict=True))
        came = sum(begins[1] < ns <= lasts[1] for ns in loaded.lanes[-1].end_ns[1::2])
        each_s = (alone_s / (len(stops) - 1), loaded_s / (len(stops) - 1))
        table.add([Beside(codec, link, *each_s, chunk * cell.scale * came / loaded_s)])


def costs(table: csv_rows.Table, job: str, codec: str, link: str, state: str) -> failures.Costs:
    """Return the costs of a job whose peers are lost, from the played transfers and the played step."""
    found = {what: table.find(job, link, state, what) for what in ("checkpoint", "recovery")}
    check_s, recovery_s = (float(row["seconds"]) if row else 0.0 for row in found.values())
    cell = failures.cell_of(job, codec, link).cell
    lab = failures.lab(failures.profile_of(link), cell.shape.nodes, cell.scale)
    (plain,) = ends([(repeated(cell.shape.trace(1, cell.scale), 6), lab)])
    return failures.Costs((plain[-1] - plain[0]) / 5, check_s, failures.REPLACED_S + recovery_s)


def histories(table: csv_rows.Table, quick: bool, known: csv_rows.Table) -> None:
    """Play histories in which about three failures happen, with the interval of Young."""
    arms: list[tuple[str, str, str, str, str]] = [
        ("pipeline", codec, LINKS[0], state, mtbf)
        for codec, state in (("bf16", "fp32"), ("bf16", "int8"))
        for mtbf in ("10 min", "1 h")
    ]
    arms.append(("data", "bf16", LINKS[0], "fp32", "1 h"))
    for job, codec, link, state, mtbf in arms[2:3] if quick else arms:  # an int8 state is the shortest
        todo = [
            seed
            for seed in range(2 if mtbf == "10 min" and not quick else 1)
            if (job, codec, link, state, mtbf, seed) not in table
        ]
        if not todo:
            continue
        cost, mtbf_s = costs(known, job, codec, link, state), failures.MTBFS_S[mtbf]
        every = 1 if job == "data" else failures.whole_steps(failures.young_s(cost.checkpoint_s, mtbf_s), cost.step_s)
        share = failures.goodput(cost, every, mtbf_s)
        steps = math.ceil((1 if quick else 3) * mtbf_s * share / cost.step_s)
        cell = failures.cell_of(job, codec, link)
        lab = failures.lab(failures.profile_of(link), cell.cell.shape.nodes, cell.cell.scale)
        for seed in todo:
            events = list(failures.history(cost, every, mtbf_s, seed, steps))
            ((*_, end),) = ends([(failures.trace_of(events, cell, state), lab)])
            useful = sum(each.kind == "checkpoint" for each in events) * every * cost.step_s
            lost = sum(each.kind == "recovery" for each in events)
            simulated = failures.seconds(events, cost)
            table.add([History(job, codec, link, state, mtbf, every, seed, lost, useful, simulated, end)])


def main(asked: argparse.Namespace) -> None:
    """Play what the tables lack."""

    def table(name: str, kind: Any, key: Sequence[str]) -> csv_rows.Table:
        return csv_rows.Table(asked.output / f"{name}.csv", kind, *key)

    transfers(known := table("transfers", Transfer, Transfer._fields[:4]), asked.quick)
    beside(table("beside", Beside, Beside._fields[:2]), asked.quick)
    histories(table("histories", History, ("job", "codec", "link", "state", "mtbf", "seed")), asked.quick, known)
    drawn(table("drawn", Drawn, Drawn._fields[:5]), asked.quick)
    outages(table("outages", Outage, Outage._fields[:6]), asked.quick)


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, failures.HERE)
