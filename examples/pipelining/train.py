"""Train one model as a pipeline with a stage per process (torch.distributed.pipelining, schedule 1F1B), over gloo."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH, MICROBATCHES, MICROBATCH, STEPS = 256, 4, 256, 10


def main() -> None:
    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    stage = PipelineStage(module, rank, stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)

    torch.manual_seed(100)  # all processes know the data; the first stage uses the inputs, the last the targets
    inputs = torch.randn(MICROBATCHES * MICROBATCH, WIDTH)
    targets = torch.roll(inputs, 1, dims=1)

    for step in range(STEPS):
        begin = time.perf_counter()
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        elif rank == stages - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        loss = f"loss {torch.stack(losses).mean().item():.4f} " if losses else ""
        print(f"stage {rank} step {step} {loss}{1e3 * (time.perf_counter() - begin):.3f} ms", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
