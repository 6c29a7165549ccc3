"""FLOPs and parameters against a real count of what the stages do and hold."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from testbed.devices import flops
from testbed.errors import UnknownNameError
from testbed.spec import ImagesSpec, TextSpec
from testbed.workloads import models, networks
from testbed.workloads.build_stage import build_stage
from testbed.workloads.images import build_network
from testbed.workloads.llama import LlamaStage
from testbed.workloads.networks import DIGITS
from tests.specs import text_spec

MODELS = ("gpt2-nano", "gpt2-mini-wide", "llama-nano", "llama-mini")


def workload(model: str, sequence_length: int, sequences: int) -> TextSpec:
    return text_spec(model, sequence_length=sequence_length, batch_size=sequences)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("sequence_length", "sequences"), [(16, 1), (33, 3)])
def test_the_count_is_exact(model: str, sequence_length: int, sequences: int) -> None:
    size, stages = models.model_size(model), 3
    for stage, own in enumerate(models.split_layers(size.layers, stages)):
        part = build_stage(
            workload(model, sequence_length, sequences), stage=stage, stages=stages, seed=1, vocabulary=size.vocabulary
        )
        ids = torch.randint(size.vocabulary, (sequences, sequence_length))
        inputs = ids if stage == 0 else torch.randn(sequences, sequence_length, size.width, requires_grad=True)
        # as matrix products, which the counter counts without discounting the mask
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
            outputs = part(inputs)
            if stage == stages - 1:
                outputs = part.loss(outputs, ids)
        counted = flops.stage(size, own, sequence_length=sequence_length, sequences=sequences)
        assert forward.get_total_flops() == counted
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as backward:
            outputs.backward(torch.ones_like(outputs))
        assert backward.get_total_flops() == 2 * counted
        assert sum(parameter.numel() for parameter in part.parameters()) == flops.parameters(size, own)


@pytest.mark.parametrize("model", ["digits-mlp", "mlp-large", "cnn"])
def test_the_count_of_a_network_for_images_is_exact(model: str) -> None:
    spec = ImagesSpec(model=model, images="digits", batch_size=1)
    network = build_network(model, DIGITS, 0)
    pixels = torch.zeros(1, DIGITS.side**2, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        outputs = network(pixels)
    with FlopCounterMode(display=False) as backward:
        outputs.backward(torch.ones_like(outputs))
    assert forward.get_total_flops() == flops.image(spec)
    assert backward.get_total_flops() == 2 * flops.image(spec)
    assert sum(parameter.numel() for parameter in network.parameters()) == flops.whole_model(spec)
    layers = [module for module in network if isinstance(module, torch.nn.Conv2d | torch.nn.Linear)]
    made = [layer.register_forward_hook(lambda *call: sizes.append(call[2].numel())) for layer in layers]
    sizes: list[int] = []
    network(pixels)
    assert len(made) == len(sizes)
    assert sum(sizes) == networks.values(spec)


@pytest.mark.parametrize("model", MODELS)
def test_the_shapes_of_all_parameters_are_known_without_the_model(model: str) -> None:
    size = models.model_size(model)
    whole = build_stage(workload(model, 16, 1), stage=0, stages=1, seed=1, vocabulary=size.vocabulary)
    assert models.shapes_of(size) == [tuple(parameter.shape) for parameter in whole.parameters()]


@pytest.mark.parametrize("model", MODELS)
def test_a_cut_adds_nothing(model: str) -> None:
    size = models.model_size(model)
    whole = flops.stage(size, range(size.layers), sequence_length=64, sequences=2)
    for stages in range(1, size.layers + 1):
        cut = models.split_layers(size.layers, stages)
        assert sum(flops.stage(size, own, sequence_length=64, sequences=2) for own in cut) == whole
        assert sum(flops.parameters(size, own) for own in cut) == flops.parameters(size, range(size.layers))


def test_a_family_that_is_not_in_the_table_is_refused() -> None:
    """Its numbers are not guessed to be those of another family."""
    unknown = dataclasses.replace(models.model_size("llama-nano"), family="mamba")
    for count in (
        lambda: flops.parameters(unknown, range(1)),
        lambda: flops.stage(unknown, range(1), sequence_length=16, sequences=1),
        lambda: flops.stage(unknown, range(unknown.layers, unknown.layers), sequence_length=16, sequences=1),
    ):
        with pytest.raises(UnknownNameError, match="mamba"):
            count()


def test_a_third_family_is_a_row_and_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else knows the families: its stages are built, and its numbers are its row's."""

    def layer_shapes(size: models.ModelSize) -> list[tuple[int, ...]]:
        biases = [(size.width,)] * 7 + [(size.inner,)]
        return [*models.FAMILIES["llama"].layer_shapes(size), *biases]

    row = dataclasses.replace(
        models.FAMILIES["llama"], stage=f"{__name__}:ThirdStage", biases=True, layer_shapes=layer_shapes
    )
    monkeypatch.setitem(models.FAMILIES, "third", row)
    monkeypatch.setitem(models.SIZES, "third-nano", dataclasses.replace(models.SIZES["llama-nano"], family="third"))
    spec, size = workload("third-nano", 16, 1), models.model_size("third-nano")
    models.check_workload(spec, 2)
    assert isinstance(build_stage(spec, stage=1, stages=2, seed=1, vocabulary=4096), ThirdStage)
    more = size.layers * (5 * size.width + size.inner + 2 * size.width)  # biases of its layers and of their norms
    like = models.SIZES["llama-nano"]
    whole = range(size.layers)
    assert flops.parameters(size, whole) == flops.parameters(like, whole) + more + size.width
    assert flops.stage(size, whole, sequence_length=16, sequences=1) == flops.stage(
        like, whole, sequence_length=16, sequences=1
    )


class ThirdStage(LlamaStage):
    """A family of its own."""
