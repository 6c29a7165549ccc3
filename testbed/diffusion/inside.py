"""Samples requests over links in a guest whose clock is virtual: `python -m testbed.diffusion.inside FOLDER`, which
`live` starts.

Each worker is a process of its own, forked once; for each request it moves into its node of the request's lab, and gets
its connections' sockets. FOLDER has what `live` wrote, an `Order` and the model's weights; what came of request N goes
to N-WORKER.safetensors, and what the nodes' devices counted to N.json.
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
from testbed.pipeline.ending import Ending
from testbed.pipeline.gather import Gather, make_sockets
from testbed.pipeline.live import Live
from testbed.pipeline.pacing import Line, be_prompt, wait_until
from testbed.pipeline.transport import Connection
from testbed.play.connections import Connections
from testbed.play.inside import ONE_PAGE
from testbed.process import die_with_parent

ORDER: Final = "order.json"
MODEL: Final = "model.safetensors"
_GRID_NS = 1_000_000_000
_PATIENCE_S = 3600.0
"""Of the virtual clock, which does not wait for a worker that is gone."""
_MOST = 16
"""How many times as long as all tokens' hidden states in fp32 a payload may be."""
_TOKEN = b"diffusion live 1"
_NAMES = ("part", "crossing")
"""What `SamplingJob` calls its messages."""


class LiveSampling(Frozen):
    """One request, and how it is sampled."""

    lab: LabSpec
    """With a node for each worker, in a star."""
    program: Program | ExpertProgram
    images: int
    codec: str = "fp32"
    """Of keys and values, or of the tokens that go to experts and back."""
    boundary: str = "fp32"
    work_ns: int = 0
    """How long each computation takes on the emulated device."""


class Order(Frozen):
    """What is to be done with one model."""

    size: DitSize
    samplings: tuple[LiveSampling, ...]


class _LastMoment:
    """Observes when a worker has ended."""

    at_ns = 0

    def did(self, lane: NodeLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        """Note when an action ended."""
        self.at_ns = end_ns


# ---------------------------------------------------------------------- a worker
class _Work:
    """What every process knows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.order = Order.model_validate_json((folder / ORDER).read_text(encoding="utf8"))
        self.model = Dit(self.order.size).requires_grad_(False)
        self.model.load_state_dict(load_file(folder / MODEL))

    def worker(self, sampling: LiveSampling, job: SamplingJob, number: int) -> TokenWorker | ExpertWorker:
        """Return a worker that has the work."""
        program, (noise, labels) = sampling.program, start(sampling.images, 0)
        if isinstance(program, Program):
            patch = TokenWorker(job, number, self.model, program.steps, Codecs(sampling.codec, sampling.boundary))
            patch.begin(noise, Conditions(self.model, labels, program.steps))
            return patch
        expert = ExpertWorker(job, number, self.model, program, sampling.codec)
        expert.begin(noise, labels)
        return expert


def peers_of(actions: Actions) -> list[int]:
    """Return the workers that one exchanges messages with."""
    return sorted({action.peer for action in actions if not isinstance(action, Compute)})


@torch.no_grad()
def _sample(
    work: _Work, sampling: LiveSampling, number: int, sockets: Sequence[socket.socket], gather: Gather, at_ns: int
) -> dict[str, Tensor]:
    """Do one worker's part; returns its images, what it sent, and how long that took. TransportError, CodecError as
    they come.
    """
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
        for peer in sorted(connections, key=lambda peer: sorted((peer, number))):  # pair by pair, in all workers' order
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
    """Sample what is asked for, until nobody asks any more."""
    be_prompt()
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
    """Build the lab, have the workers sample in it, and take it down. StageError where one fails; errors of `Lab`."""
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
    """Sample all that the order asks for."""
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
