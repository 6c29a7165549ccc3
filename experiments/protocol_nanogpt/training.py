"""What sweep.toml's trainings say of the steps that ProtocolNanoGPT's two records need, from the CSVs of a folder."""

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from testbed.codecs.catalogue import placement
from testbed.metrics import LossPoint
from testbed.metrics.time_to_loss import crossing
from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiment_tables, experiment_verdicts, experiments, floors, plots
from testbed.report.claim_rows import Facts
from testbed.report.numbers import percent

HERE = Path(__file__).resolve().parent
CURVES = "curves.csv"
COMMAND = "python -m testbed sweep protocol_nanogpt"
DENSE, LOW_RANK = "bf16", "powersgd(27)"
SUBSPACE = placement.canonical_text("subspace(6.4, reparametrised)")
SAME_LOSS = 0.01
"""Of the dense run's loss: what counts as a difference where seeds are counted."""
_PICTURE = """![Validation loss against steps](steps.png)

Marks are the ends, which alone compare: every run's rate decays to its own end, so a long run's curve is above a short
one's at equal steps. Lines and bands are from the lowest to the highest of the seeds; the dotted line is where the
dense runs end. The long run has the records' ratio of steps."""
TRAINING_S = 55.0 * 160 / 250
"""Of one core, for one training of 160 steps: 250 took 55 s, two side by side on an idle machine of 2 cores."""
_COLOURS = {DENSE: "#222222", SUBSPACE: "#0072b2", LOW_RANK: "#7b4fa3"}
_SCALE = "5.3 M parameters and 82 thousand tokens here, 204 M and 1.5 billion there"


def write(results: Path, output: Path) -> None:
    """Write the CSVs of a sweep's results: those of every experiment, and the validation curves."""
    runs = experiments.runs_frame(results)
    experiment_tables.write_tables(results, output, runs)
    curves = experiments.curves(results)
    curves = curves[curves.phase == "evaluation"].merge(runs[[*experiments.RUN, "training.steps"]])
    columns = {"codec": "codec", "training.steps": "steps", "seed": "seed", "step": "step", "loss": "loss"}
    curves[list(columns)].rename(columns=columns).sort_values(["codec", "steps", "seed", "step"]).to_csv(
        output / CURVES, index=False, float_format="%.6f", lineterminator="\n"
    )


class Losses:
    """Validation losses of the arms, by codec and by how many steps they were trained."""

    def __init__(self, folder: Path) -> None:
        """Read the CSVs that `write` has written."""
        self.tables = experiment_tables.read_tables(folder)
        self.curves = pd.read_csv(folder / CURVES)
        self.equal, self.longer = (int(end(self.curves[self.curves.codec == SUBSPACE].steps)) for end in (min, max))

    def last(self, codec: str, steps: int) -> dict[int, float]:
        """Return an arm's last losses by seed; empty where it was not run."""
        rows = self.curves[(self.curves.codec == codec) & (self.curves.steps == steps)]
        return dict(rows.sort_values("step").groupby("seed").loss.last())

    def against(self, codec: str, steps: int, base: str = DENSE, bound: float = 0.0) -> Judgement | None:
        """Judge that an arm ends at most `bound` nats above another of `equal` steps; None where one was not run."""
        sides = self.last(codec, steps), self.last(base, self.equal)
        return judge("loss", *sides, bound) if all(sides) else None

    @property
    def loss(self) -> float:
        """The dense run's, mean over seeds."""
        ends = self.last(DENSE, self.equal)
        return sum(ends.values()) / len(ends)

    def factor(self, published: float) -> Judgement | None:
        """Judge that the long subspace run takes `published` times as many steps as the dense run to the loss at which
        that ends; None where a seed does not get there.
        """
        rows = self.curves[(self.curves.codec == SUBSPACE) & (self.curves.steps == self.longer)]
        taken = {}
        for seed, target in self.last(DENSE, self.equal).items():
            curve = rows[rows.seed == seed].sort_values("step")
            points = [LossPoint(int(point.step), float(point.step), float(point.loss)) for point in curve.itertuples()]
            if (found := crossing(points, target)) is None:
                return None
            taken[seed] = found.steps
        return judge("speed_up", dict.fromkeys(taken, float(self.equal)), taken, published)


def loss(folder: Path, longer: bool = False, base: str = DENSE) -> Facts | None:
    """Return how far the subspace run ends above another of equal steps, or with more steps than that; None where one
    was not trained.
    """
    if not (folder / CURVES).is_file():
        return None
    losses = Losses(folder)
    found = losses.against(SUBSPACE, losses.longer if longer else losses.equal, base)
    size = SAME_LOSS * losses.loss
    return experiments.loss_facts(found, losses.loss, 2 * TRAINING_S, size, **needed(folder))


def needed(folder: Path) -> dict[str, float]:
    """Return how many steps the records need to their target loss, and the ratio of both."""
    steps = pd.read_csv(folder / "published.csv").set_index("run").steps_to_target
    return {"dense": steps.dense, "subspace": steps.subspace, "factor": steps.subspace / steps.dense}


def steps_needed(folder: Path) -> Facts | None:
    """Return how many times as many steps the subspace run needs here; None where that was not trained, or found."""
    if not (folder / CURVES).is_file():
        return None
    losses, records = Losses(folder), needed(folder)
    found = losses.factor(records["factor"])
    if found is None:
        return None
    why = f"the long run passes that loss while its rate is still large, so fewer steps may do; {_SCALE}"
    pair_s = TRAINING_S * (1 + losses.longer / losses.equal)
    return {"judgement": found, **records, "shown": experiments.open_words(why, found, pair_s)}


def answer(folder: Path) -> str:
    """Return the last sentence of the answer; empty where nothing was trained."""
    if not (folder / CURVES).is_file():
        return ""
    published = needed(folder)["factor"]
    factor = Losses(folder).factor(published)
    if factor is None:
        return ""
    return (
        f" In a small model the subspace needs at most {factor.value:.2f} times ({factor.interval_words}) the steps, "
        f"published {published:.2f}."
    )


@experiments.table
def table(folder: Path) -> Any:
    """Return a row for each arm: its rate, steps and loss, and what it is above the dense run."""
    losses = Losses(folder)
    rates = losses.tables.seeds.drop_duplicates(["codec", "training.steps"])
    for codec, steps in losses.curves[["codec", "steps"]].drop_duplicates().itertuples(index=False):
        ends = losses.last(codec, steps)
        arm = rates[(rates.codec == codec) & (rates["training.steps"] == steps)].iloc[0]
        found = None if codec == DENSE else losses.against(codec, steps)
        above = "" if found is None else f"{found.value:+.3f} ({experiments.interval_words(found)})"
        yield {
            "codec": codec,
            "model": arm["workload.model"],
            "steps": steps,
            "rate": f"{arm['optimiser.learning_rate']:g}",
            "kB per step": f"{arm.payload_bytes_per_step / 1e3:.0f}",
            "validation loss": f"{sum(ends.values()) / len(ends):.3f}",
            "above the dense run": above,
            "of the loss": "" if found is None else percent(found.value / losses.loss, "{:+.1f}"),
            "seeds": len(ends),
        }


def blocks(folder: Path) -> dict[str, str]:
    """Return the blocks of the README that are about training."""
    if not (folder / CURVES).is_file():
        return {"trained": f"Not measured yet: `{COMMAND}` takes about half an hour of one core.", "remarks": ""}
    losses = Losses(folder)
    remarks = (
        experiment_verdicts.floor_sentence(losses.tables.seeds),
        experiment_verdicts.tuning_sentence(losses.tables.tuning),
    )
    return {
        "trained": f"{_PICTURE}\n\n{experiments.markdown_of(table(folder))}",
        "remarks": experiments.prose(" ".join(remark for remark in remarks if remark)),
    }


def draw(axes: Axes, folder: Path) -> None:
    """Draw validation losses against steps: means over seeds, bands from the lowest to the highest."""
    losses = Losses(folder)
    names = {DENSE: "dense, bf16", SUBSPACE: "subspace, 40 of 256 channels", LOW_RANK: "low rank, as many bytes"}
    for (codec, steps), rows in losses.curves.groupby(["codec", "steps"]):
        name = f"{names[str(codec)]}, {steps} steps" if codec == SUBSPACE else names[str(codec)]
        dash = "--" if steps == losses.longer else "-"
        plots.curve(axes, rows, "step", "loss", _COLOURS[str(codec)], "", dash=dash, alpha=0.35)
        ends = list(losses.last(str(codec), int(steps)).values())
        found = plots.ErrorBar(sum(ends) / len(ends), (min(ends), max(ends)))
        size = 10 if codec == LOW_RANK else 7  # it ends where the subspace does
        plots.estimates(axes, [(steps, found)], _COLOURS[str(codec)], label=name, hollow=dash == "--", ms=size)
    axes.axhline(losses.loss, color=_COLOURS[DENSE], lw=0.8, ls=":")
    floors.draw_floors(axes, HERE)
    axes.set(xlabel="optimiser steps", ylabel="validation loss, nats per token")
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.93))
