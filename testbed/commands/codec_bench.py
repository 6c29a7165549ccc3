"""`testbed bench codecs`: cost and error of codecs on tensors from a real training."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from testbed import paths, results
from testbed.codecs.bench.measurements import BENCHED, CodecBenchmark, CodecCost
from testbed.commands.console import out, print_table, say
from testbed.errors import StageError
from testbed.process import run_program
from testbed.workloads import checkpoints


def codecs(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[CODEC]...", help="Codecs to measure; default: a long list.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Take the tensors from the first steps of this model, a named size or a checkpoint such as "
            "gpt2-mini-trained. Default: a small random model after a short training."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", dir_okay=False, help="Write this JSON file.")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Plot error against bits per value, to FIGURE.png and .svg.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write table and figure as a Markdown page.")
    ] = None,
) -> None:
    """Measure encode and decode on saved activations and gradients, next to wire time and to other packages."""
    from testbed.codecs.catalogue.placement import parse_placement
    from testbed.report import codec_costs
    from testbed.sweep.environment import describe_machine

    texts = [parse_placement(name).text for name in names] if names else list(BENCHED)
    for file in (output, figure, page):
        if file:
            results.make_folder(file.absolute().parent, "name another file")
    tensors = _tensors(model)
    environment = describe_machine()
    lines = [json.loads(line) for line in _run("testbed.codecs.bench.measure", str(tensors), *texts)]
    benchmark = CodecBenchmark(
        machine=f"{environment['cpu_model'] or 'unknown processor'}, one thread",
        tensors=_about(tensors),
        results=tuple(CodecCost.model_validate(line) for line in lines if "failed" not in line),
        failed={f"{line['codec']}, {line['direction']}": line["failed"] for line in lines if "failed" in line},
    )
    _print(benchmark)
    if output:
        results.write_json(output, benchmark)
    if figure:
        codec_costs.save_rate_distortion(benchmark, figure)
    if page:
        picture = os.path.relpath(figure.absolute().with_suffix(".png"), page.absolute().parent) if figure else None
        page.write_text(codec_costs.costs_page(benchmark, picture), encoding="utf8")
        paths.give_to_user(page)
    if benchmark.failed:
        raise typer.Exit(1)


def _print(benchmark: CodecBenchmark) -> None:
    from testbed.report import codec_costs

    print_table(codec_costs.HEADINGS, codec_costs.cost_rows(benchmark), right=codec_costs.NUMBERS)
    for name, reason in benchmark.failed.items():
        say(f"{name}: {reason}", style="red")
    say(codec_costs.costs_legend(benchmark))


def _about(tensors: Path) -> str:
    import numpy as np

    with np.load(tensors) as file:
        about = json.loads(str(file["about"]))
    return f"{about['model']}, {about['text']} text, after {about['steps']} steps (loss {about['loss']})"


def _tensors(model: str | None) -> Path:
    """Return the file of tensors, created once per machine and, for a checkpoint, once per set of weights."""
    name, asked = "boundary-tensors-1", []
    if model is not None:
        digest = checkpoints.weights_digest(model) or ""
        name += "".join(f"-{part}" for part in (*re.findall(r"[\w.-]+", model), digest[:12]) if part)
        asked = ["--model", model]
    target = paths.cache_folder() / f"{name}.npz"
    if not target.exists():
        results.make_folder(target.parent, "set XDG_CACHE_HOME to a folder of yours")
        what = f"a few steps of {model}" if model else "training a small model, for some minutes"
        out.print(f"{what}, once, for its activations and gradients: {target}", soft_wrap=True)
        _run("testbed.workloads.real_tensors", str(target), *asked)
    return target


def _run(module: str, *arguments: str) -> list[str]:
    """Run a program with one thread, as the user who called sudo; return the lines it prints."""
    return run_program(
        module,
        *arguments,
        attempt=f"run {module}",
        failure=StageError,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=False,  # Ctrl-C reaches it too
        **paths.as_invoking_user(),
    )
