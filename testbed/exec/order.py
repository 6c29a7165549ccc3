"""The order to run programs in a lab's nodes, and its result."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import Field, JsonValue

from testbed.errors import SpecError
from testbed.frozen import Frozen
from testbed.net.lab import LabSpec
from testbed.net.lab_plan import profiles_of_links
from testbed.profiles import LinkProfile
from testbed.records import Certificate, LabRecord, LinkCounters
from testbed.spec import Clock

_NODE: Final = re.compile(r"\d{1,9}", re.ASCII)

MASTER_PORT: Final = 29500
"""Port of torchrun's rendezvous, at the first node."""
RESULT: Final = "exec.json"
COUNTERS: Final = "counters.jsonl"


class ExecOrder(Frozen):
    """A command for each node of a lab."""

    lab: LabSpec
    clock: Clock
    commands: tuple[tuple[str, ...], ...]
    """One per node, with placeholders."""
    folder: str
    """Absolute path of the folder for the result."""
    time_limit_s: float = Field(gt=0)
    """In the lab's time."""
    ends_with: tuple[int, ...]
    """The job ends when these nodes' programs have ended; the others are then terminated."""
    step_pattern: str | None = None
    """A regular expression; each output line that matches ends a step of that node."""
    environment: dict[str, str] = Field(default={})
    """Variables for every node, in addition to the caller's and the node's own."""
    torch: dict[str, JsonValue] = Field(default={})
    """Settings of `testbed.torch.autoload` in PyTorch programs; empty: do not load it."""
    certify: bool = False
    """On the real clock: measure the links before and after the programs run."""
    separate: bool = False
    """Start each Python program with its own interpreter, instead of as a fork."""
    coloured: bool = False

    @property
    def links(self) -> tuple[LinkProfile, ...]:
        """The profile of each link."""
        return profiles_of_links(self.lab.profiles, self.lab.topology, self.lab.nodes, self.lab.sites)


class NodeOutcome(Frozen):
    """The outcome of one node's program. Times are in the lab's time, since the start of all programs."""

    name: str
    address: str
    command: tuple[str, ...]
    status: int | None
    """Exit status, 128 + n for signal n; None: terminated at the end of the job."""
    ended_ns: int
    steps_ns: tuple[int, ...] = ()
    """End times of its steps, according to the pattern."""
    last_words: tuple[str, ...] = ()
    """The last lines of its output."""
    left: tuple[str, ...] = ()
    """Names of the processes that still ran in the node at the end of the job."""


class Talk(Frozen):
    """TCP traffic from one node to another."""

    source: int
    target: int
    payload_bytes: int
    """Bytes sent, each counted once."""
    retransmitted_bytes: int
    connections: int


class ObservedOperation(Frozen):
    """All operations of one name of an observed PyTorch job, over all ranks."""

    what: str
    operations: int
    payload_bytes: int
    """Bytes of the tensors."""
    wire_bytes: int | None
    """TCP payload that gloo sends for them; None if it does not follow from the sizes."""
    waited_ns: int


class ExecResult(Frozen):
    """The result of an order; times are in the lab's time."""

    order: ExecOrder
    status: int
    """Exit status of the first node to fail; 124: the time limit was reached; 0: none failed."""
    reason: str
    """Reason for the job's end, as a sentence."""
    lasted_ns: int
    started_at_ns: int
    """The lab's CLOCK_MONOTONIC at the start of all programs."""
    nodes: tuple[NodeOutcome, ...]
    links: dict[str, dict[str, LinkCounters]]
    talks: tuple[Talk, ...]
    operations: tuple[ObservedOperation, ...] = ()
    lost_files: tuple[str, ...] = ()
    """Files written outside the shared folders, which a guest does not keep."""
    lab: LabRecord
    certificates: tuple[Certificate, ...] = ()
    """Before and after the run; on the virtual clock a single one, for the links."""
    seconds: float = 0.0
    """Total time on this machine."""


def fill_in(command: Sequence[str], node: int, addresses: Sequence[str]) -> list[str]:
    """Return a node's command with its placeholders replaced: {node}, {nodes}, {address}, {addresses}, {server}.

    Other braces stay as they are.
    """
    known = {
        "{node}": str(node),
        "{nodes}": str(len(addresses)),
        "{address}": addresses[node],
        "{addresses}": ",".join(addresses),
        "{server}": addresses[0],
    }

    def filled(word: str) -> str:
        for name, value in known.items():
            word = word.replace(name, value)
        return word

    return [filled(word) for word in command]


def node_environment(node: int, addresses: Sequence[str], device: str) -> dict[str, str]:
    """Return the environment of a node's program, with which torchrun and gloo need no arguments.

    `device`: the node's end of the link that leads to the other nodes.
    """
    return {
        "TESTBED_NODE": str(node),
        "TESTBED_NODES": str(len(addresses)),
        "TESTBED_ADDRESS": addresses[node],
        "TESTBED_ADDRESSES": ",".join(addresses),
        "TESTBED_DEVICE": device,
        "PET_NNODES": str(len(addresses)),
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": addresses[0],
        "PET_MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": device,
        "TP_SOCKET_IFNAME": device,
        "PYTHONUNBUFFERED": "1",
    }


def parse_commands(text: str, where: str) -> dict[int, str]:
    """Parse a file with separate commands for nodes: lines `0: COMMAND`, `1-3: COMMAND`, `*: COMMAND`.

    Returns the commands by node; -1 stands for `*`, every node without its own line. Skips empty lines and `#`
    comments. SpecError names the line.
    """
    commands: dict[int, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        nodes, colon, command = line.partition(":")
        first, dash, last = nodes.strip().partition("-")
        every = nodes.strip() == "*"
        numbered = _NODE.fullmatch(first) and (_NODE.fullmatch(last) or not dash)
        if not (colon and command.strip() and (every or numbered)):
            raise SpecError(f"{where}, line {number}: {line.strip()!r} is not `NODE: COMMAND`; write 0:, 1-3: or *:")
        span = (-1, -1) if every else (int(first), int(last or first))
        if span[1] - span[0] >= 1000:
            raise SpecError(f"{where}, line {number}: {nodes.strip()} is more nodes than a lab has")
        for node in range(span[0], span[1] + 1):
            if node in commands:
                raise SpecError(f"{where}, line {number}: node {nodes.strip()} already has a command; remove one")
            commands[node] = command.strip()
    return commands


def step_times(result: ExecResult) -> Mapping[str, list[int]]:
    """Return the duration of each step from the second on, in nanoseconds, by node."""
    return {
        node.name: [after - before for before, after in itertools.pairwise(node.steps_ns)]
        for node in result.nodes
        if len(node.steps_ns) > 1
    }
