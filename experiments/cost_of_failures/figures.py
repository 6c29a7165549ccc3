"""Generates the figures, goodput.csv, claims.csv and README blocks of cost_of_failures from what was played.

python -m testbed predict cost_of_failures
python experiments/cost_of_failures/play.py
python experiments/cost_of_failures/figures.py [--results results/cost_of_failures] [--output FOLDER]
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import failures
import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

import testbed
from testbed import csv_rows
from testbed.metrics.statistics import of_ratios
from testbed.report import experiments, plots, predicted, publishing, style
from testbed.report.claim_rows import Facts
from testbed.report.numbers import percent

GOODPUT = "goodput.csv"
DISK = "on its disk"
LABELS = {DISK: "from its own disk"}
CODEC = "bf16"
RULES = {"young": failures.young_s, "daly": failures.daly_s}
TIMER, PLAIN = "cubic, timer up to 5 s", "cubic"
LONG_S = 60
"""Outages are from 10 to 20 s, or from this to twice it."""
SEED_S = 20.0
"""Seconds of one core that one more seed of both arms takes."""
PUBLISHED = {24 * 60: 117, 6 * 60: 57, 15: 9.1}
"""Daly (2006), captions of figures 3 to 5: mean time between failures -> interval in minutes; a checkpoint takes 5."""
_FAILURES, _CHECKPOINTS = 4000, 1000


class Row(NamedTuple):
    """A line of goodput.csv."""

    job: str
    codec: str
    link: str
    state: str
    mtbf: str
    rule: str
    """Whose interval."""
    every: int
    """Steps between two checkpoints."""
    step_s: float
    checkpoint_s: float
    recovery_s: float
    goodput: float
    """By formula."""
    simulated: float
    """Of a long drawn history."""


def all_costs(folder: Path) -> Iterator[tuple[str, str, str, str, failures.Costs]]:
    """Yield job, codec, link, state and costs for everything that was played."""
    sent = pd.read_csv(folder / "transfers.csv").set_index(["job", "link", "state", "what"]).seconds
    frame = predicted.cells(folder)
    for cell in frame.assign(codec=frame.codec.fillna(frame["label.codec"])).itertuples():
        for state in failures.STATES:
            if (cell.grid, cell.links, state, "recovery") in sent:
                checkpoint_s = sent.get((cell.grid, cell.links, state, "checkpoint"), 0.0)
                recovery_s = failures.REPLACED_S + sent[cell.grid, cell.links, state, "recovery"]
                costs = failures.Costs(cell.step_s, checkpoint_s, recovery_s)
                yield cell.grid, cell.codec, cell.links, state, costs
        if cell.grid == "pipeline":
            disk_s = failures.state_bytes("pipeline", "fp32") / failures.DISK_BYTES_PER_S
            costs = failures.Costs(cell.step_s, disk_s, failures.REPLACED_S + disk_s)
            yield cell.grid, cell.codec, cell.links, DISK, costs


def write(results: Path, output: Path) -> None:
    """Write the worst steps of the sweep, and the goodput of drawn histories of lost peers beside the formula's."""
    runs, steps = experiments.runs_frame(results), testbed.steps(results)
    runs = runs.set_index(experiments.RUN).join(steps.groupby(experiments.RUN).step_s.max().rename("worst_s"))
    runs[["profile", "codec", "timing", "worst_s"]].to_csv(output / "live.csv", index=False, float_format="%.9g")
    rows = []
    for job, codec, link, state, costs in all_costs(output):
        for mtbf, mtbf_s in failures.MTBFS_S.items():
            every = {"best": 1 if job == "data" else failures.best_steps(costs, mtbf_s)}
            for name, rule in RULES.items() if job == "pipeline" else ():
                every[name] = failures.whole_steps(rule(costs.checkpoint_s, mtbf_s), costs.step_s)
            for rule, steps in every.items():
                share = failures.goodput(costs, steps, mtbf_s)
                one = (codec, link) == (CODEC, "cable") and rule != "daly"
                drawn = simulate(costs, steps, mtbf_s, share) if one else np.nan
                rows.append(Row(job, codec, link, state, mtbf, rule, steps, *costs, share, drawn))
    csv_rows.write_rows(output / GOODPUT, Row._fields, rows, digits=6)


def simulate(costs: failures.Costs, every: int, mtbf_s: float, share: float) -> float:
    """Return the goodput of a long drawn history."""
    steps = max(_CHECKPOINTS * every, round(_FAILURES * mtbf_s * share / costs.step_s))
    events = list(failures.history(costs, every, mtbf_s, 0, steps))
    kept = every * sum(event.kind == "checkpoint" for event in events)
    return kept * costs.step_s / failures.seconds(events, costs)


# ------------------------------------------------------------------ numbers
def goodputs(folder: Path, rule: str = "best", **chosen: str) -> Any:
    """Return the rows of goodput.csv with this interval."""
    return experiments.matching(pd.read_csv(folder / GOODPUT), {"rule": rule, **chosen})


def optima(folder: Path) -> Iterator[Facts]:
    """Yield Daly's interval for the mean times between failures whose intervals he published."""
    for minutes, published in PUBLISHED.items():
        yield {"minutes": minutes, "published": published, "value": failures.daly_s(5 * 60, minutes * 60) / 60}


def simulated(folder: Path) -> Facts:
    """Return how far drawn histories are from the formula, at most."""
    rows = pd.read_csv(folder / GOODPUT).dropna(subset="simulated")
    return {"value": (rows.simulated - rows.goodput).abs().max(), "settings": len(rows)}


def played(folder: Path) -> Facts:
    """Return how far played histories are from the same ones with played costs added up, at most."""
    rows = pd.read_csv(folder / "histories.csv")
    off = (rows.played_s / rows.simulated_s - 1).abs()
    return {"value": off.max(), "median": off.median(), "histories": len(rows), "failures": int(rows.failures.sum())}


def summed(folder: Path) -> Facts:
    """Return how far trainings with drawn outages are from what their outages cost one at a time, at most."""
    rows = pd.read_csv(folder / "drawn.csv")
    each = outages(folder, job="pipeline", control=PLAIN)
    each = each[each.link.isin(rows.link)]
    times = each.groupby("codec").apply(lambda part: part.cost_s.sum() / part.outage_s.sum(), include_groups=False)
    off = rows.undisturbed_s.add(rows.outages_s * rows.codec.map(times)) / rows.played_s - 1
    return {"value": off.abs().max(), "median": off.abs().median(), "trainings": len(rows)}


def intervals(folder: Path, rule: str) -> Iterator[Facts]:
    """Yield, for each mean time between failures, the smallest share of the best interval's goodput."""
    known = ["codec", "link", "state", "mtbf"]
    best = goodputs(folder, job="pipeline").set_index(known).goodput
    shares = goodputs(folder, rule, job="pipeline").set_index(known).goodput / best
    for mtbf in failures.MTBFS_S:
        part = shares.xs(mtbf, level="mtbf")
        codec, link, state = part.idxmin()
        where = f"a state {state}" if state == DISK else f"a state as {state} over {link}"
        yield {"mtbf": mtbf, "value": part.min(), "where": f"{where}, {codec} in training"}


def state_gains(folder: Path, state: str, job: str = "pipeline", codec: str = CODEC) -> Iterator[Facts]:
    """Yield how many times the goodput of an exact state a coded one has, both with their best intervals."""
    rows = goodputs(folder, job=job, codec=codec).set_index(["link", "mtbf", "state"]).goodput
    for link, mtbf, each in rows.index:
        if each == state:
            ours, exact = rows[link, mtbf, state], rows[link, mtbf, "fp32"]
            yield {"link": link, "mtbf": mtbf, "value": ours / exact, "ours": ours, "exact": exact}


def states_or_activations(folder: Path, codec: str) -> Iterator[Facts]:
    """Yield the gain of a coded state over that of coded activations, where failures are 10 minutes apart."""
    cells = predicted.cells(folder)
    steps = cells[cells.grid == "pipeline"].set_index(["codec", "links"]).step_s
    for facts in state_gains(folder, codec):
        if facts["mtbf"] == "10 min" and (codec, facts["link"]) in steps:
            speed_up = steps[CODEC, facts["link"]] / steps[codec, facts["link"]]
            yield {**facts, "value": facts["value"] / speed_up, "gain": facts["value"], "speed_up": speed_up}


def layouts(folder: Path, mtbf: str) -> Iterator[Facts]:
    """Yield, for each link, the goodput of data parallel training over that of a pipeline, with exact states."""
    rows = goodputs(folder, codec=CODEC, state="fp32", mtbf=mtbf).set_index(["job", "link"]).goodput
    for link in rows["data"].index if "data" in rows.index else ():
        data, pipeline = rows["data", link], rows["pipeline", link]
        yield {"link": link, "mtbf": mtbf, "value": data / pipeline, "data": data, "pipeline": pipeline}


def outages(folder: Path, **chosen: str) -> Any:
    """Return the rows of outages.csv in scaled form with `times`, their costs relative to their lengths.

    An outage in whose time no step ended counts together with the next one.
    """
    rows = experiments.matching(pd.read_csv(folder / "outages.csv"), chosen)
    rows = rows[(rows.scale > 1) | (rows.job == "data")]
    waited = rows.cost_s == 0
    lengths = rows.outage_s + rows.outage_s.shift(fill_value=0) * waited.shift(fill_value=False)
    rows = rows.assign(times=rows.cost_s / lengths, least_s=np.where(rows.outage_s < LONG_S, 10, LONG_S))
    return rows[~waited].assign(outage_s=lengths)


def worst_outages(folder: Path, job: str, control: str, **chosen: str) -> Facts | None:
    """Return the largest cost of an outage relative to its length, of the rows that are `chosen`."""
    rows = outages(folder, job=job, control=control, **chosen)
    if rows.empty:
        return None
    row = rows.loc[rows.times.idxmax()]
    words = f"{row.outage_s:.0f} s, {row.codec} over {row.link}, {row.cost_s:.0f} s"
    return {"value": row.times, "control": control, "worst": words, "mean": rows.times.mean(), "outages": len(rows)}


def limited(folder: Path) -> Iterator[Facts]:
    """Yield by how much a limit of TCP's timer lowers the cost of outages, by their least length."""
    rows = outages(folder, job="pipeline", codec="int8", link="cable")
    for least_s, part in rows.groupby("least_s"):
        sums = part.groupby("control").cost_s.sum()
        if TIMER in sums:
            yield {"least_s": least_s, "value": 1 - sums[TIMER] / sums[PLAIN]}


def scaled(folder: Path) -> Facts | None:
    """Return how many times as much outages cost over links at a fraction of their rates as at full rate."""
    rows = pd.read_csv(folder / "outages.csv")
    rows = experiments.matching(rows, {"job": "pipeline", "codec": "int8", "link": "cable", "control": PLAIN})
    rows = rows[rows.outage_s < LONG_S]
    sums = rows.groupby(rows.scale == 1).cost_s.sum()
    return None if len(sums) < 2 else {"value": sums[False] / sums[True], "outages": int((rows.scale == 1).sum())}


def kept(folder: Path) -> Iterator[Facts]:
    """Yield the share of its speed-up that int8 keeps over bf16 with drawn outages, paired by seed."""
    rows = pd.read_csv(folder / "drawn.csv").assign(share=lambda frame: frame.undisturbed_s / frame.played_s)
    for least_s, part in rows.groupby("least_s"):
        shares = part.pivot(index="seed", columns="codec", values="share").dropna()
        if len(shares) > 1 and len(shares.columns) > 1:
            found = of_ratios(list(shares.int8 / shares[CODEC]), "seed")
            facts = experiments.ratio_facts(found, 0.95, "trainings with the same outages", SEED_S)
            yield {"least_s": least_s, "most_s": 2 * least_s, **facts}


def live(folder: Path) -> Facts | None:
    """Return how far the worst steps of live trainings are from those of played ones, at most."""
    wide = pd.read_csv(folder / "live.csv").pivot(index=["profile", "codec"], columns="timing", values="worst_s")
    if "live" not in wide:
        return None
    off = (wide.live / wide.played - 1).abs()
    words = ", ".join(
        f"{' over '.join(row.Index[::-1])} {row.live:.1f} and {row.played:.1f} s" for row in wide.itertuples()
    )
    return {"value": off.max(), "pairs": len(wide), "worst": words}


def beside(folder: Path) -> Iterator[Facts]:
    """Yield, for each link, what a checkpoint costs beside the training, over what it costs while that waits."""
    sent = pd.read_csv(folder / "transfers.csv").set_index(["job", "link", "state", "what"])
    for link, part in pd.read_csv(folder / "beside.csv").groupby("link", sort=False):
        row = sent.loc["pipeline", link, "fp32", "checkpoint"]
        takes_s = row.megabytes * 1e6 / part.bytes_per_s
        shares = takes_s * (1 - part.step_s / part.beside_s) / row.seconds
        yield {"link": link, "value": shares.max(), "least": shares.min(), "takes": takes_s.max(), "waits": row.seconds}


# ------------------------------------------------------------------ tables
@experiments.table
def goodput_table(folder: Path) -> Any:
    """Return the goodput of all settings, each with its best interval."""
    rows = goodputs(folder)
    wide = rows[rows.codec == CODEC].set_index(["link", "mtbf", "job", "state"]).goodput
    for link in rows.link.unique():
        for mtbf in failures.MTBFS_S:
            shown = {f"pipeline, {state}": ("pipeline", state) for state in (DISK, *failures.STATES)}
            shown |= {f"data parallel, {state}": ("data", state) for state in ("fp32", "int8")}
            yield {"link": link, "failures every": mtbf} | {
                name: percent(wide[link, mtbf, *key], "{:.1f}")
                for name, key in shown.items()
                if (link, mtbf, *key) in wide
            }


@experiments.table
def cost_table(folder: Path) -> Any:
    """Return what a checkpoint and a recovery take."""
    rows = pd.read_csv(folder / "transfers.csv")
    for (job, state), part in rows.groupby(["job", "state"], sort=False):
        for what, each in part.groupby("what", sort=False):
            seconds = {row.link: f"{row.seconds:.0f} s" for row in each.itertuples()}
            yield {"job": job, "state": state, "sent": what, "MB": f"{each.megabytes.iloc[0]:.0f}", **seconds}


@experiments.table
def outage_table(folder: Path) -> Any:
    """Return what an outage costs, by arm."""
    for keys, part in outages(folder).groupby(["job", "codec", "link", "control"], sort=False):
        row = dict(zip(("job", "codec", "link", "TCP"), keys, strict=True)) | {"step": f"{part.step_s.mean():.1f} s"}
        for least_s, each in part.groupby("least_s"):
            ends = f"{each.times.min():.2f} to {each.times.max():.2f}"
            row[f"{least_s} to {2 * least_s} s"] = f"{each.times.mean():.2f}x ({ends})"
        yield row


@experiments.table
def history_table(folder: Path) -> Any:
    """Return the goodput of played histories, beside the same with costs added up, and the formula."""
    for keys, part in pd.read_csv(folder / "histories.csv").groupby(["job", "codec", "state", "mtbf"], sort=False):
        names = ("job", "codec", "state", "failures every")
        costs = next(
            costs for *each, costs in all_costs(folder) if each == [keys[0], keys[1], part.link.iloc[0], keys[2]]
        )
        share = failures.goodput(costs, int(part.every.iloc[0]), failures.MTBFS_S[keys[3]])
        yield dict(zip(names, keys, strict=True)) | {
            "failures": int(part.failures.sum()),
            "played": f"{(part.useful_s / part.played_s).mean():.3f}",
            "costs added up": f"{(part.useful_s / part.simulated_s).mean():.3f}",
            "formula": f"{share:.3f}",
        }


def answer(folder: Path) -> str:
    """Return the answer."""
    rows = {(facts["link"], facts["mtbf"]): facts for facts in state_gains(folder, "int8")}
    hour, often = rows["cable", "1 h"], rows["cable", "10 min"]
    ours = {"codec": "int8"} if worst_outages(folder, "pipeline", PLAIN, codec="int8") else {}  # not in the short form
    worst = worst_outages(folder, "pipeline", PLAIN, **ours) or {}
    both = [each["data"] for mtbf in ("1 h", "10 min") for each in layouts(folder, mtbf) if each["link"] == "cable"]
    words = " In data parallel training all have the state: {:.0%} and {:.0%}."
    data = words.format(*both) if both else ""
    least = worst_outages(folder, "pipeline", TIMER, **ours)
    limit = f", {least['mean']:.2f} with TCP's timer limited to 5 s" if least else ""
    coded = " with int8" if ours else ""
    return (
        f"An outage of a home costs a pipeline{coded} {worst['mean']:.2f} times its length on average{limit}. A "
        "lost peer costs its state: behind cable, with checkpoints at another home and a failure per hour, "
        f"{hour['exact']:.0%} of the time is useful training, {hour['ours']:.0%} with states as int8; with one every "
        f"10 minutes, {often['exact']:.0%} and {often['ours']:.0%}.{data}"
    ).replace("%", " %")


BLOCKS = {
    "answer": answer,
    "goodput": goodput_table,
    "costs": cost_table,
    "outages": outage_table,
    "histories": history_table,
}


# ------------------------------------------------------------------ figures
def draw_goodput(folder: Path) -> Any:
    """Draw the goodput of a pipeline behind cable against the interval, for each state, with Young's and Daly's."""
    known = {each[3]: each[4] for each in all_costs(folder) if each[:3] == ("pipeline", CODEC, "cable")}
    looks = style.looks(known)
    figure, (panels,) = plots.panels(1, len(failures.MTBFS_S), (9.6, 3.4), sharey=True)
    for axes, (mtbf, mtbf_s) in zip(panels, failures.MTBFS_S.items(), strict=True):
        for state, costs in known.items():
            look = looks[state]
            most = failures.whole_steps(4 * failures.young_s(costs.checkpoint_s, mtbf_s), costs.step_s)
            steps = sorted({round(each) for each in np.geomspace(1, most, 60)})
            shares = [failures.goodput(costs, each, mtbf_s) for each in steps]
            every_s, name = [each * costs.step_s for each in steps], LABELS.get(state, state)
            axes.plot(every_s, shares, color=look.colour, ls=look.dash, label=name)
            for rule, marker in (("young", "o"), ("daly", "D")):
                every = failures.whole_steps(RULES[rule](costs.checkpoint_s, mtbf_s), costs.step_s)
                share = failures.goodput(costs, every, mtbf_s)
                face = look.colour if rule == "young" else style.PAPER
                axes.plot(every * costs.step_s, share, marker, color=look.colour, mfc=face, ms=5)
        axes.set(xscale="log", title=f"a failure every {mtbf}", xlabel="time between checkpoints in s")
    panels[0].set(ylabel="share of useful time", ylim=(0, 1.03))
    marks = [
        Line2D([], [], color=style.INK, marker="o", ls="none", ms=5, label="Young's interval"),
        Line2D([], [], color=style.INK, marker="D", ls="none", ms=5, mfc=style.PAPER, label="Daly's interval"),
    ]
    handles = [*panels[0].get_legend_handles_labels()[0], *marks]
    facts = next(each for each in state_gains(folder, "int8") if (each["link"], each["mtbf"]) == ("cable", "1 h"))
    finding = f"Computed: a failure per hour behind cable, int8 states give {facts['value']:.2f} times the useful time"
    plots.finish(figure, finding, legend=handles, columns=len(handles))
    return figure


def draw_outages(folder: Path) -> Any:
    """Draw the cost of each outage relative to its length, against its length."""
    rows = outages(folder)
    figure, ((axes,),) = plots.panels(1, 1, (7.2, 3.6))
    arms = rows.groupby(["job", "control"], sort=False)
    for ((job, control), part), colour, marker in zip(arms, (style.INK, *style.OTHERS), "osD^v", strict=False):
        label = {"data": "data parallel", "pipeline": "pipeline"}[job] + f", {control}"
        axes.plot(part.outage_s, part.times, marker, color=colour, ms=4.5, label=label)
    for times, words in ((1, "its length"), (2, "twice its length")):
        plots.level(axes, times, words, at=0.42)
    axes.set(xscale="log", xlabel="outage in s", ylabel="cost / length", ylim=(min(-0.1, rows.times.min() - 0.1), None))
    plots.ticks(axes.xaxis, [10, 20, 30, 60, 100])
    plain, least = (worst_outages(folder, "pipeline", control, codec="int8") for control in (PLAIN, TIMER))
    finding = f"With int8 an outage costs {plain['mean']:.2f} times its length" if plain else ""
    finding += f"; if TCP waits up to 5 s, {least['mean']:.2f}" if least else ""
    plots.finish(figure, finding, legend=axes, columns=3)
    return figure


FIGURES = {"goodput": draw_goodput, "outages": draw_outages}

if __name__ == "__main__":
    publishing.run(globals())
