"""Runs a cell and reads results as pandas frames, for notebooks.

`import testbed` offers these functions and imports them lazily.

A cell runs in a separate process, by the command line: a lab needs privileges or a user namespace, which a notebook's
process could not drop again, and Ctrl-C must work as in a terminal.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from testbed import export, results
from testbed.errors import ResultsError, TestbedError, UserError
from testbed.export import table_files
from testbed.process import start_program
from testbed.results import Run

_SUMS = (
    "sent_frames", "sent_raw_bytes", "sent_payload_bytes", "sent_frame_bytes", "sent_wire_bytes", "retransmits",
    "overruns",
)  # fmt: skip
_MEANS = ("forward_s", "backward_s", "local_s", "update_s", "encode_s", "decode_s", "wire_s", "wait_s", "synchronise_s")
_KEY = ["cell_id", "run", "phase", "step"]


def run_cell(
    codec: str = "fp32",
    profile: str = "consumer-80mbps",
    *,
    like: str = "default",
    quick: bool = False,
    engine: str = "auto",
    folder: str | Path = "results",
    fields: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Any:
    """Run one cell, as `python -m testbed run` does, and return its steps: a pandas.DataFrame, see `steps`.

    `codec`: as for `--codec`. `profile`: one for all links, or `cable+lte+cable`, one per link. All other fields are
    those of the experiment `like`, or of its short form, except those in `fields`: {"training.steps": 20,
    "pipeline.stages": 2}. Results go to `folder`/run. `.attrs` of the frame holds `folder` (of the run) and `summary`
    (a dict, see records.Summary). `quiet` suppresses the output of the command.

    If the run fails: UserError or TestbedError, with the output of the command. Ctrl-C (the notebook's stop button)
    ends the run after its current step, or at once if pressed twice.
    """
    home = Path(folder)
    words = ["run", "--codec", codec, "--profile", profile, "--like", like, "--engine", engine, "--results", str(home)]
    words += ["--quick"] if quick else []
    for name, value in (fields or {}).items():
        words += ["--set", f"{name}={json.dumps(value)}"]  # for these values, JSON is valid TOML
    _command(words, quiet=quiet)
    (cell_id,) = results.last_sweep(home / "run").cells
    run = results.finished(home / "run", cell_id)
    summary = None if run is None else run.summary
    if run is None or summary is None:
        raise ResultsError(f"there is no finished run in {home / 'run' / cell_id}, although its command succeeded")
    frame = steps(run.folder)
    frame.attrs |= {"folder": str(run.folder), "summary": summary.model_dump(mode="json")}
    return frame


def load(folder: str | Path = "results/default") -> Any:
    """Return the runs of an experiment's last sweep as a pandas.DataFrame: the cell's fields, the results, the machine.

    Columns are described in testbed/export/README.md.
    """
    return table_files.pandas_frame("runs", _runs(Path(folder)))


def steps(folder: str | Path = "results/default", *, by_stage: bool = False) -> Any:
    """Return the steps of a run, or of all runs of an experiment's last sweep, as a pandas.DataFrame.

    A row is a step or an evaluation of the whole pipeline, with bytes summed and times of activities averaged over the
    stages. `by_stage`: one row per stage. testbed/export/README.md describes the columns.
    """
    frame = table_files.pandas_frame("steps", _runs(Path(folder)))
    if by_stage:
        return frame
    how = (
        dict.fromkeys(_SUMS, "sum")
        | dict.fromkeys(_MEANS, "mean")
        | {"loss": "mean", "accuracy": "last", "tokens": "last", "stage_end_s": "max"}
    )
    how |= dict.fromkeys(("measured", "begin_s", "step_s", "gradient_norm", "learning_rate"), "first")
    grouped = frame.groupby(_KEY, sort=False)
    whole = grouped.agg({name: how[name] for name in frame.columns if name in how and name not in _SUMS})
    sums = grouped[list(_SUMS)].sum(min_count=1)  # a value missing at every stage stays missing
    return whole.join(sums).rename(columns={"stage_end_s": "end_s"}).reset_index()


def _runs(folder: Path) -> Iterable[Run]:
    if (folder / "cell.json").exists():
        return [Run(folder)]
    if not folder.is_dir():
        raise ResultsError(f"there is no result folder {folder}")
    return export.runs_to_export(folder)


def _command(words: list[str], *, quiet: bool) -> None:
    """Run a testbed command. UserError or TestbedError, with its output, if its exit status is not 0."""
    said: list[str] = []
    interrupted = False
    # In a new session, so that an interrupt reaches it once: from here, but not also from the terminal.
    with start_program(
        "testbed", *words, attempt="run the command", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as child:
        while True:
            try:
                for line in child.stdout or ():
                    said.append(line.decode(errors="replace"))
                    if not quiet:
                        sys.stdout.write(said[-1])
                status = child.wait()
                break
            except KeyboardInterrupt:
                interrupted = True
                child.send_signal(signal.SIGINT)
    if interrupted:
        raise KeyboardInterrupt
    if status != 0:
        kind = UserError if status == UserError.exit_status else TestbedError
        raise kind(f"testbed {shlex.join(words)} ended with exit status {status}: {''.join(said)[-2000:].strip()}")
