"""Run one job from end to end: set torch up, build the stage, connect it to its neighbours, train, and take leave in order."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch

from testbed.codecs.make import make
from testbed.counters import DeviceCounters
from testbed.errors import StageError
from testbed.pipeline import connect
from testbed.pipeline.boundary import Boundary, Side, sends
from testbed.pipeline.control import Evaluated, Step
from testbed.pipeline.gather import Gather
from testbed.pipeline.job import StageJob
from testbed.pipeline.stage import Stage
from testbed.pipeline.transport import Connection
from testbed.workloads.build import build
from testbed.workloads.data import Data

_SWITCH_INTERVAL_S = 0.0005
"""How long the maths may keep the interpreter lock from a transport thread: Python's 5 ms would show in every message."""
_FRAMES = 2
"""Steps' worth of frames that may wait unsent or untaken."""


def set_up_torch() -> None:
    """One thread, deterministic kernels. StageError when the environment or torch says otherwise."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    found = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"), "torch threads": torch.get_num_threads()}
    if found != {"OMP_NUM_THREADS": "1", "torch threads": 1}:
        raise StageError(f"a stage works with one thread: set OMP_NUM_THREADS=1 before it starts; found {found}")


def run(job: StageJob, sockets: Sequence[socket.socket], report: Callable[[Step | Evaluated], None]) -> None:
    """Do the whole job. `sockets` are those of its `Gather`; both they and what is opened here are closed at the end."""
    set_up_torch()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    name = f"stage {job.stage}"
    with ExitStack() as stack:
        gather = Gather(job.stage, sockets, job.limits.message_s)
        stack.callback(gather.close)
        counters = None
        if job.devices:
            counters = DeviceCounters(job.devices, job.overhead_bytes)
            stack.callback(counters.close)
        listener = stack.enter_context(connect.listen(job.listen, name)) if job.listen is not None else None

        stages, seed = job.pipeline.stages, job.training.seed
        model = build(
            job.workload,
            stage=job.stage,
            stages=stages,
            seed=seed,
            vocabulary=job.vocabulary,
            layers=job.pipeline.layers,
        )
        tokens = np.load(job.tokens, mmap_mode="r")
        data = Data(tokens, job.workload.sequence_length, job.workload.batch_size, seed)

        upstream = downstream = None
        if job.downstream is not None:
            peer = f"{name} <-> stage {job.stage + 1} ({job.downstream})"
            sock = connect.connect(job.downstream, peer, job.limits.connect_s)
            downstream = _boundary(stack, job, "downstream", sock, peer, model.width)
        if listener is not None:
            peer = f"{name} <-> stage {job.stage - 1}"
            sock = connect.accept(listener, peer, job.limits.connect_s)
            upstream = _boundary(stack, job, "upstream", sock, peer, model.width)
        gather.exchange([])  # the first step starts when every stage is there

        steps = stack.enter_context((Path(job.folder) / f"steps-{job.stage}.jsonl").open("x", encoding="utf8"))
        Stage(
            job,
            model=model,
            data=data,
            upstream=upstream,
            downstream=downstream,
            gather=gather,
            counters=counters,
            report=report,
        ).run(steps)
        for boundary in (upstream, downstream):
            if boundary is not None:
                boundary.connection.close(job.limits.message_s)


def _boundary(stack: ExitStack, job: StageJob, side: Side, sock: socket.socket, name: str, width: int) -> Boundary:
    tensor_bytes = job.workload.batch_size // job.pipeline.microbatches * job.workload.sequence_length * width * 4
    connection = Connection(
        sock,
        name=name,
        token=bytes.fromhex(job.token),
        incoming=sends("upstream" if side == "downstream" else "downstream"),
        # room for codecs that send more than the tensor (new bases, codebooks), and an end to what a hostile length can take
        max_payload_bytes=4 * tensor_bytes + (1 << 20),
        max_frames=_FRAMES * job.pipeline.microbatches,
    )
    stack.enter_context(connection)
    return Boundary(
        side,
        index=job.stage - (side == "upstream"),
        seed=job.training.seed,
        make=partial(make, job.codec),
        connection=connection,
        timeout_s=job.limits.message_s,
    )
