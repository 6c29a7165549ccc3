"""A job that does all that torch.distributed offers over gloo, and prints what came of it: RANK RANKS FOLDER.

It knows nothing of testbed but the hook that `import torch` calls, which a fork of a process with torch has missed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from testbed.torch.autoload import load


def own(rank: int, size: int = 6) -> torch.Tensor:
    """Return values that are another rank's in no place."""
    return torch.arange(size, dtype=torch.float32) + 100 * rank


def collectives(rank: int, ranks: int, group: Any = None, asynchronous: bool = False) -> dict[str, Any]:
    """Do every collective in a group whose size is `ranks`, as which this is the rank number `rank`."""
    done: dict[str, Any] = {}

    def do(name: str, result: Any, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        work = function(*arguments, group=group, async_op=asynchronous, **keywords)
        if asynchronous:
            work.wait()
        done[name] = result

    operators = ("SUM", "PRODUCT", "MIN", "MAX") if not asynchronous else ("SUM",)
    for name in operators:
        do(f"all_reduce {name}", value := own(rank), dist.all_reduce, value, op=getattr(dist.ReduceOp, name))
    root = dist.get_global_rank(group, ranks - 1) if group else ranks - 1
    do("broadcast", value := own(rank), dist.broadcast, value, src=root)
    do("reduce", value := own(rank), dist.reduce, value, dst=root)
    if rank != ranks - 1:
        done.pop("reduce")  # only the root's is defined
    do("all_gather", parts := [torch.zeros(6) for _ in range(ranks)], dist.all_gather, parts, own(rank))
    do("into", value := torch.zeros(6 * ranks), dist.all_gather_into_tensor, value, own(rank))
    inputs = [own(rank) + k for k in range(ranks)]
    do("reduce_scatter", value := torch.zeros(6), dist.reduce_scatter, value, inputs)
    do("scattered", value := torch.zeros(6), dist.reduce_scatter_tensor, value, torch.cat(inputs))
    do("all_to_all", parts := [torch.zeros(6) for _ in range(ranks)], dist.all_to_all, parts, inputs)
    do("single", value := torch.zeros(6 * ranks), dist.all_to_all_single, value, torch.cat(inputs))
    gathered = [torch.zeros(6) for _ in range(ranks)] if rank == ranks - 1 else None
    do("gather", gathered, dist.gather, own(rank), gathered, dst=root)
    do("scatter", value := torch.zeros(6), dist.scatter, value, inputs if rank == ranks - 1 else None, src=root)
    if not asynchronous:
        dist.barrier(group)
        dist.monitored_barrier(group)
        objects: list[Any] = [None] * ranks
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank}, group)
        sent = [{"from": rank}] if rank == ranks - 1 else [None]
        dist.broadcast_object_list(sent, root, group)
        done["objects"] = [objects, sent]
    return done


def messages(rank: int, ranks: int) -> dict[str, Any]:
    after, before, done = (rank + 1) % ranks, (rank - 1) % ranks, {}
    first, second, third = (torch.zeros(6) for _ in range(3))
    handle = dist.isend(own(rank), after, tag=3)
    dist.recv(first, before, tag=3)
    handle.wait()
    operations = [dist.P2POp(dist.irecv, second, before), dist.P2POp(dist.isend, own(rank), after)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    handle = dist.isend(own(rank), after)
    if ranks == 2:
        done["anyone"] = dist.recv(third)
    else:
        dist.recv(third, before)
    handle.wait()
    return done | {"received": [first, second, third]}


def training(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    done: dict[str, Any] = {}

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 16))

    x, y = torch.full((8, 8), 0.1 * (rank + 1)), torch.ones(8, 16)
    for hook in (None, default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        parallel = DistributedDataParallel(model(), bucket_cap_mb=0.001)
        if hook:
            parallel.register_comm_hook(None, hook)
        for _ in range(3):
            torch.nn.functional.mse_loss(parallel(x), y).backward()
        done[f"ddp {hook and hook.__name__}"] = [each.grad for each in parallel.parameters()]
    mesh = init_device_mesh("cpu", (ranks,))
    sharded = model()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(sharded(x), y).backward()
        optimizer.step()
    done["fsdp"] = [each.full_tensor() for each in sharded.parameters()]
    state = {"model": sharded.state_dict()}
    checkpoint.save(state, checkpoint_id=folder / "checkpoint")
    with torch.no_grad():
        for each in sharded.parameters():
            each.zero_()
    checkpoint.load(state, checkpoint_id=folder / "checkpoint")
    done["loaded"] = [each.full_tensor() for each in state["model"].values()]
    torch.manual_seed(rank)
    layer = torch.nn.Linear(8, 8)
    schedule = Schedule1F1B(
        PipelineStage(layer, rank, ranks, torch.device("cpu")), 4, loss_fn=torch.nn.functional.mse_loss
    )
    for _ in range(2):
        schedule.step(*([torch.ones(8, 8)] if rank == 0 else []), **({"target": y[:, :8]} if rank == ranks - 1 else {}))
    done["pipeline"] = layer.weight.grad
    return done


def main(rank: int, ranks: int, folder: Path) -> None:
    load()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    done = {"world": collectives(rank, ranks), "later": collectives(rank, ranks, asynchronous=True)}
    pairs = [dist.new_group([0, other]) for other in range(1, ranks)]
    everybody = dist.new_group(list(reversed(range(ranks))))
    for pair in pairs if rank == 0 else [pairs[rank - 1]]:
        done[f"pair {dist.get_process_group_ranks(pair)}"] = collectives(dist.get_rank(pair), 2, pair)
    done["everybody"] = collectives(dist.get_rank(everybody), ranks, everybody)
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("data", "model"))
    done["mesh"] = [
        mesh.get_local_rank("data"),
        mesh["data"].get_group().size(),
        dist.get_world_size(mesh["model"].get_group()),
    ]
    done["functional"] = [
        all_reduce(own(rank), "sum", everybody).clone(),
        all_gather_tensor(own(rank), 0, everybody).clone(),
        reduce_scatter_tensor(own(rank, 6 * ranks), "sum", 0, everybody).clone(),
    ]
    done["messages"] = messages(rank, ranks)
    done["training"] = training(rank, ranks, folder)
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND)
        raise AssertionError("gloo refuses this")
    dist.destroy_process_group()
    assert not dist.is_initialized()
    print(repr(done))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_printoptions(threshold=10**6, precision=9)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
