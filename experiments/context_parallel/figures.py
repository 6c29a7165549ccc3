"""Make the figure, runs.csv, claims.csv and the README's blocks of context_parallel.

python -m testbed sweep context_parallel
python experiments/context_parallel/scale.py
python experiments/context_parallel/figures.py [--results results/context_parallel] [--output FOLDER]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from testbed import results
from testbed.jobs.kind import kind_of
from testbed.metrics.verdicts import Judgement, judge
from testbed.report import claim_rows, experiments, style
from testbed.report.claim_rows import Facts
from testbed.report.claims import Claim, claims_table
from testbed.report.numbers import percent
from testbed.spec import recipe_of
from testbed.sweep.trainings import final_loss, trained_folder

NAME = "context_parallel"
RUNS, SCALE = "runs.csv", "scale.csv"
BASE, LEARNED, CHAIN = "fp32", "learned subspace, bf16", "fp32, chain"
SLOW = "link-300Mbit-10ms"
NOTHING = 0.02
"""Nats that count as no loss in convergence."""
CROSSES = {
    (False, False): "keys and values",
    (True, False): "and their gradients",
    (True, True): "and the weights' gradients",
}
"""What crosses the links of scale.csv, by whether gradients do and whether the weights' do."""
SEED_S = 40.0
"""For one more seed of two arms: 16 s of one core each, and playing; measured on 2026-11-24."""


def runs(home: Path) -> Any:
    """Return a row for each run: its arm, bytes per step of keys, values and their gradients, time and loss."""
    rows = []
    for row in experiments.runs_frame(home).itertuples():
        run = results.Run(home / row.folder)
        job = kind_of(run.cell)
        words = job.in_short[1].removeprefix("context, ").split(", ")  # exchange, and perhaps the subspace
        arm = row.codec if len(words) == 1 else f"{words[1].rpartition(' ')[0]}, {row.codec}"
        first = job.layers * job.nodes**2  # type: ignore[attr-defined]
        steps = [step for place in range(len(job.places)) for step in run.steps(place) if step.phase == "train"]
        keys = [each.payload_bytes for step in steps for each in step.sent if each.microbatch < first]
        rows.append(
            {
                "arm": arm if words[0] == "direct" else f"{arm}, {words[0]}",
                "network": row.network,
                "seed": row.seed,
                "step_s": row.step_s,
                "key_bytes": sum(keys) / (len(steps) / len(job.places)),
                "payload_bytes": row.payload_bytes_per_step,
                "validation_loss": final_loss(trained_folder(home, recipe_of(run.cell))),
                "unigram_floor": row.unigram_floor,
                "certified": row.certified,
            }
        )
    return pd.DataFrame(rows).sort_values(["network", "arm", "seed"])


def losses(frame: Any, arm: str) -> dict[int, float]:
    """Return an arm's validation loss by seed."""
    return dict(frame[frame.arm == arm].groupby("seed").validation_loss.first())


def _times(frame: Any, network: str = SLOW) -> Mapping[str, float]:
    return dict(frame[frame.network == network].groupby("arm").step_s.first())


def _share(frame: Any, arm: str) -> float:
    """Return an arm's bytes of keys, values and gradients, as a share of the baseline's."""
    sent = frame.groupby("arm").key_bytes.first()
    return float(sent[arm] / sent[BASE])


def _order(frame: Any) -> list[str]:
    sent = frame.groupby("arm").key_bytes.first()
    return sorted(sent.index, key=lambda arm: (-sent[arm], arm))


def _short(network: str) -> str:
    return network.removeprefix("link-").replace("-buffer-200ms", "")


def _judged(frame: Any, arm: str, base: str = BASE, bound: float = NOTHING) -> Judgement:
    return judge("loss", losses(frame, arm), losses(frame, base), bound)


def above(folder: Path, arms: Sequence[str], base: str = BASE, bound: float = NOTHING) -> Iterator[Facts]:
    """Yield, for those arms that were run, the loss above the base's and how many bytes fewer than fp32 they send."""
    frame = pd.read_csv(folder / RUNS)
    for arm in arms if base in set(frame.arm) else ():
        if arm in set(frame.arm):
            found = _judged(frame, arm, base, bound)
            less, still = 1 - _share(frame, arm), experiments.open_words("", found, SEED_S)
            yield {"judgement": found, "arm": arm, "bound": bound, "less": less, "open": still}


def allowed(folder: Path) -> Facts:
    """Return the tokens per second that a chain of 300 Mbit/s allows, by what crosses, in full and 5 % of it."""
    frame = pd.read_csv(folder / SCALE)
    bare = frame[(frame.exchange == "chain") & (frame.rate_bps == 300_000_000)]
    by_kept = bare.pivot_table("tokens_per_s", ["backward", "weights"], "kept").loc[list(CROSSES)]
    return {"full": by_kept[1.0].tolist(), "few": by_kept[0.05].tolist()}


def step_ratio(folder: Path, of: str, over: str) -> Facts | None:
    """Return one arm's step over another's at 300 Mbit/s; None where one of them was not run."""
    times = _times(pd.read_csv(folder / RUNS))
    return {"value": times[of] / times[over]} if {of, over} <= times.keys() else None


def claims(folder: Path) -> list[Claim]:
    """Return what was claimed and what became of it."""
    return claim_rows.claims(globals(), folder)


def table(folder: Path) -> Any:
    """Return a row for each arm."""
    frame, rows = pd.read_csv(folder / RUNS), []
    for arm in _order(frame):
        found = None if arm == BASE else _judged(frame, arm)
        rows.append(
            {
                "keys and values": arm,
                "their bytes per step": f"{frame[frame.arm == arm].key_bytes.iloc[0] / 1e6:.2f} MB",
                "of fp32's": percent(_share(frame, arm)),
                "validation loss": experiments.mean_words(losses(frame, arm), "{:.3f}"),
                "less fp32's": "" if found is None else f"{found.value:+.3f} ({experiments.interval_words(found)})",
                **{
                    _short(network): f"{1e3 * times[arm]:.0f} ms"
                    for network in frame.network.unique()
                    if arm in (times := _times(frame, network))
                },
            }
        )
    return pd.DataFrame(rows)


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    frame, said = pd.read_csv(folder / RUNS), ""
    if LEARNED in set(frame.arm):
        found, times = _judged(frame, LEARNED), _times(frame)
        said = (
            f"In one learned subspace per layer keys, values and their gradients are "
            f"{percent(1 - _share(frame, LEARNED))} smaller than fp32, and a step at 300 Mbit/s and 10 ms is "
            f"{times[BASE] / times[LEARNED]:.2f} times as fast; the weights' gradients and round trips are left. The "
            f"loss is {found.value:+.3f} nats from fp32's ({experiments.interval_words(found)}), but so early "
            "in training other strong codecs do not raise it either: what crosses hardly matters yet."
        )
    return {
        "answer": experiments.prose(said),
        "arms": experiments.markdown_of(table(folder)),
        "scale": experiments.markdown_of(scale_table(folder)),
        "claims": claims_table(claims(folder)),
    }


def scale_table(folder: Path) -> Any:
    """Return tokens per second that links allow at 300 Mbit/s, by what crosses them."""
    frame = pd.read_csv(folder / SCALE)
    rows = []
    for (rate, exchange), part in frame.groupby(["rate_bps", "exchange"]):
        for (backward, weights), said in CROSSES.items():
            these = part[(part.backward == backward) & (part.weights == weights)].set_index("kept").tokens_per_s
            rows.append(
                {
                    "links": f"{rate / 1e6:,.0f} Mbit/s",
                    "exchange": exchange,
                    "what crosses": said,
                    "bf16": f"{these[1.0]:,.0f} tokens/s",
                    "5 % of it": f"{these[0.05]:,.0f} tokens/s",
                }
            )
    return pd.DataFrame(rows)


def draw(folder: Path) -> Any:
    """Draw the loss above fp32's against the bytes of keys and values, and the step over each network."""
    frame = pd.read_csv(folder / RUNS)
    arms = [arm for arm in _order(frame) if arm != CHAIN]
    looks = style.looks(arms)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
    for arm in arms:
        look = looks[arm]
        if arm != BASE:
            found = _judged(frame, arm)
            ends = found.interval
            left.plot(100 * _share(frame, arm), found.value, "o", color=look.colour)
            if ends is not None:
                left.plot([100 * _share(frame, arm)] * 2, [ends.low, ends.high], color=look.colour, lw=1.2)
        networks = list(frame.network.unique())
        steps = [1e3 * _times(frame, network)[arm] for network in networks]
        right.plot(range(len(networks)), steps, "o-", ms=3.5, color=look.colour, label=arm)
    left.axhline(0, color="0.4", lw=0.8)
    left.set_xscale("log")
    left.set(xlabel="bytes of keys, values and gradients, % of fp32's", ylabel="validation loss above fp32's, nats")
    right.set_xticks(range(len(networks)), [_short(network).replace("-", "\n") for network in networks])
    right.set(ylabel="step, ms", ylim=(0, None))
    style.state(figure, "Fewer bytes of keys and values save little where round trips count")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def main() -> None:
    """Read the results and write everything."""
    home, output = experiments.folders(NAME, "Figure, runs.csv, claims and the README's blocks.")
    runs(home).to_csv(output / RUNS, index=False, float_format="%.6g", lineterminator="\n")
    experiments.draw_and_publish(Path(__file__).parent, output, {"context": draw}, blocks, claims)


if __name__ == "__main__":
    main()
