"""Run one job from end to end: set torch up, build the stage, connect it to its neighbours, train, and take leave in order."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from testbed.codecs.make import make
from testbed.errors import StageError
from testbed.pipeline import faults
from testbed.pipeline.boundary import Boundary
from testbed.pipeline.control import Ended, Evaluated, Step
from testbed.pipeline.job import StageJob
from testbed.pipeline.pacing import watch_for
from testbed.pipeline.port import Side
from testbed.pipeline.recorder import Recorder
from testbed.pipeline.stage import Stage
from testbed.pipeline.transport import Connection
from testbed.pipeline.wiring import Wiring
from testbed.workloads.build import build
from testbed.workloads.data import Data


def set_up_torch() -> None:
    """One thread, deterministic kernels. StageError when the environment or torch says otherwise."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    found = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"), "torch threads": torch.get_num_threads()}
    if found != {"OMP_NUM_THREADS": "1", "torch threads": 1}:
        raise StageError(f"a stage works with one thread: set OMP_NUM_THREADS=1 before it starts; found {found}")


def run(
    job: StageJob,
    sockets: Sequence[socket.socket],
    report: Callable[[Step | Evaluated], None],
    asked: Callable[[], bool],
) -> Ended:
    """Do the whole job; returns why training ended. `sockets` are those of its `Gather`; they are closed at the end.

    `asked` says whether the job is to finish before its time. StageError, with advice, where memory does not suffice.
    """
    set_up_torch()
    stage: Stage | None = None
    try:
        with Wiring(job, sockets) as wiring:
            model = build(
                job.workload,
                stage=job.stage,
                stages=job.pipeline.stages,
                seed=job.training.seed,
                vocabulary=job.vocabulary,
                layers=job.pipeline.layers,
            )
            data = Data(np.load(job.tokens, mmap_mode="r"), job.workload, job.training.seed)
            wiring.connect()
            upstream = _boundary(job, "upstream", wiring.upstream)
            downstream = _boundary(job, "downstream", wiring.downstream)
            ports = [boundary for boundary in (upstream, downstream) if boundary is not None]
            with (Path(job.folder) / f"steps-{job.stage}.jsonl").open("x", encoding="utf8") as steps:
                stage = Stage(
                    job,
                    model=model,
                    data=data,
                    upstream=upstream,
                    downstream=downstream,
                    gather=wiring.gather,
                    recorder=Recorder(job, steps, ports=ports, counters=wiring.counters, report=report),
                    watch=watch_for(job.compute, job.stage),
                    asked=asked,
                )
                ended = stage.run()
            wiring.leave()
        return ended
    except (MemoryError, RuntimeError, OSError) as error:
        if not faults.is_out_of_memory(error):
            raise
        raise faults.out_of_memory(
            job.stage, "while its model was built" if stage is None else stage.doing, error
        ) from error


def _boundary(job: StageJob, side: Side, connection: Connection | None) -> Boundary | None:
    if connection is None:
        return None
    return Boundary(
        side,
        index=job.stage - (side == "upstream"),
        seed=job.training.seed,
        make=partial(make, job.codec),
        connection=connection,
        timeout_s=job.limits.message_s,
    )
