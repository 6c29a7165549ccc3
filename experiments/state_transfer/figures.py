"""Draw the figure of state_transfer and make its tables: `python experiments/state_transfer/figures.py`.

This reads quality.csv, losses.csv, kinds.csv, recovery.csv and transfers.csv from the output folder, which quality.py
and play.py write, and published.csv.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
import state
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiments, style
from testbed.report.claims import EXACT, Claim, Verdict, claims_table
from testbed.report.numbers import markdown_table

HERE = Path(__file__).resolve().parent
COMMAND = f"python -m testbed reproduce {HERE.name}"
HARMLESS = 0.01
"""Nats that a restored state may be worse by, to count as unharmed."""
NAMES = {
    "gpt2-mini-trained": "GPT-2 mini, trained",
    "gpt2-mini-later": f"GPT-2 mini, {state.LATER} steps later",
    "gpt2-nano": "GPT-2 nano, random",
}
BOUNDARIES = {"gpt2-mini-trained": "GPT-2 mini", "smollm2-135m": "SmolLM2-135M", "gpt2-nano": "GPT-2 nano, random"}
"""Models whose activations were coded."""
SLOW, FAST = 20, 80
WHOLE = ("gpt2-mini-trained", "gpt2-nano")


class Family(NamedTuple):
    """Codecs that differ in their width."""

    codecs: tuple[str, ...]
    colour: str
    marker: str


def families() -> dict[str, Family]:
    """Return what is drawn as lines."""
    chains = [state.chain(width) for width in state.WIDTHS]
    steps = [state.one_step(width) for width in state.WIDTHS]
    return {
        "ranges + zstd": Family(tuple(each[1] for each in chains), "#d55e00", "D"),
        "MesonGS: Haar + ranges + zstd": Family(tuple(each[2] for each in chains), "#0072b2", "o"),
        "one step + Huffman": Family(tuple(each[0] for each in steps), "#009e73", "s"),
        "Haar + one step + Huffman": Family(tuple(each[1] for each in steps), "#cc79a7", "^"),
        "change, ranges + zstd": Family(
            tuple(f"delta(zstd({state.RANGES.format(width)}, 3), fp32)" for width in state.WIDTHS), "#d55e00", "D"
        ),
        "change, one step + Huffman": Family(
            tuple(f"delta({state.one_step(width)[0]}, fp32)" for width in state.WIDTHS[1:]), "#009e73", "s"
        ),
        "change, top-k": Family(tuple(f"delta(topk({share}, tensor), fp32)" for share in (0.1, 0.01)), "#7b4fa3", "v"),
    }


class Measured(NamedTuple):
    """All tables."""

    quality: Any
    losses: Any
    transfers: Any

    @property
    def states(self) -> list[str]:
        """Return the states that were measured."""
        return [name for name in NAMES if name in set(self.quality.state)]

    def codecs(self, name: str) -> list[str]:
        """Return a state's codecs, in order."""
        return [codec for codec in state.STATES[name].arms if codec in set(self.quality.codec[self._of(name)])]

    def _of(self, name: str) -> Any:
        return self.quality.state == name

    def row(self, name: str, codec: str) -> Any:
        """Return a row of quality.csv."""
        return self.quality[self._of(name) & (self.quality.codec == codec)].iloc[0]

    def ratio(self, name: str, codec: str) -> float:
        """Return how many times shorter it is than as stored."""
        stored = self.row(name, "fp32").payload_bytes
        return float(stored / self.row(name, codec).payload_bytes)

    def harm(self, name: str, codec: str, bound: float = HARMLESS) -> Judgement:
        """Judge that the restored state is worse by at most a bound, over held-out sequences."""
        ours, base = (self._losses(name, each) for each in (codec, "fp32"))
        return judge("loss", ours, base, bound)

    def _losses(self, name: str, codec: str) -> Mapping[int, float]:
        rows = self.losses[(self.losses.state == name) & (self.losses.codec == codec)]
        return dict(zip(rows.sequence, rows.loss, strict=True))

    def transfer(self, name: str, codec: str, mbps: int) -> Any:
        """Return a row of transfers.csv; None where it was not played."""
        rows = self.transfers
        rows = rows[(rows.state == name) & (rows.codec == codec) & (rows.mbps == mbps)]
        return None if rows.empty else rows.iloc[0]

    def seconds(self, name: str, codec: str, mbps: int) -> float:
        """Return how long a transfer took; NaN where it was not played."""
        row = self.transfer(name, codec, mbps)
        return float("nan") if row is None else float(row.seconds)


def measured(folder: Path) -> Measured:
    """Read the tables."""
    return Measured(*(pandas.read_csv(folder / f"{name}.csv") for name in ("quality", "losses", "transfers")))


def interval(found: Judgement) -> str:
    """Return a judgement's interval, whose observations are sequences."""
    if found.interval is None:
        return "one sequence"
    return f"{found.interval.low:+.4f} to {found.interval.high:+.4f}, 95 %, {found.n} sequences"


# ------------------------------------------------------------------ tables
def transfers_table(all_: Measured) -> str:
    """Return every state and codec."""
    rows = []
    for name in all_.states:
        for codec in all_.codecs(name):
            row, harm = all_.row(name, codec), all_.harm(name, codec)
            slow = all_.transfer(name, codec, SLOW)
            low, high = harm.interval if harm.interval is not None else (np.nan, np.nan)
            rows.append(
                [
                    NAMES[name], f"`{codec}`", f"{8 * row.payload_bytes / row['values']:.2f}",
                    f"{all_.ratio(name, codec):.2f}",
                    f"{row.error:.5f}",
                    *(f"{all_.seconds(name, codec, mbps):.2f}" for mbps in (SLOW, FAST)),
                    "" if slow is None else f"{slow.encode_s:.2f}", "" if slow is None else f"{slow.decode_s:.2f}",
                    f"{harm.value:+.4f}", f"{low:+.4f} to {high:+.4f}",
                ]
            )  # fmt: skip
    headings = [
        "state", "codec", "bits per value", "times shorter", "error", f"s at {SLOW} Mbit/s", f"s at {FAST} Mbit/s",
        "encode s", "decode s", "loss", "95 %",
    ]  # fmt: skip
    return markdown_table(headings, rows, right=headings[2:])


def entropy_table(all_: Measured) -> str:
    """Return what entropy coders make of the codes, beside the entropy."""
    rows = []
    for name in WHOLE:
        for width in state.WIDTHS:
            codes, packed, _ = state.chain(width)
            one, _ = state.one_step(width)
            if name not in all_.states or not {codes, packed} <= set(all_.codecs(name)):
                continue
            values = all_.row(name, codes)["values"]
            bits = [8 * all_.row(name, codec).payload_bytes / values for codec in (codes, packed)]
            ideal = 8 * all_.row(name, codes).order0_bytes / values
            errors = [f"{all_.row(name, codes).error:.4f}", "", ""]
            if one in all_.codecs(name):
                single = all_.row(name, one)
                errors[1:] = [f"{8 * single.payload_bytes / values:.2f}", f"{single.error:.4f}"]
            rows.append([NAMES[name], width, *(f"{number:.2f}" for number in (*bits, ideal)), *errors])
    headings = ["state", "codes", "packed", "zstd", "entropy, order 0", "error", "one step + Huffman", "its error"]
    return markdown_table(headings, rows, right=headings[2:])


def kinds_table(folder: Path) -> str:
    """Return what the transform does to each kind of tensor."""
    tensors = pandas.read_csv(folder / "kinds.csv")
    rows = [
        [NAMES[name], kind, f"{values:,}", f"{plain:.2f}", f"{haar:.2f}", f"{error:.4f}", f"{haar_error:.4f}"]
        for name, kind, values, plain, error, haar, haar_error in tensors.itertuples(index=False)
    ]
    headings = ["state", "tensors", "values", "bits", "bits with Haar", "error", "error with Haar"]
    return markdown_table(headings, rows, right=headings[2:])


def at_boundaries(folder: Path, model: str, direction: str, codec: str) -> Any:
    """Return the rows of codecs.csv of one codec, by boundary."""
    codecs = pandas.read_csv(folder / "codecs.csv")
    same = (codecs.model == model) & (codecs.direction == direction) & (codecs.codec == codec)
    return codecs[same].sort_values("boundary")


def activations_table(folder: Path) -> str:
    """Return bits and errors at the boundaries of the models whose activations were coded."""
    codecs = pandas.read_csv(folder / "codecs.csv")
    rows = []
    for (model, direction, codec), part in codecs.groupby(["model", "direction", "codec"], sort=False):
        of = {"forward": "activations", "backward": "gradients"}[direction]
        numbers = (f"{part.bits.mean():.2f}", f"{part.error.mean():.4f}", f"{part.token_error.mean():.4f}")
        rows.append([BOUNDARIES[model], of, f"`{codec}`", *numbers])
    headings = ["model", "of", "codec", "bits per value", "error", "median token's"]
    return markdown_table(headings, sorted(rows, key=lambda row: row[:2]), right=headings[3:])


def recovery(folder: Path, codec: str, bound: float = HARMLESS) -> Judgement | None:
    """Judge that training on from what arrived is at most a bound worse than from what was sent, over seeds."""
    if not (folder / "recovery.csv").is_file():
        return None
    rows = pandas.read_csv(folder / "recovery.csv")
    rows = rows[rows.step == rows.step.max()]
    ours, base = (
        dict(zip(part.seed, part.loss, strict=True)) for part in (rows[rows.codec == codec], rows[rows.codec == "fp32"])
    )
    return judge("loss", ours, base, bound) if ours and base else None


def recovery_table(folder: Path, all_: Measured) -> str:
    """Return the loss of a coarse state as it arrives, and after some steps of training on."""
    name, rows = WHOLE[0], []
    for width in state.WIDTHS:
        codec = state.chain(width)[1]
        found = recovery(folder, codec)
        if found is not None and found.interval is not None:
            harm = all_.harm(name, codec)
            rows.append([f"`{codec}`", f"{harm.value:+.4f}", f"{found.value:+.4f}", interval_of_seeds(found)])
    headings = ["codec", "loss on arrival", "after the steps", "95 %"]
    return markdown_table(headings, rows, right=headings[1:])


def interval_of_seeds(found: Judgement) -> str:
    """Return the interval over seeds."""
    return "one seed" if found.interval is None else f"{found.interval.low:+.4f} to {found.interval.high:+.4f}"


# ------------------------------------------------------------------ claims
def claims(folder: Path) -> list[Claim]:
    """Return what is claimed of such transfers, and what became of it."""
    all_ = measured(folder)
    published = pandas.read_csv(HERE / "published.csv").set_index("name")
    rows: list[Claim] = []

    def add(claim: str, ours: str, interval: str, verdict: Verdict, why: str, paper: str = "") -> None:
        source = published.loc[paper].source if paper else "ours"
        number = str(published.loc[paper].published) if paper else ""
        rows.append(
            Claim(
                claim=claim, source=source, published=number, ours=ours, interval=interval, verdict=verdict, why=why,
                command=COMMAND,
            )
        )  # fmt: skip

    for name in (each for each in WHOLE if each in all_.states):
        of = f"({NAMES[name]})"
        chain = state.chain("int8")[-1]
        unharmed = [
            codec for codec in all_.codecs(name) if "haar(int" in codec and all_.harm(name, codec).verdict == "holds"
        ]
        if unharmed:
            best = max(unharmed, key=lambda codec: all_.ratio(name, codec))
            add(
                f"transform, ranges and an entropy coder make a state 21.8 to 28.3 times shorter {of}",
                f"{all_.ratio(name, best):.2f} times shorter than fp32", EXACT, "not comparable",
                f"with at most {HARMLESS:g} nats lost, through {best}; theirs are 3D Gaussians, of which some are left "
                "out and most values are indices of a codebook",
                "ratio",
            )  # fmt: skip
        found = all_.harm(name, chain)
        add(
            f"through the chain at 8 bits a state loses at most {HARMLESS:g} nats {of}",
            f"{found.value:+.4f} nats", interval(found), found.verdict or "not resolved",
            f"{all_.ratio(name, chain):.2f} times shorter than fp32",
            "quality",
        )  # fmt: skip
        longer = [
            all_.row(name, with_).payload_bytes / all_.row(name, without).payload_bytes - 1
            for _, without, with_ in map(state.chain, state.WIDTHS)
            if {without, with_} <= set(all_.codecs(name))
        ]
        add(
            f"the transform makes a state's codes shorter {of}",
            f"{100 * float(np.mean(longer)):+.1f} % bytes", f"{100 * min(longer):+.1f} to {100 * max(longer):+.1f} % "
            f"over {len(longer)} widths", _all(np.array(longer) < 0),
            f"{_some(_all(np.array(longer) < 0), 'width')}neighbouring rows of a weight are not alike, and each run "
            "has a range of its own, which uses all codes",
        )  # fmt: skip
        saved = [
            1 - all_.row(name, packed_).payload_bytes / all_.row(name, codes).payload_bytes
            for codes, packed_, _ in map(state.chain, state.WIDTHS)
            if {codes, packed_} <= set(all_.codecs(name))
        ]
        add(
            f"an entropy coder makes codes with a range for each run 10 % shorter {of}",
            f"{100 * float(np.mean(saved)):.1f} % shorter",
            f"{100 * min(saved):.1f} to {100 * max(saved):.1f} % over {len(saved)} widths",
            _all(np.array(saved) >= 0.1),
            f"{_some(_all(np.array(saved) >= 0.1), 'width')}ranges make values of all sizes look alike: few codes are "
            "rarer than others",
        )  # fmt: skip
        if (gain := at_equal_error(all_, name)) is not None:
            add(
                f"at the error of 4-bit ranges, one step and Huffman codes take fewer bytes than ranges and zstd {of}",
                f"{100 * gain:+.1f} % bytes", EXACT, "holds" if gain < 0 else "fails",
                "bytes between the steps that were measured, in the logarithm of the error",
            )  # fmt: skip
    for mbps in (SLOW, FAST):
        if (fitted := line(all_, mbps)) is not None:
            begin, slope, off = fitted
            add(
                f"at {mbps} Mbit/s a transfer of 1 MB or more takes a constant and its bytes over the rate, within 2 %",
                f"{1000 * begin:.0f} ms and {slope:.3f} times bytes over rate; at most {100 * off:.1f} % from the line",
                EXACT, "holds" if abs(slope - 1) <= 0.02 and off <= 0.02 else "fails",
                "headers counted; the constant is TCP's slow start, within which shorter ones end",
            )  # fmt: skip
    for model in [
        name for name in BOUNDARIES if not at_boundaries(folder, name, "forward", state.chain("int4")[1]).empty
    ]:
        _, plain, transformed = (at_boundaries(folder, model, "forward", codec) for codec in state.chain("int4"))
        less = 1 - transformed.error.to_numpy() / plain.error.to_numpy()
        more = transformed.bits.mean() / plain.bits.mean() - 1
        add(
            f"the transform lowers the error of 4-bit codes of activations by a tenth ({BOUNDARIES[model]})",
            f"{100 * less.mean():.0f} % less error", f"{100 * less.min():.0f} to {100 * less.max():.0f} % over "
            f"{len(less)} boundaries", _all(less >= 0.1),
            f"{_some(_all(less >= 0.1), 'boundary')}for {100 * more:+.1f} % bits; a channel's mean over the tokens "
            "goes apart",
        )  # fmt: skip
    for width in state.WIDTHS[2:]:
        if (found_ := recovery(folder, state.chain(width)[1])) is not None:
            add(
                f"after 10 steps of training on, a state that was sent with {width} is within {HARMLESS:g} nats of one "
                "that was sent whole",
                f"{found_.value:+.4f} nats", experiments.interval_words(found_), found_.verdict or "not resolved",
                experiments.shown_words(found_, 4.65, experiments.takes_s(HERE, "quality.py", found_.n)),
            )  # fmt: skip
    return rows


def line(all_: Measured, mbps: int) -> tuple[float, float, float] | None:
    """Return the constant (s) and the slope of seconds over the ideal of the links as formulas, by least squares, and
    how far the worst transfer is from that line, as a share; None where there are too few.
    """
    rows = all_.transfers[(all_.transfers.mbps == mbps) & (all_.transfers.payload_bytes >= 1_000_000)]
    if len(rows) < 5:
        return None
    slope, begin = np.polyfit(rows.ideal_s, rows.seconds, 1, w=1 / rows.seconds)
    return float(begin), float(slope), float(np.abs((begin + slope * rows.ideal_s) / rows.seconds - 1).max())


def _all(there: Any) -> Verdict:
    return "holds" if bool(np.all(there)) else "fails" if not bool(np.any(there)) else "not resolved"


def _some(verdict: Verdict, of: str) -> str:
    """Say of what is not resolved that it is so of some and not of others."""
    return f"it goes by the {of}, so {experiments.NO_SEEDS}; " if verdict == "not resolved" else ""


def at_equal_error(all_: Measured, name: str) -> float | None:
    """Return how many more bytes one step takes than ranges at 4 bits, at that error; None where it lies outside."""
    if state.chain("int4")[1] not in all_.codecs(name):
        return None
    target = all_.row(name, state.chain("int4")[1])
    known = sorted(
        (float(all_.row(name, one).error), float(all_.row(name, one).payload_bytes))
        for one in (state.one_step(width)[0] for width in state.WIDTHS)
        if one in all_.codecs(name)
    )
    errors, sizes = zip(*known, strict=True)
    if not errors[0] <= target.error <= errors[-1]:
        return None
    return float(np.interp(np.log(target.error), np.log(errors), sizes) / target.payload_bytes - 1)


# ------------------------------------------------------------------ words
def answer(folder: Path) -> str:
    """Return the answer in three lines; the tables have every number."""
    all_, parts = measured(folder), []
    for name in (each for each in WHOLE if each in all_.states):
        free = [codec for codec in all_.codecs(name) if all_.harm(name, codec).verdict == "holds"]
        best = max(free, key=lambda codec: all_.ratio(name, codec))
        _, plain, chain = state.chain("int8")
        fp32, whole, short, least = (
            f"{all_.seconds(name, codec, SLOW):.1f} s" for codec in ("fp32", chain, plain, best)
        )
        parts.append(
            f"{NAMES[name]} takes {fp32} as fp32 at {SLOW} Mbit/s, {whole} through MesonGS's chain at 8 bits, {short} "
            f"without its transform, and {least} as `{best}`, the shortest that loses at most {HARMLESS:g} nats."
        )
    return " ".join(["**Answer.**", *parts]) if parts else "No trained state was measured: this is the short form."


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    all_ = measured(folder)
    return {
        "answer": experiments.prose(answer(folder)),
        "claims": claims_table(claims(folder)),
        "transfers": transfers_table(all_),
        "entropy": entropy_table(all_),
        "kinds": kinds_table(folder),
        "activations": activations_table(folder),
        "recovery": recovery_table(folder, all_),
    }


# ------------------------------------------------------------------ figure
def _points(all_: Measured, name: str, family: Family) -> Iterator[tuple[float, float]]:
    for codec in family.codecs:
        if codec in all_.codecs(name):
            yield all_.seconds(name, codec, SLOW), all_.harm(name, codec).value


def _panel(axes: Axes, all_: Measured, name: str) -> None:
    for label, family in families().items():
        if points := list(_points(all_, name, family)):
            axes.plot(*zip(*points, strict=True), color=family.colour, marker=family.marker, label=label)
    for codec in ("fp32", "zstd(fp32, 3)", "bf16"):
        if codec in all_.codecs(name):
            at = all_.seconds(name, codec, SLOW), all_.harm(name, codec).value
            axes.plot(*at, color=style.INK, marker="x", ls="none")
            word = codec.replace(", 3", "")
            axes.annotate(word, at, xytext=(0, 5), textcoords="offset points", ha="right", size=8)
    axes.axhline(HARMLESS, color=style.MUTED, lw=1)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.set_title(NAMES[name])
    axes.set_xlabel(f"transfer over {SLOW} Mbit/s, s")


def draw(all_: Measured) -> Figure:
    """Draw what is lost against how long the transfer takes, a panel for each state."""
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    row = figure.subplots(1, len(all_.states), squeeze=False, sharey=True)[0]
    for axes, name in zip(row, all_.states, strict=True):
        _panel(axes, all_, name)
    row[0].set_ylabel("held-out loss above the sender's, nats")
    handles = {label: handle for axes in row for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=4)
    style.state(figure, "A transform buys nothing on weights; one step and an entropy coder send them soonest")
    return figure


def main() -> int:
    """Draw the figure, write claims.csv and fill the README where it lies in the output folder."""
    _, output = experiments.folders(HERE.name, "Draw the figure of state_transfer and make its tables.")
    experiments.draw_and_publish(HERE, output, {"transfers": lambda folder: draw(measured(folder))}, blocks, claims)
    return 0


if __name__ == "__main__":
    sys.exit(main())
