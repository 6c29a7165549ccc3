"""Draws the figure and generates the tables of mesongs: `python experiments/mesongs/figures.py`.

This reads stages.csv and transfers.csv from the output folder, which compress.py and play.py write, and published.csv.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compress
import pandas
from matplotlib.figure import Figure

from testbed.metrics import statistics
from testbed.metrics.verdicts import Judgement, judge, judge_ratio
from testbed.report import experiments, plots, publishing
from testbed.report.canvas import note
from testbed.report.claim_rows import Facts

HERE = Path(__file__).resolve().parent
FITTED, FURTHER, WHOLE, LAST, PLAIN = "fitted", "fitted further", "zstd", "fine-tuned", "without RAHT"
CHAIN = (FITTED, "pruned", "octree", "codes", "codebook", WHOLE, LAST)
SAID = {
    FITTED: "fp32, 59 numbers for each",
    "zstd alone": "the same through zstd",
    FURTHER: "fitted, then trained on as long as fine-tuning",
    "pruned": "without the least important",
    "octree": "positions as an octree",
    "codes": "RAHT and 8-bit codes",
    "codebook": "colours by direction as a codebook",
    WHOLE: "through zstd",
    LAST: "and fine-tuned",
    PLAIN: "through zstd, without RAHT",
}
COLOURS = {20: "#0072b2", 80: "#e69f00"}


def tables(folder: Path) -> tuple[Any, Any]:
    """Return stages.csv and transfers.csv."""
    return pandas.read_csv(folder / "stages.csv"), pandas.read_csv(folder / "transfers.csv")


def seed_s() -> float:
    """Return the time of one more scene."""
    return experiments.takes_s(HERE, "compress.py", pandas.read_csv(HERE / "stages.csv").scene.nunique())


def _by(frame: Any, column: str, **values: object) -> dict[int, float]:
    return experiments.by_seed(frame.rename(columns={"scene": "seed"}), column, **values)


def dearer(folder: Path, stage: str, base: str, at_most: float = 0.0) -> Judgement:
    """Judge, in dB of the held-out views, whether a stage is at most so much worse than another, over scenes."""
    stages, _ = tables(folder)
    ours, theirs = (
        {scene: -value for scene, value in _by(stages, "psnr", stage=each).items()} for each in (stage, base)
    )
    return judge("loss", ours, theirs, at_most)


def shorter(folder: Path, stage: str, base: str) -> Any:
    """Return by what factor a stage is shorter than another, over scenes."""
    stages, _ = tables(folder)
    ours, theirs = (_by(stages, "bytes", stage=each) for each in (stage, base))
    return statistics.of_ratios([theirs[scene] / ours[scene] for scene in sorted(ours)], "scene")


def sooner(folder: Path, mbps: int) -> Any:
    """Return by what factor the compressed scene arrives sooner, over scenes."""
    _, transfers = tables(folder)
    ours, theirs = (_by(transfers, "seconds", stage=each, mbps=mbps) for each in (LAST, FITTED))
    return statistics.of_ratios([theirs[scene] / ours[scene] for scene in sorted(ours)], "scene")


# ------------------------------------------------------------------ claims
def ratio(folder: Path, least: float) -> Facts:
    """Return by what factor the chain shortens a scene."""
    found = shorter(folder, LAST, FITTED)
    stages, _ = tables(folder)
    each = stages[stages.stage == LAST]
    said = experiments.open_words("", judge_ratio(found, least), seed_s())
    left = stages[stages.stage == WHOLE].gaussians.sum() / stages[stages.stage == FITTED].gaussians.sum()
    facts = {"judgement": judge_ratio(found, least), "per": each.bytes.sum() / each.gaussians.sum(), "unresolved": said}
    return {**facts, "interval": experiments.sure_words(found, of="scenes"), "left": left}


def cost(folder: Path, stage: str, base: str, bound: float) -> Facts:
    """Return what a stage costs in PSNR."""
    found = dearer(folder, stage, base, bound)
    return {"judgement": found, "change": -found.value, "interval": _words(found), "unresolved": _open(found)}


def transform(folder: Path) -> Iterator[Facts]:
    """Yield whether RAHT makes codes shorter, and their scene better."""
    found = shorter(folder, WHOLE, PLAIN)
    judged = judge_ratio(found, 1.0)
    words = experiments.open_words("", judged, seed_s())
    yield {
        "judgement": judged, "what": "shorter", "met": _met(judged), "ours": f"{found.value:.3f} times shorter",
        "interval": experiments.sure_words(found, "{:.3f}", of="scenes"), "unresolved": words,
    }  # fmt: skip
    judged = dearer(folder, WHOLE, PLAIN)
    yield {
        "judgement": judged, "what": "at least as good", "met": _met(judged), "ours": f"{-judged.value:+.4f} dB",
        "interval": _words(judged, "{:+.4f}"), "unresolved": _open(judged),
    }  # fmt: skip


def transfer(folder: Path, least: float) -> Iterator[Facts]:
    """Yield by what factor the compressed scene arrives sooner."""
    _, transfers = tables(folder)
    for mbps in sorted(set(transfers.mbps)):
        found = sooner(folder, mbps)
        means = [
            transfers[(transfers.stage == each) & (transfers.mbps == mbps)].seconds.mean() for each in (FITTED, LAST)
        ]
        judged = judge_ratio(found, least)
        words = experiments.open_words("", judged, seed_s())
        facts = {"mbps": mbps, "before": means[0], "after": means[1], "unresolved": words}
        yield {"judgement": judged, "interval": experiments.sure_words(found, of="scenes"), **facts}


def _met(found: Judgement) -> bool | None:
    return None if found.verdict == "not resolved" else found.verdict == "holds"


def _words(found: Judgement, form: str = "{:+.2f}") -> str:
    if found.interval is None:
        return found.interval_words
    low, high = found.interval
    return f"{form.format(-high)} to {form.format(-low)}, 95 %, {found.n} scenes"


def _open(found: Judgement) -> str:
    return experiments.open_words("", found, seed_s(), unit="dB")


# ------------------------------------------------------------------ the README
def stages(folder: Path) -> Any:
    """Return every stage, means over scenes."""
    found, _ = tables(folder)
    rows = []
    for stage in compress.STAGES:
        part = found[found.stage == stage]
        rows.append(
            {
                "stage": stage,
                "what is sent": SAID[stage],
                "Gaussians": f"{part.gaussians.mean():,.0f}",
                "kB": f"{part.bytes.mean() / 1e3:.1f}",
                "bytes per Gaussian": f"{(part.bytes / part.gaussians).mean():.1f}",
                "times shorter": f"{shorter(folder, stage, FITTED).value:.1f}",
                "PSNR, training views": f"{part.psnr_training.mean():.2f}",
                "PSNR, held-out views": f"{part.psnr.mean():.2f}",
            }
        )
    return pandas.DataFrame(rows)


def transfers(folder: Path) -> Any:
    """Return the transfers, means over scenes."""
    _, found = tables(folder)
    mean = found.groupby(["stage", "mbps"], sort=False).mean(numeric_only=True).reset_index()
    return pandas.DataFrame(
        {
            "stage": mean.stage,
            "Mbit/s": mean.mbps,
            "kB": (mean.payload_bytes / 1e3).map("{:.1f}".format),
            "s": mean.seconds.map("{:.3f}".format),
            "s, links alone": mean.ideal_s.map("{:.3f}".format),
        }
    )


def answer(folder: Path) -> str:
    """Return the answer in three lines."""
    found = shorter(folder, LAST, FITTED)
    harm, further, tuning = dearer(folder, LAST, FITTED), dearer(folder, LAST, FURTHER), dearer(folder, LAST, WHOLE)
    times = " and ".join(f"{sooner(folder, mbps).value:.1f} times sooner over {mbps} Mbit/s" for mbps in COLOURS)
    return (
        f"The whole chain makes a scene {experiments.with_ends(found, '{:.1f}')} times shorter. Fine-tuning adds "
        f"{-tuning.value:.2f} dB, so that it ends {-harm.value:+.2f} dB from the fitted scene, but "
        f"{-further.value:+.2f} dB from one that was trained on as long. It arrives {times}, where delay counts more."
    )


def draw(folder: Path) -> Figure:
    """Draw PSNR against bytes along the chain, and the transfers."""
    found, sent = tables(folder)
    figure, (row,) = plots.panels(1, 2, (9.6, 3.8))
    mean = found.groupby("stage")[["bytes", "psnr"]].mean()
    line = mean.loc[list(CHAIN)]
    row[0].plot(line.bytes / 1e3, line.psnr, "o-", color="#0072b2")
    sides = {
        FITTED: ((0, 8), "center"), "pruned": ((9, -3), "left"), "octree": ((2, 9), "right"),
        "codes": ((0, -14), "center"), "codebook": ((4, 8), "left"), WHOLE: ((-4, -14), "center"),
        LAST: ((0, 8), "center"), FURTHER: ((0, -14), "center"),
    }  # fmt: skip
    row[0].plot(mean.bytes[FURTHER] / 1e3, mean.psnr[FURTHER], "^", color="#767d86")
    for stage, (offset, side) in sides.items():
        note(row[0], stage, (mean.bytes[stage] / 1e3, mean.psnr[stage]), offset, ha=side, size=8)
    row[0].set(xscale="log", xlabel="kB", ylabel="PSNR of held-out views, dB", title="along the chain")
    plots.ticks(row[0].xaxis, (10, 20, 50, 100, 200, 500))
    row[0].margins(0.14, 0.2)
    for place, stage in enumerate((FITTED, LAST)):
        for shift, (mbps, colour) in enumerate(COLOURS.items()):
            values = sent[(sent.stage == stage) & (sent.mbps == mbps)].seconds
            at = place + 0.36 * (shift - 0.5)
            row[1].bar(at, values.mean(), 0.34, color=colour, label=f"{mbps} Mbit/s")
            note(row[1], f"{values.mean():.3f} s", (at, values.mean()), (0, 3), ha="center", size=8)
    row[1].set_xticks([0, 1], ["fitted", "compressed"])
    row[1].set(ylabel="seconds until it is decoded", title="over a home link")
    row[1].margins(y=0.14)
    whole = shorter(folder, LAST, FITTED)
    plots.finish(figure, f"The chain makes a scene {whole.value:.0f} times shorter", row[1], "lower center")
    return figure


BLOCKS = {"answer": answer, "stages": stages, "transfers": transfers}
FIGURES = {"chain": draw}

if __name__ == "__main__":
    publishing.run(globals())
