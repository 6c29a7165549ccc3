"""The `reproduce` command: reruns an experiment's sweeps, programs and figures, with a verdict for each claim."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.rule import Rule

from testbed import paths, process
from testbed.commands.cluster import AddressFlag, ExecutorFlag, RuntimeEnvFlag, cluster_words
from testbed.commands.console import DeviceFlag, ResultsFlag, err, one_of, out, say, table
from testbed.errors import TestbedError, UnknownNameError
from testbed.results import make_folder
from testbed.spec import TrainingDevice
from testbed.units import format_duration

if TYPE_CHECKING:
    from testbed.devices import ComputeDevice
    from testbed.devices.device import Precision
    from testbed.report.claims import Claim
    from testbed.sweep.reproduction import Reproduction, Step

    Host = Callable[[Precision], ComputeDevice]

_ALL = "all"
_RULE = 120
"""Longest line above an experiment: a file's lines are as long as a table needs."""
_PACKAGE = Path(__file__).resolve().parents[1]


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...]", help="Experiments to reproduce, or 'all'; see --list.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the experiments: work left, time, claims.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run the short forms, in a separate folder, to check that everything works.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Run finished programs again.")] = False,
    device: DeviceFlag = "",
    results: ResultsFlag = Path("results"),
    executor: ExecutorFlag = "local",
    address: AddressFlag = None,
    runtime_env: RuntimeEnvFlag = None,
) -> None:
    """Run an experiment's sweeps and programs, draw its figures, and print a verdict for each of its claims.

    Finished work is kept, so after an interruption the same command resumes. CSVs and figures go to
    results/NAME/drawn; nothing in the experiment's folder is touched.
    """
    from testbed.sweep.reproduction import load_reproduction, reproducible

    cluster = cluster_words(executor, address, runtime_env)
    if device:
        one_of("device", device, get_args(TrainingDevice))
    known = reproducible()
    for name in set(names or ()) - {_ALL, *known}:
        raise UnknownNameError("experiment", name, [*known, _ALL])
    wanted = [name for name in known if not names or _ALL in names or name in names]
    if show or not names:
        return _list([load_reproduction(name, results, quick=quick) for name in wanted], quick=quick)
    failed: dict[str, int] = {}
    if quick and len(wanted) > 1:
        flags = ["--quick", "--results", str(results), *["--again"] * again, *(["--device", device] if device else [])]
        failed = _side_by_side(wanted, [*flags, *cluster])
    else:
        for name in wanted:
            experiment = load_reproduction(name, results, quick=quick)
            out.print(Rule(name, align="left"), width=min(out.width, _RULE))
            if status := _make(experiment, cluster, quick=quick, again=again, device=device):
                failed[name] = status
            else:
                _print_verdicts(experiment, quick=quick)
    if failed:
        lost = f"a step of {', '.join(failed)}; the same command resumes there"
        say(f"testbed: failed: {lost}", on=err, style="red")
        raise typer.Exit(1 if set(failed.values()) - {2} else 2)
    return None


def _side_by_side(names: Sequence[str], flags: Sequence[str]) -> dict[str, int]:
    """Reproduce short forms, whose times mean nothing, in processes of their own, as many at once as there are cores;
    print what each says once it has ended, in order. Returns the exit statuses of those that failed.
    """
    command, failed = [sys.executable, "-P", "-m", "testbed", "reproduce", *flags], dict[str, int]()

    def made(name: str) -> tuple[int, str]:
        with tempfile.TemporaryFile("w+", encoding="utf8") as said:
            status = _run([*command, name], stdout=said, stderr=subprocess.STDOUT)
            said.seek(0)
            return status, said.read()

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            for name, (status, said) in zip(names, pool.map(made, names), strict=True):
                say(said.rstrip())
                failed |= {name: status} if status else {}
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    return failed


# ------------------------------------------------------------------ steps
def _make(experiment: Reproduction, cluster: Sequence[str], *, quick: bool, again: bool, device: str) -> int:
    """Run the steps of an experiment; return the exit status of the first that fails, or 0. `cluster`: flags of the
    cluster for sweeps and predictions.
    """
    from testbed.report.claims import FILE

    for folder in (experiment.all_results, experiment.results, experiment.output):
        make_folder(folder)
    (experiment.output / FILE).unlink(missing_ok=True)  # verdicts must belong to the current results
    for step in experiment.steps:
        if not again and experiment.is_kept(step):
            say(f"{step.words[0]}: done before; --again runs it again")
            continue
        command = step.command(experiment.all_results, quick=quick, device=device)
        command += cluster if step.sweep is not None else ()
        say(f"$ {shlex.join(command)}")
        began = time.monotonic()
        # A program may lie in the current folder, whose code root does not run for sudo.
        status = _run(command, **paths.as_invoking_user() if step.program is not None else {})
        say(f"{step.words[0]}: {time.monotonic() - began:.0f} s, exit status {status}")
        if status:
            return status if status == 2 else 1
        if step.keeps:
            experiment.stamp_file(step).write_text(experiment.stamp(step), "utf8")
    return 0


def _run(command: Sequence[str], **options: Any) -> int:
    """Run a command to its end and return its exit status. `options` go to Popen. Ctrl-C reaches the command too; this
    waits for its end.

    The command is terminated if this program is killed.
    """
    interrupted = False
    path = os.pathsep.join([str(_PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])  # this same testbed
    environment = {**os.environ, "PYTHONPATH": path}
    dies = partial(process.die_with_parent, os.getpid(), signal.SIGTERM)
    with subprocess.Popen(command, env=environment, preexec_fn=dies, **options) as running:
        while True:
            try:
                status = running.wait()
                break
            except KeyboardInterrupt:
                interrupted = True
    if interrupted:
        raise KeyboardInterrupt
    return status


# ------------------------------------------------------------------ verdicts
def _claims(path: Path) -> list[Claim]:
    from testbed.report.claims import read_claims

    return read_claims(path) if path.is_file() else []


def _print_verdicts(experiment: Reproduction, *, quick: bool) -> None:
    from testbed.report.claims import FILE, ours

    claims = _claims(experiment.output / FILE)
    kept = {(claim.claim, claim.source): claim.verdict for claim in _claims(experiment.folder / FILE)}
    for claim in claims:
        before = kept.get((claim.claim, claim.source), claim.verdict)
        differs = "" if before == claim.verdict or quick else f" (committed: {before})"
        published = f"{claim.source}: {claim.published}; " if claim.published else f"{claim.source}; "
        say(f"{claim.verdict}{differs}: {claim.claim} [{published}here {ours(claim)}]")
        say(f"  {claim.why}")
    if not claims:
        say("no claim was judged from these results")
    elif quick:
        say("this was the short form: it checks that everything works; its verdicts mean nothing")
    say(f"figures and CSVs: {experiment.output}")


# ------------------------------------------------------------------ list
def _list(experiments: Sequence[Reproduction], *, quick: bool) -> None:
    from testbed import devices
    from testbed.report.claims import FILE

    rows = table("experiment", "to do", "takes", "claims committed", "verdicts here")
    rows.columns[-2].no_wrap = False  # both may be long, and are read together
    host = cache(devices.host)
    for experiment in experiments:
        left, seconds = [], 0.0
        for step in experiment.steps:
            todo, takes_s = _outlook(experiment, step, host, quick=quick)
            left += [todo] if todo else []
            seconds += takes_s
        counts = (_counted(_claims(path)) for path in (experiment.folder / FILE, experiment.output / FILE))
        takes = format_duration(seconds) if seconds else ""
        rows.add_row(experiment.name, ", ".join(left) or "nothing", takes, *counts)
    out.print(rows)
    say("python -m testbed reproduce NAME reproduces one")


def _outlook(experiment: Reproduction, step: Step, host: Host, *, quick: bool) -> tuple[str, float]:
    """Describe the remaining work of a step; return it with its predicted seconds."""
    from testbed.commands import planned
    from testbed.predict import cells
    from testbed.sweep import conduct
    from testbed.sweep.plan import Choice, load_experiment

    takes_s = step.takes_s or 0.0
    if step.sweep is None:
        return ("", 0.0) if experiment.is_kept(step) else (step.words[0] * step.keeps, takes_s)
    try:
        if step.predicts:
            missing = cells.count_missing(cells.plan_cells(str(step.sweep), quick=quick), experiment.results)
            return f"{missing} cells" if missing else "", takes_s
        loaded = load_experiment(str(step.sweep))
        agenda = conduct.make_agenda(loaded, "relay", Choice(quick), experiment.results, clock="virtual")
        runs, seconds = planned.predicted(agenda, experiment.results, host)
    except TestbedError as error:
        # What is missing, without the settings of the cell that needs it: the command itself states those too.
        return re.sub(r"^cell .*?: (?=model )", "", str(error)), takes_s if step.predicts else 0.0
    return f"{runs} runs" if runs else "", seconds


def _counted(claims: Sequence[Claim]) -> str:
    counts = Counter(claim.verdict for claim in claims)
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "none"
