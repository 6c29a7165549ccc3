"""Sample requests over links in a guest with a virtual clock.

`over_links` starts it as `python -m testbed.diffusion.sample_in_guest FOLDER`.

Each worker is a separate process, forked once; for each request it enters its node of the request's lab, and receives
its connections' sockets. FOLDER has the files of `over_links`, an `Order` and the model's weights; results of request N
go to N-WORKER.safetensors, and the nodes' device counters to N.json.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from testbed.diffusion.dit import TOKENS, Dit, DitSize, start
from testbed.diffusion.experts import ExpertProgram, ExpertWorker
from testbed.diffusion.programs import Program
from testbed.diffusion.workers import Codecs, Conditions, TokenWorker
from testbed.errors import StageError
from testbed.frozen import Frozen
from testbed.jobs.actions import Work
from testbed.jobs.loop import NodeLane
from testbed.jobs.sampling import Actions, Compute, SamplingJob
from testbed.net.kernel.namespace import enter
from testbed.net.lab import Lab, LabSpec
from testbed.player.connections import Connections
from testbed.player.play_in_guest import ONE_PAGE
from testbed.process import die_with_parent, set_timer_slack
from testbed.runtime.ending import Ending
from testbed.runtime.gather import Gather, make_sockets
from testbed.runtime.live import Live
from testbed.runtime.pacing import Line, wait_until
from testbed.runtime.transport import Connection

ORDER: Final = "order.json"
MODEL: Final = "model.safetensors"
_GRID_NS = 1_000_000_000
_PATIENCE_S = 3600.0
"""Timeout on the virtual clock, for workers that are gone."""
_MOST = 16
"""Maximum size of a payload, in multiples of all tokens' hidden states in fp32."""
_TOKEN = b"diffusion live 1"
_NAMES = ("part", "crossing")
"""Names of the messages of `SamplingJob`."""


class LiveSampling(Frozen):
    """One request and its parameters."""

    lab: LabSpec
    """A star with a node for each worker."""
    program: Program | ExpertProgram
    images: int
    codec: str = "fp32"
    """Codec of keys and values, or of tokens to and from experts."""
    boundary: str = "fp32"
    work_ns: int = 0
    """Duration of each computation on the emulated device."""


class Order(Frozen):
    """All samplings of one model."""

    size: DitSize
    samplings: tuple[LiveSampling, ...]


class _LastMoment:
    """Records when a worker has ended."""

    at_ns = 0

    def did(self, lane: NodeLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        """Note the end of an action."""
        self.at_ns = end_ns


# ---------------------------------------------------------------------- a worker
class _Work:
    """Data shared by all processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.order = Order.model_validate_json((folder / ORDER).read_text(encoding="utf8"))
        self.model = Dit(self.order.size).requires_grad_(False)
        self.model.load_state_dict(load_file(folder / MODEL))

    def worker(self, sampling: LiveSampling, job: SamplingJob, number: int) -> TokenWorker | ExpertWorker:
        """Return the worker of a sampling."""
        program, (noise, labels) = sampling.program, start(sampling.images, 0)
        if isinstance(program, Program):
            patch = TokenWorker(job, number, self.model, program.steps, Codecs(sampling.codec, sampling.boundary))
            patch.begin(noise, Conditions(self.model, labels, program.steps))
            return patch
        expert = ExpertWorker(job, number, self.model, program, sampling.codec)
        expert.begin(noise, labels)
        return expert


def peers_of(actions: Actions) -> list[int]:
    """Return the workers with which a worker exchanges messages."""
    return sorted({action.peer for action in actions if not isinstance(action, Compute)})


@torch.no_grad()
def _sample(
    work: _Work, sampling: LiveSampling, number: int, sockets: Sequence[socket.socket], gather: Gather, at_ns: int
) -> dict[str, Tensor]:
    """Do one worker's part; returns its images, messages and duration. Raises TransportError and CodecError."""
    job = SamplingJob(sampling.program.actions(), 1)
    most = _MOST * 4 * TOKENS * sampling.images * work.model.size.width + (1 << 20)
    with ExitStack() as stack:
        connections = {
            peer: stack.enter_context(
                Connection(
                    sock,
                    name=f"worker {number} <-> worker {peer}",
                    token=_TOKEN,
                    names=_NAMES,
                    max_payload_bytes=most,
                    max_frames=len(job.workers[number]),
                )
            )
            for peer, sock in zip(peers_of(job.workers[number]), sockets, strict=True)
        }
        worker, last = work.worker(sampling, job, number), _LastMoment()
        wait_until(at_ns)
        Live(
            number,
            worker,
            connections,
            gather=gather,
            ending=Ending(lambda: False),
            line=lambda: Line(lambda action: sampling.work_ns if isinstance(action, Work) else 0),
            timeout_s=_PATIENCE_S,
            observers=[last],
        ).run(job.program(number))
        for peer in sorted(connections, key=lambda peer: sorted((peer, number))):  # pair by pair, in a common order
            connections[peer].close(_PATIENCE_S)
        sent = [
            (peer, frame.key.part, frame.payload_bytes)
            for peer, connection in connections.items()
            for frame in connection.sent_so_far()
        ]
    return {
        "images": worker.images if number == 0 or isinstance(worker, ExpertWorker) else torch.zeros(0),
        "sent": torch.tensor(sent, dtype=torch.int64).view(-1, 3),
        "took_ns": torch.tensor(last.at_ns - at_ns),
    }


def _serve(channel: socket.socket, work: _Work, number: int, meeting: Sequence[socket.socket]) -> None:
    """Serve requests until the channel closes."""
    set_timer_slack()
    while True:
        data, fds, _, _ = socket.recv_fds(channel, 1 << 16, 64)
        if not data:
            return
        place, at_ns = json.loads(data)
        try:
            enter(fds[0])
            os.close(fds[0])
            sockets = [socket.socket(fileno=fd) for fd in fds[1:]]
            sampling = work.order.samplings[place]
            gather = Gather(number, meeting[: 1 if number else sampling.program.workers - 1], _PATIENCE_S)
            made = _sample(work, sampling, number, sockets, gather, at_ns)
            save_file(made, work.folder / f"{place}-{number}.safetensors")
            channel.send(b"done")
        except Exception:
            channel.send(traceback.format_exc()[-(1 << 16) :].encode())


# ---------------------------------------------------------------------- the lab
def _sample_over_links(place: int, work: _Work, channels: Sequence[socket.socket]) -> None:
    """Build the lab, let the workers sample in it, and tear it down. StageError where one fails; also raises the errors
    of `Lab`.
    """
    sampling = work.order.samplings[place]
    actions = sampling.program.actions()
    pairs = {(min(worker, peer), max(worker, peer)) for worker, each in enumerate(actions) for peer in peers_of(each)}
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(sampling.lab))
        wait_until(_next_on_grid())
        connections = stack.enter_context(Connections(lab, sorted(pairs)))
        at_ns = lab.play(_next_on_grid())
        for number, each in enumerate(actions):
            fds = [
                lab.nodes[number].namespace.fd,
                *(connections.sockets[number, peer].fileno() for peer in peers_of(each)),
            ]
            socket.send_fds(channels[number], [json.dumps([place, at_ns]).encode()], fds)
        answers = [channels[number].recv(1 << 17).decode() for number in range(len(actions))]
        if failed := [
            f"worker {number}: {answer or 'is gone'}" for number, answer in enumerate(answers) if answer != "done"
        ]:
            raise StageError(f"sampling {place}, {sampling.program}: {'; '.join(failed)}")
        counted = [asdict(counters) for counters in connections.counters()]
        (work.folder / f"{place}.json").write_text(json.dumps(counted), encoding="utf8")


def _next_on_grid() -> int:
    return (time.monotonic_ns() // _GRID_NS + 1) * _GRID_NS


def main() -> None:
    """Run all samplings of the order."""
    ONE_PAGE.write_text("1", encoding="ascii")
    torch.set_num_threads(1)
    work, parent = _Work(Path(sys.argv[1])), os.getpid()
    channels: list[socket.socket] = []
    for number, meeting in enumerate(make_sockets(max(each.program.workers for each in work.order.samplings))):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            die_with_parent(parent)
            for channel in (*channels, ours):
                channel.close()
            _serve(theirs, work, number, meeting)
            os._exit(0)
        theirs.close()
        channels.append(ours)
    for place in range(len(work.order.samplings)):
        _sample_over_links(place, work, channels)


if __name__ == "__main__":
    main()
