"""Federated averaging of a small classifier with Flower: the server's side and the clients' side."""

import time

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

FEATURES, CLASSES, EXAMPLES, ROUNDS = 256, 64, 512, 3

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    weights = ArrayRecord([np.zeros((FEATURES, CLASSES), dtype=np.float32)])
    begin = time.perf_counter()
    result = FedAvg(min_available_nodes=2, min_train_nodes=2, fraction_evaluate=0.0).start(
        grid=grid, initial_arrays=weights, num_rounds=ROUNDS
    )
    for number, metrics in result.train_metrics_clientapp.items():
        print(f"round {number} loss {metrics['loss']:.4f}", flush=True)
    print(f"{ROUNDS} rounds in {time.perf_counter() - begin:.3f} s", flush=True)


@client.train()
def train(message: Message, context: Context) -> Message:
    weights = message.content["arrays"].to_numpy_ndarrays()[0].copy()
    task = np.random.default_rng(0).normal(size=(FEATURES, CLASSES))
    features = np.random.default_rng(1 + int(context.node_config["partition-id"])).normal(size=(EXAMPLES, FEATURES))
    labels = (features @ task).argmax(axis=1)
    for _ in range(10):
        scores = features @ weights
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances = scores / scores.sum(axis=1, keepdims=True)
        loss = -np.log(chances[range(EXAMPLES), labels]).mean()
        chances[range(EXAMPLES), labels] -= 1
        weights -= features.T @ chances / EXAMPLES
    content = {
        "arrays": ArrayRecord([weights.astype(np.float32)]),
        "metrics": MetricRecord({"loss": float(loss), "num-examples": EXAMPLES}),
    }
    return Message(content=RecordDict(content), reply_to=message)
