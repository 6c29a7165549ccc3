"""Runs a function in several processes over gloo on loopback, or over gloo groups of several threads."""

from __future__ import annotations

import datetime
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import testbed.torch
from tests import forked

PATIENCE = datetime.timedelta(seconds=60)


def in_processes(job: Callable[..., Any], folder: Path, *arguments: Any, ranks: int = 2, codecs: str = "") -> list[Any]:
    """Call `job(*arguments)` in each rank of a default group, whose operations have codecs of the seed 3; returns what
    they return, by rank.
    """
    folder.mkdir(parents=True)
    torch.save(arguments, folder / "arguments.pt")
    file = Path(inspect.getfile(job)).relative_to(Path(__file__).parents[2])
    name = f"{'.'.join(file.with_suffix('').parts)}:{job.__qualname__}"
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        forked.Program(["-m", __name__, name, str(folder), str(rank), str(ranks), codecs], env=env, merged=True)
        for rank in range(ranks)
    ]
    outputs = [program.communicate(600)[0] for program in started]
    assert [program.returncode for program in started] == [0] * ranks, "\n".join(outputs)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def in_threads(job: Callable[[dist.ProcessGroup, int], Any], ranks: int) -> list[Any]:
    """Call `job(group, rank)` in a thread for each rank; returns what they return. Raises the first error."""
    store, returned, errors = dist.HashStore(), [None] * ranks, list[BaseException]()

    def run(rank: int) -> None:
        try:
            returned[rank] = job(gloo_group(store, rank, ranks), rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    return returned


def gloo_group(store: dist.Store, rank: int, ranks: int) -> dist.ProcessGroup:
    """Return a group that torch's tables do not know."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = PATIENCE
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    group = dist.ProcessGroup(store, rank, ranks)
    gloo = dist.ProcessGroupGloo(store, rank, ranks, options)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def _main(name: str, folder: str, rank: str, ranks: str, codecs: str) -> None:
    module, _, function = name.partition(":")
    torch.set_num_threads(1)
    if codecs:
        testbed.torch.code_groups(codecs, seed=3)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(ranks), timeout=PATIENCE
    )
    arguments = torch.load(Path(folder, "arguments.pt"), weights_only=False)
    torch.save(getattr(importlib.import_module(module), function)(*arguments), Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
