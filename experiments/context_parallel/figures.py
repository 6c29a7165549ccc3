"""Generates the figure, runs.csv, claims.csv and README blocks of context_parallel.

python -m testbed sweep context_parallel
python experiments/context_parallel/scale.py
python experiments/context_parallel/figures.py [--results results/context_parallel] [--output FOLDER]
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from testbed import results
from testbed.jobs.kind import kind_of
from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiments, floors, plots, publishing, style
from testbed.report.claim_rows import Facts
from testbed.report.numbers import percent
from testbed.spec import recipe_of
from testbed.sweep.trainings import final_loss, trained_folder

HERE = Path(__file__).resolve().parent
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
"""Traffic on the links of scale.csv, by whether it includes gradients, and the weights' gradients."""
SEED_S = 40.0
"""Seconds for one more seed of two arms: 16 s of one core each, plus playing; measured on 2026-11-24."""


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
    return judge(
        "loss",
        experiments.by_seed(frame, "validation_loss", arm=arm),
        experiments.by_seed(frame, "validation_loss", arm=base),
        bound,
    )


def above(folder: Path, arms: Sequence[str], base: str = BASE, bound: float = NOTHING) -> Iterator[Facts]:
    """Yield, for the arms that were run, the loss above the base's and the reduction of bytes vs fp32."""
    frame = pd.read_csv(folder / RUNS)
    loss = experiments.mean_of(experiments.by_seed(frame, "validation_loss", arm=base))
    for arm in arms if base in set(frame.arm) else ():
        if arm in set(frame.arm):
            found = _judged(frame, arm, base, bound)
            less, still = 1 - _share(frame, arm), experiments.open_words("", found, SEED_S)
            yield {"judgement": found, "arm": arm, "bound": bound, "less": less, "open": still, "loss": loss}


def allowed(folder: Path) -> Facts:
    """Return the tokens per second that a chain of 300 Mbit/s allows, by the kind of traffic, in full and at 5 %."""
    frame = pd.read_csv(folder / SCALE)
    bare = frame[(frame.exchange == "chain") & (frame.rate_bps == 300_000_000)]
    by_kept = bare.pivot_table("tokens_per_s", ["backward", "weights"], "kept").loc[list(CROSSES)]
    return {"full": by_kept[1.0].tolist(), "few": by_kept[0.05].tolist()}


def step_ratio(folder: Path, of: str, over: str) -> Facts | None:
    """Return the ratio of two arms' steps at 300 Mbit/s; None if either was not run."""
    times = _times(pd.read_csv(folder / RUNS))
    return {"value": times[of] / times[over]} if {of, over} <= times.keys() else None


@experiments.table
def table(folder: Path) -> Any:
    """Return a row for each arm."""
    frame = pd.read_csv(folder / RUNS)
    for arm in _order(frame):
        found = None if arm == BASE else _judged(frame, arm)
        yield {
            "keys and values": arm,
            "their bytes per step": f"{frame[frame.arm == arm].key_bytes.iloc[0] / 1e6:.2f} MB",
            "of fp32's": percent(_share(frame, arm)),
            "validation loss": experiments.mean_words(experiments.by_seed(frame, "validation_loss", arm=arm), "{:.3f}"),
            "less fp32's": "" if found is None else f"{found.value:+.3f} ({experiments.interval_words(found)})",
            **{
                _short(network): f"{1e3 * times[arm]:.0f} ms"
                for network in frame.network.unique()
                if arm in (times := _times(frame, network))
            },
        }


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    frame, said = pd.read_csv(folder / RUNS), ""
    if LEARNED in set(frame.arm):
        found, times = _judged(frame, LEARNED), _times(frame)
        said = (
            f"With one learned subspace per layer, keys, values and their gradients are "
            f"{percent(1 - _share(frame, LEARNED))} smaller than fp32, and a step at 300 Mbit/s and 10 ms is "
            f"{times[BASE] / times[LEARNED]:.2f} times as fast; the weights' gradients and round trips remain. The "
            f"loss is {found.value:+.3f} nats from fp32's ({experiments.interval_words(found)}), but so early "
            "in training other strong codecs do not raise it either: the exchanged data hardly matter yet."
        )
    return {"answer": experiments.prose(said), "arms": table(folder), "scale": scale_table(folder)}


@experiments.table
def scale_table(folder: Path) -> Any:
    """Return the tokens per second that links of 300 Mbit/s allow, by the kind of traffic."""
    frame = pd.read_csv(folder / SCALE)
    for (rate, exchange), part in frame.groupby(["rate_bps", "exchange"]):
        for (backward, weights), said in CROSSES.items():
            these = part[(part.backward == backward) & (part.weights == weights)].set_index("kept").tokens_per_s
            yield {
                "links": f"{rate / 1e6:,.0f} Mbit/s",
                "exchange": exchange,
                "what crosses": said,
                "bf16": f"{these[1.0]:,.0f} tokens/s",
                "5 % of it": f"{these[0.05]:,.0f} tokens/s",
            }


def draw(folder: Path) -> Any:
    """Draw the loss above fp32's against the bytes of keys and values, and the step over each network."""
    frame = pd.read_csv(folder / RUNS)
    arms = [arm for arm in _order(frame) if arm != CHAIN]
    looks = style.looks(arms)
    figure, ((left, right),) = plots.panels(1, 2, (9.6, 3.8))
    networks = sorted(frame.network.unique(), key=lambda network: _times(frame, network)[BASE])
    for arm in arms:
        look = looks[arm]
        if arm != BASE:
            plots.estimates(left, [(100 * _share(frame, arm), _judged(frame, arm))], look.colour, width=1.2)
        steps = [1e3 * _times(frame, network)[arm] for network in networks]
        right.plot(range(len(networks)), steps, "o", ms=5, color=look.colour, label=arm)
    left.axhline(0, color="0.4", lw=0.8)
    left.semilogx()
    plots.ticks(left.xaxis, (4, 6, 10, 20), str)
    left.set(xlabel="bytes of keys, values and gradients, % of fp32's", ylabel="validation loss above fp32's, nats")
    floors.draw_floors(left, HERE, experiments.mean_of(experiments.by_seed(frame, "validation_loss", arm=BASE)))
    right.set_xticks(range(len(networks)), [_short(network).replace("-", "\n") for network in networks])
    right.set(ylabel="step, ms", ylim=(0, None))
    plots.finish(figure, "Fewer bytes of keys and values save little if round trips dominate", right, "lower center")
    return figure


FIGURES = {"context": draw}


def write(results: Path, output: Path) -> None:
    """Write the CSV of a sweep's results."""
    runs(results).to_csv(output / RUNS, index=False, float_format="%.6g", lineterminator="\n")


if __name__ == "__main__":
    publishing.run(globals())
