"""Our codecs for messages of Flower's clients: a mod for the client app, and a wrapper for a strategy. Needs
`pip install testbed[flower]`.

    app = ClientApp(mods=[testbed.torch.flower.coded_mod("ef(topk(0.01))")])
    strategy = testbed.torch.flower.coded_strategy(FedAvg(), "ef(topk(0.01))")

The codec encodes the change made by a round of training: the received arrays minus the returned ones, as in a cell with
local steps; the strategy subtracts it from the arrays it had sent. A codec's state at a client is part of the client's
context, which Flower keeps from round to round. If a reply is lost, a codec whose decoder has state (`delta`) raises
CodecError in the next round; error feedback does not, because its decoder has none.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from testbed.errors import SpecError
from testbed.nodes.bucket import Bucket
from testbed.torch.exchanges import CODED, parse_exchanged

_PAYLOAD, _STATE = "testbed.payload", "testbed.codec"


def coded_mod(text: str, *, seed: int = 0) -> Callable[..., Any]:
    """Return a mod that encodes the arrays of replies to training messages. SpecError or UnknownNameError for an
    unsuitable codec; SpecError in a round without a number, which FedAvg and similar strategies state.
    """
    parse_exchanged(text)

    def mod(message: Any, context: Any, call_next: Callable[..., Any]) -> Any:
        from flwr.app import Array, ConfigRecord

        reply = call_next(message, context)
        if reply.has_error() or message.metadata.message_type != "train":
            return reply
        for name, returned in reply.content.array_records.items():
            if (given := message.content.array_records.get(name)) is None:
                continue
            before, after = _tensors(given), _tensors(returned)
            bucket = _bucket(before, text, seed, message.metadata.dst_node_id)
            place = f"{_STATE}.{name}"
            if place in context.state:
                bucket.memory.load(torch.load(io.BytesIO(context.state[place]["state"]), weights_only=True))
            changes = [value.float() - after[key].float() for key, value in before.items()]
            payload = bucket.encode(changes, _round(message.content))
            torch.save(bucket.memory.state(), remembered := io.BytesIO())
            context.state[place] = ConfigRecord({"state": remembered.getvalue()})
            for key in before:
                del returned[key]
            returned[_PAYLOAD] = Array(dtype="uint8", shape=(len(payload),), stype=_PAYLOAD, data=payload)
        return reply

    return mod


def coded_strategy(strategy: Any, text: str, *, seed: int = 0) -> Any:
    """Return a `flwr.serverapp.strategy.Strategy` that decodes replies and delegates everything else. Errors as in
    `coded_mod`; CodecError for a reply of another codec. A reply that is not coded is unchanged.
    """
    from flwr.app import Array, ArrayRecord
    from flwr.serverapp.strategy import Strategy

    parse_exchanged(text)

    class CodedStrategy(Strategy):  # type: ignore[misc]
        def __init__(self) -> None:
            self._sent: dict[int, Any] = {}
            self._buckets: dict[tuple[int, str], Bucket] = {}
            self._loaded: Mapping[tuple[int, str], Any] = {}

        def configure_train(self, *arguments: Any, **keywords: Any) -> Iterable[Any]:
            messages = list(strategy.configure_train(*arguments, **keywords))
            self._sent = {message.metadata.dst_node_id: message.content for message in messages}
            return messages

        def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> Any:
            decoded = list(replies)
            for reply in decoded:
                if reply.has_content():
                    for name, record in reply.content.array_records.items():
                        if _PAYLOAD in record:
                            reply.content[name] = self._decoded(reply.metadata.src_node_id, name, record)
            return strategy.aggregate_train(server_round, decoded)

        def _decoded(self, node: int, name: str, record: Any) -> Any:
            given, place = self._sent[node].array_records[name], (node, name)
            before = _tensors(given)
            if place not in self._buckets:
                self._buckets[place] = _bucket(before, text, seed, node)
                if place in self._loaded:
                    self._buckets[place].memory.load(self._loaded[place])
            changes = self._buckets[place].decode(record[_PAYLOAD].data, _round(self._sent[node]))
            pairs = zip(before.items(), changes, strict=True)
            after = {key: (value.float() - change).to(value.dtype) for (key, value), change in pairs}
            return ArrayRecord({key: Array(after[key].numpy()) if key in after else record[key] for key in given})

        def configure_evaluate(self, *arguments: Any, **keywords: Any) -> Iterable[Any]:
            return strategy.configure_evaluate(*arguments, **keywords)  # type: ignore[no-any-return]

        def aggregate_evaluate(self, *arguments: Any, **keywords: Any) -> Any:
            return strategy.aggregate_evaluate(*arguments, **keywords)

        def summary(self) -> None:
            strategy.summary()

        def state_dict(self) -> dict[tuple[int, str], Any]:
            """Return the states of the decoders, by node and record."""
            return {**self._loaded, **{place: bucket.memory.state() for place, bucket in self._buckets.items()}}

        def load_state_dict(self, state: Mapping[tuple[int, str], Any]) -> None:
            """Load what `state_dict` returned."""
            self._loaded = state
            self._buckets.clear()

    return CodedStrategy()


def _tensors(record: Any) -> dict[str, Tensor]:
    """Return the arrays of a record that are to be coded."""
    every = {key: torch.from_numpy(array.numpy().copy()) for key, array in record.items() if key != _PAYLOAD}
    return {key: value for key, value in every.items() if value.dtype in CODED}


def _bucket(tensors: Mapping[str, Tensor], text: str, seed: int, node: int) -> Bucket:
    return Bucket([value.shape for value in tensors.values()], text, seed=seed, sender=node)


def _round(content: Any) -> int:
    """Return the number of a round, from 0."""
    for record in content.config_records.values():
        if "server-round" in record:
            return int(record["server-round"]) - 1
    raise SpecError('a training message has no "server-round" in a ConfigRecord, which the codec draws by; state it')
