"""Commands about this machine and its links."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.markup import escape

from testbed import profiles, units, vm
from testbed.commands.console import (
    EngineFlag,
    TopologyFlag,
    choose_engine,
    lab_spec,
    need_clock_kernel,
    one_of,
    out,
    print_table,
    say,
    typed,
    warn_of_buffers,
)
from testbed.errors import CapabilityError, TestbedError, UnknownNameError, UserError

if TYPE_CHECKING:
    from testbed.net.machine.capabilities import Capability

_MESSAGES = ["256KiB", "4MiB"]
_CLOCKS = ("real", "virtual")
_LOOK_S = 1.0
"""How often a standing lab is looked after."""


def doctor() -> None:
    """Try everything that sweeps and labs need on this machine, and say what mends each thing that is missing."""
    from testbed.net.machine import capabilities, remedies, rootless

    if os.geteuid() != 0:  # as commands that need a lab do; where it is refused, the first attempt says so
        with contextlib.suppress(CapabilityError):
            rootless.enter()
    facts = remedies.facts()
    say(f"{remedies.platform(facts)}, kernel {facts.release}")
    rows = []
    findings = (*capabilities.try_capabilities(), _clock_kernel())
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]no[/]" if finding.needed else "[yellow]no[/]"
        found = escape(finding.detail + (f"\n-> {finding.remedy}" if finding.remedy else ""))
        rows.append((mark, finding.name, found))
    print_table(("", "what", "found"), rows)
    missing = [finding.name for finding in findings if finding.needed and not finding.ok]
    ready, said = readiness(missing, virtual_clock=findings[-1].ok)
    say(said if missing else f"{said}; --engine auto takes {choose_engine('auto')[0]}")
    if not ready:
        raise typer.Exit(1)


def readiness(missing: list[str], *, virtual_clock: bool) -> tuple[bool, str]:
    """Say whether sweeps can run here, and on which clocks. `missing`: what is needed and not there."""
    if not missing:
        return True, f"ready; --clock auto takes {'virtual' if virtual_clock else 'real'}"
    if virtual_clock and "the invoking user" not in missing:
        lacking = ", ".join(missing)
        return True, f"ready for played sweeps, on the virtual clock; not for live runs, link and lab: {lacking}"
    return False, f"not ready: {', '.join(missing)}"


def _clock_kernel() -> Capability:
    from testbed.net.machine.capabilities import Capability

    kernel, ok = vm.find_clock_kernel(), True
    try:
        if os.environ.get("TESTBED_GUEST") == "1":
            detail = "a guest cannot run another"
        elif kernel is None:
            detail = f"{vm.virtual_clock()}: by the first sweep, or by python -m testbed vm --build"
        else:
            started = time.monotonic()
            vm.try_kernel(kernel)
            took_s = time.monotonic() - started
            detail = f"Linux {kernel.version}, boots, runs `true` and ends in {took_s:.1f} s"
    except (TestbedError, OSError) as error:
        ok, detail = (
            False,
            f"without its guest kernel sweeps take the real clock: {error}" if kernel is None else str(error),
        )
    return Capability(name="virtual clock", ok=ok, needed=False, detail=detail, remedy="")


def stand(
    profile: Annotated[list[str], typer.Argument(help="Name or path of a profile: one for all links, or one a link.")],
    nodes: Annotated[int, typer.Option(help="How many nodes.")] = 2,
    topology: TopologyFlag = "star",
    engine: EngineFlag = "auto",
) -> None:
    """Build a lab and let it stand until Ctrl-C, to try things by hand: `testbed shell node-0` opens a shell inside."""
    from testbed.net.lab import Lab
    from testbed.spec import Topology
    from testbed.sweep.environment import hold_machine

    one_of("topology", topology, get_args(Topology))
    wanted = tuple(profiles.load_profile(name) for name in profile)
    chosen, reason = choose_engine(engine)
    say(f"engine {chosen}: {reason}")
    links = {"topology": topology, "profiles": wanted, "nodes": nodes}
    spec = lab_spec("the lab asked for", **links, engine=chosen, engine_reason=reason)
    with hold_machine(), Lab(spec) as lab:
        ends = [(link, link.near, link.far) for link in lab.links]
        print_table(
            ("link", "profile", "from", "address", "to", "address"),
            ((link.name, link.profile.name, a.namespace, a.address, b.namespace, b.address) for link, a, b in ends),
        )
        if any(link.profile.varies for link in lab.links):
            lab.play()
            say("schedules and traces play from now on")
        say(f"open a shell: {typed('shell', lab.nodes[0].name)}; take the lab down: Ctrl-C (process {os.getpid()})")
        try:
            while True:
                time.sleep(_LOOK_S)
                lab.check()
        except KeyboardInterrupt:
            say("taken down")


def shell(
    node: Annotated[str, typer.Argument(help="A node, `hub` or `gateway-0`. Without it: what there is.")] = "",
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="Run this instead of $SHELL.")
    ] = None,
    pid: Annotated[int | None, typer.Option(help="Process of the lab, where several run. Else the newest.")] = None,
) -> None:
    """Open a shell inside a running lab, a sweep's too, as root of that network."""
    from testbed.net.directory import run_inside, running_labs

    labs = sorted(running_labs(), key=lambda lab: lab.started, reverse=True)
    if not labs:
        raise UserError(f"no lab runs here that you may enter; start one with: {typed('lab', 'cable')}")
    if pid is not None and not (labs := [lab for lab in labs if lab.pid == pid]):
        raise UserError(f"process {pid} has no lab; `{typed('shell')}` lists those that run")
    if not node:
        listed = [(str(lab.pid), lab.started, " ".join(lab.namespaces)) for lab in labs]
        print_table(("process", "started", "namespaces"), listed, right=("process",))
        return
    lab = labs[0]
    if node not in lab.namespaces:
        raise UnknownNameError("namespace in that lab", node, lab.namespaces)
    words = command or []
    words = words[1:] if words[:1] == ["--"] else words  # it ends our options, and stays where a node stands before it
    run_inside(lab.pid, lab.namespaces[node], words or [os.environ.get("SHELL", "/bin/sh")])


def link(
    profile: Annotated[str, typer.Argument(help="Name of a profile, or the path of a profile file.")],
    engine: EngineFlag = "auto",
    clock: Annotated[
        str, typer.Option(help="real: measured on this machine. virtual: in a guest whose clock is exact, with netem.")
    ] = "real",
    quick: Annotated[bool, typer.Option("--quick", help="The short form that every run gets, under 3 s.")] = False,
    message: Annotated[list[str], typer.Option(metavar="SIZE", help="Message sizes, e.g. 256KiB.")] = _MESSAGES,
    pcap: Annotated[
        Path | None, typer.Option(help="Keep the packets at both ends in this pcapng file, for Wireshark.")
    ] = None,
    overrides: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change the profile, e.g. up.rate=40Mbit.")
    ] = [],  # noqa: B006
) -> None:
    """Build one link, certify it, and print asked against measured."""
    one_of("clock", clock, _CLOCKS)
    if clock == "virtual" and (quick or pcap is not None or engine == "relay"):
        raise UserError("--clock virtual goes with neither --quick, --pcap nor --engine relay: leave them out")
    from testbed.net.capture.transits import transits
    from testbed.net.lab import Lab, LabSpec
    from testbed.play.certify import certify_virtual
    from testbed.report.certificates import certificate_summary, certificate_table
    from testbed.sweep.bounded_steps import reference_step
    from testbed.sweep.environment import hold_machine

    wanted = profiles.load_profile(profile, overrides)
    sizes = [units.parse_size(size) for size in message]
    if clock == "virtual":
        kernel = need_clock_kernel()
        say(f"clock virtual: guest kernel {kernel.version}, engine netem")
        (certificate,) = certify_virtual([wanted], kernel)
        certificate = reference_step(wanted, "netem", min(sizes)).assess(certificate)
    else:
        warn_of_buffers([("line", [wanted])])
        chosen, reason = choose_engine(engine)
        say(f"engine {chosen}: {reason}")
        step = reference_step(wanted, chosen, min(sizes))
        asked = LabSpec(topology="star", profiles=(wanted,), nodes=1, engine=chosen, engine_reason=reason)
        with hold_machine(), Lab(asked) as lab:
            certificate = lab.certify("quick" if quick else "full", sizes, pcap, step=step)
    out.print(certificate_table(certificate))
    if pcap is not None:
        crossed = [
            (each.name, str(each.sent), str(each.arrived), *(f"{value:.3f}" for value in each.transit_ms))
            for each in transits(pcap)
        ]
        headings = ("packets that crossed", "sent", "arrived", "p1 ms", "median ms", "p99 ms")
        print_table(headings, crossed, right=headings[1:3])
    say(certificate_summary(wanted.name, certificate))
    if certificate.verdict != "PASS":
        raise typer.Exit(1)
