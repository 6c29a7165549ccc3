"""A job that counts what its sockets send for each operation over gloo: RANK RANKS FOLDER; prints a JSON list.

Every line: call, bytes of the kernel's own count to each other rank, and what the observer noted of the operation.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from testbed.tcp_info import read_tcp_info
from testbed.torch import observed, process_group


def operations(rank: int, ranks: int, size: int) -> dict[str, Callable[[], Any]]:
    """Return every operation with tensors of `size` bytes, or as many times that as it needs."""
    count = size // 4
    root = ranks - 1
    after, before = (rank + 1) % ranks, (rank - 1) % ranks

    def own() -> torch.Tensor:
        return torch.ones(count)

    def all_own() -> torch.Tensor:
        return torch.ones(count * ranks)

    def parts() -> list[torch.Tensor]:
        return [own() for _ in range(ranks)]

    def neighbours() -> None:
        handle = dist.isend(own(), after)
        dist.recv(own(), before)
        handle.wait()

    def anyone() -> None:
        if rank:
            dist.send(own(), 0)
        else:
            for _ in range(ranks - 1):
                dist.recv(own())

    def uneven() -> None:
        given = [(peer + 1) * (rank + 1) for peer in range(ranks)]
        taken = [(peer + 1) * (rank + 1) for peer in range(ranks)]
        dist.all_to_all_single(torch.empty(sum(taken), 8), torch.ones(sum(given), 8), taken, given)

    def coalesced(name: str) -> Callable[[], Any]:
        group = dist.group.WORLD
        if name == "reduce_scatter":
            return lambda: group.reduce_scatter_single_coalesced([own(), own()], [all_own(), all_own()]).wait()
        return lambda: group.all_gather_single_coalesced([all_own(), all_own()], [own(), own()]).wait()

    def coalesced_sum() -> None:
        dist.all_reduce_coalesced([own(), own()])

    return {
        "all_reduce": lambda: dist.all_reduce(own()),
        "all_reduce of odd size": lambda: dist.all_reduce(torch.ones(count + 1, dtype=torch.float16)),
        "all_reduce_coalesced": coalesced_sum,
        "reduce": lambda: dist.reduce(own(), root),
        "all_gather": lambda: dist.all_gather(parts(), own()),
        "all_gather of bytes": lambda: dist.all_gather(
            [torch.zeros(1, dtype=torch.uint8) for _ in range(ranks)], torch.zeros(1, dtype=torch.uint8)
        ),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(all_own(), own()),
        "all_gather coalesced": coalesced("all_gather"),
        "reduce_scatter": lambda: dist.reduce_scatter(own(), parts()),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(own(), all_own()),
        "reduce_scatter coalesced": coalesced("reduce_scatter"),
        "broadcast": lambda: dist.broadcast(own(), root),
        "all_to_all": lambda: dist.all_to_all(parts(), parts()),
        "all_to_all_single": lambda: dist.all_to_all_single(all_own(), all_own()),
        "uneven all_to_all": uneven,
        "gather": lambda: dist.gather(own(), parts() if rank == root else None, root),
        "scatter": lambda: dist.scatter(own(), parts() if rank == root else None, root),
        "send and recv": neighbours,
        "recv from anyone": anyone,
        "barrier": lambda: dist.barrier(),
        "monitored_barrier": lambda: dist.monitored_barrier(),
        "all_gather_object": lambda: dist.all_gather_object([None] * ranks, "x" * size),
        "broadcast_object_list": lambda: dist.broadcast_object_list(["x" * size if rank == 0 else None]),
    }


class Sockets:
    """This process's TCP connections, by the rank at their other end."""

    def __init__(self, store: dist.Store, rank: int, ranks: int) -> None:
        self._store, self._ranks, self._meetings = store, ranks, 0
        self._sockets = list(_connections())
        store.set(f"ports {rank}", json.dumps([sock.getsockname()[1] for sock in self._sockets]))
        self._owner = {port: peer for peer in range(ranks) for port in json.loads(store.get(f"ports {peer}"))}

    def meet(self) -> None:
        """Wait for every rank, over the store."""
        self._meetings += 1
        self._store.add(name := f"meeting {self._meetings}", 1)
        while self._store.add(name, 0) < self._ranks:
            time.sleep(0.001)

    def sent(self) -> dict[int, int]:
        """Return how many bytes were sent to each rank, once all of them have been acknowledged."""
        self.meet()
        total: dict[int, int] = {}
        for sock in self._sockets:
            while _unsent(sock):
                time.sleep(0.001)
            peer = self._owner[sock.getpeername()[1]]
            total[peer] = total.get(peer, 0) + read_tcp_info(sock).bytes_acked
        self.meet()
        return total


def _connections() -> Iterator[socket.socket]:
    seen = set()
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            # A duplicate may have a number that the listing itself had used.
            if not (link := str(entry.readlink())).startswith("socket:") or link in seen:
                continue
            seen.add(link)
            sock = socket.socket(fileno=os.dup(int(entry.name)))
            if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.getpeername()
                yield sock
        except OSError:
            continue


def _unsent(sock: socket.socket) -> int:
    waiting = array.array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, waiting)
    return waiting[0]


@contextmanager
def _noted(log: observed.Log) -> Iterator[list[dict[str, Any]]]:
    lines: list[dict[str, Any]] = []
    own = log.note
    log.note = lambda kind, **fields: lines.append({"kind": kind, **fields})  # type: ignore[method-assign]
    yield lines
    log.note = own  # type: ignore[method-assign]


def main(rank: int, ranks: int, folder: Path) -> None:
    process_group.install(*observed.layers({"folder": str(folder)}))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    dist.barrier()
    sockets = Sockets(dist.FileStore(f"{folder}/other", ranks), rank, ranks)
    log = observed.active_log()
    assert log is not None
    counted = []
    for size in (1024, 4 << 20):
        for name, operation in operations(rank, ranks, size).items():
            before = sockets.sent()
            with _noted(log) as lines:
                operation()
                after = sockets.sent()
            sent = {peer: after[peer] - before[peer] for peer in after}
            counted.append({"name": name, "size": size, "sent": sent, "lines": lines})
    print(json.dumps(counted))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
