"""Make the figures, cells.csv, claims.csv and the README's blocks of decode from a sweep and setups.csv.

python -m testbed sweep decode
python experiments/decode/setups.py
python experiments/decode/figures.py [--results results/decode] [--output experiments/decode]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from testbed import results
from testbed.jobs.decode import Decoding
from testbed.report import experiments, style
from testbed.report.claims import Claim, claims_table

NAME = "decode"
SWEEP, SETUPS = f"python -m testbed sweep {NAME}", f"python experiments/{NAME}/setups.py"
NEAR = 0.05
"""A published number within this share of ours holds."""
CODECS = ["fp32", "bf16", "int8", "int4"]
PETALS = "Borzunov et al., arXiv 2209.01188v2, Table 3 (second-hand)"


def write_cells(runs: Path, output: Path) -> None:
    """Write cells.csv: a line for each cell, the means of its steps after the warm-up."""
    rows = []
    for run in results.runs(runs):
        job, summary = run.cell.job, run.summary
        assert isinstance(job, Decoding)
        assert summary is not None
        first, last = ([each for each in run.steps(place) if not each.warmup] for place in (0, job.stages - 1))
        seconds = fmean((step.end_ns - step.start_ns) / 1e9 for step in first)
        # The answer to a request's prompt is taken up as its next turn.
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
                "tokens_per_s": round(last[0].tokens / seconds, 4),
                "first_token_s": round(fmean(waits), 4),
                "loss": round(last[0].loss or 0.0, 6),
                "same_tokens": round(fmean(step.accuracy or 0.0 for step in last), 4),
                "efficiency": round(summary.efficiency or 0.0, 6),
                "payload_bytes": max(sent.payload_bytes for sent in first[-1].sent[job.requests :]),
            }
        )
    frame = pd.DataFrame(rows).sort_values(["requests", "codec", "rate_mbps", "delay_ms"])
    frame.to_csv(output / "cells.csv", index=False)


def cells(folder: Path) -> Any:
    """Return cells.csv."""
    return pd.read_csv(folder / "cells.csv")


def setups(folder: Path) -> Any:
    """Return setups.csv, with the link's rate and one-way delay between two nodes, ms."""
    frame = pd.read_csv(folder / "setups.csv")
    links = frame.link.str.extract(r"\((\w+), ([\d.]+)ms")
    return frame.assign(rate=links[0], apart_ms=2 * links[1].astype(float))


def speed(frame: Any, **where: Any) -> float:
    """Return the tokens/s of the cell that has these values."""
    for name, value in where.items():
        frame = frame[frame[name] == value]
    return float(frame.tokens_per_s.iloc[0])


def saved(row: Any, plain: Any) -> tuple[float, float]:
    """Return what guesses save of a token's communication: by DSD's formula, and played; seconds."""
    tokens, compute = 16, plain.forward_s
    turns = 1 + -(-(tokens - 1) // (1 + row.speculate))
    drafts = (tokens - 1) // (1 + row.speculate)
    per_turn = (turns * compute + drafts * row.draft_s) / tokens
    played = (1 / plain.ours - compute) - (1 / row.ours - per_turn)
    return (row.stages - 1) * row.apart_ms / 1e3 * (1 - turns / tokens), played


def savings(folder: Path) -> Any:
    """Return how many times the formula's saving is played, by number of stages, delay and number of guesses."""
    frame = setups(folder)
    frame = frame[frame.group == "speculating"]
    rows = []
    for (stages, apart), part in frame.groupby(["stages", "apart_ms"]):
        plain = part[part.speculate == 0].iloc[0]
        for row in part[part.speculate > 0].itertuples():
            formula, played = saved(row, plain)
            rows.append({"stages": stages, "apart": apart, "ratio": played / formula, "faster": row.ours / plain.ours})
    return pd.DataFrame(rows)


def draw_map(folder: Path) -> Figure:
    """Draw tokens/s against the rate, a panel for each delay and number of requests."""
    frame = cells(folder)
    delays, counts = sorted(frame.delay_ms.unique()), sorted(frame.requests.unique())
    figure, panels = plt.subplots(
        len(counts), len(delays), figsize=(9.2, 5.2), layout="constrained", sharey=True, sharex=True, squeeze=False
    )
    looks = style.looks(CODECS)
    for (down, count), (across, delay) in [(a, b) for a in enumerate(counts) for b in enumerate(delays)]:
        axes, part = panels[down][across], frame[(frame.requests == count) & (frame.delay_ms == delay)]
        for codec in CODECS:
            line, look = part[part.codec == codec], looks[codec]
            axes.plot(
                line.rate_mbps, line.tokens_per_s, color=look.colour, marker=look.marker, ls=look.dash, label=codec
            )
        axes.set(xscale="log", yscale="log", title=f"{count} in flight, {2 * delay} ms apart")
    figure.supxlabel("rate, Mbit/s")
    figure.supylabel("tokens per second")
    panels[0][0].legend()
    style.state(figure, "At 0.3 Mbit/s bytes decide, at 100 Mbit/s the delay, which only more requests hide")
    return figure


def draw_published(folder: Path) -> Figure:
    """Draw what was published beside what is played."""
    frame = setups(folder)
    frame = frame[frame.published.notna() & (frame.name != "tokens come back")].reset_index(drop=True)
    figure, axes = plt.subplots(figsize=(9.2, 4.2), layout="constrained")
    axes.axvline(1, color="0.6", lw=1)
    for place, row in enumerate(frame.itertuples()):
        axes.plot(row.published / row.ours, place, "o", color="#0072b2")
        axes.annotate(
            f"{row.published:g} of {row.ours:.3g} tokens/s",
            (row.published / row.ours, place),
            (6, -3),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_yticks(
        range(len(frame)), [f"{row.group}, {row.name}, {row.rate}/s, {row.apart_ms:g} ms" for row in frame.itertuples()]
    )
    axes.invert_yaxis()
    axes.set(xlabel="published tokens/s as a share of what computing and the link allow", xlim=(0.5, 1.2))
    style.state(figure, "Links explain Petals on 3 servers; llama.cpp and exo's four Macs lose 14 to 38 % elsewhere")
    return figure


def claims(folder: Path) -> Iterator[Claim]:
    """Yield what was claimed and what became of it."""
    frame = setups(folder)
    petals = frame[frame.group == "Petals"]
    for row in petals[petals.rate == "100Mbit"].itertuples():
        off = row.ours / row.published - 1
        yield Claim(
            claim=f"Petals decodes BLOOM-176B on {row.name}, 100 Mbit/s and {2 * row.apart_ms:g} ms round trip, at "
            f"{row.published:g} steps/s",
            source=PETALS,
            published=f"{row.published:g} steps/s",
            ours=f"{row.ours:.2f} steps/s",
            interval="exact",
            verdict="holds" if abs(off) < NEAR else "fails",
            why=f"{off:+.0%}".replace("%", " %") + " with servers that pass 14,336 bytes on to the next, and computing "
            "that the row at 1 Gbit/s implies",
            command=SETUPS,
        )
    rpc = frame[frame.group == "llama.cpp"].set_index("name")
    explained = 1 / rpc.ours["logits come back"] - 1 / 74.83
    yield Claim(
        claim="A network of 1 Gbit/s is why llama.cpp's RPC decodes TinyLlama at 42 tokens/s, and the card alone at 75",
        source="ggml-org/llama.cpp, pull request 6829 and issue 8832",
        published="42 tokens/s",
        ours=f"{rpc.ours['logits come back']:.1f} tokens/s",
        interval="exact",
        verdict="fails",
        why=f"128,000 bytes of logits and two crossings take {1e3 * explained:.1f} ms of the "
        f"{1e3 * (1 / 42 - 1 / 74.83):.1f} ms that a token takes longer; the rest is not the wire",
        command=SETUPS,
    )
    studios = frame[frame.group == "exo, 4 Mac Studios"]
    lost = [1e3 * (1 / row.published - 1 / row.ours) / 4 for row in studios.itertuples()]
    yield Claim(
        claim="A pipeline of 4 Mac Studios decodes as fast as its stages and its cables allow",
        source="exo-explore/exo, pull request 1781",
        published=", ".join(f"{each:g}" for each in studios.published) + " tokens/s",
        ours=", ".join(f"{each:.1f}" for each in studios.ours) + " tokens/s",
        interval="exact",
        verdict="fails",
        why=f"each of 4 crossings takes {min(lost):.1f} to {max(lost):.1f} ms that no cable explains",
        command=SETUPS,
    )
    two = frame[frame.group == "exo, two Macs"].iloc[0]
    yield Claim(
        claim="A MacBook Pro of 40 and a Mac mini of 20 tokens/s decode together at 24",
        source="exo-explore/exo, issue 489",
        published="24 tokens/s",
        ours=f"{two.ours:.1f} tokens/s",
        interval="exact",
        verdict="not resolved",
        why="half of the layers each gives 26.7 without a network, and 2 ms a crossing 24.0; "
        f"{experiments.NO_SEEDS}: the post states no link",
        command=SETUPS,
    )
    yield Claim(
        claim="An activation of Llama 3.2 3B is smaller than 4 KB",
        source="exo, blog.exolabs.net/day-1",
        published="4 KB at most",
        ours="6,144 bytes in 16 bits, 3,072 in 8",
        interval="exact",
        verdict="fails",
        why="3,072 values a token; it holds for 8 bits a value",
        command=SETUPS,
    )
    ratios = savings(folder)
    by_stages = ratios.groupby("stages").ratio.mean()
    yield Claim(
        claim="Guesses save (N - 1) t1 (k - 1) / k of a token's communication",
        source="DSD, arXiv 2511.11733, abstract",
        ours=", ".join(f"{ratio:.2f} times that with N = {stages}" for stages, ratio in by_stages.items()),
        interval="exact",
        verdict="fails",
        why="what was chosen goes back to the node that guesses, which is one crossing more: N t1, not (N - 1) t1; the "
        "rest is what bytes take",
        command=SETUPS,
    )
    yield Claim(
        claim="Guesses decode up to 2.56 (HumanEval) and 2.59 times (GSM8K) as fast",
        source="DSD, arXiv 2511.11733, abstract",
        published="2.56x, 2.59x",
        ours=f"{ratios.faster.min():.2f}x to {ratios.faster.max():.2f}x",
        interval="exact",
        verdict="not resolved",
        why="with 2 to 5 tokens a turn, all guesses accepted; "
        f"{experiments.NO_SEEDS}: how many DSD guesses and accepts was not read",
        command=SETUPS,
    )
    far, near = gains(folder)
    yield Claim(
        claim="Where the delay decides, four requests in flight decode four times as many tokens",
        source="ours",
        ours=f"{far.requests:.2f}x",
        interval="exact",
        verdict="holds" if far.requests > 4 * (1 - NEAR) else "fails",
        why="100 Mbit/s, 200 ms between nodes: while one request is on its way the stages compute the others",
        command=SWEEP,
    )
    yield Claim(
        claim="Coded activations decode a single request faster",
        source="ours",
        ours=f"int4 {far.codec:.2f}x at 100 Mbit/s and 200 ms, {near.codec:.2f}x at 300 kbit/s and 10 ms",
        interval="exact",
        verdict="holds" if far.codec > 1 + NEAR else "fails",
        why="a token is 2,304 bytes in fp32, which take 0.2 ms at 100 Mbit/s and 61 ms at 300 kbit/s",
        command=SWEEP,
    )

    efficiency = cells(folder).efficiency
    yield Claim(
        claim="A played step takes what computing, bytes, rate and delay allow, and never less",
        source="ours",
        ours=f"{efficiency.min():.4f} to {efficiency.max():.4f} of the ideal's speed over {len(efficiency)} cells",
        interval="exact",
        verdict="holds" if efficiency.min() > 1 - NEAR and efficiency.max() <= 1 else "fails",
        why="acknowledgements and TCP's windows are what is left",
        command=SWEEP,
    )


class Gain(NamedTuple):
    """How many times as many tokens a second, over one network."""

    requests: float
    """By four requests in flight instead of one, in fp32."""
    codec: float
    """By int4 instead of fp32, of one request."""


def gains(folder: Path) -> tuple[Gain, Gain]:
    """Return what is gained where the delay decides, and where the rate does."""
    frame, found = cells(folder), []
    for rate, delay in ((100, 100), (0.3, 5)):
        part = frame[(frame.rate_mbps == rate) & (frame.delay_ms == delay)]
        plain = speed(part, requests=1, codec="fp32")
        found.append(Gain(speed(part, requests=4, codec="fp32") / plain, speed(part, requests=1, codec="int4") / plain))
    return found[0], found[1]


def quality(folder: Path) -> Any:
    """Return what each codec costs on held-out text."""
    frame = cells(folder)
    base = float(frame[frame.codec == "fp32"].loss.iloc[0])
    rows = []
    for codec in CODECS:
        part = frame[frame.codec == codec]
        many = part[part.requests == part.requests.max()]
        rows.append(
            {
                "codec": codec,
                "bytes a token": f"{int(part.payload_bytes.min()):,}",
                "loss above fp32, nats": f"{float(part.loss.iloc[0]) - base:+.4f}",
                "same greedy tokens": f"{float(many.same_tokens.iloc[0]):.0%}".replace("%", " %"),
            }
        )
    return pd.DataFrame(rows)


def map_table(folder: Path) -> Any:
    """Return tokens/s and the time to the first token by link, codec and number of requests."""
    frame = cells(folder)
    rows = []
    for (rate, delay), part in frame.groupby(["rate_mbps", "delay_ms"]):
        row: dict[str, Any] = {"Mbit/s": f"{rate:g}", "ms apart": 2 * delay}
        for count in sorted(part.requests.unique()):
            for codec in ("fp32", "int8", "int4"):
                cell = part[(part.requests == count) & (part.codec == codec)].iloc[0]
                row[f"{codec}, {count}"] = f"{cell.tokens_per_s:.2f} ({cell.first_token_s:.2f} s)"
        rows.append(row)
    return pd.DataFrame(rows)


def setups_table(folder: Path) -> Any:
    """Return the published setups."""
    frame = setups(folder)
    frame = frame[frame.published.notna()]
    return pd.DataFrame(
        {
            "setup": frame.group + ", " + frame.name,
            "link": frame.rate + "/s",
            "ms apart": frame.apart_ms.map("{:g}".format),
            "bytes a token": frame.token_bytes.map("{:,}".format),
            "published tokens/s": frame.published.map("{:g}".format),
            "played": frame.ours.map("{:.2f}".format),
            "off": (frame.ours / frame.published - 1).map("{:+.0%}".format).str.replace("%", " %"),
        }
    )


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    far, near = gains(folder)
    answer = (
        "A token of SmolLM2-135M is 2,304 bytes in fp32, so that the rate matters only where it is very low: int4 "
        f"decodes one request {near.codec:.2f} times as fast as fp32 at 300 kbit/s and 10 ms between nodes, and "
        f"{far.codec:.2f} times at 100 Mbit/s and 200 ms. There, four requests in flight decode {far.requests:.2f} "
        "times as many tokens. Petals' published speeds on 3 servers follow from its links to within 4 %; what "
        "llama.cpp's RPC and exo's four Macs lose is for the most part not the wire's."
    ).replace(" %", " %")
    return {
        "answer": experiments.prose(answer),
        "map": experiments.markdown_of(map_table(folder)),
        "quality": experiments.markdown_of(quality(folder)),
        "setups": experiments.markdown_of(setups_table(folder)),
        "claims": claims_table(list(claims(folder))),
    }


if __name__ == "__main__":
    found, made = experiments.folders(NAME, __doc__)
    write_cells(found, made)
    experiments.draw_and_publish(
        Path(__file__).parent, made, {"map": draw_map, "published": draw_published}, blocks, claims
    )
