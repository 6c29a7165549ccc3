"""Runs the places of a job over loopback, each in a thread of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from testbed.jobs.actions import Job, Node
from testbed.jobs.loop import Observer
from testbed.pipeline.gather import Gather, Stops, make_sockets
from testbed.pipeline.live import Ending, Live
from testbed.pipeline.pacing import Takes
from testbed.pipeline.step_log import StepLog
from testbed.pipeline.transport import Connection

PATIENCE_S = 20.0


class Ran(NamedTuple):
    returned: list[Any]
    errors: list[BaseException | None]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def over_loopback(
    job: Job,
    node: Callable[[int, Mapping[int, Connection]], Node],
    *,
    names: Sequence[str],
    pairs: Sequence[tuple[int, int]] | None = None,
    observers: Callable[[int, Mapping[int, Connection], Node], Sequence[Observer]] = lambda place, peers, node: (),
    ending: Callable[[int, Gather], Ending] = lambda place, gather: Stops(None, 1, lambda: False),
    takes: Callable[[int], Takes | None] = lambda place: None,
    dilation: int = 1,
    timeout_s: float = PATIENCE_S,
) -> Ran:
    """Run all places; `pairs` exchange messages, all of them where it is None."""
    places = range(len(job.places))
    if pairs is None:
        pairs = [(one, other) for one in places for other in places if one < other]
    sockets: list[dict[int, socket.socket]] = [{} for _ in places]
    for one, other in pairs:
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
                has = node(place, peers)
                watching = observers(place, peers, has)
                live = Live(
                    place,
                    has,
                    peers,
                    gather=gather,
                    ending=ending(place, gather),
                    takes=takes(place),
                    dilation=dilation,
                    timeout_s=timeout_s,
                    observers=watching,
                )
                ran.returned[place] = live.run(job.program(place))
                for observer in watching:
                    if isinstance(observer, StepLog):
                        observer.finish(timeout_s)
                for peer in sorted(peers, key=lambda peer: sorted((peer, place))):
                    peers[peer].close(timeout_s)
        except BaseException as error:
            ran.errors[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ran
