"""One node of data parallel training over links: a worker, or a star's server. `pipeline.host` starts it.

What it does is its program (`jobs.data_parallel`), what it computes, encodes and decodes its `worker_node`, and who
runs it `pipeline.live`.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

from testbed.devices import flops
from testbed.errors import TransportError
from testbed.jobs.actions import Node
from testbed.jobs.asynchronous import GOODBYE
from testbed.jobs.data_parallel import MESSAGES, DataParallelJob
from testbed.pipeline.control import Ended, EvaluationDone, StepDone
from testbed.pipeline.ending import Ending, ServersEnding
from testbed.pipeline.job import NodeJob
from testbed.pipeline.live import run_place
from testbed.pipeline.pacing import Takes, takes
from testbed.pipeline.train import set_up_torch
from testbed.pipeline.wiring import Wiring
from testbed.policies.deco import MOST_STALENESS
from testbed.replicas.arrivals import Rounds, Server, training_of
from testbed.replicas.decision import as_stated, training_job
from testbed.replicas.leader import Leader
from testbed.replicas.learners import learner_of
from testbed.replicas.pace import worker_times
from testbed.replicas.worker import Learner
from testbed.replicas.worker_node import ExchangeNode, WorkerNode, named
from testbed.spec import RINGS, DataParallelSpec, Paced

_FRAMES = 4
"""Messages beyond its staleness that may wait unsent, or untaken, on one connection."""
_MOST = 4
"""How many times as long as fp32 a payload may be."""


def peers_of(data: DataParallelSpec, place: int) -> list[int]:
    """Return the places that one exchanges messages with: its server, all workers, all other workers, or in a ring
    those beside it.
    """
    workers = data.workers
    if data.exchange == "star":
        return list(range(workers)) if place == workers else [workers]
    if data.exchange in RINGS:
        return sorted({(place - 1) % workers, (place + 1) % workers})
    return [peer for peer in range(workers) if peer != place]


def node_takes(job: NodeJob) -> Takes | None:
    """Return how long a place takes for what. A server adds up in no time, and applies in an update's."""
    if not isinstance(job.compute, Paced) or job.stage == job.data.workers:
        apply_ns = job.compute.update_ns * job.compute.dilation if isinstance(job.compute, Paced) else 0
        return takes(job.compute, {"apply": apply_ns}, job.codec_cost)
    times = worker_times(job.compute, job.data, job.pipeline, job.stage)
    return takes(job.compute, {"local step": times.local_ns, "update": times.update_ns}, job.codec_cost)


def make_node(job: NodeJob, learner: Learner) -> Node:
    """Make what a place has. SpecError for more fragments than the model has tensors."""
    if job.data.arrivals is not None:
        training, codecs = training_of(job.recipe), as_stated(job.recipe).codecs
        if job.stage == job.data.workers:
            return Server(training, learner, codecs)
        return Rounds(training, job.stage, learner, codecs[job.stage])
    if job.stage < job.data.workers:
        return WorkerNode(job.recipe, job.stage, learner)
    return ExchangeNode(job.recipe, job.stage, [tuple(parameter.shape) for parameter in learner.parameters])


def live_job(job: NodeJob, raw_bytes: int) -> DataParallelJob:
    """Return what all places do; `raw_bytes` are of all tensors as fp32. One of them may choose for all."""
    does, data = training_job(job.recipe), job.data
    if data.deco is None:
        return does
    leader = data.workers if data.exchange == "star" else 0
    return replace(does, leader=leader, chooser=Leader.of(job, raw_bytes) if job.stage == leader else None)


def train_node(
    job: NodeJob,
    sockets: Sequence[socket.socket],
    report: Callable[[StepDone | EvaluationDone], None],
    asked: Callable[[], bool],
) -> Ended:
    """Build what the node needs, connect it, do its part, and take leave; returns why training ended.

    `asked` says whether a person wants it to end before its last step: all nodes do, after the same step (`ending`).
    """
    set_up_torch()
    with wire(job, sockets) as wiring:
        number = min(job.stage, job.data.workers - 1)  # a server needs the tensors' shapes, and perhaps an evaluation
        learner = learner_of(job.recipe, number, vocabulary=job.vocabulary, tokens=job.tokens)
        wiring.connect()
        return run_node(job, wiring, learner, report, asked)


def wire(job: NodeJob, sockets: Sequence[socket.socket]) -> Wiring:
    """Make a place's connections, to be entered: see there."""
    data, places = job.data, training_job(job.recipe).places
    return Wiring(
        job,
        sockets,
        places=places,
        peers=[peers_of(data, place) for place in range(len(places))],
        names=(*MESSAGES, GOODBYE),
        max_payload_bytes=_MOST * 4 * flops.whole_model(job.workload) + (1 << 20),
        max_frames=max(data.staleness) + _FRAMES,
    )


def run_node(
    job: NodeJob,
    wiring: Wiring,
    learner: Learner,
    report: Callable[[StepDone | EvaluationDone], None],
    asked: Callable[[], bool],
) -> Ended:
    """Do a connected place's part, and take leave; returns why training ended."""
    server, arrivals = job.stage == job.data.workers, job.data.arrivals is not None
    raw_bytes = 4 * sum(parameter.numel() for parameter in learner.parameters)
    does = training_of(job.recipe).job(job.compute.dilation) if arrivals else live_job(job, raw_bytes)
    furthest = max(*job.data.staleness, 0 if job.data.deco is None else MOST_STALENESS)
    ending = Ending(wiring.gather, asked, decides=job.stage == 0, steps=job.training.steps, furthest=furthest)
    ended: Ended = run_place(
        job,
        make_node(job, learner),
        does.program(job.stage),
        connections=wiring.connections,
        gather=wiring.gather,
        counters=wiring.counters,
        ending=ServersEnding(asked if server else lambda: False) if arrivals else ending,
        takes=node_takes(job),
        named=named,
        sides={peer: peer for peer in wiring.connections},
        report=report,
    )
    # An asynchronous server misses nobody who is lost by now.
    with contextlib.suppress(*([TransportError] if server and arrivals else [])):
        wiring.leave()
    return ended
