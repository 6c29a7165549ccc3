"""What measure.py has run in every node over gloo: `gloo_job.py SIZES COLLECTIVES BYTES`; a line of JSON an item.

Nothing in it knows of testbed. An item begins after a barrier and a second of rest, and is repeated, so that TCP's
windows are open. Of messages node 0 sends and node 1 receives: `early` posts the receive half a second before, `late`
so long after that the message could have been there.
"""

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

REPEATS = 3
REST_S, LEAD_S, LATE_S = 1.0, 0.5, 6.0


def note(what: str, size: int, receive: str, began_ns: int) -> None:
    """Print when it began and ended."""
    ended = time.monotonic_ns()
    noted = {"what": what, "size": size, "receive": receive, "began": began_ns, "ended": ended}
    sys.stdout.write(json.dumps(noted) + "\n")


def message(size: int, receive: str) -> None:
    """Send a message from rank 0 to rank 1."""
    content = torch.zeros(size, dtype=torch.uint8)
    time.sleep(REST_S)
    if dist.get_rank() == 0:
        time.sleep(LEAD_S if receive == "early" else 0)
        began = time.monotonic_ns()
        dist.isend(content, 1).wait()
    else:
        time.sleep(LATE_S if receive == "late" else 0)
        began = time.monotonic_ns()
        dist.recv(content, 0)
    note("message", size, receive, began)


def collective(what: str, size: int) -> None:
    """Run a collective over a tensor of `size` bytes: of all-gather what each rank has, of the others the whole."""
    ranks = dist.get_world_size()
    whole = torch.zeros(size // 4)
    parts = [torch.zeros(size // 4 // ranks) for _ in range(ranks)]
    run: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather([torch.zeros(size // 4) for _ in range(ranks)], whole),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.zeros(size // 4 // ranks), parts),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    time.sleep(REST_S)
    began = time.monotonic_ns()
    run[what]()
    note(what, size, "", began)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    sizes, collectives = ([word for word in text.split(",") if word] for text in sys.argv[1:3])
    for size in map(int, sizes):
        for receive in ("early", "late"):
            for _ in range(REPEATS):
                dist.barrier()
                message(size, receive)
    for what in collectives:
        for _ in range(REPEATS):
            dist.barrier()
            collective(what, int(sys.argv[3]))
    dist.destroy_process_group()
