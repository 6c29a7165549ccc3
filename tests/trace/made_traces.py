"""Traces for tests: a pipeline's, and any that is whole (hypothesis)."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from testbed.jobs.actions import Sizes, Work
from testbed.jobs.loop import Links
from testbed.jobs.pipeline import PipelineJob, orders_of
from testbed.spec import PipelineSpec
from testbed.trace.format import RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace
from testbed.trace.played import NodeCounters, Played
from testbed.trace.simulate import simulate
from testbed.trace.tracing import TracedJob


def pipeline(stages: int, microbatches: int, steps: int, work_ns: int = 1_000_000, size: int = 4096) -> Trace:
    """All forwards, then all backwards, of `work_ns` each; then all stages meet."""
    spec = PipelineSpec(stages=stages, microbatches=microbatches, schedule="gpipe", in_flight=stages)
    works_ns = {"forward": work_ns, "backward": work_ns, "update": work_ns // 2}
    return TracedJob(
        PipelineJob(orders_of(spec), steps),
        [Sizes(lambda key: size)] * stages,
        lambda place, action: works_ns.get(action.what) if isinstance(action, Work) else None,
    ).trace()


def two_nodes(first: Sequence[tuple[int, ...]], second: Sequence[tuple[int, ...]] = ()) -> Trace:
    """Two nodes with a lane each, in one step; operations as (kind, peer, tag, value)."""
    lanes = (Lane(0, "compute"), Lane(1, "compute"))
    for lane, operations in zip(lanes, (first, second), strict=True):
        for kind, peer, tag, value in operations:
            lane.add(kind, peer=peer, tag=tag, value=value)
        lane.end_step()
    return Trace(("a", "b"), ("work",), lanes)


def messages(*sizes: int, pause_ns: int | None = None, steps: bool = False) -> Trace:
    """Node 0 sends node 1 messages, one after the other, or each after a pause; in one step, or `steps`: one each."""
    sender, receiver = Lane(0, "a"), Lane(1, "b")
    for tag, size in enumerate(sizes):
        if pause_ns is not None:
            sender.add(WORK, value=pause_ns)
        sender.add(SEND, peer=1, tag=tag, value=size)
        receiver.add(RECEIVE, peer=0, tag=tag)
        for lane in (sender, receiver) if steps or tag == len(sizes) - 1 else ():
            lane.end_step()
    return Trace(("a", "b"), ("",), (sender, receiver))


def sent_bytes(trace: Trace, node: int | None = None) -> list[int]:
    """Return the sizes of what is sent, by lane and in order: by one node, or by all."""
    return [
        value
        for lane in trace.lanes
        for kind, value in zip(lane.kind, lane.value, strict=True)
        if kind == SEND and node in (None, lane.node)
    ]


def played_over(
    trace: Trace,
    links: Links | None = None,
    *,
    steady: tuple[int, int] | None = None,
    counters: Sequence[tuple[NodeCounters, ...]] | None = None,
) -> Played:
    """Return what a player would write over links that are formulas; None: over none."""
    counted = counters or [tuple(NodeCounters(0, 0, 0, 0) for _ in trace.nodes)] * trace.steps
    lanes = simulate(trace, links=links)
    return Played("virtual", trace.steps, steady, lanes, [*counted], [()] * trace.steps, 0)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any trace that makes sense: operations are drawn in an order in which they can be done."""
    nodes = draw(st.integers(1, 4))
    owners = draw(st.lists(st.integers(0, nodes - 1), min_size=1, max_size=6))
    lanes = [Lane(node, f"lane {number}") for number, node in enumerate(owners)]
    labels = draw(st.lists(st.text(max_size=5), min_size=1, max_size=3))
    label = st.integers(0, len(labels) - 1)
    tag = 0
    flying: list[tuple[Lane, int, int]] = []
    counts: dict[int, int] = {}
    for _ in range(draw(st.integers(0, 4))):
        for _ in range(draw(st.integers(0, 12))):
            lane = draw(st.sampled_from(lanes))
            kind = draw(st.sampled_from([WORK, SEND, RECEIVE, SIGNAL, WAIT]))
            if kind == WORK:
                lane.add(WORK, label=draw(label), value=draw(st.integers(0, 2**40)))
            elif kind == SEND and nodes > 1:
                peer = (lane.node + draw(st.integers(1, nodes - 1))) % nodes
                if not (homes := [other for other in lanes if other.node == peer]):
                    continue
                lane.add(SEND, label=draw(label), peer=peer, tag=tag, value=draw(st.integers(1, 2**40)))
                flying.append((draw(st.sampled_from(homes)), lane.node, tag))
                tag += 1
            elif kind == RECEIVE and flying:
                home, sender, which = flying.pop(draw(st.integers(0, len(flying) - 1)))
                waking_ns = draw(st.sampled_from([0, 0, 999, 3_000_000]))
                home.add(RECEIVE, label=draw(label), peer=sender, tag=which, value=waking_ns)
            elif kind == SIGNAL:
                event = draw(st.integers(0, 2))
                lane.add(SIGNAL, tag=event)
                counts[event] = counts.get(event, 0) + 1
            elif kind == WAIT and counts:
                event = draw(st.sampled_from(sorted(counts)))
                lane.add(WAIT, tag=event, value=draw(st.integers(0, counts[event])))
        for lane in lanes:
            lane.end_step()
    for home, sender, which in flying:
        home.add(RECEIVE, peer=sender, tag=which)
    for lane in lanes:
        lane.end_step()
    about = draw(st.dictionaries(st.text(max_size=3), st.integers(), max_size=2))
    return Trace(tuple(f"node {node}" for node in range(nodes)), tuple(labels), tuple(lanes), about)
