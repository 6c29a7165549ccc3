"""Train with DiLoCo: workers go 20 steps on their own, then average what they have learned (torchft, gloo)."""

import os
import time

import torch
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

SYNC_EVERY, ROUNDS, BATCH = 20, 5, 64


def main() -> None:
    group = int(os.environ["REPLICA_GROUP_ID"])
    torch.manual_seed(0)
    teacher = nn.Linear(256, 10)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=2,
        use_async_quorum=False,  # DiLoCo asks for it
        replica_id=f"diloco_{group}",
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
    )
    torch.manual_seed(1 + group)  # every worker has data of its own
    with DiLoCo(manager, [model], inner, outer, sync_every=SYNC_EVERY):
        for round_ in range(ROUNDS):
            begin = time.perf_counter()
            for _ in range(SYNC_EVERY):
                features = torch.randn(BATCH, 256)
                inner.zero_grad()
                loss = nn.functional.cross_entropy(model(features), teacher(features).argmax(dim=1))
                loss.backward()
                inner.step()  # the 20th averages over the workers
            seconds = time.perf_counter() - begin
            print(
                f"worker {group} round {round_} with {manager.num_participants()} workers "
                f"loss {loss.item():.4f} {1e3 * seconds:.3f} ms",
                flush=True,
            )
    manager.shutdown()


if __name__ == "__main__":
    main()
