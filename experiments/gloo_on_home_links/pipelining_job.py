"""PyTorch's own pipelining in two nodes: 1F1B, four micro-batches of 256 KiB. Nothing in it knows of testbed."""

import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH, TOKENS, MICROBATCHES, STEPS = 256, 256, 4, 10

if __name__ == "__main__":
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))
    stage = PipelineStage(layers, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)
    inputs = torch.randn(MICROBATCHES * TOKENS, WIDTH)
    for step in range(STEPS):
        began = time.monotonic_ns()
        schedule.step(*([inputs] if rank == 0 else []), **({"target": inputs} if rank == ranks - 1 else {}))
        for parameter in layers.parameters():
            parameter.grad = None
        sys.stdout.write(f"step {step} {time.monotonic_ns() - began}\n")
    dist.destroy_process_group()
