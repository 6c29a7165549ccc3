"""Draw the figures of dice and make its tables: `python experiments/dice/figures.py`.

This reads runs.csv and latency.csv from the output folder, which measure.py writes, and published.csv.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.figure import Figure

from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiments, style
from testbed.report.claims import EXACT, Claim, claims_table

HERE = Path(__file__).resolve().parent
COMMAND = "python experiments/dice/measure.py"
SOURCE = "DICE, arXiv 2411.16786; second-hand"
DEEP, SHALLOW = "interweaved, deep layers synchronous", "interweaved, shallow layers synchronous"
SECOND = "interweaved, every second layer synchronous"
LOW, HIGH = "interweaved, low scores skipped", "interweaved, high scores skipped"
ORDER = (
    ("interweaved", "displaced"),
    ("DICE", "interweaved"),
    (DEEP, "interweaved"),
    (DEEP, SHALLOW),
    (DEEP, SECOND),
    (LOW, HIGH),
    ("interweaved", LOW),
)
"""Which has the smaller FID, as published."""
COLOURS = ("#0072b2", "#d55e00")


def runs(folder: Path) -> Any:
    """Return the rows of runs.csv."""
    return pandas.read_csv(folder / "runs.csv")


def by_seed(frame: Any, schedule: str, steps: int, column: str = "relative_l2") -> dict[int, float]:
    """Return the error of a schedule by seed."""
    rows = frame[(frame.schedule == schedule) & (frame.steps == steps)]
    return dict(rows.set_index("seed")[column].astype(float))


def smaller(frame: Any, better: tuple[str, int], worse: tuple[str, int], column: str = "relative_l2") -> Judgement:
    """Judge that the error of one schedule and number of steps is smaller than another's."""
    return judge("speed_up", by_seed(frame, *better, column), by_seed(frame, *worse, column), 1.0)


def seed_s() -> float:
    """Return how long one more seed of all schedules takes."""
    return experiments.training_s(HERE, "runs.csv", "seed", program="measure.py")


def _claim(
    text: str,
    found: Judgement,
    means: tuple[float, float],
    source: str,
    published: str,
    size: float | None = None,
    more: str = "",
) -> Claim:
    """Make a claim; `size`: how many times smaller the published one is; `more`: to its reason."""
    assert found.verdict is not None
    ours, interval = experiments.times_smaller(found)
    return Claim(
        claim=text,
        source=source,
        published=published,
        ours=ours,
        interval=f"{interval}, 95 %, {found.n} seeds",
        verdict=found.verdict,
        why=experiments.open_words(f"relative L2 {means[0]:.4f} against {means[1]:.4f}{more}", found, seed_s(), size),
        command=COMMAND,
    )


def published(what: str) -> float:
    """Return a published number."""
    frame = pandas.read_csv(HERE / "published.csv")
    return float(str(frame[frame.what == what].value.iloc[0]).rstrip("x %"))


def claims(folder: Path) -> list[Claim]:
    """Return what is claimed, and what became of it."""
    frame, rows = runs(folder), []

    def mean(schedule: str, steps: int) -> float:
        return float(np.mean(list(by_seed(frame, schedule, steps).values())))

    every = sorted(set(frame.steps), reverse=True)
    for steps in every:
        for better, worse in ORDER:
            distances = smaller(frame, (better, steps), (worse, steps), "frechet_unsplit")
            frechet, ends = experiments.times_smaller(distances)
            rows.append(
                _claim(
                    f"The error of {better} is smaller than that of {worse} ({steps} steps)",
                    smaller(frame, (better, steps), (worse, steps)),
                    (mean(better, steps), mean(worse, steps)),
                    SOURCE,
                    f"FID {published(f'FID of {better}'):g} against {published(f'FID of {worse}'):g}, 50 steps",
                    published(f"FID of {worse}") / published(f"FID of {better}"),
                    f"; Frechet distance {frechet} ({ends})",
                )
            )
        stale = "interweaved, stale router weights"
        rows.append(
            _claim(
                f"Outputs weighted by the fresh router are better than by that of their own step ({steps} steps)",
                smaller(frame, ("interweaved", steps), (stale, steps)),
                (mean("interweaved", steps), mean(stale, steps)),
                "ours, after DICE's released code",
                "",
            )
        )
    if len(every) > 1:
        for schedule in ("displaced", "DICE"):
            rows.append(
                _claim(
                    f"Staleness costs more with fewer steps: {schedule}, {every[0]} steps against {every[-1]}",
                    smaller(frame, (schedule, every[0]), (schedule, every[-1])),
                    (mean(schedule, every[0]), mean(schedule, every[-1])),
                    SOURCE,
                    "",
                )
            )
    return [*rows, _speed_claim(folder)]


def speeds(folder: Path) -> Any:
    """Return, at most steps and the least delay, each rate's share of communication in the synchronous schedule and
    every schedule's speed-up over it.
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
    """Return a schedule's speed-up where communication is a share of the synchronous schedule, between rates."""
    ordered = found.sort_values("share")
    return float(np.interp(share, ordered.share, ordered[schedule]))


def _speed_claim(folder: Path) -> Claim:
    found = speeds(folder)
    shares = [published(f"{which} share of all-to-all") / 100 for which in ("least", "most")]
    ends = [at_share(found, "DICE", share) for share in shares]
    inter = [at_share(found, "interweaved", share) for share in shares]
    best = max(*ends)
    return Claim(
        claim="DICE is 1.2 times as fast as synchronous expert parallelism (1.26 in a later version)",
        source=SOURCE,
        published="1.26 times at most; the all-to-all is 61.7 to 73.3 % of the synchronous time",
        ours=f"{min(ends):.2f} to {best:.2f} times where messages are as large a share",
        interval=EXACT,
        verdict="holds" if best >= published("speed-up over synchronous") else "fails",
        why="two workers over links as formulas, digits; interweaved alone "
        f"{min(inter):.2f} to {max(inter):.2f} times, and DICE {found['DICE'].max():.2f} at the best rate; sending and "
        "computing do not slow each other down here, so this is an upper bound",
        command=COMMAND,
    )


def table(folder: Path) -> Any:
    """Return every schedule: means over seeds."""
    frame, rows = runs(folder), []
    for (steps, schedule), part in frame.groupby(["steps", "schedule"], sort=False):
        rows.append(
            {
                "steps": steps,
                "schedule": schedule,
                "relative L2": f"{part.relative_l2.mean():.4f}",
                "lowest, highest": f"{part.relative_l2.min():.4f}, {part.relative_l2.max():.4f}",
                "PSNR, dB": f"{part.psnr_db.mean():.1f}",
                "Frechet to unsplit": f"{part.frechet_unsplit.mean():.3g}",
                "to real digits": f"{part.frechet_real.mean():.1f}",
                "MB per worker": f"{part.sent_mb.mean():.2f}",
            }
        )
    return pandas.DataFrame(rows)


def speed_table(folder: Path) -> Any:
    """Return speed-ups over the synchronous schedule by rate."""
    found = speeds(folder)
    names = [name for name in ("displaced", "interweaved", DEEP, LOW, "DICE") if name in found]
    made = pandas.DataFrame({name: [f"{value:.2f}" for value in found[name]] for name in names})
    made.insert(0, "messages' share", [f"{share:.0%}".replace("%", " %") for share in found.share])
    made.insert(0, "rate per worker", [f"{mbit / 1000:g} Gbit/s" for mbit in found.index])
    return made


def answer(folder: Path) -> str:
    """Return the answer in a few sentences."""
    frame, said = runs(folder), []
    for steps in sorted(set(frame.steps), reverse=True):
        errors = {
            name: np.mean(list(by_seed(frame, name, steps).values())) for name in ("displaced", "interweaved", "DICE")
        }
        said.append(", ".join(f"{name} {value:.4f}" for name, value in errors.items()) + f" with {steps} steps")
    found = speeds(folder)
    mb = frame.groupby("schedule").sent_mb.mean()
    return (
        f"Relative error of the images: {'; '.join(said)}. DICE sends {mb['DICE'] / mb['synchronous']:.0%} of the "
        f"bytes and is {found['DICE'].max():.2f} times as fast as the synchronous schedule at the best rate "
        f"(interweaved {found['interweaved'].max():.2f} times)."
    ).replace("%", " %")


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    return {
        "answer": experiments.prose(answer(folder)),
        "schedules": experiments.markdown_of(table(folder)),
        "speeds": experiments.markdown_of(speed_table(folder)),
        "claims": claims_table(claims(folder)),
    }


def draw(folder: Path) -> Figure:
    """Draw each schedule's error, a bar for each number of steps."""
    frame = runs(folder)
    names = [name for name in dict.fromkeys(frame.schedule) if name != "synchronous"]
    every = sorted(set(frame.steps))
    figure = Figure(figsize=(8.6, 3.9), layout="constrained")
    axes = figure.subplots()
    for number, steps in enumerate(every):
        seen = [list(by_seed(frame, name, steps).values()) for name in names]
        places = np.arange(len(names)) + (number - (len(every) - 1) / 2) * 0.38
        means = np.array([np.mean(values) for values in seen])
        low, high = (np.array([end(values) for values in seen]) for end in (min, max))
        axes.barh(
            places, means, height=0.36, color=COLOURS[number], xerr=[means - low, high - means], label=f"{steps} steps"
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="relative L2 error to the synchronous sampler's images (bars: lowest to highest seed)")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower right")
    title = "One step of staleness costs less than two, and half of the layers less again"
    style.state(figure, title)
    return figure


def main() -> int:
    """Write the figure, claims.csv and the README's blocks."""
    _, output = experiments.folders(HERE.name, "Figure, claims and the README's blocks.")
    experiments.draw_and_publish(HERE, output, {"staleness": draw}, blocks, claims)
    return 0


if __name__ == "__main__":
    sys.exit(main())
