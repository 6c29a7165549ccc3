"""Draw the figures of compactfusion and make its tables: `python experiments/compactfusion/figures.py`.

This reads arms.csv, errors.csv, latency.csv and live.csv from the output folder, which measure.py, latency.py and
live.py write, and published.csv.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiments, style
from testbed.report.claims import EXACT, Claim, Verdict, claims_table
from testbed.report.labels import Mark, label_marks

HERE = Path(__file__).resolve().parent
MEASURE, LATENCY = "python experiments/compactfusion/measure.py", "python experiments/compactfusion/latency.py"
PAPER = "CompactFusion, arXiv 2507.17511"
SECOND = f"{PAPER}; second-hand"
COLOURS = {
    "one worker": "#c9ced4",
    "fp16": "#767d86",
    "residual 1-bit": "#d55e00",
    "residual 2-bit": "#0072b2",
    "PipeFusion": "#009e73",
    "DistriFusion": "#cc79a7",
    "AsyncDiff": "#8c5a2b",
}
CLEAR = 0.02
"""How far a latency may lie from a straight line."""
WATCHED = ("1-bit", "open loop 1-bit", "residual 1-bit")
"""Of errors.csv."""
EXPLAINED = 0.05
"""How far a ratio of seconds may lie from the published one: formulas leave out what devices and programs add."""
FLUX_QUALITY = ("one worker", "fp16", "residual 2-bit")
"""What the paper has at a FID of at most 3.26 to the unsplit model's images."""


# ---------------------------------------------------------------------- what was measured
def arms(folder: Path) -> Any:
    """Return the rows of arms.csv, with the ratio of fp16's bytes to an arm's."""
    frame = pandas.read_csv(folder / "arms.csv")
    key = ["workers", "steps", "seed"]
    raw = frame[frame.arm == "fp16"][[*key, "sent_bytes", "key_bytes"]]
    frame = frame.merge(raw, on=key, suffixes=("", "_fp16"))
    later = frame.sent_bytes - frame.key_bytes
    return frame.assign(
        ratio=frame.sent_bytes_fp16 / frame.sent_bytes,
        later_ratio=(frame.sent_bytes_fp16 - frame.key_bytes_fp16) / later.where(later > 0),
        key_share=frame.key_bytes / frame.sent_bytes,
    )


def by_seed(frame: Any, arm: str, column: str, workers: int, steps: int) -> dict[int, float]:
    """Return a column of an arm's runs by seed; empty where it was not run."""
    rows = frame[(frame.arm == arm) & (frame.workers == workers) & (frame.steps == steps)]
    return dict(rows.set_index("seed")[column].astype(float))


def times_smaller(
    frame: Any, better: str, worse: str, column: str, workers: int, steps: int, least: float = 1.0
) -> Judgement | None:
    """Judge that an arm's error is smaller than another's by at least a factor; None where one was not run."""
    ours, base = (by_seed(frame, arm, column, workers, steps) for arm in (better, worse))
    if len(ours) < 2 or ours.keys() != base.keys() or min(*ours.values(), *base.values()) <= 0:
        return None
    return judge("speed_up", ours, base, least)


def seed_s() -> float:
    """Return how long one more seed of all arms takes."""
    return experiments.training_s(HERE, "arms.csv", "seed", program="measure.py")


def order_claim(
    frame: Any,
    better: str,
    worse: str,
    column: str,
    workers: int,
    steps: int,
    source: str,
    published: str = "",
    size: float | None = None,
) -> Claim | None:
    """Return the claim that one arm's images are closer to the unsplit sampler's than another's; `size`: how many times
    smaller the published distance is.
    """
    found = times_smaller(frame, better, worse, column, workers, steps)
    if found is None or found.verdict is None:
        return None
    measure = {"relative_l2": "relative L2 error", "frechet_unsplit": "Frechet distance to unsplit samples"}[column]
    sent = [np.mean(list(by_seed(frame, arm, "sent_bytes", workers, steps).values())) / 1e6 for arm in (better, worse)]
    means = [np.mean(list(by_seed(frame, arm, column, workers, steps).values())) for arm in (better, worse)]
    ours, interval = experiments.times_smaller(found)
    return Claim(
        claim=f"{_first_upper(better)} has a smaller {measure} than {worse} ({workers} workers, {steps} steps)",
        source=source,
        published=published,
        ours=ours,
        interval=f"{interval}, 95 %, {found.n} seeds",
        verdict=found.verdict,
        why=experiments.open_words(
            f"{means[0]:.3g} against {means[1]:.3g}, with {sent[0]:.2f} and {sent[1]:.2f} MB per worker",
            found,
            seed_s(),
            size,
        ),
        command=MEASURE,
    )


def _first_upper(text: str) -> str:
    return text[0].upper() + text[1:]


def table(folder: Path) -> Any:
    """Return every arm: means over seeds."""
    frame, rows = arms(folder), []
    for (workers, steps, arm), part in frame.groupby(["workers", "steps", "arm"], sort=False):
        keyed = "residual" in str(arm) or "open loop" in str(arm)
        rows.append(
            {
                "workers": workers,
                "steps": steps,
                "arm": arm,
                "relative L2": f"{part.relative_l2.mean():.4f}",
                "lowest, highest": f"{part.relative_l2.min():.4f}, {part.relative_l2.max():.4f}",
                "PSNR, dB": f"{part.psnr_db.mean():.1f}",
                "Frechet to unsplit": f"{part.frechet_unsplit.mean():.3g}",
                "to real digits": f"{part.frechet_real.mean():.1f}",
                "MB per worker": f"{part.sent_bytes.mean() / 1e6:.2f}",
                "ratio to fp16": f"{part.ratio.mean():.1f}",
                "ratio of later messages": f"{part.later_ratio.mean():.1f}" if keyed else "",
                "key frames' share": f"{part.key_share.mean():.0%}".replace("%", " %") if keyed else "",
            }
        )
    order = {"workers": False, "steps": False}
    return pandas.DataFrame(rows).sort_values(list(order), ascending=list(order.values()), kind="stable")


# ---------------------------------------------------------------------- latency
def latency(folder: Path) -> Any:
    """Return the rows of latency.csv."""
    return pandas.read_csv(folder / "latency.csv")


def played(folder: Path) -> Any:
    """Return the rows of played.csv: some digits were played, with the ideal beside them."""
    return pandas.read_csv(folder / "played.csv")


def lines(folder: Path) -> Any:
    """Return, of each arm that was played, its straight line seconds = c + bytes / bandwidth, fitted to the relative
    error, how far what was played is from it, and how many bytes its slope stands for.
    """
    frame, rows = played(folder), []
    for arm, part in frame[frame.clock == "virtual"].groupby("arm", sort=False):
        inverse, seconds = 8e-6 / part.rate_mbps.to_numpy(float), part.seconds.to_numpy(float)  # s per byte
        system = np.stack([np.ones_like(inverse), inverse], axis=1) / seconds[:, None]
        (base, slope), *_ = np.linalg.lstsq(system, np.ones_like(seconds), rcond=None)
        rows.append(
            {
                "arm": arm,
                "rates": len(part),
                "c": f"{base * 1e3:.1f} ms",
                "slope": f"{slope / 1e6:.2f} MB",
                "sent": f"{part.sent_mb.iloc[0]:.2f} MB",
                "farthest from the line": float(np.abs((base + slope * inverse) / seconds - 1).max()),
                "slope over sent": slope / 1e6 / part.sent_mb.iloc[0],
            }
        )
    return pandas.DataFrame(rows)


def apart(folder: Path) -> float:
    """Return how far a played latency is from the ideal over the same links, at most, as a share."""
    frame = played(folder)
    key = ["setting", "arm", "workers", "steps", "rate_mbps", "delay_us"]
    both = frame[frame.clock == "virtual"].merge(frame[frame.clock == "ideal"], on=key, suffixes=("", "_ideal"))
    return float((both.seconds / both.seconds_ideal - 1).abs().max())


def fastest(folder: Path, setting: str, steps: int, among: Sequence[str] | None = None) -> Any:
    """Return which arm is fastest at each rate and delay, a table (delay, rate) of names; one worker among them."""
    frame = latency(folder)
    frame = frame[(frame.setting == setting) & (frame.steps == steps) & (frame.clock == "ideal")]
    alone = float(frame[frame.arm == "one worker"].seconds.iloc[0])
    split = frame[frame.arm != "one worker"]
    if among is not None:
        split = split[split.arm.isin(among)]
    best = split.loc[split.groupby(["delay_us", "rate_mbps"]).seconds.idxmin()]
    best = best.assign(arm=best.arm.where(best.seconds < alone, "one worker"))
    return best.pivot(index="delay_us", columns="rate_mbps", values="arm")


def seconds(folder: Path, setting: str, arm: str, mbit: int, delay_us: int) -> float | None:
    """Return the ideal seconds of an arm on most workers; None where it was not computed."""
    frame = latency(folder)
    rows = frame[(frame.setting == setting) & (frame.arm == arm) & (frame.clock == "ideal")]
    if arm != "one worker":
        rows = rows[(rows.rate_mbps == mbit) & (rows.delay_us == delay_us)]
    return None if rows.empty else float(rows.seconds.iloc[0])


def choices(folder: Path) -> Any:
    """Return the phase diagram of FLUX.1-dev's shape as a table."""
    frame = latency(folder)
    if "FLUX.1-dev" not in set(frame.setting):
        return pandas.DataFrame({"setting": ["FLUX.1-dev was not computed"]})
    found = fastest(folder, "FLUX.1-dev", 28)
    found.columns = [_rate(mbit) for mbit in found.columns]
    found.insert(0, "delay", [_delay(us) for us in found.index])
    return found.reset_index(drop=True)


def _rate(mbit: int) -> str:
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit} Mbit/s"


def _delay(us: int) -> str:
    return f"{us / 1000:g} ms"


# ---------------------------------------------------------------------- claims
def published(what: str) -> float:
    """Return a published number."""
    frame = pandas.read_csv(HERE / "published.csv")
    return float(str(frame[frame.what == what].value.iloc[0]).rstrip("x"))


def claims(folder: Path) -> list[Claim]:
    """Return what is claimed, and what became of it."""
    frame = arms(folder)
    workers, steps = int(frame.workers.max()), int(frame.steps.max())
    fid = {
        name: published(f"FID of {name}") for name in ("residual 2-bit", "PipeFusion", "residual 1-bit", "DistriFusion")
    }
    found: list[Claim | None] = []
    for bits in ("1-bit", "2-bit"):
        chain = (f"residual {bits}", f"open loop {bits}", bits)
        for better, worse in itertools.pairwise(chain):
            found.append(order_claim(frame, better, worse, "relative_l2", workers, steps, SECOND))
    ranked = sorted(fid, key=lambda name: fid[name])
    for column in ("frechet_unsplit", "relative_l2"):
        for better, worse in itertools.pairwise(ranked):
            said = f"FID {fid[better]:g} against {fid[worse]:g}" if column == "frechet_unsplit" else ""
            source = SECOND if said else "ours, after CompactFusion"
            size = fid[worse] / fid[better] if said else None
            found.append(order_claim(frame, better, worse, column, workers, steps, source, said, size))
    for better, worse, source in (
        ("residual low rank 16, INT4 factors", "residual low rank 4", SECOND),
        ("residual low rank 16, INT4 factors", "residual top 1/8", SECOND),
        ("residual low rank 16, INT4 factors", "residual blocks, 1/8", SECOND),
        ("residual 2-bit", "residual blocks, 1/8", SECOND),
        ("residual 1-bit", "residual blocks, 1/16", SECOND),
        ("residual 1-bit", "residual largest of 8, 2 bits", "ours"),
        ("residual top 1/8", "residual blocks, 1/8", "ours"),
        ("residual 1-bit", "residual 1-bit, INT8 key frame", "ours"),
        ("residual 1-bit", "residual 1-bit, 4 key frames", "ours"),
        ("DistriFusion", "DistriFusion, residual 2-bit", "ours"),
        ("DistriFusion", "DistriFusion, residual 1-bit", "ours"),
        ("residual 1-bit", "DistriFusion, residual 1-bit", "ours"),
    ):
        found.append(order_claim(frame, better, worse, "relative_l2", workers, steps, source))
    rows = [claim for claim in found if claim is not None]
    return [*_error_claims(folder), *rows, *_ratio_claims(frame, workers, steps), *_latency_claims(folder)]


def _error_claims(folder: Path) -> list[Claim]:
    frame = pandas.read_csv(folder / "errors.csv")
    exact = frame[(frame.arm == "fp32") & frame.change.notna()]
    change = (exact.change / exact.norm).to_numpy(float)
    first, middle, last = float(change[0]), float(np.median(change)), float(change[-1])
    end = frame[frame.step == frame.step.max()].set_index("arm").deviation
    open_arm, closed_arm = WATCHED[1:]
    return [
        Claim(
            claim="Keys and values change least in the middle of a request, and most at its ends",
            source=SECOND,
            published="0.35 of their norm in the first step, 0.14 to 0.17 in the middle, 0.31 in the last",
            ours=f"{first:.3f}, {middle:.3f} in the median, {last:.3f}",
            interval="one request",
            verdict="holds" if min(first, last) > 1.5 * middle else "fails",
            why="more than 1.5 times the median at both ends; digits change less than FLUX.1-dev's",
            command=MEASURE,
        ),
        Claim(
            claim="What receivers have is farther from the unsplit sampler's in an open loop than in a closed one",
            source=SECOND,
            published="norms of 1259 and 969 at the end of a request of FLUX.1-dev",
            ours=f"norms of {end[open_arm]:.0f} and {end[closed_arm]:.0f} at the end",
            interval="one request",
            verdict="holds" if end[open_arm] > end[closed_arm] else "fails",
            why=f"1 bit; without residuals {end[WATCHED[0]]:.0f}",
            command=MEASURE,
        ),
    ]


def _ratio_claims(frame: Any, workers: int, steps: int) -> list[Claim]:
    later = published("compression of the low-rank codec")
    whole = steps / (1 + (steps - 1) / later)
    rows = frame[(frame.workers == workers) & (frame.steps == steps) & frame.arm.str.startswith("residual")]
    share = 1 / (1 + (steps - 1) / later)
    toy = "; ".join(
        f"{row.arm}: {row.later_ratio:.1f} in later messages, {row.ratio:.1f} with the key frame"
        for row in rows.drop_duplicates("arm").itertuples()
        if row.arm in ("residual 1-bit", "residual 2-bit", "residual low rank 16, INT4 factors")
    )
    return [
        Claim(
            claim=f"The low-rank codec sends 100 times fewer bytes in a request of {steps} steps",
            source=SECOND,
            published=f"{later:g} times",
            ours=_percents(f"{whole:.1f} times with the key frame, which is {share:.0%} of the traffic"),
            interval=EXACT,
            verdict="fails" if whole < 0.95 * later else "holds",
            why=f"arithmetic: one step of {steps} goes as fp16, the others at {later:g} times; "
            f"digits, {workers} workers: {toy}",
            command=MEASURE,
        )
    ]


def _latency_claims(folder: Path) -> list[Claim]:
    found, fitted = [], lines(folder)
    if len(fitted):
        worst = float(fitted["farthest from the line"].max())
        slopes = [float(each) for each in fitted["slope over sent"]]
        fits = ", ".join(f"{row[0]} {row[1]:.2%}" for row in fitted[["arm", "farthest from the line"]].to_numpy())
        found.append(
            Claim(
                claim=_percents(f"Seconds per request are c + bytes / bandwidth, a straight line within {CLEAR:.0%}"),
                source="ours",
                ours=f"{worst:.2%} from it at most".replace("%", " %"),
                interval=EXACT,
                verdict="holds" if worst <= CLEAR else "fails",
                why=_percents(
                    f"played on the virtual clock at {fitted.rates.iloc[0]} rates: {fits}; slopes are "
                    f"{min(slopes):.2f} to {max(slopes):.2f} of the bytes that a worker sends (headers of packets, and "
                    f"hops that wait for each other); a played request is within {apart(folder):.1%} of the ideal"
                ),
                command=LATENCY,
            )
        )
    mbit, delay_us = 4000, 20
    ours = {arm: seconds(folder, "FLUX.1-dev", arm, mbit, delay_us) for arm in COLOURS}
    if any(ours[arm] is None for arm in COLOURS if arm != "AsyncDiff"):
        return found
    took: dict[str, float] = {arm: value for arm, value in ours.items() if value is not None}
    known = ethernet(folder)
    was = {str(row.arm): float(row.seconds) for row in known[known.mbytes_per_s == 500].itertuples()}
    words = ", ".join(f"{arm} {took[arm]:.1f} s" for arm in took)
    ratio, said = took["DistriFusion"] / took["residual 1-bit"], published("speed-up over DistriFusion")
    found.append(
        Claim(
            claim="Residual 1-bit is 6.7 times as fast as DistriFusion where each of four workers has 500 MB/s: bytes "
            f"explain it to within {EXPLAINED:.0%}".replace("%", " %"),
            source=SECOND,
            published=f"{said:g} times: {was['DistriFusion']:g} s against {was['residual 1-bit']:g} s",
            ours=f"{ratio:.2f} times",
            interval=EXACT,
            verdict="holds" if abs(ratio / said - 1) < EXPLAINED else "fails",
            why=f"FLUX.1-dev's shape, one device's published 28.06 s, bytes by formula, no delay: {words}",
            command=LATENCY,
        )
    )
    found.append(
        Claim(
            claim="PipeFusion is faster than residual 1-bit at every emulated Ethernet rate (500 to 2000 MB/s)",
            source="CompactFusion's repository at c30d06b (CSV), left out of its figure; second-hand",
            published=f"{was['PipeFusion']:g} s against {was['residual 1-bit']:g} s at 500 MB/s",
            ours=f"{took['PipeFusion']:.1f} s against {took['residual 1-bit']:.1f} s at 500 MB/s",
            interval=EXACT,
            verdict=_all_faster(folder),
            why="FLUX.1-dev's shape, no delay; it sends hidden states of stages, not keys and values of every layer",
            command=LATENCY,
        )
    )
    frame = latency(folder)
    bit = frame[(frame.setting == "FLUX.1-dev") & (frame.arm == "residual 1-bit")]
    gains = {
        delay: {int(r.rate_mbps): took["one worker"] / r.seconds for r in bit[bit.delay_us == delay].itertuples()}
        for delay in sorted(set(bit.delay_us))
    }
    enough = [mbit for mbit, gain in gains[delay_us].items() if gain >= published("speed-up over one device")]
    found.append(
        Claim(
            claim="Residual 1-bit on four workers is 3.0 times as fast as one device",
            source=SECOND,
            published="3.0 times: four L20 over PCIe",
            ours=f"from {_rate(min(enough))} per worker, without delay" if enough else "at no rate",
            interval=EXACT,
            verdict="not comparable",
            why="what PCIe gives each worker was not published; "
            + "; ".join(
                f"with {_delay(delay)} of delay {max(of.values()):.2f} times at best" for delay, of in gains.items()
            ),
            command=LATENCY,
        )
    )
    return found


def _percents(text: str) -> str:
    return text.replace("%", " %")


def ethernet(folder: Path) -> Any:
    """Return the published seconds over simulated Ethernet with ours beside them, at the rates that were computed."""
    known = pandas.read_csv(HERE / "published_seconds.csv")
    frame = latency(folder)
    frame = frame[(frame.setting == "FLUX.1-dev") & (frame.delay_us == 20)]
    ours = frame.assign(mbytes_per_s=frame.rate_mbps // 8)[["arm", "mbytes_per_s", "seconds"]]
    return known.merge(ours, on=["arm", "mbytes_per_s"], suffixes=("", "_ours"))


def _all_faster(folder: Path) -> Verdict:
    wide = ethernet(folder).pivot(index="mbytes_per_s", columns="arm", values="seconds_ours")
    return "holds" if bool((wide["PipeFusion"] < wide["residual 1-bit"]).all()) else "fails"


def ethernet_table(folder: Path) -> Any:
    """Return published seconds and ours, a row for each arm."""
    known = ethernet(folder)
    words = known.assign(cell=[f"{row.seconds:.1f}, {row.seconds_ours:.1f}" for row in known.itertuples()])
    if words.empty:
        return pandas.DataFrame({"setting": ["FLUX.1-dev was not computed"]})
    wide = words.pivot(index="arm", columns="mbytes_per_s", values="cell")
    wide.columns = [f"{mbytes} MB/s: published, ours" for mbytes in wide.columns]
    return wide.reset_index()


def live_table(folder: Path) -> Any:
    """Return the seconds of a request: sampled live, played, and the ideal, a row for each program and link."""
    frame = pandas.read_csv(folder / "live.csv")
    return pandas.DataFrame(
        {
            "link": frame.link.map(lambda text: f"`{text}`"),
            "program": frame.program,
            "kB per message": [f"{size / 1e3:.0f}" for size in frame.message_bytes],
            "ideal, s": [f"{value:.3f}" for value in frame.ideal_s],
            "live, s": [f"{value:.3f}" for value in frame.live_s],
            "live / played": [f"{value:.4f}" for value in frame.live_s / frame.played_s],
            "live / ideal": [f"{value:.2f}" for value in frame.live_s / frame.ideal_s],
            "second request / ideal": [f"{value:.2f}" for value in frame.warm_s / frame.ideal_s],
            "sent again": [f"{100 * value:.1f} %" for value in frame.retransmitted],
        }
    )


# ---------------------------------------------------------------------- README
def answer(folder: Path) -> str:
    """Return the answer in a few sentences."""
    frame = arms(folder)
    workers, steps = int(frame.workers.max()), int(frame.steps.max())

    def error(arm: str) -> str:
        values = by_seed(frame, arm, "relative_l2", workers, steps)
        return f"{np.mean(list(values.values())):.4f}" if values else "not measured"

    def ratio(arm: str) -> str:
        values = by_seed(frame, arm, "ratio", workers, steps)
        return f"{np.mean(list(values.values())):.1f}" if values else "?"

    said = (
        f"In a closed loop, with {workers} workers and {steps} steps, 1-bit residuals leave a relative error of "
        f"{error('residual 1-bit')} in the images (open loop {error('open loop 1-bit')}, PipeFusion "
        f"{error('PipeFusion')}, DistriFusion {error('DistriFusion')}) with {ratio('residual 1-bit')} times fewer "
        "bytes than fp16."
    )
    grid = latency(folder)
    if "FLUX.1-dev" in set(grid.setting):
        found = fastest(folder, "FLUX.1-dev", 28)
        cells = found.to_numpy().ravel()
        counts = {arm: int((cells == arm).sum()) for arm in COLOURS if (cells == arm).any()}
        said += f" At the shape of FLUX.1-dev, of {len(cells)} links the fastest is " + ", ".join(
            f"{arm} on {count}" for arm, count in counts.items()
        )
        said += "."
    return said


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    fitted = lines(folder)
    for column, form in (("farthest from the line", "{:.2%}"), ("slope over sent", "{:.3f}")):
        if column in fitted:
            fitted[column] = [form.format(value).replace("%", " %") for value in fitted[column]]
    return {
        "answer": experiments.prose(answer(folder)),
        "arms": experiments.markdown_of(table(folder)),
        "choice": experiments.markdown_of(choices(folder)),
        "ethernet": experiments.markdown_of(ethernet_table(folder)),
        "lines": experiments.markdown_of(fitted),
        "live": experiments.markdown_of(live_table(folder)),
        "claims": claims_table(claims(folder)),
    }


# ---------------------------------------------------------------------- figures
def draw_errors(folder: Path) -> Figure:
    """Draw what keys and values do from step to step, and what codecs make of them."""
    frame = pandas.read_csv(folder / "errors.csv")
    names = list(WATCHED)
    figure = Figure(figsize=(11, 3.3), layout="constrained")
    first, *rest = figure.subplots(1, 1 + len(names))
    exact = frame[frame.arm == "fp32"]
    first.plot(exact.step, exact.change / exact.norm, color=style.INK)
    first.set(xlabel="denoising step", ylabel="change since the step before / norm", ylim=(0, None))
    first.set_title("Change")
    highest = float(frame.deviation.max()) * 1.05
    for axes, name in zip(rest, names, strict=True):
        part = frame[frame.arm == name]
        axes.plot(part.step, part.deviation, color="#d55e00", label="from the unsplit sampler's")
        axes.plot(part.step, part.error, color="#0072b2", ls="--", label="from what was sent")
        axes.set(xlabel="denoising step", ylim=(0, highest))
        axes.set_title({"1-bit": "no residual", "open loop 1-bit": "open loop"}.get(name, "closed loop") + ", 1 bit")
    rest[0].set_ylabel("error of keys and values (norm)")
    handles, labels = rest[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower right", ncols=2)
    style.state(figure, "Errors add up in an open loop; a closed one bounds them")
    return figure


def draw_rates(folder: Path) -> Figure:
    """Draw the error of images against the compression ratio, on most workers and steps."""
    frame = arms(folder)
    frame = frame[(frame.workers == frame.workers.max()) & (frame.steps == frame.steps.max())]
    means = frame.groupby("arm", sort=False)[["ratio", "relative_l2"]].mean()
    figure = Figure(figsize=(8.6, 4.6), layout="constrained")
    axes = figure.subplots()
    kinds = {"residual": "#0072b2", "open loop": "#e69f00", "naive": "#767d86", "stale": "#cc79a7"}
    marks = []
    for arm, row in means.iterrows():
        name = str(arm)
        kind = next((kind for kind in kinds if name.startswith(kind)), "naive")
        if name.startswith(("PipeFusion", "DistriFusion", "AsyncDiff")):
            kind = "stale"
        axes.plot(row.ratio, row.relative_l2, "D" if kind == "stale" else "o", color=kinds[kind])
        marks.append(Mark(row.ratio, row.relative_l2, name.removeprefix("residual "), kinds[kind]))
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="times fewer bytes than fp16, with the key frame",
        ylabel="relative L2 error of images",
    )
    axes.legend(handles=[Patch(color=kinds[kind], label=kind) for kind in kinds], loc="lower right", fontsize=8)
    axes.margins(0.15)
    label_marks(axes, marks)
    style.state(figure, "A closed loop beats an open one and no residuals; PipeFusion sends as few bytes")
    return figure


def draw_latency(folder: Path) -> Figure:
    """Draw played seconds against the inverse of the rate, and the ideal as lines."""
    frame = played(folder)
    virtual = frame[frame.clock == "virtual"]
    alone = frame[(frame.arm == "one worker") & (frame.setting == "digits") & (frame.steps == virtual.steps.iloc[0])]
    figure = Figure(figsize=(6.6, 3.8), layout="constrained")
    axes = figure.subplots()
    key = ["setting", "workers", "steps", "delay_us", "clock"]
    for arm, part in virtual.groupby("arm", sort=False):
        colour = COLOURS[str(arm)]
        same = frame[(frame.arm == arm) & (frame.clock == "ideal")].merge(part[key[:-1]].drop_duplicates(), on=key[:-1])
        same = same[same.rate_mbps.isin(part.rate_mbps)].sort_values("rate_mbps")
        axes.plot(1e3 / same.rate_mbps, same.seconds, color=colour)
        axes.plot(1e3 / part.rate_mbps, part.seconds, "o", color=colour, mfc="none")
        last = part.sort_values("rate_mbps").iloc[0]
        axes.annotate(
            str(arm),
            (1e3 / last.rate_mbps, last.seconds),
            xytext=(4, 0),
            textcoords="offset points",
            color=colour,
            fontsize=8,
        )
    axes.axhline(float(alone.seconds.iloc[0]), color=style.MUTED, ls=":")
    axes.annotate(
        "one worker",
        (9, float(alone.seconds.iloc[0])),
        xytext=(2, 3),
        textcoords="offset points",
        color=style.MUTED,
        fontsize=8,
    )
    axes.set(xlabel="1 / rate, ns per bit", ylabel="seconds per request", ylim=(0, None), xlim=(0, None))
    axes.margins(x=0.2)
    bent = [(row.arm, float(row["farthest from the line"])) for _, row in lines(folder).iterrows()]
    bent = [(arm, share) for arm, share in bent if share > CLEAR]
    but = "".join(f"; {arm} is {share:.1%} off".replace("%", " %") for arm, share in bent)
    style.state(figure, f"Latency is a straight line{but or '; its slope is the bytes'}")
    return figure


def draw_choice(folder: Path) -> Figure:
    """Draw what is fastest over rate and delay."""
    frame = latency(folder)
    steps = int(frame[frame.setting == "digits"].steps.max())
    panels: list[tuple[str, Any]] = [("digits on a laptop's processor", fastest(folder, "digits", steps))]
    if "FLUX.1-dev" in set(frame.setting):
        panels = [
            ("FLUX.1-dev, any quality", fastest(folder, "FLUX.1-dev", 28)),
            ("FLUX.1-dev, FID at most 3.26", fastest(folder, "FLUX.1-dev", 28, FLUX_QUALITY)),
            *panels,
        ]
    figure = Figure(figsize=(3.9 * len(panels), 3.6), layout="constrained")
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    names = [arm for arm in COLOURS if any((found == arm).to_numpy().any() for _, found in panels)]
    for axes, (title, found) in zip(row, panels, strict=True):
        numbers = found.map(lambda arm: list(COLOURS).index(arm)).to_numpy()
        axes.imshow(
            numbers, origin="lower", aspect="auto", cmap=ListedColormap(list(COLOURS.values())), vmin=-0.5,
            vmax=len(COLOURS) - 0.5,
        )  # fmt: skip
        axes.set_xticks(range(len(found.columns)), [f"{mbit / 1000:g}" for mbit in found.columns], fontsize=7)
        axes.set_yticks(range(len(found.index)), [f"{us / 1000:g}" for us in found.index], fontsize=7)
        axes.set(title=title, xlabel="rate per worker, Gbit/s")
        axes.grid(False)
    row[0].set_ylabel("one-way delay, ms")
    figure.legend(
        handles=[Patch(color=COLOURS[arm], label=arm) for arm in names], loc="outside lower center", ncols=len(names)
    )
    style.state(figure, "Grey: one worker beats all splits")
    return figure


def main() -> int:
    """Write the figures, claims.csv and the README's blocks."""
    _, output = experiments.folders(HERE.name, "Figures, claims and the README's blocks.")
    figures = {
        "errors": draw_errors,
        "rates": draw_rates,
        "latency": draw_latency,
        "choice": draw_choice,
    }
    experiments.draw_and_publish(HERE, output, figures, blocks, claims)
    return 0


if __name__ == "__main__":
    sys.exit(main())
