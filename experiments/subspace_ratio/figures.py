"""Generates the figure, CSVs, claims and README blocks of subspace_ratio.

python -m testbed sweep subspace_ratio
python experiments/subspace_ratio/figures.py [--results results/subspace_ratio] [--output experiments/subspace_ratio]

Everything else is computed from the CSVs of `experiment_tables`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from testbed.codecs.catalogue import placement
from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiment_tables, experiment_verdicts, experiments, floors, plots, publishing, style
from testbed.report.canvas import Handle, canvas, note
from testbed.report.claim_rows import Facts
from testbed.report.experiment_tables import Tables
from testbed.report.numbers import percent

HERE = Path(__file__).resolve().parent
BASELINE, FREE, MAPL = "bf16", "subspace-free", "mapl"
RATE = "optimiser.learning_rate"
RATIOS = (4, 8, 16, 32, 64)
TUNED_RATIO = 8
"""The ratio at which the constraint is removed, and other codecs send as many bytes."""
LOOKS = 3
"""At three seeds, at five, and at these without the one that chose the rates."""
SAME_LOSS = 0.01
"""Share of bf16's loss: the most that "no degradation" may mean."""
TRAINING_S = 13.7
"""Seconds of one core for one training: 83 times as many tokens take 19 minutes (README, "What it does not show")."""
FAMILIES = {
    "subspace": ("subspace", "#0072b2", "o"),
    "subspace-free": ("without the constraint", "#767d86", "X"),
    "mapl": ("MAPL", "#009e73", "P"),
    "topk-shared": ("top-k", "#cc79a7", "^"),
    "int2": ("int2", "#d55e00", "D"),
    "powersgd": ("PowerSGD", "#7b4fa3", "v"),
}
"""Codec -> name, colour and marker."""


def family(codec: str) -> str:
    """Return the codec's own name, without its arguments."""
    return codec.partition("(")[0]


def name(codec: str, ratio: float) -> str:
    """Return the canonical text of a codec in the model at a ratio."""
    return placement.canonical_text(f"{codec}({ratio:g})")


def best(tables: Tables) -> Any:
    """Return the rows of each codec at its best rate: that of the smallest loss of the first seed, with which rates
    were screened. Columns of seeds.csv, and bits (per value, by counted payloads), tried (rates), and mark, if the best
    is at an end of those.
    """
    seeds = tables.seeds
    first = seeds[seeds.seed == seeds.seed.min()].sort_values("validation_loss").drop_duplicates("codec")
    rows = seeds.merge(first[["codec", RATE]])
    rates = seeds.groupby("codec")[RATE].agg(["nunique", "min", "max"])
    ends = [rates.loc[row.codec, ["min", "max"]].isin([row[RATE]]).any() for _, row in rows.iterrows()]
    tried = rows.codec.map(rates["nunique"])
    whole = rows[rows.codec == BASELINE].payload_bytes_per_step.mean()
    return rows.assign(
        bits=16 * rows.payload_bytes_per_step / whole,
        tried=tried,
        mark=[" *" if end and count > 1 else "" for end, count in zip(ends, tried, strict=True)],
    )


def losses(rows: Any, codec: str) -> Mapping[int, float]:
    """Return a codec's losses by seed, without the first of several, which chose the rates; empty if it was not run."""
    judging = rows[(rows.seed > rows.seed.min()) | (rows.seed.nunique() == 1)]
    return experiments.by_seed(judging, "validation_loss", codec=codec)


def above(rows: Any, codec: str, base: str = BASELINE, share: float = SAME_LOSS) -> Judgement | None:
    """Judge whether a codec's loss is at most a share of bf16's loss above another's; None if either was not run."""
    sides = [losses(rows, each) for each in (codec, base)]
    return judge("loss", *sides, share * _loss(rows), looks=LOOKS) if all(sides) else None


def _loss(rows: Any) -> float:
    return float(rows[rows.codec == BASELINE].validation_loss.mean())


# ---------------------------------------------------------------------- claims
def loss(folder: Path, codec: str, base: str = BASELINE, share: float = SAME_LOSS) -> Facts | None:
    """Return a codec's loss above another's, judged against a share of bf16's loss."""
    rows = best(experiment_tables.read_tables(folder))
    found = above(rows, *map(placement.canonical_text, (codec, base)), share)
    size = share * _loss(rows) or SAME_LOSS * _loss(rows)
    return experiments.loss_facts(found, _loss(rows), 2 * TRAINING_S, size, codec=codec, base=base)


def at_ratios(folder: Path) -> Iterator[Facts]:
    """Yield the same for each subspace."""
    for ratio in RATIOS:
        if (facts := loss(folder, name("subspace", ratio))) is not None:
            yield {**facts, "ratio": ratio}


def others(folder: Path) -> Iterator[Facts]:
    """Yield the same for every codec that does not change the model."""
    rows = best(experiment_tables.read_tables(folder))
    for codec in dict.fromkeys(rows.codec):
        if family(codec) in ("topk-shared", "int2", "powersgd") and (facts := loss(folder, codec)) is not None:
            yield {**facts, "bits": rows[rows.codec == codec].bits.mean()}


def as_small(folder: Path) -> Iterator[Facts]:
    """Yield the subspace's loss above that of each codec with as many bytes."""
    through = name("subspace", TUNED_RATIO)
    for codec in _near(best(experiment_tables.read_tables(folder))):
        if codec != through and (facts := loss(folder, through, codec, 0.0)) is not None:
            yield facts


# ---------------------------------------------------------------------- tables
def _difference(found: Judgement | None) -> str | None:
    return found and experiments.with_ends(found, otherwise="one seed")


@experiments.table
def losses_table(tables: Tables) -> Any:
    """Return a row for each codec at its best rate."""
    rows = best(tables)
    for codec, mine in rows.groupby("codec", sort=False):
        found = None if codec == BASELINE else above(rows, str(codec))
        first = mine.iloc[0]
        yield {
            "codec": codec,
            "bits per value": f"{mine.bits.mean():.2f}",
            "rate": f"{first[RATE]:g}{first['mark']}",
            "rates tried": int(first.tried),
            "validation loss": f"{mine.validation_loss.mean():.3f}",
            "vs bf16": _difference(found),
            "of the loss": None if found is None else percent(found.value / _loss(rows), "{:+.1f}"),
            "at most 1 %": None if found is None else found.words,
            "seeds": len(mine),
        }


def screened(tables: Tables) -> Any:
    """Return the first seed's loss of each codec (rows) at each rate (columns), if more than one was tried."""
    seeds = tables.seeds
    grid = seeds[seeds.seed == seeds.seed.min()].pivot_table(
        index="codec", columns=RATE, values="validation_loss", sort=False
    )
    return grid[grid.notna().sum(axis=1) > 1].sort_index(axis=1)


@experiments.table
def rates_table(tables: Tables) -> Any:
    """Return the README's table of `screened`."""
    for codec, of_codec in screened(tables).iterrows():
        said = {f"{rate:g}": None if pandas.isna(loss) else f"{loss:.3f}" for rate, loss in of_codec.items()}
        least = f"{of_codec.idxmin():g}"
        yield {"codec": codec, **said, least: f"**{said[least]}**"}


# ---------------------------------------------------------------------- figure
def draw(tables: Tables) -> Figure:
    """Draw the loss against bits per value, and against the learning rate with and without the constraint."""
    rows = best(tables)
    handles: list[Handle] = [
        Line2D([], [], color=colour, marker=marker, label=words)
        for codec, (words, colour, marker) in FAMILIES.items()
        if codec in set(map(family, rows.codec))
    ]
    figure, (left, right) = canvas(_title(rows), 3.3, handles, _foot(rows), 2, columns=2)
    _against_bits(left, rows)
    _against_rates(right, tables)
    return figure


def _against_bits(panel: Axes, rows: Any) -> None:
    for codec, (_, colour, marker) in FAMILIES.items():
        of_family = rows[rows.codec.map(family) == codec].groupby("codec").bits.mean().sort_values()
        found = [(bits, above(rows, str(text))) for text, bits in of_family.items()]
        panel.plot([x for x, _ in found], [one.value for _, one in found], color=colour)
        for x, one in found:
            plots.estimates(panel, [(x, one)], colour, marker, hollow=one.interval is None, width=1)
    panel.axhline(0, color=style.INK, lw=0.9)
    plots.level(panel, SAME_LOSS * _loss(rows), "1 % of the loss", at=0.51)
    panel.set_xscale("log", base=2)
    plots.ticks(panel.xaxis, [16 / ratio for ratio in RATIOS], lambda bits: f"{bits:g}\n1/{16 / bits:g}")
    panel.set_xlim(6, 0.17)
    panel.set_xlabel("bits per value, and as a part of bf16's")
    panel.set_ylabel("validation loss vs bf16, nats per token")
    floors.draw_floors(panel, HERE, _loss(rows))


def _against_rates(panel: Axes, tables: Tables) -> None:
    lines = {
        BASELINE: ("bf16", style.INK, "s"),
        name("subspace", TUNED_RATIO): (f"subspace, 1/{TUNED_RATIO}", *FAMILIES["subspace"][1:]),
        name("subspace", RATIOS[-1]): (f"subspace, 1/{RATIOS[-1]}", "#56b4e9", "o"),
        name(FREE, TUNED_RATIO): ("without the constraint", *FAMILIES[FREE][1:]),
    }
    grid = screened(tables)
    for codec, (words, colour, marker) in lines.items():
        if codec in grid.index:
            line = grid.loc[codec].dropna()
            panel.plot(line.index, line, color=colour, marker=marker)
            note(panel, words, (line.index[-1], line.iloc[-1]), (7, -3), size=8, color=colour)
    panel.set_xscale("log")
    plots.ticks(panel.xaxis, grid.columns)
    panel.set_xlabel("learning rate (one seed)")
    panel.set_ylabel("validation loss, nats per token")
    panel.set_xlim(grid.columns.min() / 1.15, 2.4 * grid.columns.max())  # room for the labels
    floors.draw_floors(panel, HERE)


def _near(rows: Any) -> list[str]:
    """Return the codecs that send about as many bits as a subspace of `TUNED_RATIO`, in the order of their losses."""
    means = rows.groupby("codec")[["bits", "validation_loss"]].mean().sort_values("validation_loss")
    near = means.bits.between(0.7 * 16 / TUNED_RATIO, 1.3 * 16 / TUNED_RATIO)
    return [str(codec) for codec in means.index[near] if family(str(codec)) != FREE]


def _title(rows: Any) -> str:
    """State the cost of the subspace with its interval."""
    found = above(rows, name("subspace", TUNED_RATIO))
    cost = "Loss against bits per value" if found is None else f"{experiments.with_ends(found)} nats above bf16"
    return f"A subspace of 1/{TUNED_RATIO} of the channels: {cost}"


def _foot(rows: Any) -> str:
    counted = f"{len(losses(rows, BASELINE))} seeds, without the one that chose the rates"
    return f"Means of {counted}, with 98.3 % intervals (the last of {LOOKS} looks) of their differences from bf16."


# ---------------------------------------------------------------------- README
def answer(tables: Tables) -> str:
    """Return the answer in three lines; `losses_table` has every number."""
    rows = best(tables)
    ratios = {f"1/{ratio}": above(rows, name("subspace", ratio)) for ratio in RATIOS}
    costs = [f"{_difference(found)} with {part}" for part, found in ratios.items() if found is not None]
    others = {codec: above(rows, codec) for codec in _near(rows) if family(codec) != "subspace"}
    values = [f"{codec} {found.value:+.3f}" for codec, found in others.items() if found is not None]
    text = (
        f"**Answer.** After few tokens of a small model ({_loss(rows):.2f} nats with bf16), training through a "
        f"subspace costs, in nats, {' to '.join(dict.fromkeys([costs[0], costs[-1]]))} of the channels."
    )
    if values:
        text += f" With as many bytes as 1/{TUNED_RATIO}: {', '.join(values)}."
    return experiments.prose(text)


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README, from the CSVs of a folder."""
    tables = experiment_tables.read_tables(folder)
    return {
        "answer": answer(tables),
        "losses": losses_table(tables),
        "rates": rates_table(tables),
        "remarks": experiments.prose(experiment_verdicts.floor_sentence(best(tables))),
    }


FIGURES = {"ratio": lambda folder: draw(experiment_tables.read_tables(folder))}
write = experiment_tables.write_tables


if __name__ == "__main__":
    publishing.run(globals())
