"""The `chaos` command: random cells of every kind, and what is wrong with their runs."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Annotated

import typer

from testbed import results as stored
from testbed.commands.console import ResultsFlag, err, need_clock_kernel, print_table, say
from testbed.errors import StageError


def chaos(
    seed: Annotated[int, typer.Option(min=0, help="Seed of what is drawn.")] = 0,
    cells: Annotated[int, typer.Option(min=1, help="Number of played cells.")] = 20,
    live: Annotated[int, typer.Option(min=0, help="How many of them are also run live, with torch and TCP.")] = 2,
    shrink: Annotated[
        bool, typer.Option("--shrink/--no-shrink", help="Whether to look for the plainest failing cell.")
    ] = True,
    results: ResultsFlag = Path("results"),
) -> None:
    """Run random cells on the virtual clock: any kind of job, codec, link, durations and faults. Each run must finish,
    be certified, be no faster than its ideal and, live, have the losses of its played twin.

    Finished cells are kept. The folder gets record.json, which is the same, byte for byte, for every run of a seed.
    """
    from testbed.commands.planned import progress_into
    from testbed.sweep import chaos as drawing
    from testbed.sweep import conduct
    from testbed.sweep.environment import Means, hold_folder

    kernel = need_clock_kernel()
    means = Means("netem", "the virtual clock's", "virtual", kernel.version)
    folder = results / f"chaos-{seed}"
    stored.check_folder(folder)
    stored.make_folder(folder)

    def run(drawn: list[drawing.ChaosCell]) -> list[drawing.ChaosRow]:
        missing = {each.cell.id: each.cell for each in drawn if stored.finished(folder, each.cell.id) is None}
        if missing:
            conduct.make_runs(tuple(missing.values()), folder, means, progress_into(folder))
        return [drawing.judge(folder, each) for each in drawn]

    with hold_folder(folder):
        drawn = list(drawing.draw(seed, cells, live))
        rows = run(drawn)
        if shrink:
            for at, (each, row) in enumerate(zip(drawn, rows, strict=True)):
                if row.cause is not None:
                    plainest = drawing.shrink(each, lambda tried: run([tried])[0].cause)
                    rows[at] = row.model_copy(update={"shrunk": drawing.words_of(plainest.drawn)})
        known = {"seed": seed, "kernel": kernel.folder.name, "torch": importlib.metadata.version("torch")}
        stored.write_json(folder / "record.json", drawing.ChaosRecord(**known, rows=tuple(rows)))
    wrong = [row for row in rows if row.cause is not None]
    print_table(
        ("number", "timing", "cell", "cause", "plainest"),
        [(str(row.number), row.timing, row.words, row.cause or "", row.shrunk or "") for row in wrong],
    )
    say(f"{len(rows)} runs of seed {seed}, {len(wrong)} wrong; record: {folder / 'record.json'}")
    if wrong:
        say(f"testbed: wrong: {', '.join(row.cell for row in wrong)}", on=err, style="red")
        raise typer.Exit(StageError.exit_status)
