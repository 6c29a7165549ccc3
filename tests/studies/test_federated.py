"""Federated averaging of digits: what its rounds are, by other means."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from testbed.policies import dagc, thresholds
from testbed.studies.federated import FederatedSpec, Federation
from testbed.workloads.images import batch_loss, build_network, images, score
from testbed.workloads.networks import DIGITS
from testbed.workloads.shards import ShardBatches


def spec(**changes: Any) -> FederatedSpec:
    return FederatedSpec(
        **{
            "model": "digits-mlp",
            "clients": 3,
            "rounds": 3,
            "local_steps": 1,
            "batch_size": 8,
            "learning_rate": 0.2,
            "learning_rate_floor": 0.5,
            "alpha": 0.5,
            "skew": 4.0,
            "seed": 3,
            **changes,
        }
    )


def test_one_local_step_is_sgd_on_the_mean_weighted_by_shares() -> None:
    federation = Federation(spec())
    rounds = list(federation.train(lambda number, stepsize: ["fp32"] * 3))
    model = build_network("digits-mlp", DIGITS, 3)
    batches = [ShardBatches(shard, 8, seed=3, worker=client) for client, shard in enumerate(federation.shards)]
    for each in rounds:
        model.zero_grad()
        losses = [batch_loss(model, images("digits").train.at(batch.batch(each.number))) for batch in batches]
        torch.stack([share * loss for share, loss in zip(federation.shares, losses, strict=True)]).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= each.stepsize * parameter.grad
        assert score(model, images("digits").test).loss == pytest.approx(each.loss, rel=1e-4)
    assert [each.stepsize for each in rounds] == pytest.approx([0.2, 0.15, 0.1])


def test_a_run_repeats_and_each_client_has_its_ratio() -> None:
    federation = Federation(spec(local_steps=2))
    ratios = dagc.ratios(federation.shares, 0.1)
    texts = [f"ef(topk({ratio:.6g}, tensor))" for ratio in ratios]
    first, second = (list(federation.train(lambda number, stepsize: texts)) for _ in range(2))
    assert first == second
    assert first[-1].kept == pytest.approx(0.1, abs=2e-3)
    assert sorted(map(len, federation.shards)) == [len(shard) for shard in reversed(federation.shards)]
    assert [sum(row) for row in federation.classes] == [len(shard) for shard in federation.shards]


def test_a_threshold_changes_from_round_to_round_and_error_feedback_goes_on() -> None:
    federation = Federation(spec())
    first = thresholds.first_threshold(federation.first_update().numpy(), 0.05)
    asked = []

    def codecs(number: int, stepsize: float) -> list[str]:
        asked.append(thresholds.threshold(first, stepsize, 0.2))
        return [f"ef(ht({asked[-1]:.9f}))"] * 3

    rounds = list(federation.train(codecs))
    assert asked == pytest.approx([first, 0.75 * first, 0.5 * first])
    assert rounds[0].kept == pytest.approx(0.05, abs=5e-3)
    # what was held back in the first round is sent as well
    without = list(federation.train(lambda number, stepsize: [codecs(number, stepsize)[0][3:-1]] * 3))
    assert rounds[1].kept > without[1].kept


def test_each_client_s_bytes_are_known() -> None:
    federation = Federation(spec())
    (first, *_) = federation.train(lambda number, stepsize: ["topk(0.5, tensor)", "fp32", "topk(0.1, tensor)"])
    assert sum(first.by_client) == first.payload_bytes
    assert first.by_client[1] > first.by_client[0] > first.by_client[2]
