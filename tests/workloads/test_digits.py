"""Digits, their networks, and shards: what data parallel training is tried on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import SpecError, UnknownNameError
from testbed.workloads.digits import MODELS, batch_loss, build_model, digits, score
from testbed.workloads.shards import ShardBatches, apportion, class_mixes, data_shares, divide

LABELS = digits().train.labels.numpy()


def test_no_image_is_learned_and_tested():
    train, test = digits()
    assert (len(train.labels), len(test.labels)) == (1437, 360)
    images = torch.cat([train.images, test.images])
    assert len(images.unique(dim=0)) == len(images)
    assert float(images.min()) == 0.0
    assert float(images.max()) == 1.0


@pytest.mark.parametrize("name", MODELS)
def test_a_network_follows_from_its_seed_and_learns(name):
    state = torch.random.get_rng_state()
    model, again, other = build_model(name, 1), build_model(name, 1), build_model(name, 2)
    assert torch.equal(state, torch.random.get_rng_state())
    first, same, different = (torch.cat([p.flatten() for p in m.parameters()]) for m in (model, again, other))
    assert torch.equal(first, same)
    assert not torch.equal(first, different)
    few = digits().train.at(np.arange(64))
    before = score(model, few)
    assert before.loss == pytest.approx(batch_loss(model, few).item())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(5):
        optimiser.zero_grad()
        batch_loss(model, few).backward()
        optimiser.step()
    assert score(model, few).loss < before.loss


def test_an_unknown_network_is_named():
    with pytest.raises(UnknownNameError, match="digits-mlp"):
        build_model("digits-mpl", 0)


@settings(max_examples=12, deadline=None)
@given(
    shares=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6),
    alpha=st.none() | st.floats(0.01, 10.0),
    seed=st.integers(0, 5),
)
def test_shards_are_disjoint_and_of_their_shares_sizes(shares, alpha, seed):
    labels = LABELS[:200]
    shards = divide(labels, shares, alpha=alpha, seed=seed)
    assert sorted(np.concatenate(shards).tolist()) == list(range(len(labels)))
    assert tuple(map(len, shards)) == apportion(len(labels), shares)
    for size, share in zip(apportion(len(labels), shares), shares, strict=True):
        assert abs(size - 1 - (len(labels) - len(shares)) * share / sum(shares)) < 1
    again = divide(labels, shares, alpha=alpha, seed=seed)
    assert all(np.array_equal(one, other) for one, other in zip(shards, again, strict=True))


def test_small_alpha_means_few_classes_each():
    def classes_of_most(alpha: float | None) -> float:
        """Return the mean share of a shard's commonest class."""
        shards = divide(LABELS, [1.0] * 8, alpha=alpha, seed=0)
        return float(np.mean([np.bincount(LABELS[shard]).max() / len(shard) for shard in shards]))

    assert classes_of_most(None) < 0.2
    assert classes_of_most(0.1) > classes_of_most(1.0) > classes_of_most(100.0)
    assert np.allclose(class_mixes(4, 10, 0.1, 0).sum(axis=1), 1)


def test_shares_are_geometric_and_mistakes_are_named():
    shares = data_shares(5, 16)
    assert sum(shares) == pytest.approx(1)
    assert shares[0] / shares[-1] == pytest.approx(16)
    assert data_shares(3, 1) == pytest.approx((1 / 3,) * 3)
    for mistake in (
        lambda: data_shares(3, 0.5),
        lambda: apportion(2, [1, 1, 1]),
        lambda: apportion(9, [1, 0]),
        lambda: class_mixes(2, 2, 0, 0),
        lambda: ShardBatches(LABELS[:0], 1, seed=0, worker=0),
    ):
        with pytest.raises(SpecError):
            mistake()


@settings(max_examples=10, deadline=None)
@given(size=st.integers(1, 30), batch=st.integers(1, 40), seed=st.integers(0, 3))
def test_each_epoch_has_every_example_once(size, batch, seed):
    shard = np.arange(100, 100 + size)
    batches = ShardBatches(shard, batch, seed=seed, worker=1)
    whole = np.concatenate([batches.batch(step) for step in range(-(-2 * size // batch))])[: 2 * size]
    assert sorted(whole[:size].tolist()) == sorted(whole[size:].tolist()) == shard.tolist()
    assert np.array_equal(batches.batch(0), whole[:batch][: len(batches.batch(0))]) or batch > 2 * size
