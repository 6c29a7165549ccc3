"""Traces without a model: stated durations and sizes. A pipeline, for `predict`, `bench play` and tests; a transfer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from testbed.jobs.schedule import Action, actions
from testbed.play.trace import RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace
from testbed.spec import ScheduleName

LABELS = ("forward", "backward", "encode", "decode", "update", "activation", "gradient", "barrier")
_LABEL = {name: number for number, name in enumerate(LABELS)}
_WORKS = (_LABEL["forward"], _LABEL["backward"])
MESSAGES = (_LABEL["activation"], _LABEL["gradient"])
"""What a message is called, forward and backward."""
Both = int | tuple[int, int]
"""A number for activations and gradients alike, or one for each."""
Message = Callable[[int, int, int, int], None]
"""See `add_batch`."""


def pipeline_trace(
    *,
    stages: int,
    microbatches: int,
    steps: int,
    message_bytes: Both,
    forward_ns: int | Sequence[int],
    backward_ns: int | Sequence[int],
    encode_ns: Both = 0,
    decode_ns: Both = 0,
    update_ns: int | Sequence[int] = 0,
    schedule: ScheduleName = "1f1b",
    in_flight: int | None = None,
    blocking: bool = False,
) -> Trace:
    """Return the trace of synchronous pipeline training; each step ends with an event that all stages signal and wait
    for, and the update.

    `forward_ns`, `backward_ns`, `update_ns`: of every stage, or one per stage. `in_flight`: see `schedule.depth`; None:
    as many as there are stages. `blocking`: a stage goes on only when its neighbour has the whole message, as a program
    does that neither sends nor computes while it does the other; else it goes on at once.
    """
    forward, backward, update = (_each(value, stages) for value in (forward_ns, backward_ns, update_ns))
    sizes, encode, decode = (_each(value, 2) for value in (message_bytes, encode_ns, decode_ns))
    boxes = _Inboxes(stages) if blocking else None
    lanes = tuple(Lane(stage, "compute") for stage in range(stages))

    def take(stage: int, before: int, way: int, tag: int) -> None:
        lane, what = lanes[stage], MESSAGES[way]
        if boxes is None:
            lane.add(RECEIVE, label=what, peer=before, tag=tag)
        else:
            lane.add(WAIT, label=what, tag=boxes.event(before, tag), value=1)
        lane.add(WORK, label=_LABEL["decode"], value=decode[way])

    def give(stage: int, after: int, way: int, tag: int) -> None:
        lane, what = lanes[stage], MESSAGES[way]
        lane.add(WORK, label=_LABEL["encode"], value=encode[way])
        lane.add(SEND, label=what, peer=after, tag=tag, value=sizes[way])
        if boxes is not None:
            lane.add(WAIT, label=what, tag=boxes.receive(stage, after, tag, what), value=1)

    for step in range(steps):
        for stage, lane in enumerate(lanes):
            order = actions(
                schedule, stage=stage, stages=stages, microbatches=microbatches, in_flight=in_flight or stages
            )
            works = forward[stage], backward[stage]
            add_batch(lane, order, stage, stages, works, first_tag=step * microbatches * 2, take=take, give=give)
            lane.add(SIGNAL, label=_LABEL["barrier"], tag=step)
            lane.add(WAIT, label=_LABEL["barrier"], tag=step, value=stages)
            lane.add(WORK, label=_LABEL["update"], value=update[stage])
            lane.end_step()
        if boxes is not None:
            boxes.end_step()
    nodes = tuple(f"stage {stage}" for stage in range(stages))
    return Trace(nodes, LABELS, lanes + (boxes.lanes if boxes else ()), {"maker": "synthetic pipeline"})


def add_batch(
    lane: Lane,
    order: Iterable[Action],
    stage: int,
    stages: int,
    works_ns: tuple[int, int],
    *,
    first_tag: int,
    take: Message,
    give: Message,
) -> None:
    """Add what a stage does for a batch: its actions in order, which take `works_ns` forward and backward, and its
    messages. `take` and `give` add how a message comes from a neighbour and goes to one: they are called with the
    stage, the neighbour, 0 forward or 1 backward, and the message's tag, from `first_tag` on two for each micro-batch.
    """
    for kind, microbatch in order:
        way = int(kind == "B")
        before, after = (stage + 1, stage - 1) if way else (stage - 1, stage + 1)
        tag = first_tag + microbatch * 2 + way
        if 0 <= before < stages:
            take(stage, before, way, tag)
        lane.add(WORK, label=_WORKS[way], value=works_ns[way])
        if 0 <= after < stages:
            give(stage, after, way, tag)


def transfer_trace(messages: Iterable[tuple[int, int, int]]) -> Trace:
    """Return the trace of one step in which a sender encodes and sends messages, and a receiver decodes them, each in
    this order: (encode in ns, bytes, decode in ns). One message is encoded while others are on their way.
    """
    labels = ("encode", "message", "decode")
    sender, receiver = Lane(0, "send"), Lane(1, "receive")
    for tag, (encode_ns, size, decode_ns) in enumerate(messages):
        sender.add(WORK, label=0, value=encode_ns)
        sender.add(SEND, label=1, peer=1, tag=tag, value=size)
        receiver.add(RECEIVE, label=1, peer=0, tag=tag)
        receiver.add(WORK, label=2, value=decode_ns)
    for lane in (sender, receiver):
        lane.end_step()
    return Trace(("sender", "receiver"), labels, (sender, receiver), {"maker": "transfer"})


class _Inboxes:
    """Lanes that do nothing but receive, one per stage and neighbour, and signal when a message is there."""

    _FIRST_EVENT = 1 << 24
    """Beyond the barriers, which are numbered by step."""

    def __init__(self, stages: int) -> None:
        self._lanes = {
            (source, stage): Lane(stage, f"from stage {source}")
            for stage in range(stages)
            for source in (stage - 1, stage + 1)
            if 0 <= source < stages
        }
        self._stages = stages

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple(self._lanes.values())

    def event(self, source: int, tag: int) -> int:
        """Return the event of a message's arrival: its sender and its tag, which says the direction, are enough."""
        return self._FIRST_EVENT + tag * self._stages + source

    def receive(self, source: int, stage: int, tag: int, label: int) -> int:
        """Let a message be received; return the event of its arrival."""
        lane, event = self._lanes[source, stage], self.event(source, tag)
        lane.add(RECEIVE, label=label, peer=source, tag=tag)
        lane.add(SIGNAL, label=label, tag=event)
        return event

    def end_step(self) -> None:
        for lane in self._lanes.values():
            lane.end_step()


def _each(value: int | Sequence[int], count: int) -> Sequence[int]:
    values = [value] * count if isinstance(value, int) else list(value)
    assert len(values) == count, f"{len(values)} numbers for {count}"
    return values
