"""The claims and the README's generated blocks of codec_quality, from the CSVs of a folder alone.

summary.csv has each arm at the learning rate that was tuned for it. one_rate.csv, where it is there, has the validation
losses of fp32 and of the arms that were run with 1e-3: a row for each codec and seed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas

from testbed.metrics.verdicts import judge
from testbed.report import experiments
from testbed.report.claim_rows import Facts

TRAINING_S = 2 * 8400 / 291
"""Of one core, for one training over its link: 291 runs took 2 h 20 min on 2 cores."""
SAME_LOSS = 0.01
"""Of fp32's loss: what "the same loss" may mean at most."""


def _one_rate(folder: Path) -> Any:
    """Return the losses at one rate, codecs by seeds; None where they were not measured."""
    path = folder / "one_rate.csv"
    return pandas.read_csv(path).pivot_table("validation_loss", "codec", "seed") if path.is_file() else None


def _tuned(folder: Path) -> Any:
    return pandas.read_csv(folder / "summary.csv").set_index("arm")


def above(folder: Path, arm: str, than: str = "fp32", share: float = SAME_LOSS) -> Facts | None:
    """Judge that an arm's loss, at its own rate, is at most this share of the other's above it."""
    arms = _tuned(folder)
    if arm not in arms.index or than not in arms.index:
        return None
    loss = arms.loc[than].loss
    found = experiments.judge_loss(folder, share * loss, {"arm": arm}, {"arm": than}, "loss_less_fp32")
    return experiments.loss_facts(found, loss, 2 * TRAINING_S)


def above_at_one_rate(folder: Path, arm: str, than: str = "fp32", share: float = SAME_LOSS) -> Facts | None:
    """Judge that an arm's loss is at most this share of fp32's above the other's, where all have one rate."""
    losses = _one_rate(folder)
    if losses is None or not {arm, than, "fp32"} <= set(losses.index):
        return None
    ours, base = (losses.loc[name].dropna().to_dict() for name in (arm, than))
    loss = losses.loc["fp32"].mean()
    return experiments.loss_facts(judge("loss", ours, base, share * loss), loss, 2 * TRAINING_S)


def tuned(folder: Path, arms: Mapping[str, str]) -> Facts | None:
    """Return the rows of summary.csv of these arms, by the names that the claim gives them."""
    rows = _tuned(folder)
    return {name: rows.loc[arm] for name, arm in arms.items()} if set(arms.values()) <= set(rows.index) else None


def lossless(folder: Path, arms: Mapping[str, str]) -> Facts | None:
    """Return how the losses and bits of a packed codec and of the plain one differ."""
    rows = tuned(folder, arms)
    if rows is None:
        return None
    packed, plain = rows["packed"], rows["plain"]
    return {
        "apart": packed.loss - plain.loss,
        "fewer": 1 - packed.bits / plain.bits,
        "forward": packed.bits_forward / plain.bits_forward,
        "better": packed.loss == plain.loss and packed.bits < plain.bits,
    }


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README that are of one_rate.csv; none without it."""
    losses = _one_rate(folder)
    if losses is None:
        return {}
    less = losses - losses.loc["fp32"]
    return {"answer": _answer(less.mean(axis=1)), "one-rate": _one_rate_table(folder, less)}


def _answer(means: Any) -> str:
    words = [f"{name} {means[codec]:+.3f}" for codec, name in _ANSWERED.items() if codec in means.index]
    return experiments.prose(
        f"**Answer.** At one learning rate the validation loss against fp32 is, in nats: {', '.join(words)}. Three "
        "seeds, 200 steps, a small model without outlier channels: most published claims are not resolved here."
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


def _one_rate_table(folder: Path, less: Any) -> str:
    less = less.drop("fp32").assign(mean=lambda rows: rows.mean(axis=1)).sort_values("mean", kind="stable")
    mean = less.pop("mean")
    arms = _tuned(folder).reindex(less.index)
    bits = arms.bits_forward.map("{:.1f} + ".format) + arms.bits_backward.map("{:.1f}".format)
    tuned = arms.loss_less_fp32.map("{:+.3f} with ".format) + arms.learning_rate.map("{:g}".format)
    return experiments.markdown_of(
        pandas.DataFrame(
            {
                "codec": less.index,
                "forward + backward bits": bits.where(arms.bits.notna(), "?"),
                "seeds 0, 1, 2": [", ".join(row.dropna().map("{:+.3f}".format)) for _, row in less.iterrows()],
                "mean": mean.map("{:+.3f}".format),
                "with its tuned rate, from the table": tuned.where(arms.bits.notna(), "?"),
            }
        )
    )
