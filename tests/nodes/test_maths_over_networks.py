"""The network never changes the maths: losses and weights are those of an unshaped lab, bit for bit, in a guest.

Each node is a process in its own namespace. All networks share the guest. Two kinds of training cross each network, and
every codec and kind one that disturbs in all these ways.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from testbed.codecs.kept_state import digest_of
from testbed.jobs.actions import Node
from testbed.net.lab import Lab, LabSpec
from testbed.profiles import GilbertElliott, LinkProfile, PipeFault, load_profile
from testbed.records import StepRecord
from testbed.runtime.gather import make_sockets
from testbed.runtime.place_job import Endpoint, Limits, PlaceJob
from testbed.training.place import run_place
from tests.over_loopback import become_node, jobs_over_loopback, nodes_of, read_steps, run_places
from tests.small_replicas import EXCHANGES
from tests.training.test_checkpoints import MEMORIES, ORDERS, PIPELINE_CODECS
from tests.training.test_live_checkpoints import Kind, pipeline, replicas

pytestmark = [
    pytest.mark.netem,
    pytest.mark.virtual_clock,
    pytest.mark.usefixtures("one_thread", "tiny_models"),
    pytest.mark.timeout(3000),
]

S = 10**9
LINK = load_profile("link(2Mbit, 25ms)")
WHOLE = {"at_ns": 0, "for_ns": 3600 * S}


def link(fault: dict[str, float] | None = None, **changes: Any) -> LinkProfile:
    """A home link, with a fault or other changes of both its pipes."""
    more = changes | ({"faults": (PipeFault.model_validate(fault),)} if fault else {})
    return LINK.model_copy(update={way: getattr(LINK, way).model_copy(update=more) for way in ("up", "down")})


BURSTS = GilbertElliott(enter_bad=0.0158, leave_bad=0.3, lost_in_bad=1.0, lost_in_good=0.0)
NETWORKS = {
    "1 % loss": link(WHOLE | {"loss": 0.01}),
    "bursts of 5 %": link(loss=BURSTS),
    "reordering": link(WHOLE | {"reorder": 0.1}),
    "duplication": link(WHOLE | {"duplicate": 0.1}),
    "corruption": link(WHOLE | {"corrupt": 0.02}),
    "jitter of 20 ms": link(jitter_ns=20_000_000),
    "outage": link({"at_ns": S, "for_ns": 2 * S, "loss": 1.0}),
}


def worst_of(way: str) -> Mapping[str, Any]:
    """A direction that disturbs in all these ways. Only one corrupts: TCP's sum cannot see two bits that cancel."""
    at_all_times = {"reorder": 0.1, "duplicate": 0.1, **({"corrupt": 0.02} if way == "up" else {})}
    faults = (
        {"at_ns": 0, "for_ns": S // 2} | at_all_times,
        {"at_ns": S // 2, "for_ns": S // 2, "loss": 1.0},
        {"at_ns": S, "for_ns": 3600 * S} | at_all_times,
    )
    return {"loss": BURSTS, "jitter_ns": 20_000_000, "faults": tuple(map(PipeFault.model_validate, faults))}


WORST = LINK.model_copy(update={way: getattr(LINK, way).model_copy(update=worst_of(way)) for way in ("up", "down")})


def name_of(kind: Kind) -> str:
    """Say which training it is."""
    data = kind.cell.data
    words = [] if data is None else [data.exchange, str(data.staleness), str(data.local_steps), str(data.streaming)]
    return " ".join(["pipeline" if data is None else "workers", kind.cell.codec, *words])


EVERY_KIND = [
    *(pipeline(codec) for codec in PIPELINE_CODECS),
    *(pipeline("delta-int8", **form) for form in ({"schedule": "gpipe"}, {"recompute": True}, {"accumulation": 2})),
    *(
        replicas(exchange, "bf16" if exchange == "all-reduce" else MEMORIES[(first + number) % len(MEMORIES)], **order)
        for first, exchange in enumerate(EXCHANGES)
        for number, order in enumerate(ORDERS.values())
    ),
]


class Outcome(NamedTuple):
    losses: list[list[float | None]]
    weights: list[str]
    """Digest of each node's weights."""
    seconds: float
    dropped: int


def run(kind: Kind, profile: LinkProfile, folder: Path) -> Outcome:
    """Train over links of this profile, each node in a process of its own."""
    folder.mkdir()
    with ExitStack() as stack:
        spec = LabSpec(
            topology="star", profiles=(profile,), nodes=kind.cell.nodes, engine="netem", engine_reason="test"
        )
        lab = stack.enter_context(Lab(spec))
        ends = tuple(Endpoint(address=node.address, port=29500) for node in lab.nodes)
        limits = Limits(connect_s=600, message_s=3600)
        jobs = jobs_over_loopback(kind.cell, folder, endpoints=ends, limits=limits, **kind.told)
        sockets = make_sockets(len(jobs))
        began = time.monotonic()
        lab.play()
        children = []
        for job, own, node in zip(jobs, sockets, lab.nodes, strict=True):
            if (pid := os.fork()) == 0:
                be_node(kind, job, own, sockets, node.namespace.fd)
            children.append(pid)
        for sock in (each for own in sockets for each in own):
            sock.close()
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * len(jobs)
        seconds = time.monotonic() - began
        counts = [way for ways in lab.counters().values() for way in ways.values()]
    weights = [(folder / f"weights-{place}").read_text() for place in range(kind.cell.nodes)]
    losses = losses_of([read_steps(folder, place) for place in range(kind.cell.nodes)])
    return Outcome(losses, weights, seconds, sum(way.dropped_buffer for way in counts))


def losses_of(records: Sequence[Sequence[StepRecord]]) -> list[list[float | None]]:
    return [[record.loss for record in node] for node in records]


def weights_of(node: Node) -> str:
    """SHA-256 of a node's weights; empty for a server."""
    return digest_of(node.weights()) if hasattr(node, "weights") else ""


def be_node(kind: Kind, job: PlaceJob, own: Any, sockets: Sequence[Any], space: int) -> None:
    """Be a node in this process, and end with it."""
    status = 1
    try:
        become_node(space, own, sockets)
        training = kind.make()
        nodes = nodes_of(training)
        run_place(job, own, lambda message: None, lambda: False, lambda setting: training)
        (Path(job.folder) / f"weights-{job.place}").write_text(weights_of(nodes[job.place]))
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


def unshaped(kind: Kind, found: Path) -> tuple[list[list[float | None]], list[str]]:
    """Return the losses and weights over loopback, found in a process of its own: mappings of a guest's are limited."""
    if (pid := os.fork()) == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            training = kind.make()
            nodes = nodes_of(training)
            loopback = run_places(kind.cell, lambda setting: training, **kind.told)
            assert loopback.errors == [None] * kind.cell.nodes
            weights = [weights_of(node) for _, node in sorted(nodes.items())]
            found.write_text(json.dumps([losses_of(loopback.records), weights]))
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    losses, weights = json.loads(found.read_text())
    return losses, weights


@pytest.mark.parametrize("kind", [pipeline("delta-int8"), replicas("all-gather", "ef(topk(0.1))")], ids=name_of)
def test_losses_and_weights_are_the_same_over_every_network(kind: Kind, tmp_path: Path) -> None:
    expected = unshaped(kind, tmp_path / "unshaped")
    calm = run(kind, link(), tmp_path / "calm")
    assert not calm.dropped
    for number, (name, profile) in enumerate(NETWORKS.items()):
        outcome = run(kind, profile, tmp_path / str(number))
        print(f"{name_of(kind)} over {name}: {outcome.seconds:.3f} s, {outcome.dropped} dropped")
        assert (outcome.losses, outcome.weights) == expected, name
        assert outcome.seconds != calm.seconds, f"{name} disturbed nothing"
        assert bool(outcome.dropped) == (name in ("1 % loss", "bursts of 5 %", "outage")), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY_KIND, ids=name_of)
def test_every_codec_and_kind_has_the_same_losses_and_weights_over_the_worst_network(
    kind: Kind, tmp_path: Path
) -> None:
    outcome = run(kind, WORST, tmp_path / "worst")
    print(f"{name_of(kind)}: {outcome.seconds:.3f} s, {outcome.dropped} dropped")
    assert outcome.seconds > 1, "it met no outage"
    assert outcome.dropped
    assert (outcome.losses, outcome.weights) == unshaped(kind, tmp_path / "unshaped")
