"""The `predict` command: plays jobs built from model shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from testbed import paths
from testbed.commands.cluster import AddressFlag, ExecutorFlag, RuntimeEnvFlag, check_cluster_flags, connected
from testbed.commands.console import ResultsFlag, need_clock_kernel, print_table, say, warn_of_buffers


def predict(
    name: Annotated[str, typer.Argument(help="Name of an experiment that has a cells.toml, or that file's path.")],
    quick: Annotated[bool, typer.Option("--quick", help="The experiment's short form.")] = False,
    results: ResultsFlag = Path("results"),
    executor: ExecutorFlag = "local",
    address: AddressFlag = None,
    runtime_env: RuntimeEnvFlag = None,
) -> None:
    """Predict step times of models too large to train here: build jobs from their shapes, and play them over links on
    the virtual clock.

    Finished cells are kept. The result folder gets cells.csv, with a row per cell, and rounds.csv, with a row per step
    of each training whose sites come and go.
    """
    from testbed import csv_rows
    from testbed.predict import cells as predicting
    from testbed.predict import churned
    from testbed.sweep.play_task import player_on

    environment = check_cluster_flags(executor, address, runtime_env)
    planned = predicting.plan_cells(name, quick=quick)
    warn_of_buffers((each.cell.topology, each.cell.profiles) for each in planned)
    folder = results / (Path(name).resolve().parent.name if name.endswith(".toml") else name)
    kernel = need_clock_kernel()

    with connected(executor, address, environment) as cluster:
        on: dict[str, Any] = {} if cluster is None else {"play": player_on(cluster, say)}

        def play(cells: Sequence[predicting.Planned]) -> None:
            predicting.play_missing(cells, folder, kernel, say=say, **on)

        play(planned)
        rounds = churned.play_rounds(planned, play, lambda cell: predicting.result_of(cell, folder))
    frame = predicting.predictions(planned, folder)
    frame.to_csv(folder / "cells.csv", index=False, float_format="%.6g")
    paths.give_to_user(folder / "cells.csv")
    if rounds:
        csv_rows.write_rows(folder / churned.FILE, churned.RoundRow._fields, rounds, digits=9)
        paths.give_to_user(folder / churned.FILE)
    rows = []
    for row in frame.itertuples():
        step = "not played" if row.step_s != row.step_s else f"{row.step_s:.4g} s"
        ideal = "not known" if row.ideal_s != row.ideal_s else f"{row.ideal_s:.4g} s"
        rows.append((row.grid, row.cell, step, ideal, _source(row)))
    print_table(("grid", "cell", "step", "ideal", "known from"), rows, right=("step", "ideal"))
    if unsettled := int(frame.unsettled.sum()):
        say(
            f"{unsettled} of these cells are not settled: their step time still drifts by more than "
            f"{predicting.SETTLED:.0%}, so a longer run would give another result. Raise their number of steps."
        )


def _source(row: Any) -> str:
    if not row.steps_counted:
        return ""
    if row.repeats:
        return "steps that repeat to the nanosecond"
    drifts = "" if row.drift != row.drift else f", drifting by {row.drift:.2%}"
    return f"{row.steps_counted} step{'s' * (row.steps_counted > 1)}{drifts}"
