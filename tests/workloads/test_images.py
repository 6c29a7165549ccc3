"""Labelled images, of digits and of the hub; their networks, and shards: what data parallel training is tried on."""

from __future__ import annotations

import json

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits

from testbed.errors import SpecError, UnknownNameError
from testbed.nodes.learners import ImagesLearner
from testbed.nodes.optimise import Optimiser
from testbed.spec import OptimiserSpec
from testbed.workloads import networks, sources
from testbed.workloads.images import batch_loss, build_network, images, score
from testbed.workloads.networks import DIGITS, NETWORKS, ImageShape, image_counts
from testbed.workloads.shards import ShardBatches, apportion, class_mixes, data_shares, divide
from tests.altered import ALTERATIONS
from tests.workloads import small_hub

LABELS = images("digits").train.labels.numpy()


def test_no_image_is_learned_and_tested():
    train, test = images("digits").train, images("digits").test
    assert (DIGITS, len(train.labels), len(test.labels)) == image_counts("digits") == (DIGITS, 1437, 360)
    every = torch.cat([train.images, test.images])
    pixels, labels = load_digits(return_X_y=True)
    assert torch.equal(every.double().sum(0), torch.tensor(pixels).sum(0) / 16)
    assert torch.cat([train.labels, test.labels]).bincount().tolist() == np.bincount(labels).tolist()
    assert len(every.unique(dim=0)) == len(every)
    assert float(every.min()) == 0.0
    assert float(every.max()) == 1.0


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_follows_from_its_seed_and_learns(name):
    state = torch.random.get_rng_state()
    model, again, other = build_network(name, DIGITS, 1), build_network(name, DIGITS, 1), build_network(name, DIGITS, 2)
    assert torch.equal(state, torch.random.get_rng_state())
    first, same, different = (torch.cat([p.flatten() for p in m.parameters()]) for m in (model, again, other))
    assert torch.equal(first, same)
    assert not torch.equal(first, different)
    few = images("digits").train.at(np.arange(64))
    before = score(model, few)
    assert before.loss == pytest.approx(batch_loss(model, few).item())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(5):
        optimiser.zero_grad()
        batch_loss(model, few).backward()
        optimiser.step()
    assert score(model, few).loss < before.loss


@pytest.mark.parametrize("name", ["digits-mlp", "digits-cnn"])
def test_muon_leaves_the_output_layer_of_a_network_to_adamw(name):
    learner = ImagesLearner(build_network(name, DIGITS, 0), None, None)
    rates = {"learning_rate": 1e-3, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.99, "clip_norm": 1.0}
    optimiser = Optimiser(learner.parameters, OptimiserSpec(algorithm="muon", **rates), tables=learner.tables)
    matrices = [parameter for parameter in learner.parameters if parameter.ndim == 2]
    assert [id(each) for each, _ in optimiser._muon._held] == [id(each) for each in matrices[:-1]]


def test_an_unknown_network_and_one_for_other_images_are_named():
    with pytest.raises(UnknownNameError, match="digits-mlp"):
        build_network("digits-mpl", DIGITS, 0)
    with pytest.raises(SpecError, match=r"for digits, 1 x 8 x 8 .* have 3 x 8 x 8 .*: use 'cnn'"):
        build_network("digits-cnn", ImageShape(3, 8, 10), 0)


@pytest.mark.parametrize("name", ["mlp", "mlp-large", "cnn"])
def test_networks_fit_any_images_and_those_for_digits_are_the_same(name):
    for_digits, same = (build_network(each, images("digits"), 3) for each in (f"digits-{name}", name))
    assert all(map(torch.equal, for_digits.parameters(), same.parameters()))
    for shape in (ImageShape(3, 32, 10), ImageShape(1, 5, 7)):
        values = torch.zeros(2, shape.channels * shape.side**2)
        made = build_network(name, shape, 0)
        assert made(values).shape == (2, shape.classes)
        stated = [each for layer in networks.network_layers(name, shape) for each in layer.shapes]
        assert stated == [tuple(parameter.shape) for parameter in made.parameters()]


def test_a_score_counts_every_image_alike(monkeypatch):
    model, test = build_network("mlp", DIGITS, 0), images("digits").test
    whole = score(model, test)
    monkeypatch.setattr(networks, "_SCORED_VALUES", 7 * 64)
    assert score(model, test) == (pytest.approx(whole.loss, rel=1e-6), whole.accuracy)


# ------------------------------------------------------------------ of the hub
NAME = "someone/some-images"


def pixels(count, channels, seed, side=4):
    """Images as Pillow takes them, (side, side) or (side, side, 3)."""
    values = np.random.default_rng(seed).integers(0, 256, (count, side, side, channels), np.uint8)
    return list(values[..., 0] if channels == 1 else values)


def rows(arrays, labels, modes=None, **columns):
    """A split of a data set, its images of the given modes, or of those that the arrays have."""
    kind = {"img": datasets.Image(), "label": datasets.ClassLabel(num_classes=3)}
    drawn = [Image.fromarray(array) for array in arrays]
    drawn = [image.convert(mode) for image, mode in zip(drawn, modes, strict=True)] if modes else drawn
    features = kind | {name: datasets.ClassLabel(num_classes=2) for name in columns}
    return datasets.Dataset.from_dict({"img": drawn, "label": labels} | columns, features=datasets.Features(features))


@pytest.mark.slow
@pytest.mark.parametrize(("how", "channels"), [("in reach", 3), ("cached", 1)])
def test_images_of_the_hub_are_decoded_once(how, channels, tmp_path, monkeypatch):
    train, test = pixels(9, channels, 0), pixels(5, channels, 1)
    files = {"train": tmp_path / "train.parquet", "test": tmp_path / "test.parquet"}
    rows(train, [0, 1, 2] * 3).to_parquet(files["train"])
    rows(test, [2, 2, 1, 0, 0]).to_parquet(files["test"])
    if how == "cached":
        small_hub.cached(tmp_path, NAME, "plain", files)
        first = small_hub.prepare(tmp_path, "--images", f"hub:{NAME}", HF_ENDPOINT=small_hub.closed())
    else:
        listed = "".join(f"  - split: {split}\n    path: {path.name}\n" for split, path in files.items())
        card = f"---\nconfigs:\n- config_name: default\n  data_files:\n{listed}---\n"
        contents = {"README.md": card.encode()} | {path.name: path.read_bytes() for path in files.values()}
        with small_hub.serve(NAME, contents) as endpoint:
            first = small_hub.prepare(tmp_path, "--images", f"hub:{NAME}", HF_ENDPOINT=endpoint)
    assert first.returncode == 0, first.stderr
    monkeypatch.setattr(networks.paths, "cache_folder", lambda: tmp_path / "nothing")
    with pytest.raises(SpecError, match=f"fetch it once with: python -m testbed.*--images hub:{NAME}"):
        image_counts(f"hub:{NAME}")
    monkeypatch.setattr(networks.paths, "cache_folder", lambda: tmp_path / "c")
    assert image_counts(f"hub:{NAME}") == (ImageShape(channels, 4, 3), 9, 5)
    found = images(f"hub:{NAME}", tmp_path / "c")  # from our cache: this process knows neither that hub nor its cache
    assert (found.channels, found.side, found.classes) == (channels, 4, 3)
    assert found.test.labels.tolist() == [2, 2, 1, 0, 0]
    for part, arrays in ((found.train, train), (found.test, test)):
        drawn = part.images.view(-1, channels, 4, 4).permute(0, 2, 3, 1) * 255
        assert torch.equal(drawn.round().to(torch.uint8), torch.tensor(np.array(arrays)).view(-1, 4, 4, channels))
        assert part.images.dtype == torch.float32
    few = found.train.at([3, 1])
    assert torch.equal(few.images, found.train.images[[3, 1]])
    assert few.labels.tolist() == [0, 1]
    model = build_network("cnn", found, 0)
    batch_loss(model, few).backward()
    assert 0 <= score(model, found.test).accuracy <= 1
    (labels,) = (tmp_path / "c" / "images").glob("*-labels.npy")
    ALTERATIONS["a bit flipped"](labels, labels)
    with pytest.raises(SpecError, match=rf"{labels.name} is altered; remove .* there, and fetch it again"):
        image_counts(f"hub:{NAME}")
    assert json.loads(first.stdout)["train"] == 9
    assert [path.name for path in (tmp_path / "c" / "images").iterdir() if path.name.startswith(".")] == []


GREY = pixels(3, 1, 0)
GOOD = rows(GREY, [0, 1, 2])


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": GOOD}, "has no split test; it has train"),
        (
            {"test": GOOD, "train": rows(GREY, [0, 1, 2], fine=[0, 0, 1])},
            r"img: Image, .* fine: ClassLabel; one must be Image",
        ),
        (
            {"test": GOOD, "train": rows(GREY, [0, 1, 2], ["L", "L", "RGB"])},
            "image 2 of split train is of 3 channel.s., 4 x 4",
        ),
        ({"test": GOOD, "train": rows(GREY[:2] + pixels(1, 1, 0, side=5), [0, 1, 2])}, "is of 1 channel.s., 5 x 5"),
        ({"test": GOOD, "train": rows([GREY[0][:, :3]], [0])}, "is 3 x 4 pixels; images must be square"),
        ({"test": GOOD, "train": rows(GREY, [0, 1, 2], ["L", "CMYK", "L"])}, "image 1 of split train is of mode CMYK"),
        ({"test": GOOD, "train": rows(GREY, [0, 1, -1])}, "image 2 of split train has label -1; labels must be 0 to 2"),
        ({"test": GOOD, "train": rows([], [])}, "0 images to train on and 3 to test on"),
    ],
)
def test_what_is_no_image_set(splits, message, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "load_hub_set", lambda *_: splits)
    with pytest.raises(SpecError, match=message):
        images(f"hub:{NAME}", tmp_path)
    assert list((tmp_path / "images").glob("*")) == []


def test_names_of_images():
    for wrong in ("hub:a/b/c", "hub:", "cifar10", "digit"):
        with pytest.raises(SpecError, match=r"workload\.images.*hub:ylecun/cifar10"):
            images(wrong)


# ------------------------------------------------------------------ shards


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
