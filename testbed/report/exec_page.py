"""Reports the run of a program in the nodes of a lab: lines for a terminal, and a page that needs no network."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from testbed.exec.order import ExecResult, step_times
from testbed.report.certificate_text import certificate_summary
from testbed.report.numbers import MISSING, size
from testbed.report.templates import write_page

_DRAWN_NS = 1_000_000_000
"""Shorter jobs get no figure, because drawing one takes half a second."""
_SHOWN_STEPS = 200


class LinkRow(NamedTuple):
    """One direction of a link, as text."""

    link: str
    way: str
    profile: str
    packets: str
    size: str
    dropped: str
    utilisation: str


def summary_lines(result: ExecResult) -> Iterator[str]:
    """Yield a summary for a terminal: the reason for the job's end, the outcome of each node, steps, certificates."""
    yield f"{result.reason}; {result.lasted_ns / 1e9:.9g} s of the lab's time"
    for node in result.nodes:
        if node.status:
            yield f"{node.name}, status {node.status}, last output:"
            yield from (f"    {line}" for line in node.last_words)
            yield from (f"    {hint}" for hint in hints(node.last_words))
        if node.left:
            left = f"{', '.join(node.left[:5])} ({len(node.left)})"
            yield f"{node.name} left processes behind, which were terminated: {left}"
    if result.lost_files:
        listed = ", ".join(result.lost_files[:3])
        yield (
            f"{len(result.lost_files)} files were written outside the shared folders and are lost: "
            f"{listed}; keep them with --share FOLDER"
        )
    for name, times in step_times(result).items():
        later = times[1:] or times
        yield f"{name}: {len(times)} steps, median {median(later) / 1e6:.6f} ms, last {times[-1] / 1e6:.6f} ms"
    yield from (lines.splitlines()[0] for lines in certificate_lines(result))


def hints(last_words: tuple[str, ...]) -> Iterator[str]:
    """Yield hints on differences between a node and a terminal that a program's last output suggests."""
    said = "\n".join(last_words)
    if "EOF when reading a line" in said or "not a tty" in said or "Inappropriate ioctl for device" in said:
        yield "(programs in nodes have no terminal, and their standard input is empty)"
    if "Read-only file system" in said:
        yield "(the guest writes to the current folder and to those of --share only)"
    if "Cannot allocate memory" in said or "MemoryError" in said:
        yield "(give the guest more with --memory)"


def certificate_lines(result: ExecResult) -> Iterator[str]:
    """Yield the evidence for the links."""
    names = ("before", "after") if result.order.clock == "real" else ("links",)
    for name, certificate in zip(names, result.certificates, strict=False):
        yield certificate_summary(name, certificate)
    if not result.certificates:
        yield "links: settings read back from the kernel; nothing was measured (--no-certify)"
    for each in result.lab.background or ():  # which did not run while links were certified
        yield f"background on {each.words}"


def write_exec_page(folder: Path, result: ExecResult) -> Path:
    """Write report.html, with a figure of the links' traffic, into the folder of the result."""
    picture, caption = None, ""
    if result.lasted_ns > _DRAWN_NS:
        from testbed.report.exec_figure import draw

        picture, caption = draw(folder, result)
    return write_page(
        folder / "report.html",
        "exec",
        title=_title(result),
        result=result,
        seconds=result.lasted_ns / 1e9,
        profiles=", ".join(profile.name for profile in result.order.lab.profiles),
        nodes=[
            (node, shlex.join(node.command), node.ended_ns / 1e9, list(hints(node.last_words)), _counted(node.left))
            for node in result.nodes
        ],
        links=list(_links(result)),
        matrix=_matrix(result),
        steps={name: [f"{ns / 1e6:.6f}" for ns in times[:_SHOWN_STEPS]] for name, times in step_times(result).items()},
        operations=list(_operations(result)),
        observed=shlex.quote(f"{folder}/torch"),
        certificates=list(certificate_lines(result)),
        picture=picture,
        caption=caption,
    )


def _title(result: ExecResult) -> str:
    """Return the command; of several the first, as its node ran it."""
    first, *others = dict.fromkeys(result.order.commands)
    if not others:
        return shlex.join(first)
    return f"{shlex.join(result.nodes[0].command)}, and {len(others)} other command{'s' * (len(others) > 1)}"


def _counted(names: Sequence[str]) -> str:
    return ", ".join(name + f" ({count})" * (count > 1) for name, count in Counter(names).items())


def _operations(result: ExecResult) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of operations."""
    for each in result.operations:
        wire = "?" if each.wire_bytes is None else size(each.wire_bytes)
        waited = f"{each.waited_ns / 1e9:.3f}" if each.waited_ns else MISSING
        yield each.what, f"{each.operations:,}", size(each.payload_bytes), wire, waited


def _links(result: ExecResult) -> Iterator[LinkRow]:
    for (name, ways), profile in zip(result.links.items(), result.order.links, strict=True):
        for way, counts in ways.items():
            pipe = profile.pipe(way)  # type: ignore[arg-type]
            share = "" if pipe is None else f"{100 * counts.bytes * 8e9 / pipe.rate_bps / result.lasted_ns:.1f} %"
            dropped = counts.dropped_buffer + (counts.dropped_loss or 0)
            yield LinkRow(name, way, profile.name, f"{counts.packets:,}", size(counts.bytes), f"{dropped:,}", share)


def _matrix(result: ExecResult) -> list[tuple[str, list[str]]]:
    """Return the traffic from each sender to each node, as text."""
    sent = {(talk.source, talk.target): talk for talk in result.talks}
    count = len(result.nodes)

    def cell(source: int, target: int) -> str:
        talk = sent.get((source, target))
        if talk is None:
            return ""
        again = f", {size(talk.retransmitted_bytes)} again" if talk.retransmitted_bytes else ""
        return f"{size(talk.payload_bytes)}{again} ({talk.connections})"

    return [(node.name, [cell(number, target) for target in range(count)]) for number, node in enumerate(result.nodes)]
