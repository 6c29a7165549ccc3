"""Commands about this machine and its links."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.text import Text

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
from testbed.errors import CapabilityError, SpecError, TestbedError, UnknownNameError, UserError

if TYPE_CHECKING:
    from testbed.net.machine.capabilities import Capability

_MESSAGES = ["256KiB", "4MiB"]
_CLOCKS = ("real", "virtual")
_LOOK_S = 1.0
"""Interval at which a running lab is checked."""


def doctor() -> None:
    """Check everything that sweeps and labs need on this machine, and print a remedy for each missing part."""
    from testbed.net.machine import capabilities, remedies, rootless

    if os.geteuid() != 0:  # as lab commands do; if this is refused, the first capability check reports it
        with contextlib.suppress(CapabilityError):
            rootless.enter()
    facts = remedies.facts()
    say(f"{remedies.platform(facts)}, kernel {facts.release}")
    rows = []
    findings = (*capabilities.try_capabilities(), _clock_kernel())
    for finding in findings:
        mark = Text("ok", "green") if finding.ok else Text("no", "red" if finding.needed else "yellow")
        rows.append((mark, finding.name, finding.detail + (f"\n-> {finding.remedy}" if finding.remedy else "")))
    print_table(("", "check", "result"), rows)
    missing = [finding.name for finding in findings if finding.needed and not finding.ok]
    ready, said = readiness(missing, virtual_clock=findings[-1].ok)
    say(said if missing else f"{said}; --engine auto chooses {choose_engine('auto')[0]}")
    if not ready:
        raise typer.Exit(1)


def readiness(missing: list[str], *, virtual_clock: bool) -> tuple[bool, str]:
    """Return whether sweeps can run here, and a line that names the clocks. `missing`: the failed required checks."""
    if not missing:
        return True, f"ready; --clock auto chooses {'virtual' if virtual_clock else 'real'}"
    if virtual_clock and "the invoking user" not in missing:
        lacking = ", ".join(missing)
        return True, f"ready for played sweeps on the virtual clock; live runs, link and lab lack: {lacking}"
    return False, f"not ready: {', '.join(missing)}"


def _clock_kernel() -> Capability:
    from testbed.net.machine.capabilities import Capability

    ok, altered = True, False
    try:
        if os.environ.get("TESTBED_GUEST") == "1":
            detail = "a guest cannot run another guest"
        else:
            started = time.monotonic()
            detail = f"{vm.virtual_clock()}; boots, runs `true` and halts in {time.monotonic() - started:.1f} s"
    except (TestbedError, OSError) as error:
        ok, altered, detail = False, isinstance(error, SpecError), str(error)
    return Capability(name="virtual clock", ok=ok, needed=altered, detail=detail, remedy="")


def stand(
    profile: Annotated[
        list[str], typer.Argument(help="Names or paths of profiles: one for all links, or one per link.")
    ],
    nodes: Annotated[int, typer.Option(help="How many nodes.")] = 2,
    topology: TopologyFlag = "star",
    engine: EngineFlag = "auto",
) -> None:
    """Build a lab and keep it until Ctrl-C, for experiments by hand: `testbed shell node-0` opens a shell inside."""
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
        if any(link.profile.varies or link.home for link in lab.links):
            lab.play()
            say("rate schedules, traces and background flows start now")
        say(f"open a shell: {typed('shell', lab.nodes[0].name)}; take the lab down: Ctrl-C (process {os.getpid()})")
        try:
            while True:
                time.sleep(_LOOK_S)
                lab.check()
        except KeyboardInterrupt:
            say("taken down")


def shell(
    node: Annotated[str, typer.Argument(help="A node, `hub` or `gateway-0`. Default: list the running labs.")] = "",
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="Run this instead of $SHELL.")
    ] = None,
    pid: Annotated[int | None, typer.Option(help="Process of the lab, if several run. Default: the newest.")] = None,
) -> None:
    """Open a shell inside a running lab, also one of a sweep, as root of its network."""
    from testbed.net.directory import run_inside, running_labs

    labs = sorted(running_labs(), key=lambda lab: lab.started, reverse=True)
    if not labs:
        raise UserError(f"no running lab here is accessible to you; start one with: {typed('lab', 'cable')}")
    if pid is not None and not (labs := [lab for lab in labs if lab.pid == pid]):
        raise UserError(f"process {pid} has no lab; `{typed('shell')}` lists the running labs")
    if not node:
        listed = [(str(lab.pid), lab.started, " ".join(lab.namespaces)) for lab in labs]
        print_table(("process", "started", "namespaces"), listed, right=("process",))
        return
    lab = labs[0]
    if node not in lab.namespaces:
        raise UnknownNameError("namespace in that lab", node, lab.namespaces)
    words = command or []
    words = words[1:] if words[:1] == ["--"] else words  # typer keeps a -- that follows the node
    run_inside(lab.pid, lab.namespaces[node], words or [os.environ.get("SHELL", "/bin/sh")])


def link(
    profile: Annotated[str, typer.Argument(help="Name of a profile, or the path of a profile file.")],
    engine: EngineFlag = "auto",
    clock: Annotated[
        str, typer.Option(help="real: measure on this machine. virtual: play in a guest with an exact clock and netem.")
    ] = "real",
    quick: Annotated[bool, typer.Option("--quick", help="Certify in under 3 s, as before every run.")] = False,
    message: Annotated[list[str], typer.Option(metavar="SIZE", help="Message size to time, e.g. 256KiB.")] = _MESSAGES,
    pcap: Annotated[
        Path | None, typer.Option(help="Capture the packets at both ends to this pcapng file, for Wireshark.")
    ] = None,
    overrides: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. up.rate=40Mbit.")
    ] = [],  # noqa: B006
) -> None:
    """Build one link, certify it, and print the requested against the measured values."""
    one_of("clock", clock, _CLOCKS)
    if clock == "virtual" and (quick or pcap is not None or engine not in ("auto", "netem")):
        raise UserError("--clock virtual cannot be combined with --quick, --pcap or another engine; omit those")
    from testbed.net.capture.transits import transits
    from testbed.net.lab import Lab, LabSpec
    from testbed.player.certify_links import certify_virtual
    from testbed.report.certificate_text import certificate_summary, certificate_table
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
