"""The claims and the README's generated blocks of codec_quality, from the CSVs of a folder alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas

from testbed.report import experiments
from testbed.report.claim_rows import Facts

TRAINING_S = 57.0
"""Of one core, for one training: the mean of all, beside other work."""
SAME_LOSS = 0.01
"""Of the other arm's loss: what "the same loss" may mean at most."""


def _arms(folder: Path) -> Any:
    return pandas.read_csv(folder / "summary.csv").set_index("arm")


def above(folder: Path, arm: str, than: str = "fp32", share: float = SAME_LOSS) -> Facts | None:
    """Judge that an arm's loss is at most this share of the other's above it."""
    arms = _arms(folder)
    if arm not in arms.index or than not in arms.index:
        return None
    loss = arms.loc[than].loss
    found = experiments.judge_loss(folder, share * loss, {"arm": arm}, {"arm": than}, "loss_less_fp32")
    return experiments.loss_facts(found, loss, 2 * TRAINING_S)


def rows_of(folder: Path, arms: Mapping[str, str]) -> Facts | None:
    """Return the rows of summary.csv of these arms, by the names that the claim gives them."""
    rows = _arms(folder)
    return {name: rows.loc[arm] for name, arm in arms.items()} if set(arms.values()) <= set(rows.index) else None


def lossless(folder: Path, arms: Mapping[str, str]) -> Facts | None:
    """Return how the losses and bits of a packed codec and of the plain one differ."""
    rows = rows_of(folder, arms)
    if rows is None:
        return None
    packed, plain = rows["packed"], rows["plain"]
    return {
        "apart": packed.loss - plain.loss,
        "fewer": 1 - packed.bits / plain.bits,
        "forward": packed.bits_forward / plain.bits_forward,
        "better": packed.loss == plain.loss and packed.bits < plain.bits,
    }


def answer(arms: Any) -> str:
    """Return the answer of the README."""
    means = arms.set_index("arm").loss_less_fp32
    words = [f"{name} {means[codec]:+.3f}" for codec, name in _ANSWERED.items() if codec in means.index]
    return experiments.prose(
        f"**Answer.** At one learning rate the validation loss against fp32 is, in nats: {', '.join(words)}. Four "
        "seeds, 200 steps, a small model without outlier channels."
    )


_ANSWERED = {
    "int6": "6 bits",
    "acsgd": "4 bits forward and 8 backward",
    "int4(group=64)": "4 bits",
    "powersgd(8)": "PowerSGD at 1.5 bits",
    "int2(group=64)": "2 bits",
    "int1": "1 bit",
    "mask(0.1)": "a mask of 10 %",
}
