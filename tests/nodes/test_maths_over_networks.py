"""The network never changes the maths: losses and weights are those of an unshaped lab, bit for bit, in a guest.

Each node is a process in its own namespace. All networks share the guest.
"""

from __future__ import annotations

import hashlib
import os
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from testbed.codecs.make import make as make_codec
from testbed.jobs.kind import Setting
from testbed.net.lab import Lab, LabSpec
from testbed.profiles import GilbertElliott, LinkProfile, PipeFault, load_profile
from testbed.records import StepRecord
from testbed.runtime.gather import make_sockets
from testbed.runtime.place_job import Endpoint, Limits, PlaceJob
from testbed.spec import Cell, recipe_of
from testbed.training.place import run_place
from tests.nodes.test_stage import TOKENS, ToyTraining, a_cell
from tests.over_loopback import become_node, jobs_over_loopback, read_steps, run_places
from tests.small_replicas import SmallTraining, a_recipe, live_cell

pytestmark = [
    pytest.mark.netem,
    pytest.mark.virtual_clock,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.timeout(3000),
]

S = 10**9
LINK = load_profile("link(2Mbit, 25ms)")
WHOLE = {"at_ns": 0, "for_ns": 3600 * S}


def link(fault: dict[str, float] | None = None, **changes: Any) -> LinkProfile:
    """A home link, with a fault or other changes of both its pipes."""
    more = changes | ({"faults": (PipeFault.model_validate(fault),)} if fault else {})
    return LINK.model_copy(update={way: getattr(LINK, way).model_copy(update=more) for way in ("up", "down")})


NETWORKS = {
    "1 % loss": link(WHOLE | {"loss": 0.01}),
    "bursts of 5 %": link(loss=GilbertElliott(enter_bad=0.0158, leave_bad=0.3, lost_in_bad=1.0, lost_in_good=0.0)),
    "reordering": link(WHOLE | {"reorder": 0.1}),
    "duplication": link(WHOLE | {"duplicate": 0.1}),
    "corruption": link(WHOLE | {"corrupt": 0.02}),
    "jitter of 20 ms": link(jitter_ns=20_000_000),
    "outage": link({"at_ns": S, "for_ns": 2 * S, "loss": 1.0}),
}


class Outcome(NamedTuple):
    losses: list[list[float | None]]
    weights: list[str]
    """Digest of each node's weights."""
    seconds: float
    dropped: int


class Kind(NamedTuple):
    """A kind of training, of small models."""

    cell: Cell
    make: Callable[[Setting], Any]
    weights: Callable[[Any, int], Iterable[Tensor]]


def pipeline() -> Kind:
    asked = a_cell(3, steps=8, warmup_steps=0, evaluate_every=0)
    return Kind(
        asked.model_copy(update={"codec": "delta-int8"}),
        lambda setting: ToyTraining(setting, partial(make_codec, "delta-int8")),
        lambda training, place: training.models[place].parameters(),
    )


def ring() -> Kind:
    recipe = a_recipe("all-gather", "ef(topk(0.1))", workers=3, steps=8, shares=(2, 1, 1))
    return Kind(live_cell(recipe), lambda setting: SmallTraining(recipe), SmallTraining.weights)


def run(kind: Kind, profile: LinkProfile, folder: Path) -> Outcome:
    """Train over links of this profile, each node in a process of its own."""
    folder.mkdir()
    with ExitStack() as stack:
        spec = LabSpec(topology="star", profiles=(profile,), nodes=3, engine="netem", engine_reason="test")
        lab = stack.enter_context(Lab(spec))
        ends = tuple(Endpoint(address=node.address, port=29500) for node in lab.nodes)
        limits = Limits(connect_s=600, message_s=600)
        jobs = jobs_over_loopback(kind.cell, folder, TOKENS, endpoints=ends, limits=limits)
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
    weights = [(folder / f"weights-{place}").read_text() for place in range(3)]
    losses = losses_of([read_steps(folder, place) for place in range(3)])
    return Outcome(losses, weights, seconds, sum(way.dropped_buffer for way in counts))


def losses_of(records: Sequence[Sequence[StepRecord]]) -> list[list[float | None]]:
    return [[record.loss for record in node] for node in records]


def digest(kind: Kind, training: Any, places: Iterable[int]) -> list[str]:
    """SHA-256 of each place's weights."""
    held = [[tensor.detach().contiguous().numpy().tobytes() for tensor in kind.weights(training, p)] for p in places]
    return [hashlib.sha256(b"".join(each)).hexdigest() for each in held]


def be_node(kind: Kind, job: PlaceJob, own: Any, sockets: Sequence[Any], space: int) -> None:
    """Be a node in this process, and end with it."""
    status = 1
    try:
        become_node(space, own, sockets)
        training = kind.make(Setting(recipe_of(kind.cell), TOKENS, ""))
        run_place(job, own, lambda message: None, lambda: False, lambda setting: training)
        (Path(job.folder) / f"weights-{job.place}").write_text(*digest(kind, training, [job.place]))
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


@pytest.mark.parametrize("make", [pipeline, ring])
def test_losses_and_weights_are_the_same_over_every_network(make: Callable[[], Kind], tmp_path: Path) -> None:
    kind = make()
    training = kind.make(Setting(recipe_of(kind.cell), TOKENS, ""))
    loopback = run_places(kind.cell, lambda setting: training)
    assert loopback.errors == [None] * 3
    unshaped = losses_of(loopback.records), digest(kind, training, range(3))
    calm = run(kind, link(), tmp_path / "calm")
    assert not calm.dropped
    for number, (name, profile) in enumerate(NETWORKS.items()):
        outcome = run(kind, profile, tmp_path / str(number))
        print(f"{make.__name__} over {name}: {outcome.seconds:.3f} s, {outcome.dropped} dropped")
        assert (outcome.losses, outcome.weights) == unshaped, name
        assert outcome.seconds != calm.seconds, f"{name} disturbed nothing"
        assert bool(outcome.dropped) == (name in ("1 % loss", "bursts of 5 %", "outage")), name
