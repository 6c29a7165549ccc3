"""The faults of a cell: what fails, when and for how long; and in which runs each kind of fault is exact.

In an experiment file they are rows `[[cell.fault]]`. A row may state a mean time between failures instead of a time:
its faults are drawn when the plan is made, so a cell holds explicit faults. The pipes of a cell's links have them.
"""

from __future__ import annotations

import functools
import operator
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from pydantic import Field

from testbed import units
from testbed.directions import LINK_DIRECTIONS, EitherOrBoth, LinkDirection
from testbed.errors import SpecError, UnknownNameError
from testbed.frozen import Frozen, is_none, validated
from testbed.profiles import LinkProfile, PipeFault
from testbed.profiles.ranges import LONGEST_NS, MomentNs, PeriodNs

MOST: Final = 1000
"""Maximum number of faults of a cell."""
ALL: Final = "all"
_OF_NODE = ("node", "stop", "slow", "kill", "frame")
_WHERE, _WHEN, _DRAWN = ("link", "way"), ("at", "for"), ("mtbf", "until", "seed")
_SAFE_S: Final = 60


class FaultKind(NamedTuple):
    """A row of the table of faults: what it is, and how exact it is in each kind of run."""

    meaning: str
    played: str
    live_virtual: str
    live_real: str
    exec: str


EXACT: Final = "exact"
REFUSED: Final = "refused, because "
_LATE = "approximate"
_NO_EXEC = REFUSED + "exec has faults of links only"
_EXEC = f"{EXACT}; {_LATE} on the real clock"
_OF_LINKS = (EXACT, EXACT, _LATE, _EXEC)
_OF_NETEM = (EXACT, EXACT, f"{_LATE}, engine netem only", f"{_EXEC}, engine netem only")
_OF_NODES = (EXACT, _LATE, _NO_EXEC)
_OF_GUESTS = (
    REFUSED + "one process plays all nodes",
    REFUSED + "all nodes share the guest's kernel, so it would hit all of them",
    REFUSED + "all nodes share this machine's kernel, so it would hit other programs",
    _NO_EXEC,
)
KINDS: Final[Mapping[str, FaultKind]] = {
    "outage": FaultKind("every packet is lost; the devices stay up", *_OF_LINKS),
    "rate": FaultKind("the rate collapses, for what waits, too", *_OF_LINKS),
    "loss": FaultKind("packets are lost independently, by the link's seed", *_OF_LINKS),
    "delay": FaultKind("the delay rises", *_OF_LINKS),
    "reorder": FaultKind("packets overtake the queue", *_OF_NETEM),
    "duplicate": FaultKind("packets arrive twice", *_OF_NETEM),
    "corrupt": FaultKind("a bit of a packet is inverted; a checksum finds it, so it is a loss", *_OF_NETEM),
    "kill": FaultKind("a node's process is killed", REFUSED + "one process plays all nodes", *_OF_NODES),
    "stop": FaultKind("a node neither computes nor reads nor sends for a while; its kernel does", EXACT, *_OF_NODES),
    "slow": FaultKind("a node's work takes several times as long", EXACT, *_OF_NODES),
    "frame": FaultKind(
        "a node's next message, above TCP, is damaged, repeated, missing or of another run (foreign)",
        REFUSED + "the player sends sizes, not frames",
        *_OF_NODES,
    ),
    "disk_full": FaultKind("a node's disk is full", *_OF_GUESTS),
    "clock_step": FaultKind("a node's clock is set", *_OF_GUESTS),
    "out_of_memory": FaultKind("a node's memory runs out", *_OF_GUESTS),
}
"""Every kind of fault, by its key in a row."""


def _outage(on: object) -> float:
    if on is not True:
        raise SpecError(f"{on!r} is not true; remove it, or state true")
    return 1.0


_READERS: Final[Mapping[str, tuple[str, Callable[[object], Any]]]] = {
    "outage": ("loss", _outage),
    "rate": ("rate_bps", units.parse_rate),
    "delay": ("delay_ns", units.parse_time),
    **{name: (name, units.parse_fraction) for name in ("loss", "reorder", "duplicate", "corrupt")},
}


class LinkFault(PipeFault):
    """A fault of a link. Times and rates are those of the emulated world."""

    link: str
    """Its name, as in certificates: node-0 in a star, boundary-0 in a line, site-0."""
    way: EitherOrBoth

    def of_pipe(self, link: str, way: LinkDirection) -> PipeFault | None:
        """Return the fault of one direction of a link; None if it is another's."""
        if self.link != link or self.way not in (way, "both"):
            return None
        return PipeFault(**self.model_dump(exclude={"link", "way"}))

    @property
    def words(self) -> str:
        """What happens, where and when."""
        parts = []
        for name, value in self.effects.items():
            write: Any = {"rate_bps": units.format_rate, "delay_ns": units.format_time}.get(name, units.write_fraction)
            parts.append("outage" if (name, value) == ("loss", 1) else f"{name.split('_')[0]} {write(value)}")
        where = self.link if self.way == "both" else f"{self.link} {self.way}"
        return f"{where}: {', '.join(parts)} at {units.format_time(self.at_ns)} for {units.format_time(self.for_ns)}"


class NodeFault(Frozen):
    """A node is stopped or slow for a while, or killed, or its next message is spoiled. Times are those of the emulated
    world.
    """

    node: int = Field(ge=0)
    at_ns: MomentNs
    for_ns: PeriodNs
    slow: float | None = Field(default=None, gt=1, le=1000, exclude_if=is_none)
    """Multiple of the durations of its work; None: it is stopped, or killed."""
    kill: bool = Field(default=False, exclude_if=operator.not_)
    """Its process is killed; `for_ns` is then longer than any run."""
    frame: Literal["damaged", "repeated", "missing", "foreign"] | None = Field(default=None, exclude_if=is_none)
    """What becomes of its next message, to whomever; `for_ns` is then 1."""

    @property
    def end_ns(self) -> int:
        """Its end."""
        return self.at_ns + self.for_ns

    @property
    def stops(self) -> bool:
        """Whether its node does nothing meanwhile."""
        return self.slow is None and self.frame is None

    @property
    def words(self) -> str:
        """What happens, where and when."""
        at = f"at {units.format_time(self.at_ns)}"
        if self.kill:
            return f"node {self.node}: killed {at}"
        if self.frame is not None:
            return f"node {self.node}: next message {self.frame} {at}"
        what = "stopped" if self.slow is None else f"{self.slow:g} times as slow"
        return f"node {self.node}: {what} {at} for {units.format_time(self.for_ns)}"

    def dilated(self, factor: int) -> NodeFault:
        """Return it with time dilated by `factor`."""
        return self.model_copy(update={"at_ns": self.at_ns * factor, "for_ns": self.for_ns * factor})


def goes_on_ns(faults: Iterable[NodeFault], at_ns: int) -> int:
    """Return when a node goes on that is stopped at a time; that time if it is not. `faults` are the node's."""
    return next((f.end_ns for f in faults if f.stops and f.at_ns <= at_ns < f.end_ns), at_ns)


def worked_ns(faults: Iterable[NodeFault], at_ns: int, work_ns: int) -> int:
    """Return when work ends that a node begins at a time. `faults` are the node's, by time."""
    for fault in faults:
        if at_ns >= fault.end_ns or fault.frame is not None:
            continue
        if at_ns + work_ns <= fault.at_ns:
            break
        before_ns = max(0, fault.at_ns - at_ns)
        at_ns, work_ns = at_ns + before_ns, work_ns - before_ns
        meanwhile_ns = 0 if fault.slow is None else int((fault.end_ns - at_ns) / fault.slow)
        if work_ns <= meanwhile_ns:
            return at_ns + round(work_ns * (fault.slow or 1))
        at_ns, work_ns = fault.end_ns, work_ns - meanwhile_ns
    return at_ns + work_ns


Fault = LinkFault | NodeFault


@functools.lru_cache(maxsize=256)
def with_faults(profile: LinkProfile, link: str, faults: tuple[LinkFault, ...]) -> LinkProfile:
    """Return a link's profile with its faults in its pipes."""
    changed = dict[str, Any]()
    for way in LINK_DIRECTIONS:
        own = sorted(filter(None, (fault.of_pipe(link, way) for fault in faults)), key=lambda fault: fault.at_ns)
        if own and (pipe := profile.pipe(way)) is not None:
            changed[way] = pipe.model_copy(update={"faults": tuple(own)})
    return profile.model_copy(update=changed) if changed else profile


def patience_s(faults: Iterable[Fault]) -> float:
    """Return the additional time to wait for a message: twice the longest outage, because TCP tries again after up to
    as long as the outage was, or fault of a node, and a minute; 0 without faults.
    """
    long = [fault.for_ns if isinstance(fault, NodeFault) or fault.loss == 1 else 0 for fault in faults]
    return 2 * max((ns for ns in long if ns < LONGEST_NS), default=0) / 1e9 + _SAFE_S if long else 0.0


def check_faults(faults: Sequence[Fault], links: Mapping[str, LinkProfile], nodes: int) -> None:
    """Raise ValueError for a fault that these links and nodes cannot have."""
    if len(faults) > MOST:
        raise ValueError(f"there are {len(faults)} faults; at most {MOST} are accepted")
    ends_ns = dict[int, int]()
    for number, fault in enumerate(faults):
        if isinstance(fault, NodeFault):
            if fault.node >= nodes or fault.at_ns < ends_ns.get(fault.node, 0):
                raise ValueError(
                    f"fault[{number}]: node {fault.node} has another fault then, or is none of {nodes} nodes"
                )
            ends_ns[fault.node] = fault.end_ns
            continue
        if fault.link not in links:
            raise ValueError(f"fault[{number}].link is {fault.link!r}; the links are {', '.join(links)}")
        for way in LINK_DIRECTIONS:
            if fault.of_pipe(fault.link, way) is None:
                continue
            if (pipe := links[fault.link].pipe(way)) is None:
                raise ValueError(
                    f"fault[{number}]: {fault.link} {way} is unshaped, so it cannot fail; state the other way"
                )
            better = fault.rate_bps is not None and fault.rate_bps >= pipe.rate_bps
            if better or (fault.delay_ns is not None and fault.delay_ns <= pipe.delay_ns):
                raise ValueError(
                    f"fault[{number}] is no worse than {fault.link} {way}; state a lower rate, a longer delay"
                )


def read_faults(rows: object, links: Mapping[str, LinkProfile], run: str) -> tuple[Fault, ...] | None:
    """Read the rows of a file, in the order of their times; None without any.

    `links`: the profile of each link, by name. `run`: a column of the table of faults. SpecError for a row that cannot
    be made, UnknownNameError for an unknown key.
    """
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise SpecError(
            f"fault must be a list of tables, for example [[cell.fault]] with at, for, outage; found {rows!r}"
        )
    drawn = Counter[tuple[str, object]]()
    faults = [fault for at, row in enumerate(rows) for fault in _read_row(f"fault[{at}]", row, links, run, drawn)]
    return tuple(sorted(faults, key=lambda fault: (fault.at_ns, fault.words))) or None


def _read_row(
    where: str, row: Mapping[str, Any], links: Mapping[str, LinkProfile], run: str, drawn: Counter[tuple[str, object]]
) -> Iterator[Fault]:
    """Yield a row's faults. `drawn`: how many rows before it draw for a link or node from a seed; it counts them."""
    for key in row:
        if key in KINDS and (verdict := getattr(KINDS[key], run)).startswith(REFUSED):
            raise SpecError(f"{where}.{key} is {verdict}")
        if key == "step":
            raise SpecError(f"{where}.step: when a step begins is known only when it runs; state its time with at")
        if key not in (known := (*(_OF_NODE if "node" in row else (*_WHERE, *_READERS)), *_WHEN, *_DRAWN)):
            raise UnknownNameError(f"key of {where}", key, known)
    if "node" in row:
        stop, kill, spoils = row.get("stop") is True, row.get("kill") is True, "frame" in row
        if stop + kill + spoils + ("slow" in row) != 1 or ((kill or spoils) and "for" in row):
            raise SpecError(
                f"{where} must have one of stop = true, slow, a multiple of durations, and, without for, kill = true "
                "or frame"
            )
        for_ns = LONGEST_NS if kill else 1 if spoils else _read(where, row, "for", units.parse_span)
        what = {"node": row["node"], "kill": kill, **{key: row[key] for key in ("slow", "frame") if key in row}}
        for at_ns in _times(where, row, f"node {row['node']}", for_ns, drawn):
            yield validated(NodeFault, {"at_ns": at_ns, "for_ns": for_ns, **what}, where)
        return
    for_ns, way = _read(where, row, "for", units.parse_span), row.get("way", "both")
    named = list(links) if (link := row.get("link", ALL)) == ALL else [link]
    if isinstance(link, int) and 0 <= link < len(links):
        named = [list(links)[link]]
    if unknown := [name for name in named if not isinstance(name, str) or name not in links]:
        raise SpecError(f"{where}.link is {unknown[0]!r}; state a number, 'all', or one of {', '.join(links)}")
    effects: dict[str, Any] = {}
    for key, (name, read) in _READERS.items():
        if key in row:
            effects[name] = _read(where, row, key, read)
    for name in named:
        for at_ns in _times(where, row, f"{[pipe.seed for pipe in links[name].pipes]} {name}", for_ns, drawn):
            yield validated(LinkFault, {"link": name, "way": way, "at_ns": at_ns, "for_ns": for_ns, **effects}, where)


def _times(
    where: str, row: Mapping[str, Any], who: str, for_ns: int, drawn: Counter[tuple[str, object]]
) -> Iterator[int]:
    """Yield when a row's fault begins: once, or after exponential times since the end of the one before, drawn for
    `who` it is, and independently of rows before it.
    """
    if ("at" in row) == ("mtbf" in row):
        raise SpecError(f"{where} must have either at, or mtbf and until")
    if "at" in row:
        yield _read(where, row, "at", units.parse_span)
        return
    mean_ns, until_ns = (_read(where, row, key, units.parse_span) for key in ("mtbf", "until"))
    if not mean_ns or until_ns / (mean_ns + for_ns) > MOST:
        raise SpecError(
            f"{where} makes about {until_ns / max(1, mean_ns + for_ns):.0f} faults; at most {MOST} are accepted"
        )
    seed = row.get("seed", 0)
    draws = random.Random(f"{who}{f' {nth}' if (nth := drawn[who, seed]) else ''} {seed}")
    drawn[who, seed] += 1
    at_ns = draws.expovariate(1 / mean_ns)
    while at_ns < until_ns:
        yield round(at_ns)
        at_ns += for_ns + draws.expovariate(1 / mean_ns)


def _read(where: str, row: Mapping[str, Any], key: str, read: Callable[[object], Any]) -> Any:
    if key not in row:
        raise SpecError(f"{where} lacks {key!r}")
    try:
        return read(row[key])
    except SpecError as error:
        raise SpecError(f"{where}.{key}: {error}") from None


def draw_faults_table() -> str:
    """Return the table of faults, in Markdown."""
    heads = ("fault", "meaning", "played", "live, virtual clock", "live, real clock", "exec")
    rows = [heads, ("---",) * len(heads), *((f"`{key}`", *kind) for key, kind in KINDS.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
