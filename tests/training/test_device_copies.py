"""Live stages on another device than the CPU: a simulated one, whose copies happen when they are waited for, and a
GPU where one is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.make import make
from testbed.codecs.wire.header import ArrivedPayload
from testbed.jobs.kind import Setting
from testbed.runtime.transport import Copies
from testbed.spec import Cell
from testbed.training import place
from testbed.training.device_copies import DeviceCopies, copies_of
from testbed.training.kinds import Training, training_of
from tests.nodes.test_stage import TOKENS
from tests.over_loopback import run_places
from tests.simulated_device import THERE, SimulatedDevice, _There, simulated
from tests.training.test_accelerator import ABLE, CHOOSES, TOLERANCE, close
from tests.training.test_alone import a_tiny_cell

BUILDING = threading.Lock()
CODECS = [
    pytest.param("fp32", TOLERANCE, marks=pytest.mark.slow),
    ("fwd=delta(int8), bwd=ef(topk(0.1))", CHOOSES),
    ("fwd=zstd(int8), bwd=powersgd(4)", CHOOSES),
]


# ---------------------------------------------------------------------- a simulated device
class Stream:
    """Copies that have not happened yet."""

    def __init__(self) -> None:
        self.due: deque[Callable[[], object]] = deque()
        self.waited = False


class Event:
    """Waiting for it makes them happen."""

    def record(self, stream: Stream) -> None:
        self._stream = stream

    def synchronize(self) -> None:
        while self._stream.due:
            self._stream.due.popleft()()


class SideStream(Stream):
    def wait_stream(self, stream: Stream) -> None:
        self.waited = True


class Deferring(SimulatedDevice):
    """While it is active, a copy from or to THERE is put off."""

    def __init__(self, stream: Stream, counts: dict[str, int]) -> None:
        super().__init__()
        self._stream, self._counts = stream, counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in ("copy_", "_to_copy"):
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._counts[name] = self._counts.get(name, 0) + 1
        if name == "copy_":
            assert self._stream.waited, "it would be copied before it is computed"
            self._stream.waited = False
            into, source = args[0].fill_(0xAB), args[1].value
            self._stream.due.append(lambda: into.copy_(source))
            return into
        there = _There(torch.zeros_like(args[0]))
        self._stream.due.append(lambda: there.value.copy_(args[0]))
        return there


class Streams:
    """The streams of THERE, like `torch.cuda`."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._current = Stream()

    def Stream(self, device: torch.device) -> SideStream:
        return SideStream()

    def Event(self, blocking: bool) -> Event:
        return Event()

    def current_stream(self, device: torch.device) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: SideStream) -> Iterator[None]:
        with Deferring(stream, self.counts):
            yield


def test_the_cpu_copies_nothing() -> None:
    copies, payload = copies_of(torch.device("cpu")), b"bytes"
    assert type(copies) is Copies
    assert copies.leave(payload)[0] is payload
    room = copies.room(3)
    assert copies.arrived(room) is room


@pytest.mark.parametrize("text", ABLE)
def test_what_arrives_is_decoded_there_as_what_was_sent(text: str) -> None:
    here, there = ([make(text, Context(3, 0, "forward")) for _ in range(2)] for _ in range(2))
    draw, key = torch.Generator().manual_seed(0), MessageKey("train", 0, 0, (1, 2))
    with simulated() as device:
        copies = DeviceCopies(THERE, Streams())
        for step, shape in enumerate([(2, 5, 24), (2, 5, 24), (0, 3)]):
            key, x = key._replace(step=step), torch.randn(shape, generator=draw)
            expected = here[0].encode(x, key)
            memory, ready = copies.leave(there[0].encode(x.to(THERE), key))
            if 0 not in shape and step == 0:
                assert bytes(memory) != bytes(expected), "it is still on its way"
            ready()
            assert bytes(memory) == bytes(expected)
            room = copies.room(len(expected))
            room[:] = memory
            arrived = copies.arrived(room)
            assert isinstance(arrived, ArrivedPayload)
            assert len(arrived) == len(expected)
            decoded = there[1].decode(arrived, key)
            assert decoded.device.type == THERE.type
            assert device.copied_values == 0, "no tensor was copied to the CPU"
            assert torch.equal(decoded.cpu(), here[1].decode(expected, key))
            device.copied_values = 0


def in_turn(setting: Setting) -> Training:
    """A training whose places, threads here, build their models in turn: torch's generator is one for all."""
    training: Any = training_of(setting)
    model = training.model

    def alone(place: int) -> Any:
        with BUILDING:
            return model(place)

    training.model = alone
    return training  # type: ignore[no-any-return]


class Ran:
    """A cell's places over loopback."""

    def __init__(self, cell: Cell, folder: Path, make: Callable[[Setting], Training] = in_turn) -> None:
        tokens = folder / "tokens.npy"
        np.save(tokens, np.random.default_rng(1).integers(TOKENS, size=20_000).astype(np.uint16))
        ran = run_places(cell, make, vocabulary=TOKENS, tokens=str(tokens))
        assert ran.errors == [None] * cell.nodes
        self.losses = [record.loss for record in ran.records[-1] if record.loss is not None]
        self.bytes = [[sent.payload_bytes for sent in record.sent] for node in ran.records for record in node]


def live(codec: str, **training: Any) -> Cell:
    return a_tiny_cell(3, codec, **{"steps": 2, "evaluate_every": 0, **training})


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "tiny_models")
@pytest.mark.parametrize(("codec", "share"), CODECS)
def test_live_stages_on_a_device_learn_as_on_the_cpu(
    codec: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell, streams = live(codec), Streams()
    here = Ran(cell, tmp_path)
    assert "computes on" not in capsys.readouterr().out
    monkeypatch.setattr(place, "device_of", lambda recipe, place: THERE)
    monkeypatch.setattr(place, "copies_of", lambda device: DeviceCopies(device, streams))

    def make_there(setting: Setting) -> Training:
        SimulatedDevice().__enter__()  # of this thread, which ends with its place
        return in_turn(setting)

    with simulated():
        there = Ran(cell, tmp_path, make_there)
    assert close(there.losses, here.losses, share), (there.losses, here.losses)
    assert "codecs that get copies: " + ("zstd(int8)" if "zstd" in codec else "none") in capsys.readouterr().out
    messages = sum(map(len, here.bytes))
    if "zstd" not in codec:
        assert there.bytes == here.bytes
        assert streams.counts == {"copy_": messages, "_to_copy": messages}, "each message crosses once, either way"
    else:
        assert streams.counts["copy_"] < messages == streams.counts["_to_copy"]


# ---------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.usefixtures("one_thread", "tiny_models")
@pytest.mark.parametrize(("codec", "share"), CODECS)
def test_live_stages_on_a_gpu_learn_as_on_the_cpu_and_repeat_to_the_bit(
    codec: str, share: float, tmp_path: Path
) -> None:
    here = Ran(live(codec), tmp_path)
    there, again = (Ran(live(codec, device="cuda"), tmp_path) for _ in range(2))
    assert there.losses == again.losses
    assert there.bytes == again.bytes
    assert close(there.losses, here.losses, share)


@pytest.mark.gpu
@pytest.mark.parametrize("text", ABLE)
def test_a_payload_leaves_a_gpu_and_returns_through_pinned_memory(text: str) -> None:
    copies, (sender, receiver) = (
        DeviceCopies(torch.device("cuda", 0)),
        (make(text, Context(3, 0, "forward")) for _ in "ab"),
    )
    x, key = torch.randn(64, 16, 64, generator=torch.Generator().manual_seed(0)).cuda(), MessageKey("train", 0, 0, (1,))
    payload: Any = sender.encode(x, key)
    memory, ready = copies.leave(payload)
    ready()
    assert torch.frombuffer(memory, dtype=torch.uint8).is_pinned()
    assert bytes(memory) == payload.to_bytes()
    room = copies.room(len(payload))
    room[:] = memory
    arrived = copies.arrived(room)
    copies.computed()
    twin = make(text, Context(3, 0, "forward"))
    assert torch.equal(receiver.decode(arrived, key), twin.decode(payload, key))
