"""A node's message that is damaged, repeated, missing or foreign ends the run, and is named."""

from __future__ import annotations

import time

import pytest

from testbed.errors import TransportError
from testbed.faults import NodeFault
from testbed.runtime.place_job import Limits
from tests.over_loopback import RanPlaces, run_places
from tests.training.test_live_checkpoints import Kind, pipeline, replicas

pytestmark = pytest.mark.usefixtures("one_thread", "tiny_models")
SAYS = {
    "damaged": r"the payload of the .* is damaged: its CRC does not match",
    "repeated": r"the peer sent the .* twice",
    "missing": r"waited for the .*, but the peer sent the|nothing arrived within 12 s of waiting for the",
    "foreign": r"a frame of another run: token f{32}, expected 0{32}",
}


def run(kind: Kind, frame: str, at_ns: int = 0) -> RanPlaces:
    training = kind.make()
    built = list(map(training.load, range(kind.cell.nodes)))
    training.load = lambda place: built[place]  # type: ignore[method-assign]
    fault = NodeFault.model_validate({"node": 1, "at_ns": at_ns, "for_ns": 1, "frame": frame})
    cell = kind.cell.model_copy(update={"fault": (fault,)})
    told = {"played_at_ns": time.monotonic_ns()}
    limits = Limits(connect_s=300, message_s=12 if frame == "missing" else 300)  # a silence is what "missing" waits for
    return run_places(cell, lambda setting: training, told=told, limits=limits, **kind.told)


@pytest.mark.slow
@pytest.mark.parametrize("frame", SAYS)
@pytest.mark.parametrize("kind", [pipeline("delta-int8"), replicas("star", "ef(topk(0.05))")], ids=["stages", "star"])
def test_a_spoiled_frame_ends_the_run_and_is_named(kind: Kind, frame: str) -> None:
    errors = [str(error) for error in run(kind, frame).errors if isinstance(error, TransportError)]
    assert errors
    with pytest.raises(TransportError, match=SAYS[frame]):
        raise TransportError("\n".join(errors))


@pytest.mark.slow
def test_one_message_is_spoiled_and_not_one_to_each_peer() -> None:
    ran = run(replicas("all-to-all", "ef(topk(0.05))"), "missing")
    ended = [any(record.step == 0 for record in records) for records in ran.records]
    assert ended[1], "it has the messages of both others"
    assert ended.count(True) == 2, "one of them has its message"


@pytest.mark.slow
def test_a_fault_after_the_end_spoils_nothing() -> None:
    kind = pipeline("delta-int8")
    calm = run(kind, "damaged", at_ns=10**13)
    assert calm.errors == [None] * kind.cell.nodes
    assert [[record.loss for record in node] for node in calm.records] == [
        [record.loss for record in node] for node in run(kind, "foreign", at_ns=10**13).records
    ]
