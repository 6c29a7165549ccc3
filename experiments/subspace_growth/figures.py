"""Draws the figure and generates the tables of subspace_growth from curves.csv, which train.py writes into the output
folder: `python experiments/subspace_growth/figures.py`. The trainings of a GPU count if there are any.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from testbed.metrics import statistics
from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiments, plots, publishing, style
from testbed.report.claim_rows import Facts
from testbed.report.numbers import span

HERE = Path(__file__).resolve().parent
BASELINE = "bf16"
SAME_LOSS = 0.01
"""Share of the loss up to which a codec keeps it, as in subspace_ratio; fixed before the trainings."""
SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
"""Of the characters of a training: the points at which costs are stated."""
EARLY = 1 / 8
TRAININGS = 17
"""That the CPU form is as long as: five codecs with three seeds, and 14 pilots."""
LABELS = ("1/8", "1/4", "1/2", "3/4", "all")
PILOTS, COUNTS = 2, (2, 3)
"""Seeds of a pilot, and of the trainings that count."""
SCALES = {"cpu": "0.17 M", "cuda": "19 M"}
"""Parameters by device."""
LOOKS = {
    BASELINE: (style.INK, "s"),
    "subspace(8)": ("#d55e00", "o"),
    "subspace(32)": ("#e69f00", "D"),
    "subspace(100)": ("#b3a000", "P"),
    "powersgd": ("#7b4fa3", "v"),
    "int4": ("#009e73", "^"),
}


@functools.lru_cache(maxsize=4)
def curves(folder: Path, use: str = "result") -> Any:
    """Return the evaluations of the larger form that has counting trainings, at the rate of a codec's last seed."""
    rows = pandas.read_csv(folder / "curves.csv")
    known = rows[rows.use == "result"].device.unique()
    rows = rows[(rows.device == ("cuda" if "cuda" in known else "cpu")) & (rows.use == use)]
    chosen = rows.sort_values("seed").drop_duplicates("codec", keep="last")[["codec", "learning_rate"]]
    return rows.merge(chosen)


def codecs(folder: Path, use: str = "result") -> list[str]:
    """Return the codecs, the baseline first."""
    return list(curves(folder, use).codec.unique())


def total(folder: Path, use: str = "result") -> int:
    """Return the characters of a whole training."""
    return int(curves(folder, use).tokens.max())


def losses(folder: Path, codec: str, share: float = 1, use: str = "result") -> dict[int, float]:
    """Return the loss by seed after a share of the characters."""
    return experiments.by_seed(curves(folder, use), "loss", codec=codec, tokens=round(share * total(folder, use)))


def base_loss(folder: Path, share: float = 1) -> float:
    """Return the mean loss of the baseline."""
    return experiments.mean_of(losses(folder, BASELINE, share))


def costs(folder: Path, codec: str, share: float = 1, use: str = "result") -> dict[int, float]:
    """Return what a codec costs by seed, in nats, after a share of the characters."""
    base, ours = (losses(folder, each, share, use) for each in (BASELINE, codec))
    return {seed: ours[seed] - base[seed] for seed in ours.keys() & base.keys()}


def above(folder: Path, codec: str, share: float = 1, of: float = SAME_LOSS, base: str = BASELINE) -> Judgement | None:
    """Judge that a codec's loss is at most a share `of` of the baseline's above another's."""
    sides = losses(folder, codec, share), losses(folder, base, share)
    return judge("loss", *sides, of * base_loss(folder, share)) if all(sides) else None


def growth(folder: Path, codec: str) -> Judgement:
    """Judge that the cost at the end is at most that after an eighth of the characters, by seed."""
    return judge("loss", costs(folder, codec), costs(folder, codec, EARLY), 0.0)


def pair_s() -> float:
    """Return the time of one more seed of two codecs."""
    return 2 * experiments.takes_s(HERE, "train.py", TRAININGS)


def words(codec: str) -> str:
    """Name a codec in a sentence."""
    name, _, argument = codec.rstrip(")").partition("(")
    return {"subspace": f"a subspace of 1/{argument}", "powersgd": f"PowerSGD of rank {argument}"}.get(name, name)


def scale(folder: Path) -> str:
    """State the size of the trainings and of the published ones."""
    size = SCALES[curves(folder).device.iloc[0]]
    return f"{size} of 8,000 M parameters, {total(folder) / 1e6:.2g} M characters"


# ---------------------------------------------------------------------- claims
def kept(folder: Path, codec: str, of: float = SAME_LOSS, base: str = BASELINE) -> Facts | None:
    """Return the loss at the end above another's; its bound is a share `of` of the baseline's loss."""
    found, mean = above(folder, codec, 1, of, base), base_loss(folder)
    more = {"name": words(codec), "scale": scale(folder)}
    return experiments.loss_facts(found, mean, pair_s(), SAME_LOSS * mean, **more)


def subspaces(folder: Path) -> Iterator[Facts]:
    """Yield that of each subspace."""
    for codec in codecs(folder):
        if codec.startswith("subspace") and (facts := kept(folder, codec)) is not None:
            yield facts


def against_low_rank(folder: Path) -> Facts | None:
    """Return the loss of a subspace of 1/8 above that of PowerSGD, which sends as many bytes."""
    low_rank = next((codec for codec in codecs(folder) if codec.startswith("powersgd")), "")
    return kept(folder, "subspace(8)", 0.0, low_rank)


def grows(folder: Path) -> Iterator[Facts]:
    """Yield how much more each codec costs at the end than after an eighth of the characters."""
    for codec in codecs(folder)[1:]:
        if not costs(folder, codec):
            continue
        found, mean = growth(folder, codec), base_loss(folder)
        early, late = (experiments.mean_of(costs(folder, codec, share)) for share in (EARLY, 1))
        why = f"{early:+.3f} nats after an eighth of the characters, {late:+.3f} at the end"
        shown = experiments.open_words(why, found, pair_s(), SAME_LOSS * mean)
        more = {"name": words(codec), "scale": scale(folder), "loss": mean}
        yield {"judgement": found, "shown": shown, **more}


# ---------------------------------------------------------------------- the README
def power(folder: Path) -> str:
    """Return what the seeds can detect, by the spread of the pilots."""
    costs_of = [list(costs(folder, codec, 1, "pilot").values()) for codec in codecs(folder, "pilot")[1:]]
    each, loss = (
        [float(np.std(pair, ddof=1)) for pair in costs_of],
        experiments.mean_of(losses(folder, BASELINE, 1, "pilot")),
    )
    sd = math.sqrt(float(np.mean(np.square(each))))
    cost, grown = (
        " and ".join(f"{factor * statistics.detectable(sd / math.sqrt(n), n - 1):.3f}" for n in COUNTS)
        for factor in (1, math.sqrt(2))
    )
    return experiments.prose(
        f"Computed before the trainings that count, from pilots of an eighth of their length with {PILOTS} other "
        f"seeds: what a codec costs has a standard deviation of {sd:.3f} nats over seeds (pooled; "
        f"{span(each, '{:.3f}'.format)} by codec), so "
        f"{' and '.join(map(str, COUNTS))} seeds detect a cost of {cost} nats with 80 % power, and a growth of {grown} "
        f"if both ends vary independently. 1 % of the pilots' loss is {SAME_LOSS * loss:.3f} nats."
    )


@experiments.table
def table(folder: Path) -> Iterator[Mapping[str, str]]:
    """Yield a row for each codec: what it sends, and what it costs on the way."""
    for codec in codecs(folder):
        rows = experiments.matching(curves(folder), {"codec": codec})
        means = [experiments.mean_of(costs(folder, codec, share)) for share in SHARES]
        yield {
            "codec": codec,
            "bits per value": f"{rows.bits.iloc[0]:.2f}",
            "rate": f"{rows.learning_rate.iloc[0]:g}",
            "loss at the end": experiments.mean_words(losses(folder, codec), "{:.3f}"),
            **{
                f"after {label}": "" if codec == BASELINE else f"{mean:+.3f}"
                for label, mean in zip(LABELS, means, strict=True)
            },
            "growth from 1/8 to the end": "" if codec == BASELINE else experiments.with_ends(growth(folder, codec)),
        }


@experiments.table
def rates(folder: Path) -> Iterator[Mapping[str, str]]:
    """Yield the pilots' last loss of each codec at each rate, of the seed that tried them; the best is bold."""
    rows = pandas.read_csv(folder / "curves.csv")
    rows = rows[(rows.use == "pilot") & (rows.device == curves(folder).device.iloc[0])]
    rows = rows[rows.seed == rows.seed.min()].drop_duplicates(["codec", "learning_rate"], keep="last")
    every = sorted(rows.learning_rate.unique())
    for codec, part in rows.groupby("codec", sort=False):
        found, best = part.set_index("learning_rate").loss, part.loss.min()
        said = {rate: f"{found[rate]:.3f}" if rate in found.index else "" for rate in every}
        said[part.learning_rate[part.loss.idxmin()]] = f"**{best:.3f}**"
        yield {"codec": codec, **{f"{rate:g}": text for rate, text in said.items()}}


def answer(folder: Path) -> str:
    """Return the answer in three lines."""
    said = []
    for codec in codecs(folder)[1:]:
        early, late = (experiments.mean_of(costs(folder, codec, share)) for share in (EARLY, 1))
        grown = experiments.with_ends(growth(folder, codec))
        said.append(f"{codec} {early:+.3f} to {late:+.3f} (growth {grown})")
    return (
        f"**Answer.** From an eighth of {total(folder) / 1e6:.2g} million characters to all, the loss above "
        f"{BASELINE}'s goes, in nats: {'; '.join(said)}."
    )


# ---------------------------------------------------------------------- the figure
def draw(folder: Path) -> Figure:
    """Draw the losses against the characters trained on, and what each codec costs at five points."""
    figure, ((left, right),) = plots.panels(1, 2, (9.6, 4.0))
    for codec in codecs(folder):
        colour, marker = LOOKS[codec if codec in LOOKS else codec.partition("(")[0]]
        rows = experiments.matching(curves(folder), {"codec": codec})
        rows = rows[rows.tokens >= round(SHARES[0] * total(folder))]
        plots.curve(left, rows, "tokens", "loss", colour, "")
        if codec == BASELINE:
            continue
        points = [(share * total(folder), above(folder, codec, share)) for share in SHARES]
        plots.estimates(right, points, colour, marker, label=codec, line="-")
    _floor(left, folder)
    right.axhline(0, color=style.INK, lw=0.9)
    for axes, name in ((left, "validation loss"), (right, f"loss above {BASELINE}")):
        axes.set_xscale("log")
        plots.ticks(axes.xaxis, [share * total(folder) for share in SHARES], lambda at: f"{at / 1e3:,.0f} k")
        axes.set(xlabel="characters trained on", ylabel=f"{name}, nats per character")
    below = float(curves(folder).bigram_floor.iloc[0]) - base_loss(folder)
    left.set_title(f"{BASELINE} ends {abs(below):.2f} nats {'below' if below > 0 else 'above'} a table of pairs")
    right.set_title(_title(folder))
    handles = [Line2D([], [], color=LOOKS[BASELINE][0], label=BASELINE), right]
    plots.finish(figure, legend=handles, columns=6)
    return figure


def _floor(axes: Axes, folder: Path) -> None:
    """Draw the bigram floor, which the trainings have recorded."""
    floor = float(curves(folder).bigram_floor.iloc[0])
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, floor - 0.05), max(high, floor + 0.05))
    plots.level(axes, floor, f"bigram floor {floor:.2f}", at=0, dash=(0, (2, 2)))


def _title(folder: Path) -> str:
    """State what the numbers of the smallest subspace's ratio support."""
    codec = next(each for each in codecs(folder) if each.startswith("subspace"))
    found = growth(folder, codec)
    name = words(codec).removeprefix("a ")
    if found.interval is None or found.interval[0] <= 0 <= found.interval[1]:
        return f"{name}: no change of the cost was resolved"
    return f"{name}: the cost {'grows' if found.value > 0 else 'falls'} by {abs(found.value):.3f} nats"


BLOCKS = {"answer": answer, "power": power, "costs": table, "rates": rates}
FIGURES = {"growth": draw}


if __name__ == "__main__":
    publishing.run(globals())
