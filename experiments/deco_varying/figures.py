"""Draws the figures and generates the tables of deco_varying: `python experiments/deco_varying/figures.py`.

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
from testbed.report import experiments, plots, publishing, style
from testbed.report.claim_rows import Facts
from testbed.report.numbers import percent, span

HERE = Path(__file__).resolve().parent
TARGET = 2.5
"""Nats, as in train.py."""
DECO, KNOWS, ORACLE = "DeCo-SGD", "DeCo-SGD, told the link", "oracle"
CHOOSERS = (DECO, KNOWS, ORACLE)
COLOURS = {DECO: "#d55e00", KNOWS: "#cc79a7", ORACLE: style.INK}
ESTIMATE = "#009e73"
STATIC_COLOUR = "#0072b2"
NEAR, EXACT = 0.02, 0.001
"""Largest relative deviation of a formula or of the played timeline; the same in the formula's own case; the rank
correlation that counts as following."""
TURN = 0.25
"""Largest deviation of a message's end from a whole number of delays."""
SETTLED = 30
"""The first judged message, once windows have opened."""

BySeed = Mapping[int, float]


class Results(NamedTuple):
    """Measurements of the programs."""

    timeline: dict[tuple[str, str], dict[int, Any]]
    """By network and arm, a row per step for each seed; static pairs have the same rows for all seeds."""
    steps: dict[tuple[str, str], BySeed]
    """The same up to the target; empty if a seed does not reach it."""
    rates: dict[tuple[str, str], float]
    """Learning rates."""
    apart: Any
    live: Any

    @property
    def networks(self) -> list[str]:
        return list(dict.fromkeys(network for network, _ in self.timeline))

    def arms(self, network: str) -> list[str]:
        """Return the arms that were trained to the target, adaptive ones first."""
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
        """Return the static pair that reaches the target first, in hindsight."""
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
    # The state that a message encounters: its connection's window at creation.
    windows = apart.groupby(["network", "rate", "directions", "buffer"]).window_packets.shift(1)
    return Results(timeline, steps, rates, apart.assign(before_packets=windows), live)


def against(found: Results, network: str, ours: str, base: str, effect: float | None = None) -> Judgement:
    """Judge how many times as soon one arm reaches the target as another."""
    return judge("time_to_loss", found.seconds(network, ours), found.seconds(network, base), effect)


def following(found: Results, network: str, arm: str) -> BySeed:
    """Return the rank correlation of an arm's ratios with the link's rate, over steps at the same times, if both
    vary.
    """
    return {
        seed: float(spearmanr(part.ratio, part.rate_mbps).statistic)
        for seed, part in found.timeline[network, arm].items()
        if part.ratio.nunique() > 1 and part.rate_mbps.nunique() > 1
    }


# ------------------------------------------------------------------ tables
def arms_table(folder: Path) -> Any:
    """Return each arm's results over each link."""
    found, rows = results(folder), []
    for network in found.networks:
        for arm in [arm for name, arm in found.timeline if name == network]:
            parts, steps = list(found.timeline[network, arm].values()), found.steps[network, arm]
            part = pandas.concat(parts)
            mean_s = mean(each.end_s.iloc[-1] / len(each) for each in parts)
            row: dict[str, object] = {
                "link": network,
                "arm": arm,
                "ratios": span(part.ratio, "{:.2g}".format),
                "staleness": span(part.staleness, "{:.0f}".format),
                "mean step": f"{mean_s:.3f} s",
                "learning rate": f"{found.rates[network, arm]:g}",
                "steps to the target": experiments.mean_words(steps, "{:.0f}") if steps else "not all seeds",
                "seconds to it": experiments.mean_words(found.seconds(network, arm), "{:.0f}") if steps else "",
            }
            if steps and arm != DECO and found.steps[network, DECO]:
                judged = against(found, network, DECO, arm)
                row["DeCo-SGD reaches it"] = f"{judged.value:.2f} times as soon ({judged.interval_words})"
            rows.append(row)
    return pandas.DataFrame(rows).fillna("")


def apart_table(folder: Path) -> Any:
    """Return message times by the pipe formula and in the guest, by the remaining effects of the link."""
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
    """Live runs of a cell, compared with the draws of their timeline."""

    live_s: float
    """The end of the last compared step."""
    played_s: list[float]
    """In each draw."""
    steps: int
    alike: int
    """Number of first steps whose end in every draw equals the live one to EXACT."""
    runs: str
    sizes: float
    """Mean size of messages, played over live."""

    @property
    def apart(self) -> float:
        """Relative distance of the live end from the range of the draws."""
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
    """Return the deviation of the timeline's draws from live runs."""
    return pandas.DataFrame(
        {
            "link": network,
            "steps": each.steps,
            "live": f"{each.live_s:.2f} s",
            "draws of the timeline": f"{min(each.played_s):.2f} to {max(each.played_s):.2f} s",
            "mean": f"{mean(each.played_s):.2f} s ({_signed(mean(each.played_s) / each.live_s - 1)})",
            f"first steps that all agree, to {percent(EXACT)}": each.alike,
            "bytes sent, played / live": f"{each.sizes:.2f}",
        }
        for network, each in beside(results(folder)).items()
    )


# ------------------------------------------------------------------ claims
def ratio_follows(folder: Path, least: float) -> Iterator[Facts]:
    """Yield, for each link that varies, the rank correlation of DeCo-SGD's ratio with its rate."""
    found = results(folder)
    for network in found.networks:
        alone, told = (following(found, network, arm) for arm in (DECO, KNOWS))
        if not (alone and told):
            continue
        # As a difference, of which a smaller one is better.
        judged = judge("loss", {seed: -value for seed, value in alone.items()}, dict.fromkeys(alone, 0.0), -least)
        low, high = judged.interval or (judged.value, judged.value)
        why = (
            f"over steps at the same times; {experiments.mean_of(told):.2f} if it knows the link's rate when it "
            "chooses, because a choice takes effect three or more steps later"
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
    """Yield, for each link, how many times as soon one arm reaches the target as another, or the best static pair."""
    found = results(folder)
    for network in found.networks:
        other = base or found.best_static(network)
        if found.steps[network, ours] and found.steps[network, other]:
            judged = against(found, network, ours, other, 1.0)
            about = {"network": network, "other": other, "shown": _why(judged), "loss": TARGET}
            yield {"judgement": judged, **about}


def _settled(folder: Path, rate: str) -> Any:
    frame = results(folder).apart
    later = frame[frame.step >= min(SETTLED, frame.step.max() // 2)]
    return later[later.rate == rate]


def link_that_stays(folder: Path) -> Facts | None:
    """Return the deviation of messages from the pipe formula without large messages in the other direction."""
    plain = _settled(folder, "constant")
    plain = plain[plain.directions == "one"]
    if not len(plain):
        return None
    return {"value": float((plain.played_s / plain.formula_s - 1).abs().max()), "count": len(plain), "exact": EXACT}


def further_windows(folder: Path) -> Facts | None:
    """Return how many crossing messages are later by one delay for each further window that they need."""
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


def rate_of_now(folder: Path) -> Facts | None:
    """Return how many fitting messages take as long as the integral of the link's rate says."""
    entering = _settled(folder, "varying")
    entering = entering[(entering.buffer == "whole") & (entering.before_packets >= entering.packets)]
    if not len(entering):
        return None
    off = (entering.played_s / entering.formula_s - 1).abs()
    near = {"near": (off <= EXACT).sum(), "exact": EXACT, "mean": float(off.mean())}
    return {"value": (off <= EXACT).mean(), "median": float(off.median()), "count": len(entering), **near}


def formula_off(folder: Path) -> Facts | None:
    """Return the deviation of the pipe formula from all messages over the real links."""
    frame = results(folder).apart
    whole = frame[(frame.rate == "varying") & (frame.directions == "both") & (frame.buffer == "own")]
    if not len(whole):
        return None
    sums = whole.groupby("network", sort=False)[["played_s", "formula_s"]].sum()
    off = sums.played_s / sums.formula_s - 1
    each = "; ".join(f"{network}: {_signed(value)}" for network, value in off.items())
    return {"value": off.abs().max(), "near": NEAR, "each": each}


def live_beside(folder: Path) -> Iterator[Facts]:
    """Yield the distance of the timeline's draws from live runs."""
    for network, each in beside(results(folder)).items():
        draws = f"{len(each.played_s)} draws {min(each.played_s):.1f} to {max(each.played_s):.1f} s"
        about = {"network": network, "draws": draws, "near": NEAR, "exact": EXACT}
        yield {"value": abs(each.apart), "apart": each.apart, **about, "live": each}


def seed_s() -> float:
    """Return the time of one more seed of two arms."""
    return 2 * experiments.training_s(HERE, "runs.csv")


def _why(judged: Judgement) -> str:
    return experiments.open_words("times to a loss of 2.5 nats, each arm at its own learning rate", judged, seed_s())


# ------------------------------------------------------------------ the README
def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    return {
        "answer": experiments.prose(answer(folder)),
        "arms": arms_table(folder),
        "apart": apart_table(folder),
        "live": live_table(folder),
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


def _signed(share: float) -> str:
    return percent(share, "{:+.1f}")


# ------------------------------------------------------------------ figures
def draw_choices(folder: Path) -> Figure:
    """Draw the link's rate, DeCo-SGD's estimate of it, and the chosen ratios, over time, for one seed."""
    found = results(folder)
    figure, grid = plots.panels(2, len(found.networks), (9.2, 4.4), sharex="col")
    for column, network in enumerate(found.networks):
        rate, ratio = grid[0][column], grid[1][column]
        part = found.timeline[network, DECO][0]
        rate.plot(part.end_s, part.rate_mbps, color=style.MUTED, lw=1.2, label="the link")
        known = part[part.known_mbps > 0]
        rate.plot(known.end_s, known.known_mbps, color=ESTIMATE, lw=1.2, label="measured by DeCo-SGD")
        rate.set(ylim=(0, None), title=network)
        for arm in CHOOSERS:
            each = found.timeline[network, arm][0]
            ratio.step(each.end_s, each.ratio, where="pre", color=COLOURS[arm], lw=1.2, label=arm)
        ratio.set(yscale="log", xlabel="seconds")
    grid[0][0].set_ylabel("Mbit/s")
    grid[1][0].set_ylabel("ratio")
    both = {network: following(found, network, DECO) for network in found.networks}
    alike = [
        f"{experiments.mean_words(known, '{:.2f}') if known else 'none, one ratio,'} over {network}"
        for network, known in both.items()
    ]
    title = f"Rank correlation of DeCo-SGD's ratio with the link's rate:\n{', '.join(alike)}"
    plots.finish(figure, title, grid[:, 0], "lower center", columns=5)
    return figure


def draw_time(folder: Path) -> Figure:
    """Draw the seconds to the target by arm, with intervals over seeds."""
    found = results(folder)
    figure, (row,) = plots.panels(1, len(found.networks), (9.2, 3.2))
    for axes, network in zip(row, found.networks, strict=True):
        names = sorted(found.arms(network), key=lambda arm: -experiments.mean_of(found.seconds(network, arm)))
        for place, arm in enumerate(names):
            estimate = of_differences(list(found.seconds(network, arm).values()), "seed")
            plots.estimates(axes, [(place, estimate)], COLOURS.get(arm, STATIC_COLOUR), across=True, width=1.7)
        axes.set_yticks(range(len(names)), names)
        axes.set(xlim=(0, None), xlabel="seconds to the target loss", title=f"{network}: {names[-1]} is first")
    return figure


FIGURES = {"choices": draw_choices, "time": draw_time}

if __name__ == "__main__":
    publishing.run(globals())
