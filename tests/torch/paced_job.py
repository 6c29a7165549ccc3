"""A DistributedDataParallel job whose sleeps and all-reduces are listed in order: RANK RANKS FOLDER; TESTBED_TORCH."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from testbed.torch import autoload, pace, process_group
from testbed.torch.process_group import WrappedGroup

done: list[list[object]] = []


class Listed(WrappedGroup):
    def allreduce(self, tensors, *rest):  # type: ignore[no-untyped-def]
        done.append(["all_reduce", sum(tensor.numel() for tensor in tensors)])
        return self.inner.allreduce(tensors, *rest)


def main(rank: int, ranks: int, folder: Path) -> None:
    wanted = json.loads(os.environ["TESTBED_TORCH"])
    if "pace" in wanted:
        pace.sleep_ns = lambda duration: done.append(["sleep", duration])
        pace.layers(wanted)
        process_group.install(Listed)
    else:
        autoload.install(wanted)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(40, 40, bias=False) for _ in range(3)]
    activation = torch.nn.ReLU(inplace=True)  # which full backward hooks would refuse
    model = DistributedDataParallel(
        torch.nn.Sequential(layers[0], activation, layers[1], layers[2]), bucket_cap_mb=0.001
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(8, 40)).square().mean().backward()
        optimizer.step()
        if step == 2:
            done.clear()
    dist.destroy_process_group()
    print(json.dumps(done))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
