"""A layer around a gloo group that codes messages, all-reduces, all-gathers and reduce-scatters.

    testbed.torch.code_groups("p2p: fwd=int8, bwd=int4(64); all_reduce: ef(topk(0.01))")  # before init_process_group

Floating-point tensors of at least 1,024 values are coded if they are sent, summed or averaged. Integers, small tensors,
calls with several tensors and all other operations are unchanged. A message to a higher rank is an activation, one to a
lower rank a gradient, as in a pipeline whose stages are in the order of the ranks. Messages use the codecs of a stage's
boundary to each peer, and a message's number among those of its tag in its step (`steps`) serves as its micro-batch. A
collective's codecs are selected by its number in the step and the tensor's shape; `exchanges` explains how sums are
computed.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

from testbed.codecs.catalogue.placement import CodecPair, parse_placement
from testbed.codecs.make import build_codec
from testbed.errors import CodecError, SpecError, UnknownNameError
from testbed.message_key import MessageKey
from testbed.nodes.boundary import Boundary
from testbed.nodes.fragments import SMALL
from testbed.torch import exchanges, observed, process_group
from testbed.torch.steps import MOST, Position

OPERATIONS: Final = ("p2p", "all_reduce", "all_gather", "reduce_scatter")
_LENGTH, _VARYING = 1 << 29, 1 << 30
"""Added to the tag of a message whose payload's length varies; the length is sent first, under a separate tag."""
_TAKES: Final = {
    "allreduce": "all_reduce", "allgather": "all_gather", "_allgather_base": "all_gather",
    "all_gather_single": "all_gather", "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter", "send": "p2p", "recv": "p2p", "recv_anysource": "p2p",
    "allgather_into_tensor_coalesced": "all_gather", "all_gather_single_coalesced": "all_gather",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "reduce_scatter_single_coalesced": "reduce_scatter",
}  # fmt: skip
"""The operation of each method of a process group; functional collectives of one tensor call the last four."""


class GroupCodecs(NamedTuple):
    """The codecs of a group's operations; an operation without one is unchanged."""

    pairs: Mapping[str, CodecPair]

    @property
    def text(self) -> str:
        """The canonical text."""
        return "; ".join(f"{name}: {self.pairs[name].text}" for name in OPERATIONS if name in self.pairs)


def parse_group_codecs(text: str) -> GroupCodecs:
    """Read `OPERATION: CODEC; ...`; for p2p also `fwd=CODEC, bwd=CODEC`. SpecError or UnknownNameError."""
    pairs: dict[str, CodecPair] = {}
    for rule in text.split(";"):
        name, colon, codec = (part.strip() for part in rule.partition(":"))
        if not colon:
            raise SpecError(f"codecs {text!r}: {rule.strip()!r} is no rule; write OPERATION: CODEC, as in 'p2p: int8'")
        if name not in OPERATIONS:
            raise UnknownNameError(f"operation in {text!r}:", name, OPERATIONS)
        if name in pairs:
            raise SpecError(f"codecs {text!r}: there are two rules for {name}; remove one")
        placement = parse_placement(codec)
        if placement.rest is None or placement.numbered:
            raise SpecError(f"codecs {text!r}: {name} has no boundaries to number; state one codec for all of them")
        pairs[name] = placement.rest
        for spec in {*placement.rest}:
            if name != "p2p" or not any(part.row.pairs for part in spec.parts()):
                exchanges.parse_exchanged(spec.text)
        if name != "p2p" and len({*placement.rest}) > 1:
            raise SpecError(f"codecs {text!r}: {name} has one direction; state one codec")
    return GroupCodecs(pairs)


class _Peer:
    """The boundary to another rank."""

    def __init__(self, rank: int, peer: int, ranks: int, pair: CodecPair, seed: int) -> None:
        low, high = sorted((rank, peer))
        self.boundary = Boundary(
            "downstream" if rank < peer else "upstream",
            index=low if high == low + 1 else ranks * (low + 1) + high,
            seed=seed,
            make=lambda context: build_codec(
                pair.forward if context.direction == "forward" else pair.backward, context
            ),
            measure=None,
        )
        self.sent, self.received = defaultdict[int, Position](Position), defaultdict[int, Position](Position)
        """By tag: receives of different tags may be posted in another order than their sends."""
        self.lanes: defaultdict[int, ThreadPool] = defaultdict(lambda: ThreadPool(1))
        """Receivers of payloads whose lengths go first, by tag. They start at once: senders may wait for that."""


class _Waiting(dist.Work):
    """Work that is done by the call that waits for it."""

    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__()
        self._wait, self._done = wait, False

    def wait(self, timeout: Any = None) -> bool:
        if not self._done:
            self._wait()
            self._done = True
        return True

    def is_completed(self) -> bool:
        return self._done


class Coder:
    """Performs a group's operations with codecs."""

    def __init__(self, group: dist.ProcessGroup, codecs: GroupCodecs, seed: int = 0, number: int = 0) -> None:
        """Arguments are the same on all ranks. `number` differs between parallel coders, so that codecs draw apart."""
        self._group, self._pairs, self._seed, self._number = group, codecs.pairs, seed, number * MOST
        self._peers: dict[int, _Peer] = {}
        self._positions = {name: Position() for name in codecs.pairs}
        self._exchanges: dict[tuple[str, int, tuple[int, ...]], Any] = {}
        self._loaded: Mapping[str, Any] = {}

    def call(self, operation: str, *arguments: Any) -> Any:
        """Perform an operation of the group, coded if it has a codec; return its Work. CodecError, SpecError."""
        return self._coded(operation, arguments) or getattr(self._group, operation)(*arguments)

    def _coded(self, operation: str, arguments: Sequence[Any]) -> dist.Work | None:
        """Perform an operation with its codec, if it has one and these tensors are to be coded."""
        if (name := _TAKES.get(operation)) not in self._pairs:
            return None
        first, ranks = arguments[0], self._group.size()
        if not isinstance(first, Tensor) and len(first) > 1:
            return None
        if operation.endswith("_coalesced"):
            first, arguments = first[0], [first[0], arguments[1][0], *arguments[2:]]
        match name, operation:
            case "p2p", _:
                do = {"send": self._send, "recv": self._recv, "recv_anysource": self._recv_anysource}[operation]
                return do(first[0], *arguments[1:]) if _is_coded(first[0]) else None
            case "all_reduce", _:
                tensor = first if isinstance(first, Tensor) else first[0]
                return self._sum(tensor, arguments[1:]) if _is_coded(tensor) else None
            case "all_gather", _:
                given = arguments[1] if isinstance(first, Tensor) else arguments[1][0]
                outputs = first.view(-1).chunk(ranks) if isinstance(first, Tensor) else first[0]
                return self._gather(outputs, given) if _is_coded(given) else None
        output = first if isinstance(first, Tensor) else first[0]
        parts = arguments[1].reshape(ranks, *first.shape) if isinstance(first, Tensor) else arguments[1][0]
        return self._scatter(output, list(parts), arguments[2:]) if _is_coded(output) else None

    # ------------------------------------------------------------------ messages
    def _send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        to = self._peer(peer)
        key = _key(to.sent, tag)
        payload = exchanges.buffer_of(to.boundary.encode(_fp32(tensor), key)[0])
        length = to.boundary.payload_bytes(tensor.shape, out=True)
        if length is None:
            works = [self._group.send([torch.tensor([len(payload)])], peer, tag + _LENGTH)]
            works.append(self._group.send([payload], peer, tag + _VARYING))
        else:
            exchanges.check_length(payload, length)
            works = [self._group.send([payload], peer, tag)]
        return _Waiting(lambda: [work.wait() for work in works])

    def _recv(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        from_ = self._peer(peer)
        key = _key(from_.received, tag)
        length = from_.boundary.payload_bytes(tensor.shape, out=False)

        def received(length: int | None, offset: int) -> Tensor:
            buffer = torch.empty(1, dtype=torch.int64) if length is None else torch.empty(length, dtype=torch.uint8)
            self._group.recv([buffer], peer, tag + offset).wait()
            return buffer

        def take(payload: Tensor) -> None:
            value = from_.boundary.decode(payload.numpy().data, key)
            if value.shape != tensor.shape:
                came = f"{key} from rank {peer} has shape {[*value.shape]}"
                raise CodecError(f"{came}, and {[*tensor.shape]} was to come")
            tensor.data.copy_(value)  # a leaf that requires a gradient, in torch's pipelines

        if length is None:
            payload = from_.lanes[tag].apply_async(lambda: received(int(received(None, _LENGTH)), _VARYING))
            return _Waiting(lambda: take(payload.get()))
        buffer = torch.empty(length, dtype=torch.uint8)
        work = self._group.recv([buffer], peer, tag)
        return _Waiting(lambda: take(buffer) if work.wait() else None)

    def _recv_anysource(self, *_: Any) -> dist.Work:
        raise SpecError("cannot decode a message from any rank, as its codec depends on the sender; name the rank")

    def _peer(self, peer: int) -> _Peer:
        if peer not in self._peers:
            made = self._peers[peer] = _Peer(
                self._group.rank(), peer, self._group.size(), self._pairs["p2p"], self._seed
            )
            if (loaded := self._loaded.get("peers", {}).get(peer)) is not None:
                made.boundary.memory.load(loaded["memory"])
                for positions, steps in ((made.sent, loaded["sent"]), (made.received, loaded["received"])):
                    positions.update({tag: Position(number) for tag, number in steps.items()})
        return self._peers[peer]

    # ------------------------------------------------------------------ collectives
    def _sum(self, tensor: Tensor, options: Sequence[Any]) -> dist.Work | None:
        if (weights := self._weights(options)) is None:
            return None
        coded, step = self._exchange("all_reduce", tensor, lambda *told: exchanges.CodedSum([tensor.shape], *told))
        sums = coded.start(self._group, [_fp32(tensor)], weights, step)
        return _work(sums.then(lambda future: _filled([tensor], future.value())))

    def _gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> dist.Work:
        ranks = self._group.size()

        def make(text: str, among: exchanges.Among, number: int) -> exchanges.CodedGather:
            senders = range(number * ranks, (number + 1) * ranks)
            return exchanges.CodedGather([[tensor.shape]] * ranks, text, among, senders, "forward")

        coded, step = self._exchange("all_gather", tensor, make)
        gathered = coded.start(self._group, [_fp32(tensor)], step)
        return _work(gathered.then(lambda future: _filled(outputs, [value for (value,) in future.value()])))

    def _scatter(self, output: Tensor, parts: Sequence[Tensor], options: Sequence[Any]) -> dist.Work | None:
        if (weights := self._weights(options)) is None:
            return None
        shapes = [[output.shape]] * self._group.size()
        coded, step = self._exchange("reduce_scatter", output, lambda *told: exchanges.CodedScatter(shapes, *told))
        total = coded.sum(self._group, [[_fp32(part)] for part in parts], weights, step)
        done: Future[list[Tensor]] = Future()
        done.set_result(_filled([output], total))
        return _work(done)

    def _weights(self, options: Sequence[Any]) -> list[float] | None:
        """Return the weight of each rank's tensor in the sum; None if they are not summed."""
        op = next((getattr(each, "reduceOp", each) for each in options), dist.ReduceOp.SUM)
        weight = {dist.ReduceOp.SUM: 1.0, dist.ReduceOp.AVG: 1 / self._group.size()}
        return next(([weight[each]] * self._group.size() for each in weight if op == each), None)

    def _exchange(self, name: str, tensor: Tensor, make: Callable[[str, exchanges.Among, int], Any]) -> tuple[Any, int]:
        """Return the exchange for tensors of this shape at this position in a step, and the step."""
        step, number = self._positions[name].advance()
        key = name, number, tuple(tensor.shape)
        if key not in self._exchanges:
            among = exchanges.Among(self._group.rank(), self._group.size(), self._seed)
            made = self._exchanges[key] = make(self._pairs[name].forward.text, among, self._number + number)
            if (loaded := self._loaded.get("exchanges", {}).get(key)) is not None:
                made.memory.load(loaded)
        return self._exchanges[key], step

    # ------------------------------------------------------------------ checkpoints
    def state_dict(self) -> dict[str, Any]:
        """Return the state of its codecs on this rank, between two steps."""
        peers = {
            peer: {"memory": to.boundary.memory.state(), "sent": _steps(to.sent), "received": _steps(to.received)}
            for peer, to in self._peers.items()
        }
        exchanges = {key: coded.memory.state() for key, coded in self._exchanges.items()}
        positions = _steps(self._positions)
        used: dict[str, dict[Any, Any]] = {"peers": peers, "exchanges": exchanges}  # the rest waits
        return {kind: {**self._loaded.get(kind, {}), **now} for kind, now in used.items()} | {"positions": positions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. A state of another codec is a CodecError when the codec is first used."""
        self._loaded = state
        self._peers.clear()
        self._exchanges.clear()
        self._positions = {name: Position(steps) for name, steps in state["positions"].items()}


def _key(positions: Mapping[int, Position], tag: int) -> MessageKey:
    """Return the key of the next message with a tag; one without a tag has tag 0."""
    step, number = positions[tag].advance()
    return MessageKey("train", step, tag * MOST + number, ())


def _steps(positions: Mapping[Any, Position]) -> dict[Any, int]:
    return {of: position.steps for of, position in positions.items()}


def _work(future: Future[Any]) -> dist.Work:
    """Return Work that completes with a future; C++ can wait for it."""
    work: dist.Work = _create_work_from_future(future)
    return work


def _is_coded(tensor: Tensor) -> bool:
    return tensor.dtype in exchanges.CODED and tensor.numel() >= SMALL


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32)


def _filled(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.data.copy_(value.view_as(tensor))
    return list(tensors)


_coders: weakref.WeakKeyDictionary[CodedGroup, Coder] = weakref.WeakKeyDictionary()


class CodedGroup(process_group.WrappedGroup):
    """A process group whose operations are coded."""

    def __init__(self, inner: dist.ProcessGroup, codecs: GroupCodecs, seed: int = 0) -> None:
        """Arguments are the same on all ranks."""
        super().__init__(inner)
        self._coder = _coders[self] = Coder(inner, codecs, seed)

    def call(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """Perform an operation: see `Coder.call`."""
        return self._coder.call(operation, *arguments, *keywords.values())


def layers(wanted: Mapping[str, Any]) -> list[process_group.Layer]:
    """Return the layer that TESTBED_TORCH requests (`autoload`)."""
    codecs = parse_group_codecs(wanted["codec"])

    def layer(group: dist.ProcessGroup) -> dist.ProcessGroup:
        log = observed.active_log()  # of what the job calls; what is sent is below the codecs
        return CodedGroup(group if log is None else observed.ObservedGroup(group, log, level=1), codecs)

    return [layer]


def code_groups(text: str, *, seed: int = 0) -> None:
    """Code every gloo group that is made from now on. SpecError or UnknownNameError for an invalid text."""
    codecs = parse_group_codecs(text)
    process_group.install(lambda group: CodedGroup(group, codecs, seed))


def state_dict() -> dict[str, Any]:
    """Return the state of all groups' codecs on this rank, between two steps, by the groups' names."""
    return {group.group_name: coder.state_dict() for group, coder in _coders.items()}


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Load what `state_dict` returned on this rank, for groups of these names."""
    for group, coder in _coders.items():
        if group.group_name in state:
            coder.load_state_dict(state[group.group_name])
