"""The `exec` command: runs an unmodified program in the nodes of a lab, over its links."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from pydantic import JsonValue

from testbed import faults, paths, profiles, results, units, vm
from testbed.codecs.catalogue.placement import parse_placement
from testbed.commands.console import (
    EngineFlag,
    SiteFlag,
    TopologyFlag,
    choose_clock,
    choose_engine,
    err,
    lab_spec,
    need_clock_kernel,
    one_of,
    read_sites,
    refuse_engine,
    say,
    warn_of_buffers,
    writing,
)
from testbed.devices import load_device
from testbed.errors import LabError, SpecError, UserError
from testbed.process import command_line, start_program
from testbed.spec import Topology, link_names

if TYPE_CHECKING:
    from testbed.exec.order import ExecOrder, ExecResult
    from testbed.net.lab import LabSpec
    from testbed.records import Certificate

CODED = ("p2p", "all_reduce", "all_gather", "reduce_scatter")
"""`testbed.torch.coded.OPERATIONS`, without torch."""
_PROGRAM = "testbed.exec.inside"
_HOST_LIMIT_S = 3600.0
_REFUSED = 2


def execute(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="Command of every node.", show_default=False)
    ] = None,
    profile: Annotated[str, typer.Option(help="Profile of all links, or A+B+C, one per link.")] = "cable",
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes; default: as the profiles need.")] = None,
    topology: TopologyFlag = "star",
    site: SiteFlag = [],  # noqa: B006
    engine: EngineFlag = "auto",
    clock: Annotated[str, typer.Option(help="virtual (exact), real, or auto: virtual where possible.")] = "auto",
    per_node: Annotated[
        Path | None, typer.Option(help="File of one command per node, with lines `0: COMMAND`, `1-3: ...`, `*: ...`.")
    ] = None,
    ends_with: Annotated[
        str, typer.Option(help="End the job when the programs of these nodes end: 1 or 1,2. Default: all.")
    ] = "",
    time_limit: Annotated[float, typer.Option(help="Stop the job after these seconds of the lab's time.")] = 3600.0,
    host_limit: Annotated[
        float | None, typer.Option(help="Stop everything after these seconds of real time; default: at least 3600.")
    ] = None,
    step_pattern: Annotated[
        str | None, typer.Option(help="Regular expression of the output lines that end a step.")
    ] = None,
    fault: Annotated[
        list[str],
        typer.Option(metavar="ROW", help='Fault of links, as in docs/faults.md: \'at="9s", for="2s", outage=true\'.'),
    ] = [],  # noqa: B006
    env: Annotated[list[str], typer.Option("--env", metavar="NAME=VALUE", help="Set a variable in every node.")] = [],  # noqa: B006
    memory: Annotated[str, typer.Option(help="Memory of the guest, on the virtual clock.")] = "4G",
    share: Annotated[
        list[Path], typer.Option(help="Folder that programs in the guest may write to, besides the current one.")
    ] = [],  # noqa: B006
    observe: Annotated[
        bool,
        typer.Option("--observe", help="PyTorch: record collectives, messages, steps; on the real clock modules too."),
    ] = False,
    codec: Annotated[
        str | None, typer.Option(help="PyTorch: encode the messages, e.g. 'p2p: int8; all_reduce: ef(topk(0.01))'.")
    ] = None,
    pace: Annotated[
        str | None, typer.Option(help="PyTorch: pace modules, as in the recording in this folder, or on this device.")
    ] = None,
    separate: Annotated[
        bool, typer.Option("--separate", help="Start a separate interpreter for every Python program; slower.")
    ] = False,
    certify: Annotated[
        bool, typer.Option(help="On the real clock: certify the links before and after, about 3 s each.")
    ] = True,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for the report; default: results/exec/N.")
    ] = None,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Save bytes, packets, steps: a baseline.")] = None,
    check: Annotated[Path | None, typer.Option(help="Compare with a baseline; exit status 1 if they differ.")] = None,
    threshold: Annotated[str, typer.Option(help="With --check: largest accepted relative difference.")] = "1%",
) -> None:
    """Run an unmodified program in every node of a lab: torchrun, or anything that uses a network.

    Exits with the status of the first node that fails. {node}, {nodes}, {address}, {addresses} and {server} in the
    command are replaced; the environment has the same (TESTBED_NODE ...), and the variables of torchrun and gloo.
    """
    from testbed.exec.order import ExecOrder
    from testbed.exec.regressions import differences, numbers, read_numbers, write_numbers
    from testbed.sweep.environment import hold_machine

    started = time.monotonic()
    one_of("topology", topology, get_args(Topology))
    if not all(0 < seconds < math.inf for seconds in (time_limit, 1 if host_limit is None else host_limit)):
        raise SpecError("--time-limit and --host-limit are seconds above 0")
    _check_pattern(step_pattern)
    for rule in codec.split(";") if codec is not None else ():
        operation, colon, text = rule.partition(":")
        if not colon:
            raise SpecError(f"--codec: {rule.strip()!r} is no rule; write OPERATION: CODEC, as in 'p2p: int8'")
        one_of("operation of --codec", operation.strip(), CODED)
        parse_placement(text.strip())
    if pace is not None and not Path(pace).exists():
        load_device(pace)
    off_by, baseline = units.parse_fraction(threshold), None if check is None else read_numbers(check)
    links = tuple(profiles.load_profile(name) for name in profiles.split_networks(profile))
    count = nodes or max(2, len(links) + (topology == "line" and len(links) > 1))  # a line has a link less than nodes
    commands = _commands(command, per_node, count)
    chosen_clock, clock_reason = choose_clock(clock)
    say(f"clock {chosen_clock}: {clock_reason}")
    kernel = need_clock_kernel() if chosen_clock == "virtual" else None
    refuse_engine(engine, kernel)
    limit_s = host_limit or _HOST_LIMIT_S + (0 if kernel else time_limit)
    if save is not None:
        results.make_folder(save.absolute().parent, "name another file")
    chosen, reason = ("netem", "the virtual clock's") if kernel else choose_engine(engine)
    if kernel is None:
        say(f"engine {chosen}: {reason}")
    lab = lab_spec(
        f"the links {profile}",
        topology=topology,
        profiles=links,
        nodes=count,
        sites=read_sites(site),
        engine=chosen,
        engine_reason=reason,
    )
    lab = _with_faults(lab, fault)
    warn_of_buffers([(lab.topology, lab.distinct)])
    last, variables = _ends_with(ends_with, count), _environment(env)
    folder = _folder(output)
    order = ExecOrder(
        lab=lab,
        clock=chosen_clock,
        commands=tuple(commands),
        folder=str(folder.resolve()),
        time_limit_s=time_limit,
        ends_with=last,
        step_pattern=step_pattern,
        environment=variables,
        torch=_torch(folder, observe=observe, codec=codec, pace=pace, computes=kernel is None),
        certify=certify and kernel is None,
        separate=separate,
        coloured=sys.stdout.isatty(),
    )
    results.write_json(folder / "order.json", order)
    made = folder.resolve().stat()
    if kernel is not None:
        _in_a_guest(kernel, folder, memory, [folder, *share], limit_s)
    else:
        with hold_machine(say):
            _here(folder, limit_s)
    if not os.path.samestat(made, folder.resolve().stat()):
        raise LabError(f"a program replaced the folder of the report, {folder}")
    result = _finish(folder, kernel, started)
    if result.status:
        raise typer.Exit(result.status)
    if save is not None:
        with writing("the baseline", save):
            write_numbers(numbers(result), save)
        say(f"baseline: {save}")
    if baseline is not None:
        changed = list(differences(numbers(result), baseline, off_by))
        for line in changed:
            say(line)
        say(f"{len(changed)} numbers differ from {check} by more than {threshold}" if changed else f"same as {check}")
        if changed:
            raise typer.Exit(1)


def _commands(command: Sequence[str] | None, per_node: Path | None, count: int) -> list[tuple[str, ...]]:
    """Return the command of each node. SpecError if the options contradict each other."""
    from testbed.exec.order import parse_commands

    words = list(command or [])
    words = words[1:] if words[:1] == ["--"] else words
    if bool(words) == (per_node is not None):
        raise SpecError("add -- and the command of every node, or pass --per-node FILE; exactly one of them")
    if per_node is None:
        return [tuple(words)] * count
    try:
        text = per_node.read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot read the commands in {per_node}: {error}") from None
    listed = parse_commands(text, str(per_node))
    if beyond := [node for node in listed if node >= count]:
        raise SpecError(f"{per_node} has a command for node {max(beyond)} of only {count} nodes; raise --nodes")
    commands = []
    for node in range(count):
        if (line := listed.get(node, listed.get(-1))) is None:
            raise SpecError(f"{per_node} has no command for node {node}; add a line `{node}: COMMAND` or `*: COMMAND`")
        try:
            commands.append(tuple(shlex.split(line)))
        except ValueError as error:
            raise SpecError(f"{per_node}: cannot split the command of node {node}, {line!r}: {error}") from None
    return commands


def _with_faults(lab: LabSpec, rows: Sequence[str]) -> LabSpec:
    """Return a lab whose links have the faults of --fault. SpecError or UnknownNameError for one that cannot be."""
    from testbed.net.lab_plan import profiles_of_links

    names = link_names(lab.topology, lab.nodes, lab.sites)
    links = dict(zip(names, profiles_of_links(lab.profiles, lab.topology, lab.nodes, lab.sites), strict=True))
    try:
        stated = faults.read_faults([tomllib.loads(f"row = {{ {row} }}")["row"] for row in rows], links, "exec") or ()
        faults.check_faults(stated, links, lab.nodes)
    except ValueError as error:
        raise SpecError(f"--fault: {error}") from None
    on_links = tuple(fault for fault in stated if isinstance(fault, faults.LinkFault))
    worse = [faults.with_faults(profile, name, on_links) for name, profile in links.items()]
    count = len(worse) - len(lab.sites or ())
    sites = zip(lab.sites or (), worse[count:], strict=True)
    joined = tuple(site.model_copy(update={"profile": profile}) for site, profile in sites) or None
    return lab.model_copy(update={"profiles": tuple(worse[:count]), "sites": joined}) if stated else lab


def _check_pattern(pattern: str | None) -> None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise SpecError(f"--step-pattern {pattern!r} is not a regular expression: {error}") from None


def _ends_with(text: str, count: int) -> tuple[int, ...]:
    if not text:
        return tuple(range(count))
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) < count for word in words):
        raise SpecError(f"--ends-with {text!r} does not list nodes from 0 to {count - 1}; write for example 1,2")
    return tuple(sorted({int(word) for word in words}))


def _environment(pairs: Sequence[str]) -> dict[str, str]:
    split = [pair.partition("=") for pair in pairs]
    if wrong := [pair for pair, (name, equals, _) in zip(pairs, split, strict=True) if not (name and equals)]:
        raise SpecError(f"--env {wrong[0]!r} is not NAME=VALUE")
    return {name: value for name, _, value in split}


def _torch(folder: Path, *, observe: bool, codec: str | None, pace: str | None, computes: bool) -> dict[str, JsonValue]:
    """Return the settings of `testbed.torch.autoload`; empty: programs run without it. `computes`: computing takes
    time on this clock, so the durations of modules are worth recording.
    """
    wanted: dict[str, JsonValue] = {"codec": codec} if codec is not None else {}
    if observe and computes:
        wanted["record"] = True
    if pace is not None:
        file = Path(pace)
        wanted["pace"] = (
            {"mode": "recorded", "file": str(file.resolve())} if file.exists() else {"mode": "flops", "device": pace}
        )
    if observe or wanted:
        results.make_folder(folder / "torch")
        wanted["folder"] = str((folder / "torch").resolve())
    return wanted


def _folder(output: Path | None) -> Path:
    """Create the folder of the report: the requested one, or the next in results/exec."""
    if output is not None:
        if (output / "report.html").exists():
            raise UserError(f"{output} has the result of another run; choose another folder with -o")
        folder = results.make_folder(output, "choose another with -o")
        for left in (folder / "exec.json", *folder.glob("torch/rank-*.jsonl")):  # of a command that was killed
            left.unlink(missing_ok=True)
        return folder
    above = results.make_folder(Path("results/exec"), "choose another with -o")
    with paths.locked(above / ".lock"):  # another command may choose at the same time
        taken = [int(path.name) for path in above.iterdir() if path.name.isdecimal()]
        return results.make_folder(above / str(max(taken, default=0) + 1), "choose another with -o")


def _in_a_guest(kernel: vm.GuestKernel, folder: Path, memory: str, share: Sequence[Path], limit_s: float) -> None:
    arguments = command_line(_PROGRAM, str(folder.resolve() / "order.json"))
    with vm.start_guest(
        kernel, arguments, memory=memory, share=share, virtual_clock=True, time_limit_s=limit_s
    ) as guest:
        status = guest.wait()
    _check_status(status, folder, limit_s)


def _here(folder: Path, limit_s: float) -> None:
    """Run the lab and its programs in a process namespace, so that nothing outlives this process."""
    order = str(folder.resolve() / "order.json")
    process = start_program(_PROGRAM, order, "--alone", attempt="run the lab", stdin=subprocess.DEVNULL)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        status = 124
    finally:
        process.kill()
        process.wait()
    _check_status(status, folder, limit_s)


def _check_status(status: int, folder: Path, limit_s: float) -> None:
    """Raise the error of the lab, if any; errors of programs are in the result."""
    if (folder / "exec.json").exists():
        return
    if status == 124:
        raise LabError(f"everything was stopped after {limit_s:g} s of real time (--host-limit); see {folder}")
    if status == _REFUSED:
        raise typer.Exit(_REFUSED)
    killed = f" by {signal.Signals(-status).name}" if status < 0 else ""
    raise LabError(f"the lab ended with status {status}{killed} before the end of the job; see {folder}")


def _finish(folder: Path, kernel: vm.GuestKernel | None, started: float) -> ExecResult:
    """Add the certificates, write the report, and print a summary."""
    from testbed.exec.observed import with_observations
    from testbed.exec.order import RESULT, ExecResult
    from testbed.report.exec_page import summary_lines, write_exec_page

    result = results.read_json(folder / RESULT, ExecResult)
    added: dict[str, object] = {"seconds": time.monotonic() - started}
    if kernel is not None:
        added["certificates"] = (_virtual_certificate(result.order, kernel),)
    result = with_observations(result.model_copy(update=added), folder)
    results.write_json(folder / RESULT, result)
    page = write_exec_page(folder, result)
    for line in summary_lines(result):
        say(line)
    if result.order.torch.get("codec") and not [*(folder / "torch").glob("rank-*.jsonl")]:
        why = "no program made a process group in a Python that has torch and testbed"
        say(f"testbed: --codec did nothing: {why}", on=err, style="red")
    say(f"report: {page}; {units.format_duration(result.seconds)} of this machine")
    return result


def _virtual_certificate(order: ExecOrder, kernel: vm.GuestKernel) -> Certificate:
    from testbed.player.certify_links import certify_virtual, network_certificate

    distinct = list(dict.fromkeys(order.links))
    known = dict(zip(distinct, certify_virtual(distinct, kernel), strict=True))
    return network_certificate(link_names(order.lab.topology, order.lab.nodes, order.lab.sites), order.links, known)
