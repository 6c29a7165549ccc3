"""Draws the figure and generates the tables of state_transfer: `python experiments/state_transfer/figures.py`.

This reads quality.csv, losses.csv, kinds.csv, recovery.csv and transfers.csv from the output folder, which quality.py
and play.py write.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
import state
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiments, floors, plots, publishing, style
from testbed.report.canvas import note
from testbed.report.claim_rows import Facts
from testbed.report.numbers import markdown_table

HERE = Path(__file__).resolve().parent
HARMLESS = 0.01
"""Largest loss in nats of a restored state that counts as unharmed."""
NAMES = {
    "gpt2-mini-trained": "GPT-2 mini, trained",
    "gpt2-mini-later": f"GPT-2 mini, {state.LATER} steps later",
    "gpt2-nano": "GPT-2 nano, random",
}
BOUNDARIES = {"gpt2-mini-trained": "GPT-2 mini", "smollm2-135m": "SmolLM2-135M", "gpt2-nano": "GPT-2 nano, random"}
"""Models whose activations were coded."""
SLOW, FAST = 20, 80
SENDER = 4.65
"""Held-out loss of the trained state, in nats."""
WHOLE = ("gpt2-mini-trained", "gpt2-nano")


class Family(NamedTuple):
    """Codecs that differ in their width."""

    codecs: tuple[str, ...]
    colour: str
    marker: str


def families() -> dict[str, Family]:
    """Return the families, which are drawn as lines."""
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
        """Return the measured states."""
        return [name for name in NAMES if name in set(self.quality.state)]

    def codecs(self, name: str) -> list[str]:
        """Return a state's codecs, in order."""
        return [codec for codec in state.STATES[name].arms if codec in set(self.quality.codec[self._of(name)])]

    @property
    def whole(self) -> list[str]:
        """Return the measured whole states."""
        return [name for name in WHOLE if name in self.states]

    def unharmed(self, name: str, bound: float = HARMLESS) -> list[str]:
        """Return the codecs that cost a state at most `bound` nats."""
        return [codec for codec in self.codecs(name) if self.harm(name, codec, bound).verdict == "holds"]

    def _of(self, name: str) -> Any:
        return self.quality.state == name

    def row(self, name: str, codec: str) -> Any:
        """Return a row of quality.csv."""
        return self.quality[self._of(name) & (self.quality.codec == codec)].iloc[0]

    def ratio(self, name: str, codec: str) -> float:
        """Return by what factor it is shorter than the stored state."""
        stored = self.row(name, "fp32").payload_bytes
        return float(stored / self.row(name, codec).payload_bytes)

    def harm(self, name: str, codec: str, bound: float = HARMLESS) -> Judgement:
        """Judge whether the restored state is worse by at most `bound`, over held-out sequences."""
        rows = self.losses.rename(columns={"sequence": "seed"})
        ours, base = (experiments.by_seed(rows, "loss", state=name, codec=each) for each in (codec, "fp32"))
        return judge("loss", ours, base, bound)

    def transfer(self, name: str, codec: str, mbps: int) -> Any:
        """Return a row of transfers.csv; None if it was not played."""
        rows = experiments.matching(self.transfers, {"state": name, "codec": codec, "mbps": mbps})
        return None if rows.empty else rows.iloc[0]

    def seconds(self, name: str, codec: str, mbps: int) -> float:
        """Return the time of a transfer; NaN if it was not played."""
        row = self.transfer(name, codec, mbps)
        return float("nan") if row is None else float(row.seconds)


def measured(folder: Path) -> Measured:
    """Read the tables."""
    return Measured(*(pandas.read_csv(folder / f"{name}.csv") for name in ("quality", "losses", "transfers")))


# ------------------------------------------------------------------ tables
def transfers_table(folder: Path) -> str:
    """Return every state and codec."""
    all_, rows = measured(folder), []
    for name in all_.states:
        for codec in all_.codecs(name):
            row, harm = all_.row(name, codec), all_.harm(name, codec)
            slow = all_.transfer(name, codec, SLOW)
            rows.append(
                [
                    NAMES[name], f"`{codec}`", f"{8 * row.payload_bytes / row['values']:.2f}",
                    f"{all_.ratio(name, codec):.2f}",
                    f"{row.error:.5f}",
                    *(f"{all_.seconds(name, codec, mbps):.2f}" for mbps in (SLOW, FAST)),
                    "" if slow is None else f"{slow.encode_s:.2f}", "" if slow is None else f"{slow.decode_s:.2f}",
                    f"{harm.value:+.4f}", harm.interval_words,
                ]
            )  # fmt: skip
    headings = [
        "state", "codec", "bits per value", "times shorter", "error", f"s at {SLOW} Mbit/s", f"s at {FAST} Mbit/s",
        "encode s", "decode s", "loss", "95 %",
    ]  # fmt: skip
    return markdown_table(headings, rows, right=headings[2:])


def entropy_table(folder: Path) -> str:
    """Return the sizes of entropy-coded codes, next to the entropy."""
    all_, rows = measured(folder), []
    for name in all_.whole:
        for width in state.WIDTHS:
            codes, packed, _ = state.chain(width)
            one, _ = state.one_step(width)
            if not {codes, packed} <= set(all_.codecs(name)):
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
    """Return the transform's effect on each kind of tensor."""
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
    return experiments.matching(codecs, {"model": model, "direction": direction, "codec": codec}).sort_values(
        "boundary"
    )


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
    """Judge whether training on from the received state is at most `bound` worse than from the sent one, over seeds."""
    if not (folder / "recovery.csv").is_file():
        return None
    rows = pandas.read_csv(folder / "recovery.csv")
    ours, base = (experiments.by_seed(rows, "loss", step=rows.step.max(), codec=each) for each in (codec, "fp32"))
    return judge("loss", ours, base, bound) if ours and base else None


def recovery_table(folder: Path) -> str:
    """Return the loss of a coarse state on arrival, and after some further training steps."""
    all_, name, rows = measured(folder), WHOLE[0], []
    for width in state.WIDTHS:
        codec = state.chain(width)[1]
        found = recovery(folder, codec)
        if found is not None and found.interval is not None:
            harm = all_.harm(name, codec)
            rows.append([f"`{codec}`", f"{harm.value:+.4f}", f"{found.value:+.4f}", found.interval_words])
    headings = ["codec", "loss on arrival", "after the steps", "95 %"]
    return markdown_table(headings, rows, right=headings[1:])


# ------------------------------------------------------------------ claims
def shortest(folder: Path, transform: str, harmless: float) -> Iterator[Facts]:
    """Yield, for each whole state, the shortest codec with a given part that costs at most `harmless` nats."""
    all_ = measured(folder)
    for name in all_.whole:
        free = [codec for codec in all_.unharmed(name, harmless) if transform in codec]
        if free:
            best = max(free, key=lambda codec: all_.ratio(name, codec))
            yield {"state": NAMES[name], "value": all_.ratio(name, best), "codec": best}


def harmed(folder: Path, width: str, harmless: float) -> Iterator[Facts]:
    """Yield the chain's cost for each whole state."""
    all_, chain = measured(folder), state.chain(width)[-1]
    for name in all_.whole:
        found = all_.harm(name, chain, harmless)
        yield {"state": NAMES[name], "judgement": found, "ratio": all_.ratio(name, chain)}


def longer(folder: Path, link: int, bound: float) -> Iterator[Facts]:
    """Yield by how many percent a link of the chain lengthens each whole state, compared with the previous one, over
    the widths.
    """
    all_ = measured(folder)
    for name in all_.whole:
        pairs = [state.chain(width)[link - 1 : link + 1] for width in state.WIDTHS]
        there = [pair for pair in pairs if {*pair} <= set(all_.codecs(name))]
        sizes = np.array([[all_.row(name, codec).payload_bytes for codec in pair] for pair in there])
        facts = _spread(100 * (sizes[:, 1] / sizes[:, 0] - 1), bound, "width")
        less = {"shorter": -facts["value"], "least": -facts["high"], "most": -facts["low"]}
        yield {"state": NAMES[name], **facts, **less}


def _spread(values: Any, bound: float, of: str) -> Facts:
    """Return the mean, minimum and maximum of values, and whether they lie on both sides of the bound."""
    low, high = values.min(), values.max()
    some = f"it depends on the {of}, so {experiments.NO_SEEDS}; " if low < bound <= high else ""
    return {"value": values.mean(), "low": low, "high": high, "n": len(values), "some": some}


def less_error(folder: Path, width: str, bound: float) -> Iterator[Facts]:
    """Yield by how many percent the transform lowers the error of each model's activations, over its boundaries."""
    for model, name in BOUNDARIES.items():
        _, plain, transformed = (at_boundaries(folder, model, "forward", codec) for codec in state.chain(width))
        if not plain.empty:
            less = 100 * (1 - transformed.error.to_numpy() / plain.error.to_numpy())
            more = transformed.bits.mean() / plain.bits.mean() - 1
            yield {"model": name, "more": more, **_spread(less, bound, "boundary")}


def recovered(folder: Path, width: str, harmless: float) -> Facts | None:
    """Return the excess loss of a state sent with `width`, after some training, over seeds."""
    found = recovery(folder, state.chain(width)[1], harmless)
    if found is None:
        return None
    return experiments.loss_facts(found, SENDER, experiments.takes_s(HERE, "quality.py", found.n))


def line(folder: Path, mbps: int) -> Facts | None:
    """Return the constant and the slope of seconds over the links' formula ideal, by least squares, the worst
    transfer's relative deviation from that line, and the larger of both departures; None if there are too few.
    """
    rows = measured(folder).transfers
    rows = rows[(rows.mbps == mbps) & (rows.payload_bytes >= 1_000_000)]
    if len(rows) < 5:
        return None
    slope, begin = np.polyfit(rows.ideal_s, rows.seconds, 1, w=1 / rows.seconds)
    off = np.abs((begin + slope * rows.ideal_s) / rows.seconds - 1).max()
    return {"value": max(abs(slope - 1), off), "begin_ms": 1000 * begin, "slope": slope, "off": off}


def at_equal_error(folder: Path) -> Iterator[Facts]:
    """Yield by how many percent one step takes more bytes than ranges at 4 bits, at equal error, if reached."""
    all_, ranges = measured(folder), state.chain("int4")[1]
    for name in all_.whole:
        if ranges not in all_.codecs(name):
            continue
        target, steps = all_.row(name, ranges), [state.one_step(width)[0] for width in state.WIDTHS]
        known = [all_.row(name, one) for one in steps if one in all_.codecs(name)]
        errors, sizes = zip(*sorted((row.error, row.payload_bytes) for row in known), strict=True)
        if errors[0] <= target.error <= errors[-1]:
            bytes_ = np.interp(np.log(target.error), np.log(errors), sizes)
            yield {"state": NAMES[name], "value": 100 * (bytes_ / target.payload_bytes - 1)}


# ------------------------------------------------------------------ words
def answer(folder: Path) -> str:
    """Return the answer in three lines; the tables have every number."""
    all_, parts = measured(folder), []
    for name in all_.whole:
        best = max(all_.unharmed(name), key=lambda codec: all_.ratio(name, codec))
        _, plain, chain = state.chain("int8")
        fp32, whole, short, least = (
            f"{all_.seconds(name, codec, SLOW):.1f} s" for codec in ("fp32", chain, plain, best)
        )
        parts.append(
            f"{NAMES[name]} takes {fp32} as fp32 at {SLOW} Mbit/s, {whole} through MesonGS's chain at 8 bits, {short} "
            f"without its transform, and {least} as `{best}`, the shortest at a cost of at most {HARMLESS:g} nats."
        )
    return " ".join(["**Answer.**", *parts]) if parts else "No trained state was measured: this is the short form."


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
            note(axes, codec.replace(", 3", ""), at, (0, 5), ha="right", size=8)
    axes.axhline(HARMLESS, color=style.MUTED, lw=1)
    if name == WHOLE[0]:
        floors.draw_floors(axes, HERE, SENDER, corner=(1, 1), label=0.6)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.set_title(NAMES[name])
    axes.set_xlabel(f"transfer over {SLOW} Mbit/s, s")


def draw(all_: Measured) -> Figure:
    """Draw the loss against the transfer time, a panel for each state."""
    figure, (row,) = plots.panels(1, len(all_.states), (10.5, 4.2), sharey=True)
    for axes, name in zip(row, all_.states, strict=True):
        _panel(axes, all_, name)
    row[0].set_ylabel("held-out loss above the sender's, nats")
    plots.finish(figure, "A transform gains nothing on weights; one step and an entropy coder send them fastest", row)
    return figure


BLOCKS = {"answer": answer, "transfers": transfers_table, "entropy": entropy_table, "kinds": kinds_table,
          "activations": activations_table, "recovery": recovery_table}  # fmt: skip
FIGURES = {"transfers": lambda folder: draw(measured(folder))}


if __name__ == "__main__":
    publishing.run(globals())
