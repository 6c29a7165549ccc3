"""Generates the figures, cells.csv, claims.csv and README blocks of decode from a sweep and setups.csv.

python -m testbed sweep decode
python experiments/decode/setups.py
python experiments/decode/figures.py [--results results/decode] [--output experiments/decode]
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from testbed import results
from testbed.jobs.decode import Decoding
from testbed.report import experiments, plots, publishing, style
from testbed.report.canvas import name_rows, note
from testbed.report.claim_rows import Facts

CODECS = ["fp32", "bf16", "int8", "int4"]


def timed(run: results.Run) -> tuple[Decoding, list[Any], list[Any], float]:
    """Return a run's job, the steps after the warm-up of its first and its last stage, and its tokens per second."""
    job = run.cell.job
    assert isinstance(job, Decoding)
    first, last = ([each for each in run.steps(place) if not each.warmup] for place in (0, job.stages - 1))
    return job, first, last, last[0].tokens / fmean((step.end_ns - step.start_ns) / 1e9 for step in first)


def write(runs: Path, output: Path) -> None:
    """Write cells.csv: a line for each cell, the means of its steps after the warm-up."""
    rows = []
    for run in results.runs(runs):
        (job, first, last, tokens_per_s), summary = timed(run), run.summary
        assert summary is not None
        # The reply to a request's prompt starts its next turn.
        waits = [
            (action.input_ns - step.start_ns) / 1e9
            for step in first
            for action in step.actions
            if job.requests <= action.microbatch < 2 * job.requests
        ]
        (link,) = {profile.name for profile in run.cell.profiles}
        ((rate, unit, delay),) = re.findall(r"(\d+)([kM])bit-(\d+)ms", link)
        rows.append(
            {
                "requests": job.requests,
                "codec": run.cell.codec,
                "rate_mbps": int(rate) * {"k": 1e-3, "M": 1}[unit],
                "delay_ms": int(delay),
                "tokens_per_s": round(tokens_per_s, 4),
                "first_token_s": round(fmean(waits), 4),
                "loss": round(last[0].loss or 0.0, 6),
                "same_tokens": round(fmean(step.accuracy or 0.0 for step in last), 4),
                "efficiency": round(summary.efficiency or 0.0, 6),
                "payload_bytes": max(sent.payload_bytes for sent in first[-1].sent[job.requests :]),
            }
        )
    frame = pd.DataFrame(rows).sort_values(["requests", "codec", "rate_mbps", "delay_ms"])
    frame.to_csv(output / "cells.csv", index=False)


def cells(folder: Path, **where: object) -> Any:
    """Return the rows of cells.csv that have these values."""
    return experiments.matching(pd.read_csv(folder / "cells.csv"), where)


def setups(folder: Path, **where: object) -> Any:
    """Return the rows of setups.csv that have these values, with the link's rate and the nodes' delay, ms."""
    frame = pd.read_csv(folder / "setups.csv")
    links = frame.link.str.extract(r"\((\w+), ([\d.]+)ms")
    return experiments.matching(frame.assign(rate=links[0], apart_ms=2 * links[1].astype(float)), where)


def saved(row: Any, plain: Any) -> tuple[float, float]:
    """Return the communication time per token that guesses save: by DSD's formula, and played; seconds."""
    tokens, compute = 16, plain.forward_s
    turns = 1 + -(-(tokens - 1) // (1 + row.speculate))
    drafts = (tokens - 1) // (1 + row.speculate)
    per_turn = (turns * compute + drafts * row.draft_s) / tokens
    played = (1 / plain.ours - compute) - (1 / row.ours - per_turn)
    return (row.stages - 1) * row.apart_ms / 1e3 * (1 - turns / tokens), played


@experiments.table
def savings(folder: Path) -> Any:
    """Return the ratio of played and predicted savings, by number of stages, delay and number of guesses."""
    for (stages, _), part in setups(folder, group="speculating").groupby(["stages", "apart_ms"]):
        plain, *guessing = part.itertuples()
        for row in guessing:
            formula, played = saved(row, plain)
            yield {"stages": stages, "ratio": played / formula, "faster": row.ours / plain.ours}


def draw_map(folder: Path) -> Figure:
    """Draw tokens/s against the rate, a panel for each delay and number of requests."""
    frame = cells(folder)
    delays, counts = sorted(frame.delay_ms.unique()), sorted(frame.requests.unique())
    figure, panels = plots.panels(len(counts), len(delays), (9.2, 5.2), sharey=True, sharex=True)
    looks = style.looks(CODECS)
    for axes, (count, delay) in zip(panels.flat, itertools.product(counts, delays), strict=True):
        part = frame[(frame.requests == count) & (frame.delay_ms == delay)]
        for codec in CODECS:
            line, (colour, marker, dash) = part[part.codec == codec], looks[codec]
            axes.plot(line.rate_mbps, line.tokens_per_s, color=colour, marker=marker, ls=dash, label=codec)
        axes.set(xscale="log", yscale="log", title=f"{count} in flight, {2 * delay} ms apart")
    figure.supxlabel("rate, Mbit/s")
    figure.supylabel("tokens per second")
    panels[0][0].legend()
    style.state(figure, "Bytes dominate at 0.3 Mbit/s, the delay at 100 Mbit/s, which only more requests hide")
    return figure


def draw_published(folder: Path) -> Figure:
    """Draw published and played speeds."""
    frame = setups(folder)
    frame = frame[frame.published.notna() & (frame.name != "tokens come back")].reset_index(drop=True)
    figure, ((axes,),) = plots.panels(1, 1, (9.2, 4.2))
    axes.axvline(1, color="0.6", lw=1)
    for place, row in enumerate(frame.itertuples()):
        share = row.published / row.ours
        axes.plot(share, place, "o", color="#0072b2")
        note(axes, f"{row.published:g} of {row.ours:.3g} tokens/s", (share, place), (6, -3), size=8)
    name_rows(axes, [f"{row.group}, {row.name}, {row.rate}/s, {row.apart_ms:g} ms" for row in frame.itertuples()])
    axes.set(xlabel="published tokens/s as a share of the limit by compute and link", xlim=(0.5, 1.2))
    style.state(figure, "Links explain Petals on 3 servers; llama.cpp and exo's four Macs lose 14 to 38 % elsewhere")
    return figure


def played(folder: Path, alone: float = float("nan"), **where: object) -> Iterator[Facts]:
    """Yield the setups that have these values; `alone`: tokens/s without a network."""
    for row in setups(folder, **where).to_dict("records"):
        off, wire, longer = row["ours"] / row["published"] - 1, 1 / row["ours"], 1 / row["published"]
        times = {"wire_ms": 1e3 * (wire - 1 / alone), "longer_ms": 1e3 * (longer - 1 / alone)}
        yield {**row, **times, "round_trip_ms": 2 * row["apart_ms"], "off": off, "value": row["ours"]}


def crossings(folder: Path, group: str, crossings: int) -> Facts:
    """Return the excess of published over played time per crossing, over the setups of a group."""
    frame = setups(folder, group=group)
    lost = 1e3 * (1 / frame.published - 1 / frame.ours) / crossings
    numbers = {"published": ", ".join(map("{:g}".format, frame.published)), "least_ms": lost.min()}
    off = frame.ours / frame.published
    ends = {"low": off.min(), "high": off.max(), "most_ms": lost.max()}
    return {"ours": ", ".join(map("{:.1f}".format, frame.ours)), **numbers, **ends}


def guesses(folder: Path) -> Facts:
    """Return the ratio of played to DSD's predicted saving, by number of stages, and the speed-up of decoding."""
    frame = savings(folder)
    ratios = frame.groupby("stages").ratio.mean()
    said = ", ".join(f"{ratio:.2f} times that with N = {stages}" for stages, ratio in ratios.items())
    faster = {"slowest": frame.faster.min(), "fastest": frame.faster.max()}
    return {"low": ratios.min(), "high": ratios.max(), "ratios": said, **faster}


def efficiency(folder: Path) -> Facts:
    """Return the lowest and highest share of the ideal speed that cells reach."""
    found = cells(folder).efficiency
    low, high = found.min(), found.max()
    return {"low": low, "high": high, "cells": len(found), "near_and_never_more": low > 0.95 and high <= 1}


def gains(folder: Path, of: str = "requests") -> dict[str, float]:
    """Return speed-ups in tokens per second: of four requests in flight over one if the delay dominates, in fp32; and
    of int4 over fp32, for one request, in that case (far) and if the rate dominates (near).
    """

    def times(rate: float, delay: int, codec: str, requests: int) -> float:
        here = {"rate_mbps": rate, "delay_ms": delay}
        plain = cells(folder, **here, codec="fp32", requests=1)
        ours = cells(folder, **here, codec=codec, requests=requests)
        return float(ours.tokens_per_s.iloc[0] / plain.tokens_per_s.iloc[0])

    found = {
        "requests": times(100, 100, "fp32", 4),
        "far": times(100, 100, "int4", 1),
        "near": times(0.3, 5, "int4", 1),
    }
    return {**found, "value": found[of]}


def quality(folder: Path) -> Any:
    """Return each codec's cost on held-out text."""
    codecs = cells(folder).sort_values("requests").groupby("codec")
    frame = codecs.agg({"payload_bytes": "min", "loss": "first", "same_tokens": "last"}).loc[CODECS]
    return pd.DataFrame(
        {
            "codec": CODECS,
            "bytes per token": frame.payload_bytes.map("{:,}".format),
            "loss above fp32, nats": (frame.loss - frame.loss["fp32"]).map("{:+.4f}".format),
            "same greedy tokens": frame.same_tokens.map("{:.0%}".format).str.replace("%", " %"),
        }
    )


def map_table(folder: Path) -> Any:
    """Return tokens/s and the time to the first token by link, codec and number of requests."""
    frame = cells(folder).assign(
        shown=lambda f: [f"{a:.2f} ({b:.2f} s)" for a, b in zip(f.tokens_per_s, f.first_token_s, strict=True)],
        column=lambda f: f.codec + ", " + f.requests.astype(str),
    )
    wide = frame.pivot(index=["rate_mbps", "delay_ms"], columns="column", values="shown").reset_index()
    columns = [f"{codec}, {count}" for count in sorted(frame.requests.unique()) for codec in ("fp32", "int8", "int4")]
    links = {"Mbit/s": wide.rate_mbps.map("{:g}".format), "ms apart": 2 * wide.delay_ms}
    return pd.concat([pd.DataFrame(links), wide[columns]], axis=1)


def setups_table(folder: Path) -> Any:
    """Return the published setups."""
    frame = setups(folder)
    frame = frame[frame.published.notna()]
    return pd.DataFrame(
        {
            "setup": frame.group + ", " + frame.name,
            "link": frame.rate + "/s",
            "ms apart": frame.apart_ms.map("{:g}".format),
            "bytes per token": frame.token_bytes.map("{:,}".format),
            "published tokens/s": frame.published.map("{:g}".format),
            "played": frame.ours.map("{:.2f}".format),
            "off": (frame.ours / frame.published - 1).map("{:+.0%}".format).str.replace("%", " %"),
        }
    )


def answer(folder: Path) -> str:
    """Return the answer in a few sentences."""
    gain = gains(folder)
    return (
        "A token of SmolLM2-135M is 2,304 bytes in fp32, so the rate matters only if it is very low: int4 "
        f"decodes one request {gain['near']:.2f} times as fast as fp32 at 300 kbit/s and 10 ms between nodes, and "
        f"{gain['far']:.2f} times at 100 Mbit/s and 200 ms. There, four requests in flight decode "
        f"{gain['requests']:.2f} times as many tokens. Petals' published speeds on 3 servers follow from its links to "
        "within 4 %; the wire does not explain most of the loss of llama.cpp's RPC and exo's four Macs."
    )


BLOCKS = {"answer": answer, "map": map_table, "quality": quality, "setups": setups_table}
FIGURES = {"map": draw_map, "published": draw_published}


if __name__ == "__main__":
    publishing.run(globals())
