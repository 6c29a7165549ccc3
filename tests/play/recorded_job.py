"""A small job of two or more ranks over gloo, recorded: `recorded_job.py RANK RANKS FOLDER`."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from testbed.errors import SpecError
from testbed.play.recorder import Recorder


def main(rank: int, ranks: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    own = dist.all_reduce
    with Recorder(folder / "job") as recorder:
        for _ in range(3):
            time.sleep(0.02)
            handle = dist.isend(torch.ones(1000), after)
            taken = torch.zeros(1000)
            dist.recv(taken, before)
            handle.wait()
            time.sleep(0.01)
            gradient = torch.ones(500)
            dist.all_reduce(gradient)
            assert float(gradient[0]) == ranks
            parts = [torch.zeros(10) for _ in range(ranks)]
            work = dist.all_gather(parts, torch.ones(10), async_op=True)
            time.sleep(0.01)
            work.wait()
            dist.broadcast(taken, src=ranks - 1)
            dist.barrier()
            recorder.step()
        with contextlib.suppress(SpecError):
            dist.reduce(gradient, 0)
            raise AssertionError("a collective that cannot be recorded must be refused")
    assert dist.all_reduce is own
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
