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
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from testbed.diffusion.dit import TOKENS, Dit, DitSize, start
from testbed.diffusion.exchange import SamplingWorker, proceed
from testbed.diffusion.experts import ExpertProgram, ExpertWorker
from testbed.diffusion.programs import Message, Program
from testbed.diffusion.workers import Codecs, Conditions, TokenWorker
from testbed.errors import StageError
from testbed.frozen import Frozen
from testbed.jobs.actions import Key, Work
from testbed.jobs.sampling import Action, Actions, Compute, numbers_of
from testbed.net.kernel.namespace import enter
from testbed.net.lab import Lab, LabSpec
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
_DONE = b""
_PART = "part"


class LiveSampling(Frozen):
    """One request, and how it is sampled."""

    lab: LabSpec
    """With a node for each worker, in a star."""
    program: Program | ExpertProgram
    images: int
    seed: int = 0
    """Of the noise: see `dit.start`."""
    codec: str = "fp32"
    """Of keys and values, or of the tokens that go to experts and back."""
    boundary: str = "fp32"
    key_steps: int = 1
    refresh_every: int = 0
    """As in `workers.Codecs`."""
    work_ns: int = 0
    """How long each computation takes on the emulated device."""


class Order(Frozen):
    """What is to be done with one model."""

    size: DitSize
    samplings: tuple[LiveSampling, ...]


class _Links:
    """What lies between one worker and all others: connections, and the emulated device's time."""

    def __init__(self, connections: Mapping[int, Connection], numbers: Mapping[Message, int], work_ns: int) -> None:
        self._connections, self._numbers = connections, numbers
        self._line, self._arrived_ns = Line(lambda action: work_ns), 0
        self.moments_ns: list[int] = []
        """When each action was done."""

    def compute(self, worker: SamplingWorker, action: Compute) -> None:
        self._line.came(self._arrived_ns)
        began_ns = self._line.now()
        worker.compute(action)
        self._line.spent(Work("compute", Key(_PART, action.step)), began_ns)
        self._line.wait()
        self.moments_ns.append(time.monotonic_ns())

    def send(self, part: Message, peer: int, payload: bytes) -> None:
        key = self._key(part)
        self._connections[peer].send(key, payload, not_before_ns=self._line.at_ns)
        self.moments_ns.append(time.monotonic_ns())

    def take(self, part: Message, peer: int) -> memoryview:
        arrival = self._connections[peer].take(self._key(part), _PATIENCE_S)
        self._arrived_ns = max(self._arrived_ns, arrival.last_byte_ns)
        self.moments_ns.append(time.monotonic_ns())
        return arrival.payload

    def _key(self, part: Message) -> Key:
        return Key(_PART, self._numbers[part])


# ---------------------------------------------------------------------- a worker
class _Work:
    """What every process knows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.order = Order.model_validate_json((folder / ORDER).read_text(encoding="utf8"))
        self.model = Dit(self.order.size).requires_grad_(False)
        self.model.load_state_dict(load_file(folder / MODEL))

    def worker(self, sampling: LiveSampling, number: int) -> TokenWorker | ExpertWorker:
        """Return a worker that has the work."""
        program, (noise, labels) = sampling.program, start(sampling.images, sampling.seed)
        if isinstance(program, Program):
            codecs = Codecs(sampling.codec, sampling.boundary, sampling.key_steps, sampling.refresh_every)
            patch = TokenWorker(self.model, program.steps, codecs)
            patch.begin(noise, Conditions(self.model, labels, program.steps))
            return patch
        expert = ExpertWorker(self.model, program, number, sampling.codec)
        expert.begin(noise, labels)
        return expert


def peers_of(actions: Actions) -> list[int]:
    """Return the workers that one exchanges messages with."""
    return sorted({action.peer for action in actions if not isinstance(action, Compute)})


@torch.no_grad()
def _sample(
    work: _Work, sampling: LiveSampling, number: int, sockets: Sequence[socket.socket], at_ns: int
) -> dict[str, Tensor]:
    """Do one worker's part; returns its images, times, and what it sent. TransportError, CodecError as they come."""
    every = sampling.program.actions()
    most = _MOST * 4 * TOKENS * sampling.images * work.model.size.width + (1 << 20)
    with ExitStack() as stack:
        connections = {
            peer: stack.enter_context(
                Connection(
                    sock,
                    name=f"worker {number} <-> worker {peer}",
                    token=_TOKEN,
                    names=(_PART,),
                    max_payload_bytes=most,
                    max_frames=len(every[number]),
                )
            )
            for peer, sock in zip(peers_of(every[number]), sockets, strict=True)
        }
        worker = work.worker(sampling, number)
        wait_until(at_ns)
        links, ahead = _Links(connections, numbers_of(every), sampling.work_ns), deque[Action](every[number])
        proceed(worker, ahead, links)
        assert not ahead  # a message is waited for, however long it takes
        for peer in sorted(connections, key=lambda peer: sorted((peer, number))):  # pair by pair, in all workers' order
            connections[peer].close(_PATIENCE_S)
        sent = [
            (peer, frame.key.step, frame.payload_bytes)
            for peer, connection in connections.items()
            for frame in connection.sent_so_far()
        ]
    return {
        "images": worker.images if number == 0 or isinstance(worker, ExpertWorker) else torch.zeros(0),
        "moments_ns": torch.tensor(links.moments_ns, dtype=torch.int64) - at_ns,
        "sent": torch.tensor(sent, dtype=torch.int64).view(-1, 3),
    }


def _serve(channel: socket.socket, work: _Work, number: int) -> None:
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
            made = _sample(work, work.order.samplings[place], number, sockets, at_ns)
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
    for number in range(max(sampling.program.workers for sampling in work.order.samplings)):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            die_with_parent(parent)
            for channel in (*channels, ours):
                channel.close()
            _serve(theirs, work, number)
            os._exit(0)
        theirs.close()
        channels.append(ours)
    for place in range(len(work.order.samplings)):
        _sample_over_links(place, work, channels)


if __name__ == "__main__":
    main()
