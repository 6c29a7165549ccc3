"""A job with a collective that a codec may take and one that it leaves alone: RANK RANKS FOLDER."""

import sys

import torch
import torch.distributed as dist

from testbed.torch.autoload import load


def main(rank: int, ranks: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    for _ in range(2):
        dist.all_reduce(torch.ones(4096))
        dist.broadcast(torch.ones(16), src=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    load()  # a fork of a process with torch has missed the hook
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
