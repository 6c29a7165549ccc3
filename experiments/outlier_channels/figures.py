"""Draws the figure and generates the tables of outlier_channels: `python experiments/outlier_channels/figures.py`.

This reads tensors.csv and codecs.csv from the output folder, which measure.py writes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.figure import Figure

from testbed.report import experiments, numbers, plots, publishing
from testbed.report.claim_rows import Facts
from testbed.report.numbers import markdown_table, percent, three

NAMES = experiments.MODELS
WAYS = {"forward": "activations X", "backward": "gradients G"}
SENT = {"forward": "X", "backward": "G"}
_GROUPED = [f"int{bits}(group=64)" for bits in (2, 3, 4, 6, 8)]
SERIES: dict[str, tuple[list[str], str, str]] = {
    "int4, int8: a step per token": (["int4", "int8"], "#d55e00", "D"),
    "the same, rotated": (["hadamard(int4)", "hadamard(int8)"], "#e69f00", "D"),
    "int2 to int8: a step per 64 channels": (_GROUPED, "#0072b2", "o"),
    "the same, rotated ": ([f"hadamard({codec})" for codec in _GROUPED], "#56b4e9", "o"),
    "tah": (["tah"], "#009e73", "P"),
    "fp8": (["fp8"], "#767d86", "s"),
    "blockwise-8": (["blockwise-8"], "#8c5a2b", "X"),
    "top-k, 2 and 10 %": (["topk(0.02)", "topk(0.1)"], "#cc79a7", "^"),
    "PowerSGD, rank 8 and 32": (["powersgd(8)", "powersgd(32)"], "#7b4fa3", "v"),
}
"""Lines of the figure: codecs by bits, colour, marker."""
PAIRS = [
    ("int8", "hadamard(int8)"),
    ("int4", "hadamard(int4)"),
    ("int8(group=64)", "hadamard(int8(group=64))"),
    ("int4(group=64)", "hadamard(int4(group=64))"),
    ("int4(group=64)", "tah"),
]
"""A codec, and the one whose error is divided by its error."""


def measured(folder: Path) -> tuple[Any, Any]:
    """Return tensors.csv and codecs.csv."""
    return pandas.read_csv(folder / "tensors.csv"), pandas.read_csv(folder / "codecs.csv")


def of_codec(codecs: Any, model: str, way: str, codec: str, column: str = "token_error") -> Any:
    """Return one number per boundary, in their order."""
    rows = experiments.matching(codecs, {"model": model, "direction": way, "codec": codec})
    return rows.sort_values("boundary")[column].to_numpy()


def mean_error(codecs: Any, model: str, way: str, codec: str, column: str = "token_error") -> float:
    """Return the geometric mean over boundaries."""
    return float(np.exp(np.log(of_codec(codecs, model, way, codec, column)).mean()))


def ratios(codecs: Any, model: str, way: str, plain: str, other: str) -> Any:
    """Return the ratio of the errors of `plain` and `other`, one number per boundary."""
    return of_codec(codecs, model, way, plain) / of_codec(codecs, model, way, other)


# ------------------------------------------------------------------ figure
def draw(codecs: Any) -> Figure:
    """Draw bits against error: a column per model, activations above gradients; the geometric mean over boundaries."""
    names = experiments.models_of(codecs)
    figure, panels = plots.panels(2, len(names), (10, 7.0), sharex=True, sharey=True)
    for row, way in zip(panels, WAYS, strict=True):
        for panel, model in zip(row, names, strict=True):
            for label, (texts, colour, marker) in SERIES.items():
                bits = [of_codec(codecs, model, way, text, "bits").mean() for text in texts]
                errors = [mean_error(codecs, model, way, text) for text in texts]
                panel.plot(bits, errors, color=colour, marker=marker, ms=5, lw=1.3, label=label)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            plots.ticks(panel.xaxis, [0.5, 1, 2, 4, 8])
            panel.set_title(f"{NAMES[model]}: {WAYS[way]}")
        row[0].set_ylabel("median relative error of a token")
    for panel in panels[-1]:
        panel.set_xlabel("bits per value on the wire")
    finding = "A rotation pays on activations that have outlier channels, and nowhere else"
    plots.finish(figure, finding, panels[0][0], columns=3)
    return figure


# ------------------------------------------------------------------ tables
def span(values: Any) -> str:
    """Write the range of numbers, one per boundary."""
    return numbers.span(map(float, values), three)


def outliers_table(tensors: Any) -> str:
    """Return the unevenness of the sent tensors: a row per model, boundary and direction."""
    rows = tensors[tensors.model.isin(NAMES)].sort_values(
        "model", key=lambda f: f.map(list(NAMES).index), kind="stable"
    )
    columns = {
        "model": rows.model.map(NAMES),
        "after layer": rows.boundary.astype(str),
        "of": rows.direction.map(SENT),
        "kurtosis": rows["kurtosis"].map(three),
        "largest channel": rows.channel_ratio.map(three),
        "share of the top 1 %": rows.top_channels.map(lambda share: percent(share, "{:.0f}")),
        "largest token": rows.token_ratio.map(three),
    }
    headings = list(columns)
    return markdown_table(headings, list(zip(*columns.values(), strict=True)), right=headings[3:])


def gains_table(codecs: Any) -> str:
    """Return by what factor each pair's second codec reduces the error, over the boundaries."""
    names = experiments.models_of(codecs)
    headings = ["of", "codec", "against", *(NAMES[model] for model in names)]
    rows = [
        [SENT[way], other, plain, *(span(ratios(codecs, model, way, plain, other)) for model in names)]
        for way in WAYS
        for plain, other in PAIRS
        if (way, other) != ("backward", "tah")  # its gradients have 6 bits
    ]
    return markdown_table(headings, rows, right=headings[3:])


def errors_table(codecs: Any) -> str:
    """Return bits and errors of activations, all codecs: the median token's, and of all values together."""
    names = experiments.models_of(codecs)
    kinds = [
        (column, words, model) for column, words in (("token_error", "token"), ("error", "all")) for model in names
    ]
    headings = ["codec", "bits", *(f"{NAMES[model]}: {words}" for _, words, model in kinds)]
    rows = [
        [
            codec,
            span([of_codec(codecs, model, "forward", codec, "bits").mean() for model in names]),
            *(f"{mean_error(codecs, model, 'forward', codec, column):.1e}" for column, _, model in kinds),
        ]
        for codec in dict.fromkeys(codecs.codec)
    ]
    return markdown_table(headings, rows, right=headings[1:])


def errs_less(folder: Path) -> Iterator[Facts]:
    """Yield for each model and rotated codec by what factor it reduces the plain one's error, over boundaries."""
    tensors, codecs = measured(folder)
    for model in experiments.models_of(codecs):
        sent = tensors[(tensors.model == model) & (tensors.direction == "forward")]
        for plain, rotated in (PAIRS[1], PAIRS[-1]):
            values = ratios(codecs, model, "forward", plain, rotated)
            yield {
                "works": bool(values.min() >= 2),
                "less": three(float(np.median(values))),
                "ends": f"{span(values)} over {len(values)} boundaries",
                "largest": span(sent.channel_ratio),
                "names": {"plain": plain, "rotated": rotated, "model": NAMES[model]},
            }


def answer(tensors: Any, codecs: Any) -> str:
    """Return the answer in three lines; the tables have every number."""
    forward = tensors[tensors.direction == "forward"]
    said = list[str]()
    for model in reversed(experiments.models_of(codecs)):
        gain = span(ratios(codecs, model, "forward", "int4", "hadamard(int4)"))
        largest = f"{span(forward[forward.model == model].channel_ratio)} times"
        of = f" ({largest})" if said else f", whose largest channel is {largest} the median one"
        said.append(f"by {gain} on {NAMES[model]}{of}")
    return experiments.prose(
        f"**Answer.** A rotation (`hadamard`, `tah`) divides int4's error of activations {'; '.join(said)}."
    )


def blocks(folder: Path) -> dict[str, str]:
    """Return the README's blocks, from the CSVs in the folder alone."""
    tensors, codecs = measured(folder)
    return {
        "answer": answer(tensors, codecs),
        "outliers": outliers_table(tensors),
        "gains": gains_table(codecs),
        "errors": errors_table(codecs),
    }


FIGURES = {"errors": lambda folder: draw(measured(folder)[1])}

if __name__ == "__main__":
    publishing.run(globals())
