"""Train one stage of a model over links: what it does is its program (`jobs.pipeline`), what it computes, encodes and
decodes its `node.StageNode`, and who runs it `live`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

import torch

from testbed.errors import StageError
from testbed.jobs.actions import Key
from testbed.jobs.pipeline import MESSAGES, training_job
from testbed.jobs.recorder import Named
from testbed.message_key import Side
from testbed.pipeline import faults
from testbed.pipeline.control import Ended, EvaluationDone, StepDone
from testbed.pipeline.gather import Stops
from testbed.pipeline.job import StageJob, StageWork
from testbed.pipeline.live import run_place
from testbed.pipeline.node import StageNode, build_model, make_node, open_data
from testbed.pipeline.pacing import Takes, takes
from testbed.pipeline.wiring import Wiring, largest_payload
from testbed.spec import Paced
from testbed.workloads import models as workloads

_FRAMES = 2
"""Steps' worth of frames that may wait unsent or untaken."""


def train_job(
    job: StageJob,
    sockets: Sequence[socket.socket],
    report: Callable[[StepDone | EvaluationDone], None],
    asked: Callable[[], bool],
) -> Ended:
    """Set torch up, build the stage, connect it to its neighbours, train, and take leave in order; returns why training
    ended.

    `sockets` are those of the job's `Gather`; they are closed at the end. `asked` says whether the job is to finish
    before its time. StageError, with advice, where memory does not suffice.
    """
    set_up_torch()
    node: StageNode | None = None
    workload, pipeline, parts = job.workload, job.pipeline, job.microbatches
    tokens = workload.batch_size // parts * workload.sequence_length
    does = training_job(pipeline, job.training, workload.validation_batches)
    try:
        with Wiring(
            job,
            sockets,
            places=does.places,
            peers=[neighbours(stage, pipeline.stages) for stage in range(pipeline.stages)],
            names=tuple(MESSAGES.values()),
            max_payload_bytes=largest_payload(tokens, workloads.hidden_width(workload)),
            max_frames=_FRAMES * parts,
        ) as wiring:
            model = build_model(job)
            data = open_data(job)
            wiring.connect()
            sides = sides_of(job.stage, pipeline.stages)
            measure = {sides[peer]: connection.measure for peer, connection in wiring.connections.items()}
            node = make_node(job, measure=measure, model=model, data=data)
            ended: Ended = run_place(
                job,
                node,
                does.program(job.stage),
                connections=wiring.connections,
                gather=wiring.gather,
                counters=wiring.counters,
                ending=Stops(job.training.budget_s, job.compute.dilation, asked),
                takes=stage_takes(job),
                named=lambda key: named(job, key),
                sides=sides,
                report=report,
            )
            wiring.leave()
        return ended
    except (MemoryError, RuntimeError, OSError) as error:
        explain_memory(job.name, node, error)
        raise


def neighbours(stage: int, stages: int) -> list[int]:
    """Return the stages that one exchanges messages with."""
    return [other for other in (stage - 1, stage + 1) if 0 <= other < stages]


def sides_of(stage: int, stages: int) -> dict[int, Side]:
    """Return where its neighbours are, by number."""
    return {other: "upstream" if other < stage else "downstream" for other in neighbours(stage, stages)}


def named(work: StageWork, key: Key) -> Named:
    """Return how records name a message."""
    number = work.number_in_record(key.phase, key.step, key.part)
    return Named("forward" if key.what == MESSAGES["F"] else "backward", number, with_peer=False)


def stage_takes(job: StageJob) -> Takes | None:
    """Return how long a stage takes for what."""
    compute, durations = job.compute, {}
    if isinstance(compute, Paced):
        forward, backward = ((ns * job.pipeline.stages)[job.stage] for ns in (compute.forward_ns, compute.backward_ns))
        durations = {"forward": forward, "backward": backward, "update": compute.update_ns}
        durations = {what: ns * compute.dilation for what, ns in durations.items()}
    return takes(compute, durations, job.codec_cost)


def explain_memory(name: str, node: StageNode | None, error: Exception) -> None:
    """Raise the StageError, with advice, for an exception that means that memory could not be had; no other.

    `node` is None while the stage's model is built.
    """
    if faults.is_out_of_memory(error):
        where = "while its model was built" if node is None else node.doing
        raise faults.out_of_memory(name, where, error) from error


def set_up_torch() -> None:
    """Have torch use one thread and deterministic kernels. StageError when the environment or torch says otherwise."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"), "torch threads": torch.get_num_threads()}
    if threads != {"OMP_NUM_THREADS": "1", "torch threads": 1}:
        raise StageError(f"a stage works with one thread: set OMP_NUM_THREADS=1 before it starts; found {threads}")
