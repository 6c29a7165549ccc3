"""The `advise` command: which layout trains a model fastest on given devices and links, and what speaks for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from testbed import units
from testbed.commands.console import say, typed, writing

if TYPE_CHECKING:
    from testbed.predict.advice import Advice, Predicted
    from testbed.report.evidence import Evidence

_BAR = 40
"""Characters of the bar that shows what limits a step."""


def advise(
    model: Annotated[str, typer.Option(help="A named model, or the folder or id of a checkpoint.")],
    device: Annotated[str, typer.Option(help="Device of every node, see `devices`.")],
    nodes: Annotated[int, typer.Option(help="Number of nodes.")],
    profile: Annotated[str, typer.Option(help="Access link of every node, see `profiles`; or link(80Mbit, 10ms).")],
    batch: Annotated[int, typer.Option(help="Sequences per batch, over all nodes.")],
    sequence_length: Annotated[int | None, typer.Option(help="Tokens per sequence; default: 1,024 at most.")] = None,
    local_steps: Annotated[int, typer.Option(help="Maximum number of batches between two exchanges.")] = 8,
    explain: Annotated[bool, typer.Option("--explain", help="List what was compared, and what was left out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    toml: Annotated[Path | None, typer.Option(help="Write an experiment that plays the recommendations here.")] = None,
) -> None:
    """Recommend how to train a model over slow links: layout, schedule and codecs, with predicted times, memory, what
    limits them, and the evidence for the loss.
    """
    from testbed.predict import advice as advising
    from testbed.predict import advice_cells
    from testbed.report.evidence import read_evidence

    evidence = read_evidence()
    codecs = [name for name, one in evidence.items() if one.holds and "steps" not in name]
    asked = advising.Asked(model, device, nodes, profile, batch, sequence_length, local_steps)
    answer = advising.advise(asked, codecs)
    told = [_told(answer, one, evidence) for one in answer.chosen]
    if toml is not None:
        with writing("the experiment", toml):
            toml.write_text(advice_cells.experiment(answer.setting, [one.layout for one in answer.chosen]), "utf8")
    if as_json:
        typer.echo(json.dumps({"asked": asked._asdict(), "recommendations": told, "alone_s": answer.alone_s}, indent=1))
        return
    for number, one in enumerate(told, 1):
        say(_text(number, one))
    say(
        f"The first is the fastest of {len(answer.simulated)} layouts simulated, of {answer.layouts} that fit; none was played."
    )
    if answer.alone_s is not None:
        faster = "slower than" if answer.alone_s > answer.chosen[0].batch_s else "no slower than"
        say(
            f"One node alone, without links, takes {units.format_duration(answer.alone_s)} a batch: {faster} the first."
        )
    if explain:
        _explain(answer, evidence, codecs)
    if toml is not None:
        say(f"To play them here: {typed('predict', str(toml))}")


def _told(answer: Advice, one: Predicted, evidence: dict[str, Evidence]) -> dict[str, Any]:
    """Return a recommendation as plain values."""
    from testbed.predict.advice import limits

    layout, setting = one.layout, answer.setting
    job = layout.job
    codec = job.get("codec", "")
    forward, _, backward = codec.removeprefix("fwd=").partition(", bwd=") if "bwd=" in codec else (codec, "", codec)
    return {
        "layout": layout.kind,
        "replicas": layout.replicas,
        "stages": layout.stages,
        "nodes": layout.replicas * layout.stages,
        "local_steps": layout.local_steps,
        "schedule": job.get("schedule"),
        "in_flight": job.get("in_flight"),
        "microbatches": layout.microbatches,
        "sequences": job["sequences"],
        "recompute": job.get("recompute", False),
        "forward": forward or None,
        "backward": backward or None,
        "step_s": one.batch_s,
        "token_s": one.batch_s / (setting.asked.batch * setting.tokens),
        "memory_bytes": layout.memory_bytes,
        "device_memory_bytes": setting.device.memory_bytes,
        "limits": limits(one, setting),
        "evidence": [
            {
                "setting": name,
                "grade": evidence[name].claim.grade,
                "verdict": evidence[name].claim.verdict,
                "claim": evidence[name].claim.claim,
                "ours": evidence[name].claim.ours,
                "experiment": evidence[name].experiment,
                "parameters": evidence[name].parameters,
                "asked_parameters": setting.parameters,
            }
            for name in layout.settings
        ],
        "unknown": setting.unknown(layout),
    }


def _text(number: int, told: dict[str, Any]) -> str:
    """Return a recommendation as text."""
    kind, stages, steps = told["layout"], told["stages"], told["local_steps"]
    shape = {
        "pipeline": f"pipeline of {stages} stages",
        "data parallel": f"data parallel, {told['replicas']} workers, a ring of fp32",
        "hybrid": f"hybrid, {told['replicas']} pipelines of {stages} stages, exchange in fp32",
    }[kind]
    lines = [f"{number}. {shape}" + (f", {steps} local steps" if kind != "pipeline" else "")]
    if kind != "data parallel":
        again = ", recomputing activations" if told["recompute"] else ""
        lines += [
            f"schedule  {told['schedule']}, {told['in_flight']} of {told['microbatches']} micro-batches in flight, "
            f"{told['sequences']} sequences each{again}",
            f"codec     {told['forward']} forward, {told['backward']} backward",
        ]
    marks = "".join(name[0].upper() * round(share * _BAR) for name, share in told["limits"].items())
    shares = ", ".join(f"{name} {share:.0%}" for name, share in told["limits"].items())
    lines += [
        f"time      {units.format_duration(told['step_s'])} a batch, {told['token_s'] * 1e6:.3g} us a token (predicted)",
        f"memory    {told['memory_bytes'] / 1e9:.1f} of {told['device_memory_bytes'] / 1e9:.0f} GB",
        f"limits    [{marks}] {shares}",
    ]
    for one in told["evidence"]:
        times = one["asked_parameters"] / one["parameters"]
        scale = f"toy scale, {one['parameters'] / 1e6:.3g} M parameters; yours has {times:,.0f} times as many"
        lines.append(
            f"loss      {one['setting']}: grade {one['grade']}, {one['verdict']}: {one['claim']}: {one['ours']} "
            f"({one['experiment']}; {scale})"
        )
    lines += ["loss      as without a network: it sends fp32 in every step"] * (not told["evidence"])
    lines += [f"unknown   {one}" for one in told["unknown"]]
    return "\n   ".join(lines) + "\n"


def _explain(answer: Advice, evidence: dict[str, Evidence], codecs: list[str]) -> None:
    say("\nSimulated, seconds a batch:")
    for one in answer.simulated:
        layout = one.layout
        depth = f", {layout.job['in_flight']} in flight" if "in_flight" in layout.job else ""
        what = f"{layout.kind} {layout.replicas} x {layout.stages}, {layout.local_steps} local steps{depth}"
        say(f"  {one.batch_s:10.3f}  {what}, {layout.job.get('codec', 'fp32')}")
    for name, one in evidence.items():
        if name not in codecs and "steps" not in name:
            say(f"Left out: {name}, because its claim is {one.claim.verdict}: {one.claim.claim}: {one.claim.ours}")
