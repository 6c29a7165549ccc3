"""Draws the figure and generates the tables of gloo_on_home_links: `python experiments/gloo_on_home_links/figures.py`.

This reads the CSVs in the output folder, which measure.py writes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
from matplotlib.figure import Figure

from testbed.report import experiments, plots, publishing, style
from testbed.report.claim_rows import Facts
from testbed.report.numbers import markdown_table

LOOKS = {0: ("#56b4e9", "o"), 25: ("#0072b2", "s"), 100: ("#d55e00", "D")}
"""By the delay each way, in ms."""
POSTED = {"early": "received immediately", "late": "received when it could have arrived"}


def binary(size: int) -> str:
    """Write a size of whole KiB."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def draw(folder: Path) -> Figure:
    """Draw the time of a message over gloo and over our transport, for an early receive and for a late one."""
    messages = pandas.read_csv(folder / "messages.csv")
    figure, (panels,) = plots.panels(1, 2, (10, 4.4), sharex=True, sharey=True)
    for panel, (receive, words) in zip(panels, POSTED.items(), strict=True):
        for delay, (colour, marker) in LOOKS.items():
            one = messages[(messages.receive == receive) & (messages.delay_ms == delay)]
            panel.plot(one.bytes, one.gloo_ms, color=colour, marker=marker, label=f"gloo, {delay} ms each way")
            if receive == "early":
                panel.plot(one.bytes, one.ours_ms, color=colour, ls=":", label=f"testbed, {delay} ms")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(sorted(set(messages.bytes)), [binary(size) for size in sorted(set(messages.bytes))])
        panel.tick_params(axis="x", rotation=45)
        panel.set_title(words)
    look: Any = {"xycoords": "axes fraction", "ha": "right", "color": style.MUTED, "size": 9}
    panels[1].annotate("testbed: 0, the message has arrived", (0.97, 0.05), **look)
    panels[0].set_ylabel("time of a message, ms")
    least = {"receive": "late", "delay_ms": max(LOOKS), "bytes": messages.bytes.min()}
    slow = experiments.matching(messages, least).iloc[0]
    took = f"{slow.gloo_ms:.0f} ms for {binary(int(slow.bytes))}"
    finding = f"gloo sends a message when its receive is posted: {took} that could have arrived"
    plots.finish(figure, finding, panels[0], columns=3)
    return figure


# ------------------------------------------------------------------ tables
def message_table(folder: Path) -> str:
    """Return message times by delay and size, in milliseconds."""
    messages = pandas.read_csv(folder / "messages.csv")
    headings = ["delay each way", "size", "gloo, early", "gloo, late", "testbed, early", "testbed, late", "the link"]
    rows = []
    for (delay, size), both in messages.groupby(["delay_ms", "bytes"]):
        early, late = (both[both.receive == receive].iloc[0] for receive in POSTED)
        times = (early.gloo_ms, late.gloo_ms, early.ours_ms, late.ours_ms, early.ideal_ms)
        rows.append([f"{delay} ms", binary(int(size)), *(f"{ms:.1f}" for ms in times)])
    return markdown_table(headings, rows, right=headings[1:])


def collective_table(folder: Path) -> str:
    """Return the times of collectives of 4 MiB, in milliseconds."""
    collectives = pandas.read_csv(folder / "collectives.csv")
    headings = ["nodes", "collective", "gloo", "testbed's ring", "the links", "gloo / testbed"]
    rows = [
        [str(row.nodes), row.what, f"{row.gloo_ms:.0f}", f"{row.ours_ms:.0f}", f"{row.ideal_ms:.0f}",
         f"{row.gloo_ms / row.ours_ms:.2f}"]
        for row in collectives.itertuples()
    ]  # fmt: skip
    return markdown_table(headings, rows, right=headings[2:])


def pipelining_table(folder: Path) -> str:
    """Return the step times of the same pipeline."""
    pipelining = pandas.read_csv(folder / "pipelining.csv")
    headings = ["runtime", "in flight", "step, ms", "ideal, ms"]
    forms = {"in_flight": "{:.0f}", "step_ms": "{:.2f}", "ideal_ms": "{:.2f}"}
    rows = [
        [row["runtime"], *("" if pandas.isna(row[name]) else form.format(row[name]) for name, form in forms.items())]
        for _, row in pipelining.iterrows()
    ]
    return markdown_table(headings, rows, right=headings[1:])


def late(folder: Path) -> Iterator[Facts]:
    """Yield, for each delay, the extra time of the smallest message with a late receive."""
    messages = pandas.read_csv(folder / "messages.csv")
    for delay, some in messages[messages.bytes == messages.bytes.min()].groupby("delay_ms"):
        gloo = some.set_index("receive").gloo_ms
        if delay:
            yield {"value": gloo["late"] / delay, "delay": delay}


def ratio(folder: Path, what: str) -> Iterator[Facts]:
    """Yield the ratio of a collective's time over gloo and over our ring, by the number of nodes."""
    collectives = pandas.read_csv(folder / "collectives.csv")
    for row in collectives[collectives.what == what].itertuples():
        yield {"value": row.gloo_ms / row.ours_ms, "nodes": row.nodes}


def pipeline_ratio(folder: Path) -> Facts:
    """Return the ratio of a step of PyTorch's pipelining and ours, both with two micro-batches in flight."""
    steps = pandas.read_csv(folder / "pipelining.csv").set_index("in_flight", drop=False).step_ms
    return {"value": steps.iloc[0] / steps.loc[2]}


def answer(folder: Path) -> str:
    """Return the answer in three lines."""
    scatter = [fact["value"] for fact in ratio(folder, "reduce_scatter")]
    whole = [fact["value"] for fact in ratio(folder, "all_reduce")]
    return (
        "**Answer.** gloo sends a message only when its receive is posted, so a late receive waits for the transfer "
        "and a round trip that our transport has completed by then. gloo's reduce-scatter takes "
        f"{min(scatter):.2f} to {max(scatter):.2f} times as long as a ring, its all-reduce {min(whole):.2f} to "
        f"{max(whole):.2f} times. A step of PyTorch's pipelining takes {pipeline_ratio(folder)['value']:.2f} times as "
        "long as testbed's."
    )


FIGURES = {"messages": draw}
BLOCKS = {"answer": answer, "messages": message_table, "collectives": collective_table, "pipelining": pipelining_table}

if __name__ == "__main__":
    publishing.run(globals())
