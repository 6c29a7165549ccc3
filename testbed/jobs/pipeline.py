"""Pipeline training: layers are cut into stages, and a batch into micro-batches.

For each action of its schedule a stage waits for its input, decodes it, computes, encodes the output and hands it over;
then it clips, meets the others and updates. Activations go to the stage after it, gradients to the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from testbed.jobs.actions import Begin, Decode, Encode, EndStep, Key, Meet, Program, Receive, Send, Wait, Work
from testbed.jobs.schedule import Action

MESSAGES = {"F": "activation", "B": "gradient"}
"""What an action of a schedule sends."""
MATHS = {"F": "forward", "B": "backward"}
_FURTHER = {"F": 1, "B": -1}


@dataclass(frozen=True)
class PipelineJob:
    """Stages that train together, and what each does in a step."""

    orders: Sequence[Sequence[Action]]
    """By stage: the actions of a step."""
    steps: int
    blocking: bool = False
    """A stage goes on only when its neighbour has the whole message, as a program does that neither sends nor computes
    while it does the other."""

    @property
    def places(self) -> Sequence[str]:
        """The names of the stages."""
        return tuple(f"stage {stage}" for stage in range(len(self.orders)))

    def program(self, place: int, first_step: int = 0) -> Program:
        """Return what a stage does, from that step on."""
        for step in range(first_step, self.steps):
            for kind, part in self.orders[place]:
                yield from self.action(place, kind, Key(MESSAGES[kind], step, part))
            yield Begin()
            squares = yield Work("clip", Key("clip", step))
            met = yield Meet(squares)
            yield Work("update", Key("update", step), met)
            yield EndStep(step)

    def action(self, place: int, kind: str, key: Key) -> Program:
        """Take one micro-batch forward or backward through a stage."""
        yield Begin(kind, key.part)
        source, target, value = place - _FURTHER[kind], place + _FURTHER[kind], None
        if 0 <= source < len(self.orders):
            message = yield Receive(key, source)
            (value,) = yield Decode((message,))
        value = yield Work(MATHS[kind], key, value)
        if 0 <= target < len(self.orders):
            message = yield Encode(key, value)
            yield Send(message, target, awaited=self.blocking)
            if self.blocking:
                yield Wait(key, target)
