"""Draws the figures and generates the tables of dice: `python experiments/dice/figures.py`.

This reads runs.csv and latency.csv from the output folder, which measure.py writes, and published.csv.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.figure import Figure

from testbed.metrics.verdicts import judge
from testbed.report import experiments, plots, publishing
from testbed.report.canvas import name_rows
from testbed.report.claim_rows import Facts

HERE = Path(__file__).resolve().parent
METRICS = ("frechet_unsplit", "relative_l2")
"""The paper's own measure, a Frechet distance, and the one with less noise."""
LOOKS = 3
"""At three seeds of 32 images, at five of 128, and at these by Frechet distance."""
COLOURS = ("#0072b2", "#d55e00")


def by_seed(frame: Any, schedule: str, steps: int, column: str = "relative_l2") -> dict[int, float]:
    """Return the error of a schedule by seed."""
    return experiments.by_seed(frame, column, schedule=schedule, steps=steps)


def published() -> Any:
    """Return the published numbers by quantity."""
    return pandas.read_csv(HERE / "published.csv").set_index("what").value.str.rstrip("x %").astype(float)


def errors(
    folder: Path, pairs: Sequence[Sequence[str]], column: str | None = None, *, fewer_steps: bool = False
) -> Iterator[Facts]:
    """Yield by what factor the error of the first schedule of each pair is smaller than that of the second, for each
    number of steps; or, if the second takes `fewer_steps`, for the most against the fewest. The error is the first of
    `METRICS`, or a column of runs.csv.
    """
    frame, fid = pandas.read_csv(folder / "runs.csv"), published()
    seed_s = experiments.training_s(HERE, "runs.csv", "seed", program="measure.py")
    every = sorted(set(frame.steps), reverse=True)
    for steps, fewest in (
        zip(every[:1], every[1:][-1:], strict=False) if fewer_steps else zip(every, every, strict=True)
    ):
        for better, worse in pairs:
            arms = (better, steps), (worse, fewest)
            of, other = METRICS if column is None else (column, METRICS[0])
            found, also = (
                judge("speed_up", *(by_seed(frame, *arm, each) for arm in arms), 1.0, looks=LOOKS)
                for each in (of, other)
            )
            (times, ends), (l2, l2_ends) = map(experiments.times_smaller, (found, also))
            fids = {"fid_better": fid.get(f"FID of {better}"), "fid_worse": fid.get(f"FID of {worse}")}
            size = fids["fid_worse"] / fids["fid_better"] if all(fids.values()) else None
            yield {
                **fids,
                "better": better, "worse": worse, "steps": steps, "fewest": fewest,
                "judgement": found, "times": times, "interval": f"{ends}, {found.confidence_words}, {found.n} seeds",
                "error_better": experiments.mean_of(by_seed(frame, better, steps, of)),
                "error_worse": experiments.mean_of(by_seed(frame, worse, fewest, of)),
                "l2": l2, "l2_interval": l2_ends,
                "unresolved": experiments.open_words("", found, seed_s, size),
            }  # fmt: skip


def speeds(folder: Path) -> Any:
    """Return, for the most steps and the shortest delay, each rate's share of communication in the synchronous schedule
    and every schedule's speed-up over it.
    """
    frame = pandas.read_csv(folder / "latency.csv")
    frame = frame[frame.steps == frame.steps.max()]
    nothing = frame[frame.rate_mbps == 0].set_index("schedule").seconds
    seconds = frame[(frame.rate_mbps > 0) & (frame.delay_us == frame[frame.rate_mbps > 0].delay_us.min())]
    wide = seconds.pivot(index="rate_mbps", columns="schedule", values="seconds")
    found = wide.rdiv(wide["synchronous"], axis=0)
    found.insert(0, "share", 1 - nothing["synchronous"] / wide["synchronous"])
    return found


def at_share(found: Any, schedule: str, share: float) -> float:
    """Return a schedule's speed-up at a share of communication in the synchronous schedule, interpolated over rates."""
    ordered = found.sort_values("share")
    return float(np.interp(share, ordered.share, ordered[schedule]))


def speed(folder: Path) -> Facts:
    """Return DICE's speed-up over the synchronous schedule at the published share of messages."""
    found, said = speeds(folder), published()
    shares = [said[f"{which} share of all-to-all"] / 100 for which in ("least", "most")]
    least, most = sorted(at_share(found, "DICE", share) for share in shares)
    alone = sorted(at_share(found, "interweaved", share) for share in shares)
    facts = {"least": least, "alone": alone, "best": found["DICE"].max()}
    return {"value": most, "published": said["speed-up over synchronous"], **facts}


def table(folder: Path) -> Any:
    """Return every schedule: means over seeds."""
    runs_of = pandas.read_csv(folder / "runs.csv").groupby(["steps", "schedule"], sort=False)
    mean, low, high = runs_of.mean(), runs_of.relative_l2.min(), runs_of.relative_l2.max()
    return pandas.DataFrame(
        {
            "relative L2": mean.relative_l2.map("{:.4f}".format),
            "lowest, highest": low.map("{:.4f}, ".format) + high.map("{:.4f}".format),
            "PSNR, dB": mean.psnr_db.map("{:.1f}".format),
            "Frechet to unsplit": mean.frechet_unsplit.map("{:.3g}".format),
            "to real digits": mean.frechet_real.map("{:.1f}".format),
            "MB per worker": mean.sent_mb.map("{:.2f}".format),
        }
    ).reset_index()


def speed_table(folder: Path) -> Any:
    """Return speed-ups over the synchronous schedule by rate."""
    found = speeds(folder)
    skipping = ["interweaved, deep layers synchronous", "interweaved, low scores skipped"]
    made = found.filter(["displaced", "interweaved", *skipping, "DICE"]).map("{:.2f}".format)
    made.insert(0, "messages' share", found.share.map("{:.0%}".format).str.replace("%", " %"))
    made.insert(0, "rate per worker", [f"{mbit / 1000:g} Gbit/s" for mbit in found.index])
    return made


def answer(folder: Path) -> str:
    """Return the answer in a few sentences."""
    frame, found = pandas.read_csv(folder / "runs.csv"), speeds(folder)
    mb = frame.groupby("schedule").sent_mb.mean()
    error = frame.groupby(["steps", "schedule"]).relative_l2.mean()
    said = "; ".join(
        ", ".join(f"{name} {error[steps, name]:.4f}" for name in ("displaced", "interweaved", "DICE"))
        + f" with {steps} steps"
        for steps in sorted(set(frame.steps), reverse=True)
    )
    return (
        f"Relative error of the images: {said}. DICE sends {mb['DICE'] / mb['synchronous']:.0%} of the "
        f"bytes and is {found['DICE'].max():.2f} times as fast as the synchronous schedule at the best rate "
        f"(interweaved {found['interweaved'].max():.2f} times)."
    ).replace("%", " %")


def draw(folder: Path) -> Figure:
    """Draw each schedule's error, a bar for each number of steps."""
    frame = pandas.read_csv(folder / "runs.csv")
    names = [name for name in dict.fromkeys(frame.schedule) if name != "synchronous"]
    every = sorted(set(frame.steps))
    figure, ((axes,),) = plots.panels(1, 1, (8.6, 3.9))
    for number, steps in enumerate(every):
        seen = [list(by_seed(frame, name, steps).values()) for name in names]
        places = np.arange(len(names)) + (number - (len(every) - 1) / 2) * 0.38
        means = np.array([np.mean(values) for values in seen])
        low, high = (np.array([end(values) for values in seen]) for end in (min, max))
        spread = [means - low, high - means]
        axes.barh(places, means, height=0.36, color=COLOURS[number], xerr=spread, label=f"{steps} steps")
    name_rows(axes, names)
    axes.set(xlabel="relative L2 error to the synchronous sampler's images (bars: lowest to highest seed)")
    axes.legend(loc="lower right")
    plots.finish(figure, "One step of staleness costs less than two, and half of the layers less again")
    return figure


BLOCKS = {"answer": answer, "schedules": table, "speeds": speed_table}
FIGURES = {"staleness": draw}

if __name__ == "__main__":
    publishing.run(globals())
