"""Runs the places of a job over loopback, each in a thread; or makes a forked process one of a lab's nodes."""

from __future__ import annotations

import itertools
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from testbed.jobs.actions import Job, Node
from testbed.jobs.kind import Setting
from testbed.jobs.loop import Observer
from testbed.jobs.pipeline import Ended
from testbed.net.kernel import namespace
from testbed.process import die_with_parent
from testbed.records import StepRecord
from testbed.runtime.control_plane import EvaluationDone, StepDone
from testbed.runtime.ending import Ending, Stops
from testbed.runtime.gather import Gather, make_sockets
from testbed.runtime.live import Live
from testbed.runtime.pacing import Line, Takes
from testbed.runtime.place_job import Endpoint, Limits, PlaceJob, jobs
from testbed.runtime.transport import Connection
from testbed.spec import Cell
from testbed.training.kinds import Training, training_of
from testbed.training.place import run_place

PATIENCE_S = 20.0


def become_node(space: int, own: Any, sockets: Iterable[Any]) -> None:
    """Make a process that was forked a node of a lab: in its namespace, with its own sockets alone, and one thread."""
    die_with_parent(os.getppid())
    namespace.enter(space)
    for sock in (each for others in sockets for each in others if others is not own):
        sock.close()
    torch.set_num_threads(1)


class Ran(NamedTuple):
    returned: list[Any]
    errors: list[BaseException | None]


def tcp_server() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with tcp_server() as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def over_loopback(
    job: Job,
    nodes: Sequence[Node],
    *,
    names: Sequence[str],
    observers: Sequence[Observer] = (),
    ending: Ending | None = None,
    takes: Callable[[int], Takes | None] = lambda place: None,
    dilation: int = 1,
    timeout_s: float = PATIENCE_S,
) -> Ran:
    """Run all places, each with a connection to every other. `observers` by place, or none."""
    places = range(len(job.places))
    sockets: list[dict[int, socket.socket]] = [{} for _ in places]
    for one, other in itertools.combinations(places, 2):
        sockets[one][other], sockets[other][one] = tcp_pair()
    gathers, ran = make_sockets(len(places)), Ran([None for _ in places], [None for _ in places])

    def run(place: int) -> None:
        try:
            with ExitStack() as stack:
                gather = Gather(place, gathers[place], timeout_s)
                stack.callback(gather.close)
                peers = {
                    peer: stack.enter_context(
                        Connection(
                            sock,
                            name=f"{job.places[place]} <-> node {peer}",
                            token=bytes(16),
                            names=names,
                            max_payload_bytes=1 << 20,
                            max_frames=64,
                        )
                    )
                    for peer, sock in sorted(sockets[place].items())
                }
                live = Live(
                    place,
                    nodes[place],
                    peers,
                    gather=gather,
                    ending=ending or Stops(lambda: False),
                    line=lambda: Line(takes(place), dilation),
                    timeout_s=timeout_s,
                    observers=observers[place : place + 1],
                )
                ran.returned[place] = live.run(job.program(place))
                for peer in sorted(peers, key=lambda peer: sorted((peer, place))):
                    peers[peer].close(timeout_s)
        except BaseException as error:
            ran.errors[place] = error

    in_threads(run, places)
    return ran


def in_threads(run: Callable[[int], None], places: Iterable[int]) -> None:
    threads = [threading.Thread(target=run, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class RanPlaces(NamedTuple):
    """How a cell's places came out; by place, but for `told`."""

    ended: list[Ended | None]
    errors: list[BaseException | None]
    records: list[list[StepRecord]]
    told: list[StepDone | EvaluationDone]


def jobs_over_loopback(cell: Cell, folder: Path, vocabulary: int = 96, **changes: Any) -> tuple[PlaceJob, ...]:
    """Return a cell's jobs; `changes` are of what `jobs` is told."""
    ends = [tcp_server() for _ in range(cell.nodes)]
    asked: dict[str, Any] = {
        "endpoints": tuple(Endpoint(address="127.0.0.1", port=end.getsockname()[1]) for end in ends),
        "token": "0" * 32,
        "vocabulary": vocabulary,
        "tokens": "",
        "folder": str(folder),
        "devices": ((),) * cell.nodes,
        "overhead_bytes": 0,
        "limits": Limits(connect_s=3 * PATIENCE_S, message_s=3 * PATIENCE_S),
    }
    for end in ends:
        end.close()
    return jobs(cell, **{**asked, **changes})


def run_places(
    cell: Cell,
    make: Callable[[Setting], Training] = training_of,
    *,
    asked: Callable[[int], bool] = lambda place: False,
    told: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> RanPlaces:
    """Run all places of a cell, each in a thread, with Unix and TCP sockets as in a lab. `make` makes their training,
    `asked` says whether a person asks a place for the end; `told`: fields of all jobs; `changes` as in
    `jobs_over_loopback`.
    """
    ran = RanPlaces([None] * cell.nodes, [None] * cell.nodes, [], [])
    with tempfile.TemporaryDirectory() as folder:
        work, sockets = jobs_over_loopback(cell, Path(folder), **changes), make_sockets(cell.nodes)

        def run(place: int) -> None:
            job = PlaceJob.model_validate_json(work[place].model_copy(update=told).model_dump_json())  # as it travels
            try:
                ran.ended[place] = run_place(job, sockets[place], ran.told.append, lambda: asked(place), make)
            except BaseException as error:
                ran.errors[place] = error

        in_threads(run, range(cell.nodes))
        ran.records.extend(read_steps(Path(folder), place) for place in range(cell.nodes))
    return ran


def nodes_of(training: Training) -> dict[int, Node]:
    """Return a training's nodes, by place, once it has made them."""
    nodes, made = dict[int, Node](), training.node

    def node(place: int, *of: Any) -> Node:
        nodes[place] = made(place, *of)
        return nodes[place]

    training.node = node  # type: ignore[method-assign]
    return nodes


def read_steps(folder: Path, place: int) -> list[StepRecord]:
    path = folder / f"steps-{place}.jsonl"
    lines = path.read_text(encoding="utf8").splitlines() if path.exists() else []
    return [StepRecord.model_validate_json(line) for line in lines]
