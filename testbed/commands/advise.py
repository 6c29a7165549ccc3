"""The `advise` command: which layout trains a model fastest on given devices and links, and what speaks for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from testbed.commands.console import say, typed, writing
from testbed.devices.flops import parameters
from testbed.errors import UserError
from testbed.predict import advice
from testbed.report.claims import Evidence, proven_codecs, read_evidence

_BAR = 40
"""Characters of the bar of what limits a batch."""


def advise(
    model: Annotated[str, typer.Option(help="A named model, or the folder or id of a checkpoint.")],
    device: Annotated[str, typer.Option(help="Device of every node, see `devices`.")],
    nodes: Annotated[int, typer.Option(help="Number of nodes.")],
    profile: Annotated[str, typer.Option(help="Access link of every node, see `profiles`; or link(80Mbit, 10ms).")],
    batch: Annotated[int, typer.Option(help="Sequences per batch, over all nodes.")],
    sequence_length: Annotated[int | None, typer.Option(help="Tokens per sequence; default: at most 1,024.")] = None,
    local_steps: Annotated[int, typer.Option(min=1, help="Batches between exchanges: of 1, 8, 32 up to this.")] = 8,
    explain: Annotated[bool, typer.Option("--explain", help="List what was compared, and what was left out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    toml: Annotated[Path | None, typer.Option(help="Write an experiment that plays the recommendations.")] = None,
) -> None:
    """Recommend how to train a model over slow links: layout, schedule and codecs, with predicted times, memory, what
    limits them, and the evidence for the loss.
    """
    if toml is not None and toml.suffix != ".toml":
        raise UserError(f"--toml {toml}: an experiment's file ends in .toml")
    evidence, codecs = read_evidence(), proven_codecs()
    setting = advice.look_up(model, device, nodes, profile, batch, sequence_length, local_steps)
    simulated, fitting = advice.advise(setting, codecs)
    fastest = {each.kind: each for each in reversed(simulated)}.values()
    chosen = [advice.with_most_bits(each, setting, codecs) for each in sorted(fastest, key=lambda each: each.batch_s)]
    told = [_told(setting, one, evidence) for one in chosen]
    whole = (each for each in simulated if each[:4] == ("data parallel", nodes, 1, 1))
    alone_s = next((advice.batch_s(each, setting, "none", sequences=batch) for each in whole), None)
    if toml is not None:
        with writing("the experiment", toml):
            toml.write_text(advice.experiment(setting, chosen), encoding="utf8")
    if as_json:
        return say(json.dumps({"recommendations": told, "one_node_s": alone_s}, indent=1))
    for number, one in enumerate(told, 1):
        shares = one["limits"]
        bar = "".join(name[0].upper() * round(share * _BAR) for name, share in shares.items())
        one["limits"] = f"[{bar}] " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        say(f"{number}. {one.pop('layout')}")
        for name, value in one.items():
            for line in value if isinstance(value, list) else [value]:
                say(f"   {name:9} {line}")
    say(f"Predicted: the fastest of {len(simulated)} layouts simulated, of {fitting} that fit; none was played.")
    if alone_s is not None:
        say(f"One node alone, without links, takes {alone_s:.4g} s a batch.")
    for layout in simulated if explain else ():
        say(f"{layout.batch_s:10.4g} s  {_words(layout)}")
    for name, (_, claim, _) in evidence.items() if explain else ():
        if name not in codecs and "steps" not in name:
            say(f"left out: {name}: {claim.verdict}: {claim.claim}: {claim.ours}")
    return say(f"To play them here: {typed('predict', str(toml))}") if toml is not None else None


def _words(layout: advice.Layout) -> str:
    """Return a layout in words."""
    kind, replicas, stages, steps, whole, job, *_ = layout
    words = {"data parallel": f"{replicas} workers in a ring", "hybrid": f"{replicas} pipelines of {stages} stages"}
    text = f"{kind}: {words.get(kind, f'{stages} stages')}" + f", {steps} local steps, fp32 exchanged" * (replicas > 1)
    depth = f"; 1f1b, {job.get('in_flight')} of {whole} micro-batches of {job['sequences']} in flight"
    depth += f"{', recomputing' * job.get('recompute', 0)}; {' forward, '.join(layout.codecs)} backward"
    return text + depth * (stages > 1)


def _told(setting: advice.Question, layout: advice.Layout, evidence: dict[str, Evidence]) -> dict[str, Any]:
    """Return a recommendation as plain values, in the order in which they are shown."""
    millions = parameters(setting.size, range(setting.size.layers)) / 1e6
    settings = [*dict.fromkeys(layout.codecs), *[f"{layout.local_steps} local steps"] * (layout.local_steps > 1)]
    loss = [
        f"{name}: grade {claim.grade}, {claim.verdict}: {claim.claim}: {claim.ours} "
        f"({experiment}, toy scale: {trained:.2g} of your {millions:,.0f} M parameters)"
        for name, (experiment, claim, trained) in ((name, evidence[name]) for name in settings)
    ]
    unknown = [f"what full buffers{''.join(f', {effect}' for effect in setting.effects)} cost, and how TCP reacts"]
    unknown += [f"the speed of {setting.device.name} with this model: its file assumes a share of the peak"]
    unknown += ["the loss at this scale"] * bool(loss) + ["the outer optimiser's time"] * (layout.local_steps > 1)
    return {
        "layout": _words(layout),
        "batch_s": float(f"{layout.batch_s:.4g}"),
        "token_s": float(f"{layout.batch_s / setting.batch / setting.tokens:.4g}"),
        "memory": f"{layout.memory_bytes / 1e9:.1f} of {(setting.device.memory_bytes or 0) / 1e9:.0f} GB",
        "limits": advice.limits(layout, setting),
        "loss": loss or ["fp32 after every batch changes nothing"],
        "unknown": unknown,
    }
