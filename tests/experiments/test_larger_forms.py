"""subspace_growth and diloco_scale: what their forms train, without training it; the quick forms train."""

from __future__ import annotations

import tomllib

import pytest

from testbed.codecs.catalogue.codec_spec import parse_codec
from testbed.workloads import models
from tests.commands import Command, module_beside

GROWTH, SCALE = (Command.shipped / name for name in ("subspace_growth", "diloco_scale"))


@pytest.mark.parametrize("name", ["CPU", "GPU"])
def test_low_rank_sends_as_many_bytes_as_the_first_subspace(name: str) -> None:
    with module_beside(GROWTH, "train") as train:
        form = getattr(train, name)
        width, tokens = models.SIZES[form.model].width, form.sequences * form.length
        bits = 16 * form.rank * (1 / width + 1 / tokens)
        assert bits == pytest.approx(16 / form.ratios[0], rel=0.07)
        assert all(form.batches % parts == 0 for parts in (train.EVALUATIONS, train.PILOT))
        assert form.batches // train.PILOT % (form.batches // train.EVALUATIONS) == 0, "a pilot ends with an evaluation"
        assert train.VALIDATION_SEQUENCES % form.sequences == 0
        assert parse_codec(form.arms[0]).nominal_bits == 16


@pytest.mark.parametrize("name", ["CPU", "GPU"])
def test_every_claim_is_about_methods_that_are_trained(name: str) -> None:
    claims = tomllib.loads((SCALE / "claims.toml").read_text(encoding="utf8"))["claim"]
    with module_beside(SCALE, "train") as train:
        form = getattr(train, name)
        arms = {arm.name for arm in form.arms}
        assert {row["with"][side] for row in claims for side in ("ours", "base")} <= arms
        batches = [form.batches, form.batches // train.PARTS]
        assert all(each % arm.local_steps == 0 for each in batches for arm in form.arms)
        assert form.sequences % train.WORKERS == 0
        assert train.VALIDATION_CHARACTERS % (form.sequences * form.length) == 0
        assert form.frozen_after < form.batches // train.PARTS
