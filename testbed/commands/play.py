"""The `play` command: plays a job's trace over links, e.g. a cluster's job over home links."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from testbed import paths, profiles, units, vm
from testbed.commands.console import (
    EngineFlag,
    SiteFlag,
    TopologyFlag,
    choose_engine,
    lab_spec,
    need_clock_kernel,
    one_of,
    print_table,
    read_sites,
    refuse_engine,
    say,
    warn_of_buffers,
)
from testbed.errors import LabError, SpecError
from testbed.player.split import StepSplit, repeated, step_split
from testbed.records import LabRecord
from testbed.spec import Topology
from testbed.trace.format import Trace

if TYPE_CHECKING:
    from testbed.player.play_job import PlayJob

_CLOCKS = ("auto", "virtual", "real")
_AGAIN = 20
"""Repetitions of a single-step trace: only the first step starts with small TCP windows."""


def play(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A trace, or NAME.et for the Chakra traces NAME.0.et, NAME.1.et, ...")
    ],
    profile: Annotated[
        list[str], typer.Option(help="Profile of all links, or A+B+C, one per link. Repeat to compare networks.")
    ],
    topology: TopologyFlag = "star",
    site: SiteFlag = [],  # noqa: B006
    clock: Annotated[str, typer.Option(help="virtual, real, or auto: virtual if its kernel is installed.")] = "auto",
    engine: EngineFlag = "auto",
    link_seeds: Annotated[int, typer.Option(help="Number of seeds for links with random loss or rate.", min=1)] = 1,
    repeat: Annotated[int | None, typer.Option(help="Play the whole trace this many times in a row.", min=1)] = None,
    flops: Annotated[str | None, typer.Option(help="NPU speed, for .et files without durations.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File for the times of all operations; with several plays, a folder."),
    ] = None,
) -> None:
    """Play a job's trace over links: step times, each node's work and waits, and traffic."""
    from testbed.player.guests import play_jobs
    from testbed.sweep.environment import hold_machine

    one_of("topology", topology, get_args(Topology))
    one_of("clock", clock, _CLOCKS)
    if output is not None and output.exists() and file.exists() and output.samefile(file):
        raise SpecError(f"-o {output} would overwrite the trace; name another file")
    trace = _load(file, flops)
    again = repeat or (_AGAIN if trace.steps == 1 else 1)
    if again > 1:
        trace = repeated(trace, again)
        say(f"the trace is played {again} times in a row")
    kernel = need_clock_kernel() if clock == "virtual" else vm.find_clock_kernel() if clock == "auto" else None
    refuse_engine(engine, kernel)
    with paths.scratch_folder("testbed-play-") as folder:
        trace.write(folder / "trace")
        jobs = _jobs(trace, folder, profile, topology, site, link_seeds, output, None if kernel else engine)
        say(_clock_words(clock, kernel))
        warn_of_buffers((job.lab.topology, job.lab.distinct) for job in jobs)
        with nullcontext() if kernel else hold_machine():
            outcomes = play_jobs(
                jobs, clock="virtual" if kernel else "real", folder=folder / "work", kernel=kernel, guests=2
            )
        for job, outcome in zip(jobs, outcomes, strict=True):
            if outcome.error is not None:
                links = "+".join(link.name for link in job.lab.profiles)
                raise LabError(f"the trace could not be played over {links}: {outcome.error}")
        _print(trace, jobs, profile)
        if output is not None:
            for path in (output, *(output.rglob("*") if output.is_dir() else ())):
                paths.give_to_user(path)


def _load(file: Path, flops: str | None) -> Trace:
    from testbed.trace.chakra import load_chakra
    from testbed.trace.check import load_trace

    if file.suffix == ".et":
        trace = load_chakra(file, flops_per_s=units.parse_flops(flops) if flops else None)
        say(f"ignored: {trace.about['ignored']}")
    else:
        trace = load_trace(file)
    if not any(map(len, trace.lanes)):
        raise SpecError(f"{file} has no operations, so there is nothing to play")
    return trace


def _clock_words(clock: str, kernel: vm.GuestKernel | None) -> str:
    if kernel is not None:
        return f"clock virtual: guest kernel {kernel.version}"
    missing = "the kernel with a virtual clock runs on x86-64 only"
    return f"clock real: {'asked for' if clock == 'real' else missing}"


def _jobs(
    trace: Trace,
    folder: Path,
    networks: Sequence[str],
    topology: str,
    sites: Sequence[str],
    seeds: int,
    output: Path | None,
    engine: str | None,
) -> list[PlayJob]:
    """Return a job for each network and seed; one seed if nothing is random. SpecError for links that make no lab."""
    from testbed.player.play_job import PlayJob

    chosen, reason = ("netem", "the guest's only one") if engine is None else choose_engine(engine)
    alone = len(networks) * seeds == 1 and not (output is not None and output.is_dir())
    jobs = []
    for number, network in enumerate(networks):
        links = tuple(profiles.load_profile(name) for name in profiles.split_networks(network))
        asked = {"topology": topology, "profiles": links, "nodes": len(trace.nodes), "sites": read_sites(sites)}
        lab = lab_spec(f"the links {network}", **asked, engine=chosen, engine_reason=reason)
        for seed in range(seeds):
            kept = (output or folder / "played") if alone else (output or folder) / f"{number}-seed-{seed}.played"
            jobs.append(PlayJob(trace=folder / "trace", lab=lab, link_seed=seed, output=kept))
            if jobs[-1].repeatable:
                break  # every seed is the same
    return jobs


def _print(trace: Trace, jobs: Sequence[PlayJob], networks: Sequence[str]) -> None:
    from testbed.trace.played import read_played
    from testbed.trace.simulate import simulate, step_ends

    ideal = step_ends(trace, simulate(trace), trace.steps)
    ideal_ns = (ideal[-1] - ideal[0]) / (trace.steps - 1) if trace.steps > 1 else ideal[-1]
    rows = []
    splits: list[StepSplit] = []
    left = list(jobs)
    for network in networks:
        plays = [read_played(left.pop(0).output)]
        for each in LabRecord.model_validate(plays[0].lab).background or ():
            say(f"background on {each.words}")
        while left and left[0].link_seed:
            plays.append(read_played(left.pop(0).output))
        here = [step_split(trace, played) for played in plays]
        steps_ns = [split.step_ns for split in here]
        step = units.format_time(mean(steps_ns))
        if len(plays) > 1:
            step += f" ({units.format_time(min(steps_ns))} to {units.format_time(max(steps_ns))})"
        sent = units.format_size(mean(split.sent_bytes for split in here))
        rows.append((network, step, units.format_time(ideal_ns), sent, _source(here, plays[0].steady)))
        splits += here[:1]
    print_table(("links", "step", "without a network", "sent per step", "known from"), rows)
    if len(networks) == 1:
        _print_nodes(trace, splits[0])


def _source(splits: Sequence[StepSplit], steady: tuple[int, int] | None) -> str:
    if steady is not None:
        period = "every step" if steady[1] == 1 else f"every {steady[1]} steps"
        return f"proved: from step {steady[0]} on, {period} the same to the nanosecond"
    count, cycle = len(splits[0].steps_ns), splits[0].cycle
    known = f"the median of {count} steps" if count > 1 else "one step"
    if cycle > 1:
        known = f"{count} steps, averaged over cycles of {cycle}"
    return known + (f", mean and range of {len(splits)} seeds" if len(splits) > 1 else "")


def _print_nodes(trace: Trace, split: StepSplit) -> None:
    columns = ("works", "waits for messages", "waits for others", "sent per step", "received per step")
    rows = []
    for name, node in zip(trace.nodes, split.nodes, strict=True):
        times = (node.works_ns, node.waits_for_messages_ns, node.waits_for_events_ns)
        sizes = (node.sent_bytes, node.received_bytes)
        rows.append((name, *map(units.format_time, times), *map(units.format_size, sizes)))
    print_table(("node", *columns), rows, right=columns[:-1])
