"""The claims and the README's generated blocks of codec_quality, from the CSVs of a folder alone.

summary.csv has each arm at the learning rate that was tuned for it. one_rate.csv, where it is there, has the validation
losses of fp32 and of the arms that were run with 1e-3: a row for each codec and seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas

from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiments
from testbed.report.claims import EXACT, Claim, Verdict, claims_table
from testbed.report.numbers import percent

HERE = Path(__file__).resolve().parent
COMMAND = f"python -m testbed reproduce {HERE.name}"
FLOOR = 6.62
"""Unigram entropy of the bundled text under its tokenizer, in nats."""
TRAINING_S = 2 * 8400 / 291
"""Of one core, for one training over its link: 291 runs took 2 h 20 min on 2 cores."""
SAME_LOSS = 0.01
"""Of fp32's loss: what "the same loss" may mean at most."""
RUD = "Rudakov et al., arXiv 2401.07788, abstract"
TAH = "He et al., TAH-Quant, arXiv 2506.01352v2, abstract"
AQSGD = "Wang et al., AQ-SGD, arXiv 2206.01299, abstract"
_AGAINST: dict[str | None, Verdict] = {"holds": "fails", "fails": "holds"}


class AtMost(NamedTuple):
    """A claim that an arm's loss is at most 1 % above fp32's, or that it is more."""

    arm: str
    claim: str
    source: str
    published: str
    one_rate: bool = False
    """Judge the runs that all have one learning rate."""
    more: bool = False
    """The claim is that it is more than 1 %."""
    confounded: str = ""
    """Why no verdict can rest on this interval."""
    note: str = ""
    """What must be known besides."""


CLAIMS = (
    AtMost("bf16", "bf16 costs at most 1 % of the loss", "ours", ""),
    AtMost("int8", "int8, both ways, costs at most 1 % of the loss", "ours", ""),
    AtMost("int6", "6 bits both ways cost at most 1 % of the loss", "ours", "", one_rate=True),
    AtMost("int4(group=64)", "4 bits both ways cost at most 1 % of the loss", "ours", "", one_rate=True),
    AtMost(
        "int2(group=64)",
        "quantising directly to 2 bits loses quality",
        "Wang et al., AQ-SGD, arXiv 2206.01299, figures (second-hand)",
        "DirectQ fails at 2 to 3 bits",
        one_rate=True,
        more=True,
    ),
    AtMost(
        "tah(sample)",
        "TAH at about 4 bits forward and 6 backward keeps the loss (at most 1 % above)",
        TAH,
        "3 to 4 bits, preserving training convergence",
        one_rate=True,
    ),
    AtMost(
        "aqsgd, 800 sequences",
        "AQ-SGD at 4 bits forward keeps the loss (at most 1 % above) where examples come back",
        AQSGD,
        "2 to 4 bits, without sacrificing model quality",
        note="; the first of the four passes is sent in full",
    ),
    AtMost(
        "topk(0.1, sample)",
        "top-k of 10 % of activations and gradients does not harm convergence severely (at most 1 % above)",
        RUD,
        "10 % is the lowest that does not; GPT-2 from about 20 % (second-hand)",
        confounded="masks of its own for the gradient and the learning rate are not told apart; shared and own masks "
        "have to be run on one grid of rates, from pretrained weights",
    ),
    AtMost(
        "topk(0.3, sample)",
        "top-k of 30 % of activations and gradients does not harm convergence (at most 1 % above)",
        RUD,
        "10 % is the lowest that does not",
        confounded="conflicts with the published knee; masks of its own for the gradient and the rate, an end of the "
        "list, are not told apart",
    ),
    AtMost(
        "topk-shared(0.1, sample)",
        "top-k of 10 % with the gradient on the activations' places does not harm convergence (at most 1 % above)",
        RUD,
        "10 % is the lowest that does not",
    ),
    AtMost(
        "subspace",
        "training through a subspace, an eighth here, keeps the loss (at most 1 % above)",
        "Ramasinghe et al., Protocol Models, arXiv 2506.01260, abstract",
        "up to 99 % compression with no convergence degradation",
    ),
    AtMost(
        "powersgd(8)",
        "low rank (PowerSGD, 1.5 bits) costs more than 1 % of the loss",
        "ours",
        "",
        one_rate=True,
        more=True,
    ),
)


def claims(folder: Path) -> list[Claim]:
    """Return what the CSVs say of the claims; those whose arms they lack are left out."""
    arms = pandas.read_csv(folder / "summary.csv").set_index("arm")
    losses = _one_rate(folder)
    made = []
    for asked in CLAIMS:
        found = _judged(folder, arms, losses, asked)
        if found is not None:
            made.append(_at_most(asked, *found))
    return [*made, *_memory(arms), *_rotation(losses), *_feedback(arms), *_lossless(arms)]


def _one_rate(folder: Path) -> Mapping[str, dict[int, float]]:
    path = folder / "one_rate.csv"
    if not path.is_file():
        return {}
    table = pandas.read_csv(path)
    return {codec: rows.set_index("seed").validation_loss.to_dict() for codec, rows in table.groupby("codec")}


def _judged(
    folder: Path, arms: Any, losses: Mapping[str, dict[int, float]], asked: AtMost
) -> tuple[Judgement, float] | None:
    """Return the judgement and fp32's loss; None where the arm was not run."""
    if asked.one_rate:
        if not {asked.arm, "fp32"} <= losses.keys():
            return None
        base = sum(losses["fp32"].values()) / len(losses["fp32"])
        return judge("loss", losses[asked.arm], losses["fp32"], SAME_LOSS * base), base
    reference = "fp32, 800 sequences" if "800" in asked.arm else "fp32"
    if asked.arm not in arms.index or reference not in arms.index:
        return None
    base = arms.loc[reference].loss
    found = experiments.judge_loss(folder, SAME_LOSS * base, {"arm": asked.arm}, {"arm": reference}, "loss_less_fp32")
    return None if found is None else (found, base)


def _at_most(asked: AtMost, found: Judgement, loss: float) -> Claim:
    verdict = (_AGAINST.get(found.verdict) if asked.more else found.verdict) or "not resolved"
    rate = "all at the rate 1e-3: " if asked.one_rate else ""
    return Claim(
        claim=asked.claim,
        source=asked.source,
        published=asked.published,
        ours=f"{found.value:+.3f} nats ({percent(found.value / loss, '{:+.1f}')})",
        interval=experiments.interval_words(found),
        verdict="not resolved" if asked.confounded else verdict,
        why=f"{asked.confounded}; {experiments.NO_SEEDS}"
        if asked.confounded
        else rate + experiments.shown_words(found, loss, 2 * TRAINING_S) + asked.note,
        command=COMMAND,
    )


def _memory(arms: Any) -> Iterator[Claim]:
    ours, control = (f"{name}, 800 sequences" for name in ("aqsgd", "acsgd"))
    if {ours, control} <= set(arms.index):
        a, b = arms.loc[ours], arms.loc[control]
        yield Claim(
            claim="it is the memory of each example that keeps AQ-SGD's loss: without it the same bits cost more",
            source=AQSGD,
            published="changes of activations are compressed, not activations",
            ours=f"{a.plain_less_fp32:+.3f} with, {b.plain_less_fp32:+.3f} nats without the memory",
            interval=f"{a.plain_less_fp32_low:+.3f} to {a.plain_less_fp32_high:+.3f} with, "
            f"{b.plain_less_fp32_low:+.3f} to {b.plain_less_fp32_high:+.3f} without, {int(a.seeds)} seeds",
            verdict="not resolved",
            why="one of the four passes is in full precision with the memory and none without it; the control is acsgd "
            f"with a full first pass; {experiments.NO_SEEDS}",
            command=COMMAND,
        )


def _rotation(losses: Mapping[str, dict[int, float]]) -> Iterator[Claim]:
    rotated, plain = "hadamard(int4(group=64))", "int4(group=64)"
    if not {rotated, plain, "fp32"} <= losses.keys():
        return
    found = judge("loss", losses[rotated], losses[plain], 0.0)
    loss = sum(losses["fp32"].values()) / len(losses["fp32"])
    yield Claim(
        claim="Hadamard's rotation makes the loss of 4 bits smaller",
        source=TAH,
        published="suppresses outliers",
        ours=f"{found.value:+.3f} nats against plain groups of 64",
        interval=experiments.interval_words(found),
        verdict="not comparable",
        why="this model was trained for 200 steps and has no outlier channels, which are what a rotation is for; "
        + experiments.shown_words(found, loss, 2 * TRAINING_S),
        command=COMMAND,
    )


def _feedback(arms: Any) -> Iterator[Claim]:
    names = ["topk(0.1, sample)", ef := "ef(topk(0.1, sample))", "ef21(topk(0.1, sample))"]
    if not set(names) <= set(arms.index):
        return
    rows = [arms.loc[name] for name in names]
    yield Claim(
        claim="error feedback does not improve training over plain top-k",
        source=RUD,
        published="does not improve model-parallel training",
        ours=", ".join(f"{name} {row.loss_less_fp32:+.2f}" for name, row in zip(names, rows, strict=True)) + " nats",
        interval="; ".join(f"{row.loss_less_fp32_low:+.2f} to {row.loss_less_fp32_high:+.2f}" for row in rows)
        + f", {int(rows[0].seeds)} seeds",
        verdict="not resolved",
        why=f"rates differ ({', '.join(f'{row.learning_rate:g}' for row in rows)}), so feedback and rate are not told "
        f"apart; {experiments.NO_SEEDS}",
        command=COMMAND,
    )
    row = arms.loc[ef]
    yield Claim(
        claim="error feedback lets a model trained with top-k be used without it, almost without loss",
        source=RUD,
        published="almost no quality drop",
        ours=f"{row.loss_less_fp32:+.2f} nats with the codec, {row.plain_less_fp32:+.2f} without",
        interval=f"{row.loss_less_fp32_low:+.2f} to {row.loss_less_fp32_high:+.2f} with, "
        f"{row.plain_less_fp32_low:+.2f} to {row.plain_less_fp32_high:+.2f} without, {int(row.seeds)} seeds",
        verdict="not resolved",
        why=f"at its rate ({row.learning_rate:g}) this arm ends at {row.loss:.2f} nats; the unigram entropy is "
        f"{FLOOR} nats, and what is above it has learned nothing that could be kept; {experiments.NO_SEEDS}",
        command=COMMAND,
    )


def _lossless(arms: Any) -> Iterator[Claim]:
    if not {"zstd(bf16)", "bf16"} <= set(arms.index):
        return
    packed, plain = arms.loc["zstd(bf16)"], arms.loc["bf16"]
    yield Claim(
        claim="zstd(bf16) trains exactly as bf16 does, with fewer bits",
        source="ours",
        ours=f"{packed.loss - plain.loss:+g} nats, {percent(1 - packed.bits / plain.bits)} fewer bits",
        interval=EXACT,
        verdict="holds" if packed.loss == plain.loss and packed.bits < plain.bits else "fails",
        why="losses are equal to the last digit of the table",
        command=COMMAND,
    )
    yield Claim(
        claim="split by bytes and packed by zstd, activations take 46 % of 16 bits",
        source="BloomBee (second-hand)",
        published="46 % of fp16",
        ours=f"{percent(packed.bits_forward / plain.bits_forward)} of bf16, forward",
        verdict="not comparable",
        why="a nearly untrained model's activations have other exponents; bf16 and not fp16",
        command=COMMAND,
    )


def blocks(folder: Path, table: str) -> dict[str, str]:
    """Return the generated blocks of the README; `table` is that of all arms."""
    made = {"claims": claims_table(claims(folder)), "arms": table}
    if _one_rate(folder):
        made |= {"answer": _answer(folder), "one-rate": _one_rate_table(folder)}
    return made


def _answer(folder: Path) -> str:
    losses = _one_rate(folder)
    means = {codec: _mean_difference(losses, codec) for codec in losses}
    words = [f"{name} {means[codec]:+.3f}" for codec, name in _ANSWERED.items() if codec in means]
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


def _mean_difference(losses: Mapping[str, dict[int, float]], codec: str) -> float:
    base = losses["fp32"]
    return sum(loss - base[seed] for seed, loss in losses[codec].items()) / len(losses[codec])


def _one_rate_table(folder: Path) -> str:
    losses = _one_rate(folder)
    arms = pandas.read_csv(folder / "summary.csv").set_index("arm")
    rows = []
    for codec in sorted(losses, key=lambda name: _mean_difference(losses, name)):
        if codec == "fp32":
            continue
        row = {"codec": codec, "seeds 0, 1, 2": ", ".join(
            f"{loss - losses['fp32'][seed]:+.3f}" for seed, loss in sorted(losses[codec].items())
        ), "mean": f"{_mean_difference(losses, codec):+.3f}"}  # fmt: skip
        arm = arms.loc[codec] if codec in arms.index else None
        row["bits"] = "?" if arm is None else f"{arm.bits_forward:.1f} + {arm.bits_backward:.1f}"
        row["tuned"] = "?" if arm is None else f"{arm.loss_less_fp32:+.3f} with {arm.learning_rate:g}"
        rows.append(row)
    named = {"bits": "forward + backward bits", "tuned": "with its tuned rate, from the table"}
    frame = pandas.DataFrame(rows)[["codec", "bits", "seeds 0, 1, 2", "mean", "tuned"]]
    return experiments.markdown_of(frame.rename(columns=named))
