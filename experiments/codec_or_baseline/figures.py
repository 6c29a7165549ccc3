"""Generates the figures, CSVs, claims.csv and README blocks of codec_or_baseline from published numbers.

python experiments/codec_or_baseline/figures.py [--output FOLDER]

model.py computes predictions.csv and shares.csv from tables.toml and published.csv; everything else reads those two.
"""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import model
import pandas as pd

from testbed.report import experiments, plots, publishing, style
from testbed.report.canvas import name_rows
from testbed.report.claim_rows import Facts
from testbed.report.numbers import percent

NEARBY = 0.2
WORTH = 1.1
"""Smallest factor that counts as a gain from the codec."""
PARTS = {
    "format": ("16-bit instead of fp32 wires", "#8b939c"),
    "overlap": ("overlap, more in flight", "#e69f00"),
    "codec": ("the codec", "#7b4fa3"),
}
_READ = {"read": "", "second-hand": " (second-hand)"}


def write(_: Path, output: Path) -> None:
    """Write predictions.csv, a row per published number, and shares.csv, a row per headline."""
    for name, frame in zip(("predictions", "shares"), model.computed(), strict=True):
        frame.to_csv(output / f"{name}.csv", index=False, float_format="%.6g", lineterminator="\n")


def shares(folder: Path) -> Any:
    """Return the rows of shares.csv by table, from the largest headline to the smallest."""
    return pd.read_csv(folder / "shares.csv").set_index("table").sort_values("published", ascending=False)


def left_out(folder: Path) -> Any:
    """Return the rows of predictions.csv with the relative error of the prediction by a table's other rows."""
    frame = pd.read_csv(folder / "predictions.csv")
    return frame.assign(error=frame.left_out_s / frame.published_s - 1)


def errors(folder: Path) -> Any:
    """Return the median relative error of left-out rows by table."""
    return left_out(folder).groupby("table").error.apply(lambda error: error.abs().median())


@experiments.table
def headlines(folder: Path) -> Any:
    """Return the factors of each table's largest speed-up."""
    for name, row in shares(folder).iterrows():
        table = model.tables()[str(name)]
        factors = {words: f"{row[part]:.2f}" for part, (words, _) in PARTS.items()}
        yield {
            "table": table.name,
            "largest speed-up": f"{row['arm']}, {row['at']}",
            "published": f"{row.published:.2f}x",
            **factors,
            "unexplained": f"{row.unexplained:.2f}",
            "of the baseline": f"{row.baseline_off:.2f}",
            "of the codec": f"{row.codec_off:.2f}",
        }


@experiments.table
def fits(folder: Path) -> Any:
    """Return how well each table is met: with nothing hidden, with what can be, and each row by the others."""
    counts, off = left_out(folder).groupby("table").size(), errors(folder)
    for name, row in shares(folder).iterrows():
        table = model.tables()[str(name)]
        same = abs(row.error_nothing - row.error_hidden) < 1e-3
        yield {
            "table": table.name,
            "numbers": counts[name],
            "fitted": "compute, wire" if table.wire else "compute",
            "error, nothing hidden": percent(row.error_nothing, "{:.0f}"),
            "error, messages hidden": percent(row.error_hidden, "{:.0f}"),
            "hidden": "either" if same else row.overlap_chosen + (" (stated)" if table.overlap else ""),
            "left-out error": percent(off[name], "{:.0f}"),
        }


def sources(_: Path) -> str:
    """Return the list of sources with the conditions of their tables."""
    words = (
        f"- **{table.name}** ({table.read}): {table.source}. {table.conditions}. Bytes: {table.bytes}."
        for table in model.tables().values()
    )
    return "\n".join(textwrap.fill(each, 120, subsequent_indent="  ", break_on_hyphens=False) for each in words)


def each_headline(folder: Path) -> Iterator[Facts]:
    """Yield each table's largest speed-up, with both rows predicted by the others of the table, and its factors."""
    rows = left_out(folder).set_index(["table", "at", "arm"]).left_out_s
    for name, row in shares(folder).iterrows():
        table = model.tables()[str(name)]
        value = rows[name, row["at"], table.baseline] / rows[name, row["at"], row["arm"]]
        said = {"arm": row["arm"], "at": row["at"], "theirs": row.published, "baseline": table.baseline}
        factors = {part: row[part] for part in (*PARTS, "unexplained")}
        yield {"value": value, "name": table.name, "from": table.source + _READ[table.read], **said, **factors}


def met(folder: Path) -> Facts:
    """Return the number of tables whose left-out rows are met to `NEARBY` in the median."""
    off, rows = errors(folder), left_out(folder).error.abs()
    facts = {"tables": len(off), "half": len(off) / 2, "rows": len(rows), "share": (rows <= NEARBY).mean()}
    return {"value": int((off <= NEARBY).sum()), "nearby": NEARBY, **facts}


def gains(folder: Path, rates: Sequence[str] = ()) -> Facts:
    """Return the number of headlines in which the codec gains over a good baseline, and the largest gain."""
    rows = shares(folder)
    if rates:
        rows = rows[rows["at"].isin(rates)]
    found = rows[rows.codec >= WORTH]
    names = [model.tables()[str(name)].name for name in found.index]
    facts = {"tables": len(rows), "half": len(rows) / 2, "worth": WORTH, "largest": rows.codec.max()}
    otherwise = int((rows.codec_otherwise >= WORTH).sum())
    return {"value": len(found), "names": "; ".join(names), "otherwise": otherwise, **facts}


def answer(folder: Path) -> str:
    """Return the answer in a few sentences."""
    seen, gain, rows = met(folder), gains(folder), shares(folder)
    most = rows[rows.codec < WORTH].published.max()
    return (
        f"In {seen['value']} of {seen['tables']} published tables, bytes, rate, schedule and one fitted compute time "
        f"predict the median left-out row to within {NEARBY:.0%}. By the same arithmetic, the codec gains {WORTH}x or "
        f"more over a baseline with 16-bit wires and overlap in {gain['value']} of {gain['tables']} headlines, and "
        f"nothing or less in the others, which report up to {most:.1f}x: fp32 wires, sends that wait, or unexplained."
    ).replace("%", " %")


def _rows(axes: Any, order: Any) -> None:
    """Name the rows of a panel by table, the first at the top."""
    name_rows(axes, [model.tables()[name].name for name in order])


def draw_shares(folder: Path) -> Any:
    """Draw the factors of each headline as a bar on a logarithmic axis, and the published number as a mark."""
    rows = shares(folder)
    figure, ((axes,),) = plots.panels(1, 1, (8.6, 5.8))
    for place, (_, row) in enumerate(rows.iterrows()):
        begin = 1.0
        for part, (_, colour) in PARTS.items():
            end = begin * row[part]
            high = 0.62 if end >= begin else 0.36  # a factor below 1 leads back
            axes.barh(place, end - begin, high, begin, color=colour, zorder=2 if end >= begin else 3)
            begin = end
        for colour, dash, width in ((style.PAPER, "-", 2.4), (style.INK, ":", 1.0)):
            axes.plot([begin, row.published], [place, place], color=colour, lw=width, ls=dash, zorder=4)
    axes.plot(rows.published, range(len(rows)), "o", color=style.INK, mfc=style.PAPER, ms=5, zorder=5)
    for words, colour in PARTS.values():
        axes.barh(0, 0, color=colour, label=words)
    axes.plot([], [], "o:", color=style.INK, mfc=style.PAPER, ms=5, label="published; dotted: unexplained")
    axes.axvline(1, color=style.MUTED, lw=0.8)
    _rows(axes, rows.index)
    axes.set(xscale="log", xlim=(0.96, 27), xlabel="times as fast as the published baseline")
    plots.ticks(axes.xaxis, [1, 1.5, 2, 3, 5, 10, 20], "{:g}x".format)
    lost = f"{(rows.codec < WORTH).sum()} of {len(rows)}"
    plots.finish(figure, f"By arithmetic, 16-bit wires and overlap match the codec in {lost} headlines", axes)
    return figure


def draw_predictions(folder: Path) -> Any:
    """Draw the prediction of each row by the other rows of its table, relative to the published number."""
    order, frame = list(errors(folder).sort_values().index), left_out(folder)
    figure, ((axes,),) = plots.panels(1, 1, (8.6, 5.4))
    axes.axvspan(1 - NEARBY, 1 + NEARBY, color=style.RULE, alpha=0.6, lw=0)
    base = [model.tables()[name].baseline == arm for name, arm in zip(frame.table, frame.arm, strict=True)]
    for mine, marker, colour, words in (
        (True, "o", PARTS["format"][1], "uncompressed baseline"),
        (False, "D", PARTS["codec"][1], "with the codec"),
    ):
        part = frame[[own == mine for own in base]]
        places = [order.index(name) + (0.16 if mine else -0.16) for name in part.table]
        axes.plot(
            part.left_out_s / part.published_s, places, marker, color=colour, ms=4, alpha=0.75, mew=0, label=words
        )
    _rows(axes, order)
    axes.set(xscale="log", xlabel="predicted / published time of a step; the row itself is left out of the fit")
    plots.ticks(axes.xaxis, [0.1, 0.2, 0.5, 0.8, 1, 1.2, 2, 5], "{:g}".format)
    seen = "{value} of {tables}".format(**met(folder))
    finding = f"In {seen} tables, the median left-out row is predicted to within {percent(NEARBY, '{:.0f}')}"
    plots.finish(figure, finding, axes)
    return figure


BLOCKS = {"answer": answer, "headlines": headlines, "fits": fits, "sources": sources}
FIGURES = {"shares": draw_shares, "predictions": draw_predictions}

if __name__ == "__main__":
    publishing.run(globals())
