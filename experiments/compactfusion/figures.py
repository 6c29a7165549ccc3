"""Draws the figures and generates the tables of compactfusion: `python experiments/compactfusion/figures.py`.

This reads arms.csv, errors.csv, latency.csv and live.csv from the output folder, which measure.py, latency.py and
live.py write, and published.csv.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiments, plots, publishing, style
from testbed.report.canvas import note
from testbed.report.claim_rows import Facts
from testbed.report.labels import Mark, label_marks
from testbed.report.numbers import percent

HERE = Path(__file__).resolve().parent
COLOURS = {
    "one worker": "#c9ced4",
    "fp16": "#767d86",
    "residual 1-bit": "#d55e00",
    "residual 2-bit": "#0072b2",
    "PipeFusion": "#009e73",
    "DistriFusion": "#cc79a7",
    "AsyncDiff": "#8c5a2b",
}
WATCHED = ("1-bit", "open loop 1-bit", "residual 1-bit")
"""Of errors.csv."""
LOOKS = 2
"""At three seeds of 24 images, and at five of 128."""
FLUX = "FLUX.1-dev"
NOT_COMPUTED = pandas.DataFrame({"setting": [f"{FLUX} was not computed"]})
FLUX_QUALITY = ("one worker", "fp16", "residual 2-bit")
"""The paper's arms with a FID of at most 3.26 to the unsplit model's images."""


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


def largest(folder: Path) -> Any:
    """Return the rows of `arms` with the most workers and steps."""
    frame = arms(folder)
    return frame[(frame.workers == frame.workers.max()) & (frame.steps == frame.steps.max())]


def mean(frame: Any, arm: str, column: str) -> float:
    """Return the mean of an arm's column; NaN if it was not run."""
    return float(frame[frame.arm == arm][column].mean())


def times_smaller(frame: Any, better: str, worse: str, column: str) -> Judgement | None:
    """Judge whether an arm's error is smaller than another's; None if either was not run."""
    ours, base = (experiments.by_seed(frame, column, arm=arm) for arm in (better, worse))
    if len(ours) < 2 or ours.keys() != base.keys() or min(*ours.values(), *base.values()) <= 0:
        return None
    return judge("speed_up", ours, base, 1.0, looks=LOOKS)


def seed_s() -> float:
    """Return the time of one more seed of all arms."""
    return experiments.training_s(HERE, "arms.csv", "seed", program="measure.py")


def closer(
    folder: Path, pairs: Sequence[Sequence[str]], column: str = "relative_l2", number: str = ""
) -> Iterator[Facts]:
    """Yield, for each pair of arms, by what factor the first one's error is smaller; `number`: the published one of
    each, as a name in published.csv.
    """
    frame = largest(folder)
    for better, worse in pairs:
        found = times_smaller(frame, better, worse, column)
        if found is not None:
            said = [published(number.format(arm)) for arm in (better, worse)] if number else None
            smaller, ends = experiments.times_smaller(found)
            yield {
                "judgement": found,
                "better": better[0].upper() + better[1:],
                "worse": worse,
                "workers": frame.workers.iloc[0],
                "steps": frame.steps.iloc[0],
                "said": said,
                "smaller": smaller,
                "interval": f"{ends}, {found.confidence_words}, {found.n} seeds",
                "error": [mean(frame, arm, column) for arm in (better, worse)],
                "mb": [mean(frame, arm, "sent_bytes") / 1e6 for arm in (better, worse)],
                "open": experiments.open_words("", found, seed_s(), said[1] / said[0] if said else None),
            }


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
                "key frames' share": percent(part.key_share.mean(), "{:.0f}") if keyed else "",
            }
        )
    return pandas.DataFrame(rows).sort_values(["workers", "steps"], ascending=False, kind="stable")


# ---------------------------------------------------------------------- latency
@experiments.table
def lines(folder: Path) -> Any:
    """Return, for each played arm, its fitted straight line seconds = c + bytes / bandwidth (least relative error), the
    deviation of the played times from it, and the bytes that its slope represents.
    """
    frame = pandas.read_csv(folder / "played.csv")
    for arm, part in frame[frame.clock == "virtual"].groupby("arm", sort=False):
        inverse, seconds = 8e-6 / part.rate_mbps.to_numpy(float), part.seconds.to_numpy(float)  # s per byte
        system = np.stack([np.ones_like(inverse), inverse], axis=1) / seconds[:, None]
        (base, slope), *_ = np.linalg.lstsq(system, np.ones_like(seconds), rcond=None)
        yield {
            "arm": arm,
            "rates": len(part),
            "c": f"{base * 1e3:.1f} ms",
            "slope": f"{slope / 1e6:.2f} MB",
            "sent": f"{part.sent_mb.iloc[0]:.2f} MB",
            "farthest from the line": float(np.abs((base + slope * inverse) / seconds - 1).max()),
            "slope over sent": slope / 1e6 / part.sent_mb.iloc[0],
        }


def apart(folder: Path) -> float:
    """Return the largest relative deviation of a played latency from the ideal over the same links."""
    frame = pandas.read_csv(folder / "played.csv")
    key = ["setting", "arm", "workers", "steps", "rate_mbps", "delay_us"]
    both = frame[frame.clock == "virtual"].merge(frame[frame.clock == "ideal"], on=key, suffixes=("", "_ideal"))
    return float((both.seconds / both.seconds_ideal - 1).abs().max())


def fastest(folder: Path, setting: str, steps: int, among: Sequence[str] | None = None) -> Any:
    """Return the fastest arm at each rate and delay, as a table (delay, rate) of names; includes one worker."""
    frame = pandas.read_csv(folder / "latency.csv")
    frame = frame[(frame.setting == setting) & (frame.steps == steps) & (frame.clock == "ideal")]
    alone = float(frame[frame.arm == "one worker"].seconds.iloc[0])
    split = frame[frame.arm != "one worker"]
    if among is not None:
        split = split[split.arm.isin(among)]
    best = split.loc[split.groupby(["delay_us", "rate_mbps"]).seconds.idxmin()]
    best = best.assign(arm=best.arm.where(best.seconds < alone, "one worker"))
    return best.pivot(index="delay_us", columns="rate_mbps", values="arm")


def took(folder: Path, mbit: int, delay_us: int) -> dict[str, float]:
    """Return the ideal seconds of each computed arm at FLUX.1-dev's shape over one link."""
    frame = pandas.read_csv(folder / "latency.csv")
    frame = frame[(frame.setting == FLUX) & (frame.clock == "ideal")]
    frame = frame[(frame.arm == "one worker") | ((frame.rate_mbps == mbit) & (frame.delay_us == delay_us))]
    every = frame.groupby("arm").seconds.first()
    return {arm: float(every[arm]) for arm in COLOURS if arm in every}


def choices(folder: Path) -> Any:
    """Return the phase diagram of FLUX.1-dev's shape as a table."""
    if FLUX not in set(pandas.read_csv(folder / "latency.csv").setting):
        return NOT_COMPUTED
    found = fastest(folder, FLUX, 28)
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


def request(folder: Path) -> Facts:
    """Return the change of keys and values in one request, and receivers' deviation from the unsplit ones."""
    frame = pandas.read_csv(folder / "errors.csv")
    exact = frame[(frame.arm == "fp32") & frame.change.notna()]
    change = (exact.change / exact.norm).to_numpy(float)
    first, middle, last = float(change[0]), float(np.median(change)), float(change[-1])
    end = frame[frame.step == frame.step.max()].set_index("arm").deviation
    plain, opened, closed = end[list(WATCHED)]
    return {
        "changes": [first, middle, last],
        "ends": None,
        "value": opened,
        "low": None,
        "high": None,
        "closed": closed,
        "plain": plain,
    }


def low_rank(folder: Path) -> Facts:
    """Compute by what factor the low-rank codec reduces the bytes of a request, including its key frame."""
    frame, later = largest(folder), published("compression of the low-rank codec")
    steps = int(frame.steps.iloc[0])
    share = 1 / (1 + (steps - 1) / later)
    shown = frame.drop_duplicates("arm")
    shown = shown[shown.arm.isin(["residual 1-bit", "residual 2-bit", "residual low rank 16, INT4 factors"])]
    toy = [
        f"{row.arm}: {row.later_ratio:.1f} in later messages, {row.ratio:.1f} with the key frame"
        for row in shown.itertuples()
    ]
    facts = {"steps": steps, "workers": frame.workers.iloc[0], "toy": "; ".join(toy)}
    return {"value": steps * share, "later": later, "near": 0.95 * later, "share": share, **facts}


def straight(folder: Path) -> Facts | None:
    """Return the deviation of played seconds from a straight line, and its slope; None if none were played."""
    fitted = lines(folder)
    if fitted.empty:
        return None
    far, slopes = fitted["farthest from the line"], fitted["slope over sent"]
    fits = [f"{arm} {percent(share, '{:.2f}')}" for arm, share in zip(fitted.arm, far, strict=True)]
    facts = {"fits": ", ".join(fits), "least": slopes.min(), "most": slopes.max(), "apart": apart(folder)}
    return {"value": far.max(), "rates": fitted.rates.iloc[0], **facts}


def flux(folder: Path, mbit: int, delay_us: int) -> Facts | None:
    """Return our and the published seconds at FLUX.1-dev's shape over one link, and the links over which residual 1-bit
    is as fast as published; None unless every arm was computed.
    """
    ours = took(folder, mbit, delay_us)
    if COLOURS.keys() - ours.keys() - {"AsyncDiff"}:
        return None
    ratio, said = ours["DistriFusion"] / ours["residual 1-bit"], published("speed-up over DistriFusion")
    known, frame = ethernet(folder), pandas.read_csv(folder / "latency.csv")
    wide = known.pivot(index="mbytes_per_s", columns="arm", values="seconds_ours")
    bit = frame[(frame.setting == FLUX) & (frame.arm == "residual 1-bit")]
    gain = ours["one worker"] / bit.seconds
    enough = bit[(bit.delay_us == delay_us) & (gain >= published("speed-up over one device"))].rate_mbps
    best = gain.groupby(bit.delay_us).max()
    return {
        "value": ratio,
        "ratio": ratio,
        "said": said,
        "was": dict(known[known.mbytes_per_s == mbit // 8].set_index("arm").seconds),
        "took": ours,
        "every": ", ".join(f"{arm} {seconds:.1f} s" for arm, seconds in ours.items()),
        "pipe_is_faster": bool((wide["PipeFusion"] < wide["residual 1-bit"]).all()),
        "enough": "at no rate" if enough.empty else f"from {_rate(enough.min())} per worker, without delay",
        "best": "; ".join(f"with {_delay(delay)} of delay, at best {most:.2f} times" for delay, most in best.items()),
    }


def ethernet(folder: Path) -> Any:
    """Return published and our seconds over simulated Ethernet, at the computed rates."""
    known = pandas.read_csv(HERE / "published_seconds.csv")
    frame = pandas.read_csv(folder / "latency.csv")
    frame = frame[(frame.setting == FLUX) & (frame.delay_us == 20)]
    ours = frame.assign(mbytes_per_s=frame.rate_mbps // 8)[["arm", "mbytes_per_s", "seconds"]]
    return known.merge(ours, on=["arm", "mbytes_per_s"], suffixes=("", "_ours"))


def ethernet_table(folder: Path) -> Any:
    """Return published seconds and ours, a row for each arm."""
    known = ethernet(folder)
    words = known.assign(cell=[f"{row.seconds:.1f}, {row.seconds_ours:.1f}" for row in known.itertuples()])
    if words.empty:
        return NOT_COMPUTED
    wide = words.pivot(index="arm", columns="mbytes_per_s", values="cell")
    wide.columns = [f"{mbytes} MB/s: published, ours" for mbytes in wide.columns]
    return wide.reset_index()


def live_table(folder: Path) -> Any:
    """Return the seconds of a request: sampled live, played, and the ideal, a row for each program and link."""
    frame = pandas.read_csv(folder / "live.csv")
    return pandas.DataFrame(
        {
            "link": frame.link.map("`{}`".format),
            "program": frame.program,
            "kB per message": (frame.message_bytes / 1e3).map("{:.0f}".format),
            "ideal, s": frame.ideal_s.map("{:.3f}".format),
            "live, s": frame.live_s.map("{:.3f}".format),
            "live / played": (frame.live_s / frame.played_s).map("{:.4f}".format),
            "live / ideal": (frame.live_s / frame.ideal_s).map("{:.2f}".format),
            "second request / ideal": (frame.warm_s / frame.ideal_s).map("{:.2f}".format),
            "sent again": frame.retransmitted.map(percent),
        }
    )


# ---------------------------------------------------------------------- README
def answer(folder: Path) -> str:
    """Return the answer in a few sentences."""
    frame = largest(folder)
    error = {arm: f"{value:.4f}" for arm, value in frame.groupby("arm").relative_l2.mean().items()}
    one, opened, pipe, distri = (
        error.get(arm, "not measured") for arm in ("residual 1-bit", "open loop 1-bit", "PipeFusion", "DistriFusion")
    )
    ratio = f"{mean(frame, 'residual 1-bit', 'ratio'):.1f}" if one in error.values() else "?"
    said = (
        f"In a closed loop, with {frame.workers.iloc[0]} workers and {frame.steps.iloc[0]} steps, 1-bit residuals "
        f"leave a relative error of {one} in the images (open loop {opened}, PipeFusion {pipe}, DistriFusion {distri}) "
        f"with {ratio} times fewer bytes than fp16."
    )
    if FLUX in set(pandas.read_csv(folder / "latency.csv").setting):
        cells = fastest(folder, FLUX, 28).to_numpy().ravel()
        counts = [f"{arm} on {(cells == arm).sum()}" for arm in COLOURS if (cells == arm).any()]
        said += f" At the shape of {FLUX}, the fastest over {len(cells)} links is {', '.join(counts)}."
    return said


def lines_table(folder: Path) -> Any:
    """Return the fitted lines as the README's table."""
    fitted = lines(folder)
    for column, form in (("farthest from the line", "{:.2%}"), ("slope over sent", "{:.3f}")):
        if column in fitted:
            fitted[column] = fitted[column].map(form.format).str.replace("%", " %")
    return fitted


# ---------------------------------------------------------------------- figures
def draw_errors(folder: Path) -> Figure:
    """Draw the change of keys and values from step to step, and codecs' errors on them."""
    frame = pandas.read_csv(folder / "errors.csv")
    names = list(WATCHED)
    figure, ((first, *rest),) = plots.panels(1, 1 + len(names), (11, 3.3))
    exact = frame[frame.arm == "fp32"]
    first.plot(exact.step, exact.change / exact.norm, color=style.INK)
    first.set(xlabel="denoising step", ylabel="change since the previous step / norm", ylim=(0, None))
    first.set_title("Change")
    highest = float(frame.deviation.max()) * 1.05
    for axes, name in zip(rest, names, strict=True):
        part = frame[frame.arm == name]
        axes.plot(part.step, part.deviation, color="#d55e00", label="vs the unsplit sampler's")
        axes.plot(part.step, part.error, color="#0072b2", ls="--", label="vs the sent values")
        axes.set(xlabel="denoising step", ylim=(0, highest))
        axes.set_title({"1-bit": "no residual", "open loop 1-bit": "open loop"}.get(name, "closed loop") + ", 1 bit")
    rest[0].set_ylabel("error of keys and values (norm)")
    plots.finish(figure, "Errors add up in an open loop; a closed one bounds them", rest[0], "lower right")
    return figure


def draw_rates(folder: Path) -> Figure:
    """Draw the error of images against the compression ratio, for the most workers and steps."""
    means = largest(folder).groupby("arm", sort=False)[["ratio", "relative_l2"]].mean()
    figure, ((axes,),) = plots.panels(1, 1, (8.6, 4.6))
    kinds = {"residual": "#0072b2", "open loop": "#e69f00", "naive": "#767d86", "stale": "#cc79a7"}
    marks = []
    for arm, row in means.iterrows():
        name = str(arm)
        kind = next((kind for kind in kinds if name.startswith(kind)), "naive")
        if name.startswith(("PipeFusion", "DistriFusion", "AsyncDiff")):
            kind = "stale"
        axes.plot(row.ratio, row.relative_l2, "D" if kind == "stale" else "o", color=kinds[kind])
        marks.append(Mark(row.ratio, row.relative_l2, name.removeprefix("residual "), kinds[kind]))
    axes.set(xlabel="times fewer bytes than fp16, with the key frame", ylabel="relative L2 error of images")
    axes.loglog()
    axes.legend(handles=[Patch(color=kinds[kind], label=kind) for kind in kinds], loc="lower right", fontsize=8)
    axes.margins(0.15)
    label_marks(axes, marks)
    style.state(figure, "A closed loop beats an open one and no residuals; PipeFusion sends as few bytes")
    return figure


def draw_latency(folder: Path) -> Figure:
    """Draw played seconds against the inverse of the rate, and the ideal as lines."""
    frame = pandas.read_csv(folder / "played.csv")
    virtual = frame[frame.clock == "virtual"]
    alone = frame[(frame.arm == "one worker") & (frame.setting == "digits") & (frame.steps == virtual.steps.iloc[0])]
    figure, ((axes,),) = plots.panels(1, 1, (6.6, 3.8))
    key = ["setting", "workers", "steps", "delay_us", "clock"]
    for arm, part in virtual.groupby("arm", sort=False):
        colour = COLOURS[str(arm)]
        same = frame[(frame.arm == arm) & (frame.clock == "ideal")].merge(part[key[:-1]].drop_duplicates(), on=key[:-1])
        same = same[same.rate_mbps.isin(part.rate_mbps)].sort_values("rate_mbps")
        axes.plot(1e3 / same.rate_mbps, same.seconds, color=colour)
        axes.plot(1e3 / part.rate_mbps, part.seconds, "o", color=colour, mfc="none")
        last = part.sort_values("rate_mbps").iloc[0]
        note(axes, str(arm), (1e3 / last.rate_mbps, last.seconds), (4, 0), color=colour, fontsize=8)
    axes.axhline(float(alone.seconds.iloc[0]), color=style.MUTED, ls=":")
    note(axes, "one worker", (9, float(alone.seconds.iloc[0])), (2, 3), color=style.MUTED, fontsize=8)
    axes.set(xlabel="1 / rate, ns per bit", ylabel="seconds per request", ylim=(0, None), xlim=(0, None))
    axes.margins(x=0.2)
    far = lines(folder).set_index("arm")["farthest from the line"]
    words = f"{far.idxmax()} is off by {percent(far.max())}, the others by at most {percent(far.nlargest(2).iloc[-1])}"
    style.state(figure, f"A straight line? {words}")
    return figure


def draw_choice(folder: Path) -> Figure:
    """Draw the fastest arm over rate and delay."""
    frame = pandas.read_csv(folder / "latency.csv")
    steps = int(frame[frame.setting == "digits"].steps.max())
    panels: list[tuple[str, Any]] = [("digits on a laptop's processor", fastest(folder, "digits", steps))]
    if FLUX in set(frame.setting):
        panels = [
            ("FLUX.1-dev, any quality", fastest(folder, FLUX, 28)),
            ("FLUX.1-dev, FID at most 3.26", fastest(folder, FLUX, 28, FLUX_QUALITY)),
            *panels,
        ]
    figure, (row,) = plots.panels(1, len(panels), (3.9 * len(panels), 3.6))
    names = [arm for arm in COLOURS if any((found == arm).to_numpy().any() for _, found in panels)]
    for axes, (title, found) in zip(row, panels, strict=True):
        for (y, x), arm in np.ndenumerate(found.to_numpy()):
            axes.plot(x + 0.5, y + 0.5, "s", ms=13, color=COLOURS[arm])
        rates, delays = ([f"{each / 1000:g}" for each in side] for side in (found.columns, found.index))
        plots.cells(axes, rates, delays, "rate per worker, Gbit/s", "one-way delay, ms" if axes is row[0] else "")
        axes.set_title(title)
        axes.tick_params(labelsize=7)
    handles = [Patch(color=COLOURS[arm], label=arm) for arm in names]
    plots.finish(
        figure, "Fastest at each computed link; grey: one worker beats all splits", handles, "lower center", len(names)
    )
    return figure


BLOCKS = {"answer": answer, "arms": table, "choice": choices, "ethernet": ethernet_table, "lines": lines_table,
          "live": live_table}  # fmt: skip
FIGURES = {"errors": draw_errors, "rates": draw_rates, "latency": draw_latency, "choice": draw_choice}


if __name__ == "__main__":
    publishing.run(globals())
