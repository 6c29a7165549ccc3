"""A codec in Flower: messages of the mod and the strategy alone, and a whole simulation."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from testbed.errors import SpecError
from testbed.nodes.bucket import Bucket
from tests.small_replicas import same

pytestmark = pytest.mark.flower
SHAPES = {"0.weight": (48, 32), "0.bias": (48,), "1.weight": (2000,)}
ROUNDS = 10


def weights(number: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()} | {
        "steps": torch.tensor(number)
    }


@pytest.fixture
def a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages can be made, as in an app that runs."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1, raising=False)


class Kept:
    """A strategy that keeps what it is given."""

    def __init__(self, nodes: list[int]) -> None:
        self._nodes, self.given = nodes, list[Any]()

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> list[Any]:
        from flwr.app import Message, RecordDict

        config["server-round"] = server_round
        content = RecordDict({"arrays": arrays, "config": config})
        return [Message(content=content, message_type="train", dst_node_id=node) for node in self._nodes]

    def aggregate_train(self, server_round: int, replies: list[Any]) -> tuple[Any, Any]:
        self.given = [reply.content["arrays"].to_torch_state_dict() for reply in replies]
        return None, None

    def summary(self) -> None:
        """Say nothing."""


@pytest.mark.parametrize("text", ["fp32", "int8", "ef(topk(0.05))", "delta(int8)", "zstd(int4(64))"])
def test_what_crosses_is_what_a_workers_message_is_in_a_cell_with_local_steps(text: str, a_run: None) -> None:
    """With clients that are made anew in every round, and a server that goes on from a checkpoint."""
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

    from testbed.torch.flower import coded_mod, coded_strategy

    nodes, kept = [3, 2**63 + 5], Kept([3, 2**63 + 5])
    strategy = coded_strategy(kept, text, seed=3)
    contexts = {
        node: Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={}) for node in nodes
    }
    shapes = list(SHAPES.values())
    ends = {node: [Bucket(shapes, text, seed=3, sender=node) for _ in range(2)] for node in nodes}
    for number in range(1, ROUNDS + 1):
        before = weights(number)
        messages = strategy.configure_train(number, ArrayRecord(before), ConfigRecord(), None)
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            after = weights(1000 * number + node % 97)

            def train(message: Any, context: Any, after: Any = after) -> Any:
                return Message(RecordDict({"arrays": ArrayRecord(after)}), reply_to=message)

            reply = coded_mod(text, seed=3)(message, contexts[node], train)
            sender, receiver = ends[node]
            payload = sender.encode([before[name] - after[name] for name in SHAPES], number - 1)
            record = reply.content["arrays"]
            assert set(record) == {"testbed.payload", "steps"}
            assert record["testbed.payload"].data == payload
            replies.append((reply, after, receiver.decode(payload, number - 1)))
        if number == 5:
            torch.save(strategy.state_dict(), saved := io.BytesIO())
            saved.seek(0)
            sent = strategy._sent
            strategy = coded_strategy(kept, text, seed=3)
            strategy.load_state_dict(torch.load(saved, weights_only=True))
            strategy._sent = sent
        strategy.aggregate_train(number, [reply for reply, _, _ in replies])
        for given, (_, after, changes) in zip(kept.given, replies, strict=True):
            assert list(given) == list(before)
            assert given["steps"] == after["steps"]
            expected = [before[name] - change for name, change in zip(SHAPES, changes, strict=True)]
            assert same([given[name] for name in SHAPES], expected)


def test_a_round_without_a_number_is_refused_and_evaluations_are_left_alone(a_run: None) -> None:
    from flwr.app import ArrayRecord, Context, Message, RecordDict

    from testbed.torch.flower import coded_mod

    context = Context(run_id=1, node_id=3, node_config={}, state=RecordDict(), run_config={})
    content = RecordDict({"arrays": ArrayRecord(weights(1))})

    def answer(message: Any, context: Any) -> Any:
        return Message(RecordDict({"arrays": ArrayRecord(weights(2))}), reply_to=message)

    with pytest.raises(SpecError, match='a training message has no "server-round"'):
        coded_mod("int8")(Message(content, message_type="train", dst_node_id=3), context, answer)
    reply = coded_mod("int8")(Message(content, message_type="evaluate", dst_node_id=3), context, answer)
    assert set(reply.content["arrays"]) == {*SHAPES, "steps"}


def simulated(text: str) -> list[float]:
    """Fit y = x + 1 with two clients over five rounds, with ray, and return the loss after each."""
    import numpy as np
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from testbed.torch.flower import coded_mod, coded_strategy

    client, server, losses = ClientApp(mods=[coded_mod(text)] if text else []), ServerApp(), list[float]()

    @client.train()
    def train(message: Any, context: Any) -> Any:
        weight = message.content["arrays"]["weight"].numpy()
        target = np.arange(2000, dtype=np.float32) / 2000 + 1
        after = ArrayRecord([weight - np.float32(0.5) * (weight - target)])
        record = ArrayRecord({"weight": after["0"]})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    @server.main()
    def main(grid: Any, context: Any) -> None:
        def measure(server_round: int, arrays: Any) -> Any:
            target = np.arange(2000, dtype=np.float32) / 2000 + 1
            losses.append(float(np.square(arrays["weight"].numpy() - target).mean()))

        strategy: Any = FedAvg(fraction_evaluate=0.0)
        first = ArrayRecord({"weight": ArrayRecord([np.zeros(2000, np.float32)])["0"]})
        strategy = coded_strategy(strategy, text) if text else strategy
        strategy.start(grid=grid, initial_arrays=first, num_rounds=5, evaluate_fn=measure)

    run_simulation(server, client, 2, backend_config={"client_resources": {"num_cpus": 1}})
    return losses


@pytest.mark.slow
def test_a_simulation_learns_with_a_coded_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.torch_codecs.ranks import in_processes

    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    (losses,) = in_processes(simulated, tmp_path / "ranks", "ef(int4(64))", ranks=1)
    assert len(losses) == 6
    assert all(later < 0.3 * earlier for earlier, later in itertools.pairwise(losses))
