"""Draw the figure of byte_split and make its tables: `python experiments/byte_split/figures.py`.

This reads codecs.csv from the output folder, which measure.py writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
from matplotlib.figure import Figure

from testbed.report import claim_rows, experiments, style
from testbed.report.claim_rows import Facts
from testbed.report.claims import Claim, claims_table
from testbed.report.numbers import markdown_table

HERE = Path(__file__).resolve().parent
PUBLISHED = 0.46
"""35.2 of 76.5 MiB: BloomBee (arXiv 2604.21072), fp16 activations of inference; second-hand."""
PLANES, WHOLE = "zstd({}, 3)", "zstd({}, 3, whole)"
NAMES = {
    "gpt2-nano": "GPT-2 nano, random",
    "gpt2-mini": "GPT-2 mini, random",
    "gpt2-mini-trained": "GPT-2 mini, trained",
    "smollm2-135m": "SmolLM2-135M",
}
RANDOM = ("gpt2-nano", "gpt2-mini")
"""Models that no claim is about."""
TEXTS = {"bundled": "a text", "repeated": "one sentence repeated"}
WAYS = {"forward": "activations X", "backward": "gradients G"}
LOOKS = {
    ("bundled", PLANES): ("#d55e00", "D", "-"),
    ("bundled", WHOLE): ("#e69f00", "D", "--"),
    ("repeated", PLANES): ("#0072b2", "o", "-"),
    ("repeated", WHOLE): ("#56b4e9", "o", "--"),
}


def measured(folder: Path) -> Any:
    """Return codecs.csv, with the share of 16 bits that is left."""
    codecs = pandas.read_csv(folder / "codecs.csv")
    return codecs.assign(share=codecs.bits / 16)


def models_of(codecs: Any) -> list[str]:
    """Return the models that were measured, the random one first."""
    return [name for name in NAMES if name in set(codecs.model)]


def shares(codecs: Any, model: str, text: str, codec: str, way: str = "forward") -> Any:
    """Return the shares of 16 bits that a codec leaves, by boundary."""
    same = (codecs.model == model) & (codecs.text == text) & (codecs.direction == way) & (codecs.codec == codec)
    return codecs[same].set_index("boundary").share.sort_index()


def span(values: Any) -> str:
    """Write the range of shares."""
    low, high = (f"{100 * value:.0f}" for value in (min(values), max(values)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def draw(folder: Path) -> Figure:
    """Draw what is left of fp16 at each boundary: a column per model, activations above gradients."""
    codecs = measured(folder)
    names = models_of(codecs)
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    panels = figure.subplots(2, len(names), sharex="col", sharey=True, squeeze=False)
    for row, way in zip(panels, WAYS, strict=True):
        for panel, model in zip(row, names, strict=True):
            for (text, codec), (colour, marker, dash) in LOOKS.items():
                line = shares(codecs, model, text, codec.format("fp16"), way)
                label = f"{TEXTS[text]}, {'byte planes' if codec == PLANES else 'as it is'}"
                panel.plot(line.index, 100 * line, color=colour, marker=marker, ls=dash, label=label)
            if way == "forward":
                panel.axhline(100 * PUBLISHED, color=style.MUTED, lw=1)
                panel.annotate(
                    "published: 46 %", (0.98, 100 * PUBLISHED), xycoords=("axes fraction", "data"), ha="right",
                    xytext=(0, 3), textcoords="offset points", color=style.MUTED, size=8,
                )  # fmt: skip
            panel.set_ylim(0, 105)
            panel.set_xticks(sorted(set(codecs[codecs.model == model].boundary)))
            panel.set_title(f"{NAMES[model]}: {WAYS[way]}")
        row[0].set_ylabel("bytes left of fp16, %")
    for panel in panels[-1]:
        panel.set_xlabel("layers before the boundary")
    most = names[-1]
    style.state(
        figure,
        f"Byte planes leave {span(shares(codecs, most, 'bundled', PLANES.format('fp16')))} of {NAMES[most]}'s fp16 "
        f"activations, not {100 * PUBLISHED:.0f} %",
    )
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower left", ncols=4)
    return figure


# ------------------------------------------------------------------ tables
def table(codecs: Any) -> str:
    """Return what every codec leaves, over the boundaries."""
    names = models_of(codecs)
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
    """Yield for each trained model what byte planes leave of fp16 activations, or how much shorter than zstd alone."""
    codecs = measured(folder)
    for model in models_of(codecs):
        planes, whole = (shares(codecs, model, text, codec.format("fp16")) for codec in (PLANES, WHOLE))
        found = 1 - planes / whole if saved else planes
        facts = {"model": NAMES[model], "range": span(found), "boundaries": len(found)}
        if model not in RANDOM:
            yield {"value": found.mean(), "low": found.min(), "high": found.max(), **facts}


def claims(folder: Path) -> list[Claim]:
    """Return the claims, from the CSVs in the folder alone."""
    return claim_rows.claims(globals(), folder)


def answer(codecs: Any) -> str:
    """Return the answer in three lines; `table` has every number."""
    fp16, every = PLANES.format("fp16"), models_of(codecs)
    models = [model for model in every if model not in RANDOM] or every
    said = " and ".join(f"{span(shares(codecs, model, 'bundled', fp16))} ({NAMES[model]})" for model in models)
    repeated = [share for model in models for share in shares(codecs, model, "repeated", fp16)]
    return experiments.prose(
        f"**Answer.** Byte planes and zstd leave {said} of the bytes of fp16 activations, where "
        f"{100 * PUBLISHED:.0f} % are published, and {span(repeated)} where one sentence is repeated. The low byte of "
        "an fp16 value is noise, so half of the bytes stay."
    )


def blocks(folder: Path) -> dict[str, str]:
    """Return the README's blocks, from the CSVs in the folder alone."""
    codecs = measured(folder)
    return {"answer": answer(codecs), "claims": claims_table(claims(folder)), "bytes": table(codecs)}


if __name__ == "__main__":
    _, written = experiments.folders(HERE.name, "Draw the figure of byte_split and make its tables.")
    experiments.draw_and_publish(HERE, written, {"bytes": draw}, blocks, claims)
