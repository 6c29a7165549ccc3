"""FLOPs and parameters against a real count of what the stages do and hold."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from testbed.devices import flops
from testbed.errors import UnknownNameError
from testbed.spec import Family, WorkloadSpec
from testbed.workloads import table
from testbed.workloads.build import build

MODELS = ("gpt2-nano", "gpt2-mini", "llama-nano", "llama-mini")


def workload(model: str, sequence_length: int, sequences: int) -> WorkloadSpec:
    return WorkloadSpec(
        family=table.size_of(model).family,
        model=model,
        text="bundled",
        sequence_length=sequence_length,
        batch_size=sequences,
        validation_batches=1,
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("sequence_length", "sequences"), [(16, 1), (33, 3)])
def test_the_count_is_exact(model: str, sequence_length: int, sequences: int) -> None:
    size, stages = table.size_of(model), 3
    for stage, own in enumerate(table.split(size.layers, stages)):
        part = build(
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


@pytest.mark.parametrize("model", MODELS)
def test_a_cut_adds_nothing(model: str) -> None:
    size = table.size_of(model)
    whole = flops.stage(size, range(size.layers), sequence_length=64, sequences=2)
    for stages in range(1, size.layers + 1):
        cut = table.split(size.layers, stages)
        assert sum(flops.stage(size, own, sequence_length=64, sequences=2) for own in cut) == whole
        assert sum(flops.parameters(size, own) for own in cut) == flops.parameters(size, range(size.layers))


def test_a_family_that_is_not_in_the_table_is_refused() -> None:
    """Its numbers are not guessed to be those of another family."""
    unknown = dataclasses.replace(table.size_of("llama-nano"), family="mamba")  # type: ignore[arg-type]
    for count in (
        lambda: flops.parameters(unknown, range(1)),
        lambda: flops.stage(unknown, range(1), sequence_length=16, sequences=1),
        lambda: flops.stage(unknown, range(unknown.layers, unknown.layers), sequence_length=16, sequences=1),
    ):
        with pytest.raises(UnknownNameError, match="mamba"):
            count()


def test_every_family_has_its_row() -> None:
    assert set(flops.FAMILIES) == set(get_args(Family))
