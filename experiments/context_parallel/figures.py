"""Make the figure, runs.csv, claims.csv and the README's blocks of context_parallel.

python -m testbed sweep context_parallel
python experiments/context_parallel/scale.py
python experiments/context_parallel/figures.py [--results results/context_parallel] [--output FOLDER]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from testbed import results
from testbed.jobs.kind import kind_of
from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiments, style
from testbed.report.claims import EXACT, Claim, Verdict, claims_table
from testbed.spec import recipe_of
from testbed.sweep.trainings import final_loss, trained_folder

NAME = "context_parallel"
COMMAND = f"python -m testbed reproduce {NAME}"
RUNS, SCALE = "runs.csv", "scale.csv"
BASE, LEARNED, FIXED, CHAIN = "fp32", "learned subspace, bf16", "fixed subspace, bf16", "fp32, chain"
SLOW = "link-300Mbit-10ms"
PAPER = "Ramasinghe et al., arXiv 2606.16384"
NOTHING = 0.02
"""Nats that count as no loss in convergence."""
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


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _order(frame: Any) -> list[str]:
    sent = frame.groupby("arm").key_bytes.first()
    return sorted(sent.index, key=lambda arm: (-sent[arm], arm))


def _judged(frame: Any, arm: str, base: str, bound: float) -> Judgement:
    return judge("loss", losses(frame, arm), losses(frame, base), bound)


def _loss_claim(
    claim: str, source: str, published: str, frame: Any, arm: str, why: str, verdict: Verdict | None = None
) -> Claim:
    """`verdict`: stated, where no number can decide it."""
    found = _judged(frame, arm, BASE, NOTHING)
    return Claim(
        claim=claim,
        source=source,
        published=published,
        ours=f"{_percent(1 - _share(frame, arm))} less, {found.value:+.3f} nats",
        interval=experiments.interval_words(found),
        verdict=verdict or found.verdict or "not resolved",
        why=why if verdict else experiments.open_words(why, found, SEED_S),
        command=COMMAND,
    )


def claims(folder: Path) -> list[Claim]:
    """Return what was claimed and what became of it."""
    frame, scale = pd.read_csv(folder / RUNS), pd.read_csv(folder / SCALE)
    made = []
    if LEARNED in set(frame.arm):
        why = (
            "100,000 tokens into training the loss does not rest on what crosses (top-k of 5 % beats fp32, too), "
            "so it cannot show what compression costs; one subspace instead of mixtures, 0.7M parameters"
        )
        made.append(
            _loss_claim(
                "Keys and values, and their gradients, can be compressed by over 95 % with no loss in convergence",
                f"{PAPER}, abstract",
                "over 95 %, no loss",
                frame,
                LEARNED,
                why,
                "not comparable",
            )
        )
    if {LEARNED, FIXED} <= set(frame.arm):
        found = _judged(frame, LEARNED, FIXED, 0.0)
        made.append(
            Claim(
                claim="A learned subspace is better than a fixed one",
                source=f"{PAPER} (second-hand)",
                published="perplexity 22.64 against 26.57: -0.16 nats",
                ours=f"{found.value:+.3f} nats",
                interval=experiments.interval_words(found),
                verdict=found.verdict or "not resolved",
                why=experiments.open_words("the same 6 dimensions, drawn at random", found, SEED_S),
                command=COMMAND,
            )
        )
    for arm in [arm for arm in ("int8", "int4") if arm in set(frame.arm)]:
        made.append(
            _loss_claim(
                f"Keys and values as {arm} cost at most {NOTHING} nats",
                "ours",
                "",
                frame,
                arm,
                "gradients are rounded stochastically; what comes from other nodes is coded, what is a node's own not",
            )
        )
    bare = scale[(scale.exchange == "chain") & (scale.rate_bps == 300_000_000)]
    allowed = {(row.kept, row.backward, row.weights): row.tokens_per_s for row in bare.itertuples()}
    made.append(
        Claim(
            claim="At 300 Mbit/s, 132,000 tokens and 800M parameters train at 2,700 tokens/s, and compressed at 55,000",
            source=f"{PAPER} (second-hand)",
            published="2.7K and 55K tokens/s",
            ours=f"links allow {allowed[1.0, False, False]:,.0f} and {allowed[0.05, False, False]:,.0f} tokens/s for "
            f"keys and values alone; with their gradients {allowed[1.0, True, False]:,.0f} and "
            f"{allowed[0.05, True, False]:,.0f}; with the weights' as bf16 {allowed[1.0, True, True]:,.0f} and "
            f"{allowed[0.05, True, True]:,.0f}",
            interval=EXACT,
            verdict="not comparable",
            why="the model's shape is not in what was read of the paper, so that of Llama 3.2 1B with 8 layers was "
            "taken; with it the published numbers are those of one way of keys and values",
            command="python experiments/context_parallel/scale.py",
        )
    )
    times = _times(frame)
    if {LEARNED, BASE} <= set(times):
        faster = times[BASE] / times[LEARNED]
        made.append(
            Claim(
                claim="Over 300 Mbit/s and 10 ms, 95 % fewer bytes of keys and values make a step twice as fast",
                source="ours",
                ours=f"{faster:.2f}x",
                interval=EXACT,
                verdict="holds" if faster >= 2 else "fails",
                why="what is left are the weights' gradients, as int8, and round trips: a layer waits for two",
                command=COMMAND,
            )
        )
    if {CHAIN, BASE} <= set(times):
        slower = times[CHAIN] / times[BASE]
        made.append(
            Claim(
                claim="Passing keys and values on from node to node is as fast as sending them to all directly",
                source="ours",
                ours=f"{slower:.2f} times as long over 300 Mbit/s and 10 ms",
                interval=EXACT,
                verdict="holds" if slower <= 1.05 else "fails",
                why="the busiest link carries as many bytes, and the last hop waits for all before it",
                command=COMMAND,
            )
        )
    return made


def table(folder: Path) -> Any:
    """Return a row for each arm."""
    frame, rows = pd.read_csv(folder / RUNS), []
    for arm in _order(frame):
        found = None if arm == BASE else _judged(frame, arm, BASE, NOTHING)
        rows.append(
            {
                "keys and values": arm,
                "their bytes per step": f"{frame[frame.arm == arm].key_bytes.iloc[0] / 1e6:.2f} MB",
                "of fp32's": _percent(_share(frame, arm)),
                "validation loss": experiments.mean_words(losses(frame, arm), "{:.3f}"),
                "less fp32's": "" if found is None else f"{found.value:+.3f} ({experiments.interval_words(found)})",
                **{
                    network.removeprefix("link-").replace("-buffer-200ms", ""): f"{1e3 * times[arm]:.0f} ms"
                    for network in frame.network.unique()
                    if arm in (times := _times(frame, network))
                },
            }
        )
    return pd.DataFrame(rows)


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    frame, made, said = pd.read_csv(folder / RUNS), claims(folder), ""
    if LEARNED in set(frame.arm):
        found, times = _judged(frame, LEARNED, BASE, NOTHING), _times(frame)
        said = (
            f"In one learned subspace per layer keys, values and their gradients are "
            f"{_percent(1 - _share(frame, LEARNED))} smaller than fp32, and a step at 300 Mbit/s and 10 ms is "
            f"{times[BASE] / times[LEARNED]:.2f} times as fast; the weights' gradients and round trips are left. The "
            f"loss is {found.value:+.3f} nats from fp32's ({experiments.interval_words(found)}), but so early "
            "in training other strong codecs do not raise it either: what crosses hardly matters yet."
        )
    return {
        "answer": experiments.prose(said),
        "arms": experiments.markdown_of(table(folder)),
        "scale": experiments.markdown_of(scale_table(folder)),
        "claims": claims_table(made),
    }


def scale_table(folder: Path) -> Any:
    """Return tokens per second that links allow at 300 Mbit/s, by what crosses them."""
    frame = pd.read_csv(folder / SCALE)
    crosses = {
        (False, False): "keys and values",
        (True, False): "and their gradients",
        (True, True): "and the weights' gradients",
    }
    rows = []
    for (rate, exchange), part in frame.groupby(["rate_bps", "exchange"]):
        for (backward, weights), said in crosses.items():
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
            found = _judged(frame, arm, BASE, NOTHING)
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
    names = [each.removeprefix("link-").replace("-buffer-200ms", "").replace("-", "\n") for each in networks]
    right.set_xticks(range(len(networks)), names)
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
