"""Draw the figures of deco_varying and make its tables: `python experiments/deco_varying/figures.py`.

This reads timeline.csv, runs.csv, apart.csv and live.csv from the output folder, which the other programs write.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import pandas
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from testbed.metrics.statistics import of_differences
from testbed.metrics.verdicts import Judgement, judge
from testbed.report import claim_rows, experiments, style
from testbed.report.claim_rows import Facts
from testbed.report.claims import Claim, claims_table
from testbed.report.numbers import percent

HERE = Path(__file__).resolve().parent
DECO, KNOWS, ORACLE = "DeCo-SGD", "DeCo-SGD, told the link", "oracle"
CHOOSERS = (DECO, KNOWS, ORACLE)
COLOURS = {DECO: "#d55e00", KNOWS: "#e69f00", ORACLE: style.INK}
STATIC_COLOUR = "#0072b2"
NEAR, EXACT = 0.02, 0.001
"""How far a formula or the played timeline may be off, as a share; the same of what is the formula's case; the rank
correlation that is following."""
TURN = 0.25
"""How far from a whole number of delays a message's end may be."""
SETTLED = 30
"""The first message that is judged where windows must have opened."""

BySeed = Mapping[int, float]


class Results(NamedTuple):
    """What the programs measured."""

    timeline: dict[tuple[str, str], dict[int, Any]]
    """By network and arm, for each seed a row for each step; static pairs' is the same for all."""
    steps: dict[tuple[str, str], BySeed]
    """To the target, likewise; nothing where a seed does not get there."""
    rates: dict[tuple[str, str], float]
    """Learning rates."""
    apart: Any
    live: Any

    @property
    def networks(self) -> list[str]:
        return list(dict.fromkeys(network for network, _ in self.timeline))

    def arms(self, network: str) -> list[str]:
        """Return the arms that were trained to the target, those that choose first."""
        known = [arm for name, arm in self.timeline if name == network and self.steps[network, arm]]
        return [arm for arm in CHOOSERS if arm in known] + [arm for arm in known if arm not in CHOOSERS]

    def seconds(self, network: str, arm: str) -> BySeed:
        """Return each seed's seconds to the target."""
        found = {}
        for seed, steps in self.steps[network, arm].items():
            ends = np.concatenate([[0.0], self.timeline[network, arm][seed].end_s])
            found[seed] = float(np.interp(steps, range(len(ends)), ends))
        return found

    def best_static(self, network: str) -> str:
        """Return the static pair that is there first, in hindsight."""
        static = [arm for arm in self.arms(network) if arm not in CHOOSERS]
        return min(static, key=lambda arm: experiments.mean_of(self.seconds(network, arm)))


@functools.lru_cache(maxsize=2)
def results(folder: Path) -> Results:
    """Read the CSVs."""
    lines, runs, apart, live = (
        pandas.read_csv(folder / f"{name}.csv") for name in ("timeline", "runs", "apart", "live")
    )
    timeline: dict[tuple[str, str], dict[int, Any]] = {}
    steps: dict[tuple[str, str], BySeed] = {}
    rates: dict[tuple[str, str], float] = {}
    for (network, arm), lines_of in lines.groupby(["network", "arm"], sort=False):
        timeline[network, arm] = {
            int(seed): lines_of[lines_of.seed.isna() | (lines_of.seed == seed)] for seed in sorted(runs.seed.unique())
        }
        part = runs[(runs.arm == arm) & runs.chosen & (runs.network.isna() | (runs.network == network))]
        whole = len(part) and not part.steps.isna().any()
        steps[network, arm] = {int(row.seed): float(row.steps) for row in part.itertuples()} if whole else {}
        rates[network, arm] = float(part.learning_rate.iloc[0])
    # What a message finds: its connection's window when it is made.
    windows = apart.groupby(["network", "rate", "directions", "buffer"]).window_packets.shift(1)
    return Results(timeline, steps, rates, apart.assign(before_packets=windows), live)


def against(found: Results, network: str, ours: str, base: str, effect: float | None = None) -> Judgement:
    """Judge how many times as soon one arm gets to the target as another."""
    return judge("time_to_loss", found.seconds(network, ours), found.seconds(network, base), effect)


def following(found: Results, network: str, arm: str) -> BySeed:
    """Return the rank correlation of an arm's ratios with the link's rate, over steps of the same moments, where both
    move.
    """
    return {
        seed: float(spearmanr(part.ratio, part.rate_mbps).statistic)
        for seed, part in found.timeline[network, arm].items()
        if part.ratio.nunique() > 1 and part.rate_mbps.nunique() > 1
    }


# ------------------------------------------------------------------ tables
def arms_table(folder: Path) -> Any:
    """Return how each arm does over each link."""
    found, rows = results(folder), []
    for network in found.networks:
        for arm in [arm for name, arm in found.timeline if name == network]:
            parts, steps = list(found.timeline[network, arm].values()), found.steps[network, arm]
            part = pandas.concat(parts)
            mean_s = mean(each.end_s.iloc[-1] / len(each) for each in parts)
            row: dict[str, object] = {
                "link": network,
                "arm": arm,
                "ratios": _span(part.ratio, "{:.2g}"),
                "staleness": _span(part.staleness, "{:.0f}"),
                "mean step": f"{mean_s:.3f} s",
                "learning rate": f"{found.rates[network, arm]:g}",
                "steps to the target": experiments.mean_words(steps, "{:.0f}") if steps else "not all seeds",
                "seconds to it": experiments.mean_words(found.seconds(network, arm), "{:.0f}") if steps else "",
            }
            if steps and arm != DECO and found.steps[network, DECO]:
                judged = against(found, network, DECO, arm)
                row["DeCo-SGD is there"] = f"{judged.value:.2f} times as soon ({judged.interval_words})"
            rows.append(row)
    return pandas.DataFrame(rows).fillna("")


def apart_table(folder: Path) -> Any:
    """Return how long messages take by the pipe's formula and in the guest, by what is left of the link."""
    frame, rows = results(folder).apart, []
    for (network, rate, directions, buffer), part in frame.groupby(
        ["network", "rate", "directions", "buffer"], sort=False
    ):
        first, others = part.iloc[0], part.iloc[1:]
        rows.append(
            {
                "link": network,
                "rate": {"constant": "stays", "varying": "varies"}[rate],
                "messages": {"one": "one way", "both": "both ways"}[directions],
                "buffer": {"whole": "for whole messages", "own": "its own"}[buffer],
                "first message, later by": f"{1e3 * (first.played_s - first.formula_s):.0f} ms",
                "the others: formula": f"{1e3 * others.formula_s.mean():.0f} ms",
                "guest": f"{1e3 * others.played_s.mean():.0f} ms",
                "apart": _signed(others.played_s.sum() / others.formula_s.sum() - 1),
                "sent again": f"{others.resent_packets.max():.0f} packets",
            }
        )
    return pandas.DataFrame(rows)


class Beside(NamedTuple):
    """Live runs of a cell beside the draws of their timeline."""

    live_s: float
    """The end of the last step that is compared."""
    played_s: list[float]
    """In each draw."""
    steps: int
    alike: int
    """The first steps, of which every draw's end is the live one to EXACT."""
    runs: str
    sizes: float
    """Mean size of messages, played over live."""

    @property
    def apart(self) -> float:
        """How far the live end is from the nearest draw's, or from what lies between two, as a share."""
        nearest = min(max(self.live_s, min(self.played_s)), max(self.played_s))
        return nearest / self.live_s - 1


def beside(found: Results) -> dict[str, Beside]:
    """Return them by link."""
    made = {}
    for network, part in found.live.groupby("network", sort=False):
        draws = [rows for _, rows in part.groupby("draw")]
        off = [(rows.played_end_s / rows.live_end_s - 1).abs().to_numpy() > EXACT for rows in draws]
        late = np.flatnonzero(np.any(off, axis=0))
        live = draws[0]
        made[str(network)] = Beside(
            float(live.live_end_s.iloc[-1]),
            [float(rows.played_end_s.iloc[-1]) for rows in draws],
            len(live),
            int(late[0]) if len(late) else len(live),
            f"{live.runs.iloc[0]} live runs are {'the same to the nanosecond' if part.same.all() else 'not the same'}",
            float(part.played_bytes.mean() / live.live_bytes.mean()),
        )
    return made


def live_table(folder: Path) -> Any:
    """Return how far draws of the timeline are from live runs."""
    return pandas.DataFrame(
        {
            "link": network,
            "steps": each.steps,
            "live": f"{each.live_s:.2f} s",
            "draws of the timeline": f"{min(each.played_s):.2f} to {max(each.played_s):.2f} s",
            "mean": f"{mean(each.played_s):.2f} s ({_signed(mean(each.played_s) / each.live_s - 1)})",
            f"first steps that all are alike, to {percent(EXACT)}": each.alike,
            "bytes sent, played / live": f"{each.sizes:.2f}",
        }
        for network, each in beside(results(folder)).items()
    )


# ------------------------------------------------------------------ claims
def claims(folder: Path) -> list[Claim]:
    """Return what we asked of DeCo-SGD, and what became of it."""
    return claim_rows.claims(globals(), folder)


def ratio_follows(folder: Path, least: float) -> Iterator[Facts]:
    """Yield, for each link that varies, the rank correlation of DeCo-SGD's ratio with its rate."""
    found = results(folder)
    for network in found.networks:
        alone, told = (following(found, network, arm) for arm in (DECO, KNOWS))
        if not (alone and told):
            continue
        # As a difference of which less is better.
        judged = judge("loss", {seed: -value for seed, value in alone.items()}, dict.fromkeys(alone, 0.0), -least)
        low, high = judged.interval or (judged.value, judged.value)
        why = (
            f"over steps of the same moments; {experiments.mean_of(told):.2f} where it is told the link's rate when it "
            "chooses, since what it chooses holds three or more steps later"
        )
        yield {
            "judgement": judged,
            "bound": -least,
            "network": network,
            "correlation": -judged.value,
            "interval": f"{-high:.2f} to {-low:.2f}, 95 %, {judged.n} timelines",
            "shown": experiments.open_words(why, judged, seed_s(), unit=""),
        }


def sooner(folder: Path, ours: str, base: str = "") -> Iterator[Facts]:
    """Yield, for each link, how many times as soon one arm gets to the target as another, or the best static pair."""
    found = results(folder)
    for network in found.networks:
        other = base or found.best_static(network)
        if found.steps[network, ours] and found.steps[network, other]:
            judged = against(found, network, ours, other, 1.0)
            about = {"network": network, "other": other, "shown": _why(judged)}
            yield {"judgement": judged, **about}


def _settled(folder: Path, rate: str) -> Any:
    frame = results(folder).apart
    later = frame[frame.step >= min(SETTLED, frame.step.max() // 2)]
    return later[later.rate == rate]


def link_that_stays(folder: Path) -> Facts | None:
    """Return how far messages are from the pipe's formula where nothing large goes the other way."""
    plain = _settled(folder, "constant")
    plain = plain[plain.directions == "one"]
    if not len(plain):
        return None
    return {"value": float((plain.played_s / plain.formula_s - 1).abs().max()), "count": len(plain), "exact": EXACT}


def further_windows(folder: Path) -> Facts | None:
    """Return how many messages that cross others are later by a delay for each further window that they need."""
    frame = results(folder).apart
    turns = frame[(frame.rate == "constant") & (frame.directions == "both") & (frame.buffer == "whole")]
    turns = turns[turns.step > 0]
    if not len(turns):
        return None
    delays = (turns.played_s - turns.formula_s) / turns.delay_s
    most = np.ceil(turns.packets / turns.before_packets) - 1
    least = np.ceil(turns.packets / turns.window_packets) - 1
    inside = (delays >= least - TURN) & (delays <= most + TURN)
    return {"value": inside.mean(), "inside": inside.sum(), "count": len(turns), "turn": TURN}


def entry_rate(folder: Path) -> Facts | None:
    """Return how many messages that fit leave at the rate of the moment when they entered."""
    entering = _settled(folder, "varying")
    entering = entering[(entering.buffer == "whole") & (entering.before_packets >= entering.packets)]
    if not len(entering):
        return None
    off = (entering.played_s / entering.entry_s - 1).abs()
    integral = (entering.played_s / entering.formula_s - 1).abs()
    near = {"near": (off <= EXACT).sum(), "exact": EXACT, "integral": float(integral.mean())}
    return {"value": (off <= EXACT).mean(), "median": float(off.median()), "count": len(entering), **near}


def formula_off(folder: Path) -> Facts | None:
    """Return how far a pipe's formula is from all messages over the links themselves."""
    frame = results(folder).apart
    whole = frame[(frame.rate == "varying") & (frame.directions == "both") & (frame.buffer == "own")]
    if not len(whole):
        return None
    sums = whole.groupby("network", sort=False)[["played_s", "formula_s"]].sum()
    off = sums.played_s / sums.formula_s - 1
    each = "; ".join(f"{network}: {_signed(value)}" for network, value in off.items())
    return {"value": off.abs().max(), "near": NEAR, "each": each}


def live_beside(folder: Path) -> Iterator[Facts]:
    """Yield how near the timeline's draws are to live runs."""
    for network, each in beside(results(folder)).items():
        draws = f"{len(each.played_s)} draws {min(each.played_s):.1f} to {max(each.played_s):.1f} s"
        about = {"network": network, "draws": draws, "near": NEAR, "exact": EXACT}
        yield {"value": abs(each.apart), "apart": each.apart, **about, "live": each}


def seed_s() -> float:
    """Return how long one more seed of two arms takes."""
    return 2 * experiments.training_s(HERE, "runs.csv")


def _why(judged: Judgement) -> str:
    return experiments.open_words(
        "times to a loss of 2.5 nats, each arm at a learning rate of its own", judged, seed_s()
    )


# ------------------------------------------------------------------ the README
def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    return {
        "answer": experiments.prose(answer(folder)),
        "claims": claims_table(claims(folder)),
        "arms": experiments.markdown_of(arms_table(folder)),
        "apart": experiments.markdown_of(apart_table(folder)),
        "live": experiments.markdown_of(live_table(folder)),
    }


def answer(folder: Path) -> str:
    """Return the answer in a few sentences."""
    found, said = results(folder), []
    for network in found.networks:
        static = [arm for arm in found.arms(network) if arm not in CHOOSERS]
        if not found.steps[network, DECO] or not static:
            continue
        best = found.best_static(network)
        judged, oracle = (against(found, network, DECO, base) for base in (best, ORACLE))
        said.append(
            f"over {network} {judged.value:.2f} times ({judged.interval_words}) as soon as the best static pair, "
            f"{best.removeprefix('static ')}, and {oracle.value:.2f} times ({oracle.interval_words}) as soon as the "
            "oracle"
        )
    return f"DeCo-SGD reaches the loss {'; '.join(said)}."


def _span(values: Any, form: str) -> str:
    low, high = form.format(values.min()), form.format(values.max())
    return low if low == high else f"{low} to {high}"


def _signed(share: float) -> str:
    return percent(share, "{:+.1f}")


# ------------------------------------------------------------------ figures
def draw_choices(folder: Path) -> Figure:
    """Draw the link's rate, what DeCo-SGD takes it for, and the ratios that are chosen, over time, for one seed."""
    found = results(folder)
    figure = Figure(figsize=(9.2, 4.4), layout="constrained")
    grid = figure.subplots(2, len(found.networks), sharex="col", squeeze=False)
    for column, network in enumerate(found.networks):
        rate, ratio = grid[0][column], grid[1][column]
        part = found.timeline[network, DECO][0]
        rate.plot(part.end_s, part.rate_mbps, color=style.MUTED, lw=1.2, label="the link")
        known = part[part.known_mbps > 0]
        rate.plot(known.end_s, known.known_mbps, color=COLOURS[DECO], lw=1.2, label="what DeCo-SGD measured")
        rate.set(
            ylim=(0, None),
            title=f"{network}: rank correlation {experiments.mean_of(following(found, network, DECO)):.2f}",
        )
        for arm in CHOOSERS:
            each = found.timeline[network, arm][0]
            ratio.step(each.end_s, each.ratio, where="pre", color=COLOURS[arm], lw=1.2, label=arm)
        ratio.set(yscale="log", xlabel="seconds")
    grid[0][0].set_ylabel("Mbit/s")
    grid[1][0].set_ylabel("ratio")
    shown = [axes.get_legend_handles_labels() for axes in (grid[0][0], grid[1][0])]
    figure.legend(
        *([*first, *second] for first, second in zip(*shown, strict=True)), loc="outside upper center", ncols=5
    )
    return figure


def draw_time(folder: Path) -> Figure:
    """Draw the seconds to the target by arm, with intervals over seeds."""
    found = results(folder)
    figure = Figure(figsize=(9.2, 3.2), layout="constrained")
    row = figure.subplots(1, len(found.networks), squeeze=False)[0]
    for axes, network in zip(row, found.networks, strict=True):
        names = sorted(found.arms(network), key=lambda arm: -experiments.mean_of(found.seconds(network, arm)))
        for place, arm in enumerate(names):
            estimate = of_differences(list(found.seconds(network, arm).values()), "seed")
            colour = COLOURS.get(arm, STATIC_COLOUR)
            axes.plot(estimate.value, place, "o", color=colour)
            if estimate.interval is not None:
                axes.plot(estimate.interval, [place, place], color=colour)
        axes.set_yticks(range(len(names)), names)
        first = names[-1]
        axes.set(xlim=(0, None), xlabel="seconds to the target loss", title=f"{network}: {first} is first")
    return figure


if __name__ == "__main__":
    _, written = experiments.folders(HERE.name, "Figures, claims and the README's blocks.")
    experiments.draw_and_publish(HERE, written, {"choices": draw_choices, "time": draw_time}, blocks, claims)
