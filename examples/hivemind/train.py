"""Train together with whoever else is there: hivemind's optimizer, and its DHT in place of a server.

train.py ADDRESS          begins, and tells everyone who asks where it can be found
train.py ADDRESS FIRST    asks the one at the address FIRST, and joins
"""

import socket
import sys
import threading
import time

import hivemind
import torch
from hivemind.compression import Float16Compression
from torch import nn

BATCH, TARGET_BATCH, EPOCHS = 32, 960, 3
PORT = 4000  # where the first peer tells its multiaddresses, in place of a message to friends


def ask(first: str) -> list[str]:
    while True:
        try:
            with socket.create_connection((first, PORT)) as peer, peer.makefile() as said:
                return said.read().split()
        except OSError:  # it has not begun
            time.sleep(0.5)


def tell(server: socket.socket, text: str) -> None:
    while True:
        with server.accept()[0] as peer:
            peer.sendall(text.encode())


def connect(address: str, first: str | None = None) -> hivemind.DHT:
    peers = [] if first is None else ask(first)
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{address}/tcp/0"], initial_peers=peers, use_relay=False, use_auto_relay=False, start=True
    )
    if first is None:
        found_at = "\n".join(str(each) for each in dht.get_visible_maddrs())
        threading.Thread(target=tell, args=(socket.create_server((address, PORT)), found_at), daemon=True).start()
    return dht


def main() -> None:
    address, *first = sys.argv[1:]
    dht = connect(address, *first)
    torch.manual_seed(0)
    teacher = nn.Linear(256, 10)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="three_homes",
        params=model.parameters(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        batch_size_per_step=BATCH,
        target_batch_size=TARGET_BATCH,  # of all peers together: then they average
        matchmaking_time=3.0,
        averaging_timeout=30.0,
        grad_compression=Float16Compression(),
    )
    torch.manual_seed(int(address.split(".")[-1]))
    begin = time.perf_counter()
    while optimizer.local_epoch < EPOCHS:
        features = torch.randn(BATCH, 256)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), teacher(features).argmax(dim=1))
        loss.backward()
        time.sleep(0.3)  # a batch of a model that is worth distributing takes time
        before = optimizer.local_epoch
        optimizer.step()
        if optimizer.local_epoch != before:
            peers = optimizer.tracker.global_progress.num_peers
            seconds = time.perf_counter() - begin
            print(f"epoch {optimizer.local_epoch} peers {peers} loss {loss.item():.4f} {seconds:.3f} s", flush=True)
            begin = time.perf_counter()
    time.sleep(10)  # let others finish theirs
    optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
