"""Train a small classifier with DistributedDataParallel, one process per machine, over gloo."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STEPS = 12


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    features = torch.randn(4096, 256)
    labels = (features @ torch.randn(256, 10)).argmax(dim=1)
    dataset = TensorDataset(features, labels)
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset, shuffle=False))

    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    for step, (inputs, targets) in zip(range(STEPS), loader):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # gradients are averaged over all processes here
        optimizer.step()
        seconds = time.perf_counter() - begin
        print(f"rank {rank} step {step} loss {loss.item():.4f} {1e3 * seconds:.3f} ms", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
