"""Draws the figure and generates the tables of byte_split: `python experiments/byte_split/figures.py`.

This reads codecs.csv from the output folder, which measure.py writes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
from matplotlib.figure import Figure

from testbed.report import experiments, numbers, plots, publishing
from testbed.report.claim_rows import Facts
from testbed.report.numbers import markdown_table

PUBLISHED = 0.46
"""35.2 of 76.5 MiB: BloomBee (arXiv 2604.21072), fp16 activations of inference; second-hand."""
PLANES, WHOLE = "zstd({}, 3)", "zstd({}, 3, whole)"
NAMES = experiments.MODELS
RANDOM = ("gpt2-nano", "gpt2-mini")
"""Models without a claim."""
TEXTS = {"bundled": "a text", "repeated": "one sentence repeated"}
WAYS = {"forward": "activations X", "backward": "gradients G"}
LOOKS = {
    ("bundled", PLANES): ("#d55e00", "D", "-"),
    ("bundled", WHOLE): ("#e69f00", "D", "--"),
    ("repeated", PLANES): ("#0072b2", "o", "-"),
    ("repeated", WHOLE): ("#56b4e9", "o", "--"),
}


def measured(folder: Path) -> Any:
    """Return codecs.csv, with the remaining share of 16 bits."""
    codecs = pandas.read_csv(folder / "codecs.csv")
    return codecs.assign(share=codecs.bits / 16)


def shares(codecs: Any, model: str, text: str, codec: str, way: str = "forward") -> Any:
    """Return the shares of 16 bits that a codec leaves, by boundary."""
    wanted = {"model": model, "text": text, "direction": way, "codec": codec}
    return experiments.matching(codecs, wanted).set_index("boundary").share.sort_index()


def span(values: Any) -> str:
    """Write the range of shares."""
    return numbers.span(100 * values, "{:.0f}".format, " %")


def draw(folder: Path) -> Figure:
    """Draw the remaining share of fp16 at each boundary: a column per model, activations above gradients."""
    codecs = measured(folder)
    names = experiments.models_of(codecs)
    figure, panels = plots.panels(2, len(names), (10, 6.4), sharex="col", sharey=True)
    for row, way in zip(panels, WAYS, strict=True):
        for panel, model in zip(row, names, strict=True):
            for (text, codec), (colour, marker, dash) in LOOKS.items():
                line = shares(codecs, model, text, codec.format("fp16"), way)
                label = f"{TEXTS[text]}, {'byte planes' if codec == PLANES else 'not split'}"
                panel.plot(line.index, 100 * line, color=colour, marker=marker, ls=dash, label=label)
            if way == "forward":
                plots.level(panel, 100 * PUBLISHED, "published: 46 %")
            panel.set_ylim(0, 105)
            panel.set_xticks(sorted(set(codecs[codecs.model == model].boundary)))
            panel.set_title(f"{NAMES[model]}: {WAYS[way]}")
        row[0].set_ylabel("remaining bytes of fp16, %")
    for panel in panels[-1]:
        panel.set_xlabel("layers before the boundary")
    left = span(shares(codecs, names[-1], "bundled", PLANES.format("fp16")))
    finding = f"Byte planes leave {left} of {NAMES[names[-1]]}'s fp16 activations, not {100 * PUBLISHED:.0f} %"
    plots.finish(figure, finding, panels[0][0])
    return figure


# ------------------------------------------------------------------ tables
def table(codecs: Any) -> str:
    """Return the share that every codec leaves, over the boundaries."""
    names = experiments.models_of(codecs)
    headings = ["text", "of", "codec", *(NAMES[model] for model in names)]
    rows = [
        [TEXTS[text], "X" if way == "forward" else "G", codec,
         *(span(shares(codecs, model, text, codec, way)) for model in names)]
        for text in TEXTS
        for way in WAYS
        for codec in dict.fromkeys(codecs.codec)
    ]  # fmt: skip
    return markdown_table(headings, rows, right=headings[3:])


def kept(folder: Path, text: str, saved: bool = False) -> Iterator[Facts]:
    """Yield for each trained model the share of fp16 activations left by byte planes, or their gain over zstd alone."""
    codecs = measured(folder)
    for model in experiments.models_of(codecs):
        planes, whole = (shares(codecs, model, text, codec.format("fp16")) for codec in (PLANES, WHOLE))
        found = 1 - planes / whole if saved else planes
        facts = {"model": NAMES[model], "range": span(found), "boundaries": len(found)}
        if model not in RANDOM:
            yield {"value": found.mean(), "low": found.min(), "high": found.max(), **facts}


def answer(codecs: Any) -> str:
    """Return the answer in three lines; `table` has every number."""
    fp16, every = PLANES.format("fp16"), experiments.models_of(codecs)
    models = [model for model in every if model not in RANDOM] or every
    said = " and ".join(f"{span(shares(codecs, model, 'bundled', fp16))} ({NAMES[model]})" for model in models)
    repeated = pandas.concat([shares(codecs, model, "repeated", fp16) for model in models])
    return experiments.prose(
        f"**Answer.** Byte planes and zstd leave {said} of the bytes of fp16 activations "
        f"(published: {100 * PUBLISHED:.0f} %), and {span(repeated)} if one sentence is repeated. The low byte of an "
        "fp16 value is noise, so half of the bytes are incompressible."
    )


def blocks(folder: Path) -> dict[str, str]:
    """Return the README's blocks, from the CSVs in the folder alone."""
    codecs = measured(folder)
    return {"answer": answer(codecs), "bytes": table(codecs)}


FIGURES = {"bytes": draw}

if __name__ == "__main__":
    publishing.run(globals())
