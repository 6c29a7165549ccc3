"""Autoregressive decoding of a causal language model whose layers are cut over nodes, as in Petals, exo or llama.cpp.

A step decodes `requests` requests, each a batch of sequences, from their prompts to their last tokens. The first stage
embeds tokens, activations go from stage to stage, and the last one sends the tokens that it chose back to the first.
Requests take turns: while one is on its way, stages work on others. Turn t of a step carries one request through all
stages; the first turns are the requests' prompts. A note says which request it is, and how many of its tokens are
there, so that a stage knows which keys and values still hold.

With a draft model on the first node (speculative decoding, Leviathan et al., arXiv 2211.17192; over slow links DSD,
arXiv 2511.11733) a turn carries `speculate` guesses besides, which go to the last stage directly. It accepts those that
it would have chosen itself, up to the first that it would not, and says how many in the note of its answer. In a batch
all sequences go on by as many tokens as the slowest.
"""

from __future__ import annotations

import importlib
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from testbed.jobs.actions import Begin, Decode, Encode, EndStep, Key, Node, Program, Receive, Send, Work
from testbed.jobs.kind import JobKind, Setting
from testbed.jobs.recorder import Named

_TURN = struct.Struct("<HH")
"""The note of a turn: its request, and how many tokens of it are there. A request that is none: the step is over."""


class Decoding(JobKind):
    """Stages that decode together."""

    unit = "stage"
    counts = "turn"

    stages: int = Field(ge=2)
    layers: tuple[int, ...] | None = None
    """Layers of each stage; not stated: as even as can be."""
    requests: int = Field(default=1, ge=1, le=60_000)
    """In flight at a time: a step's, which take turns. Each is of `workload.batch_size` sequences."""
    prompt: int = Field(ge=1)
    """Tokens of a prompt, from held-out text."""
    tokens: int = Field(ge=1, le=60_000)
    """Tokens that are decoded for each sequence."""
    cache: bool = True
    """Whether stages keep keys and values. Without, each turn carries the whole prefix and computes it again."""
    draft: str | None = None
    """The draft model, on the first node: a named size or a checkpoint, with the workload's tokenizer."""
    speculate: int = Field(default=0, ge=0, le=255)
    """How many tokens it guesses for a turn."""

    @model_validator(mode="after")
    def _draft_guesses(self) -> Decoding:
        if (self.draft is None) != (self.speculate == 0):
            raise ValueError("job.draft and job.speculate go together: a model, and how many tokens it guesses")
        return self

    @property
    def places(self) -> Sequence[str]:
        """The names of the stages."""
        return tuple(f"stage {stage}" for stage in range(self.stages))

    @property
    def in_short(self) -> tuple[str, str]:
        guesses = f", {self.speculate} guesses" if self.speculate else ""
        return f"{self.stages} stages", f"{self.requests} requests of {self.prompt} + {self.tokens} tokens{guesses}"

    def named(self, key: Key) -> Named:
        return Named("forward" if key.what == "activation" else "backward", key.part)

    def node(self, place: int, setting: Setting) -> Node:
        # By name, because nodes are built on this module, and import torch.
        node: Node = importlib.import_module("testbed.kinds.decode").DecodingNode(place, self, setting)
        return node

    def guesses(self, position: int) -> int:
        """Return how many tokens are guessed for a turn at which so many are there; the last is never worth one."""
        return 0 if position == 0 else min(self.speculate, self.tokens - position - 1)

    def program(self, place: int, first_step: int = 0) -> Program:
        """Return what a stage does, from that step on."""
        step, goes_on = first_step, True
        while goes_on:
            yield from self._lead(step) if place == 0 else self._follow(place, step)
            goes_on = yield EndStep(step)
            step += 1

    def _lead(self, step: int) -> Program:
        """Decode a step's requests as the first stage, which takes up each answer as the next turn of its request."""
        answers = deque[tuple[int, int, int]]()
        """Those awaited, in order: turn, request, and how many of its tokens were there."""
        turn, last = 0, self.stages - 1
        for request in range(self.requests):
            yield Begin("F", turn)
            yield from self._forward(step, turn, request, 0, None)
            answers.append((turn, request, 0))
            turn += 1
        while answers:
            asked, request, position = answers.popleft()
            yield Begin() if position + 1 == self.tokens else Begin("F", turn)
            answer = yield Receive(Key("token", step, asked, origin=last), last)
            chosen = yield Decode((answer,))
            position += 1 + int.from_bytes(answer.note, "little")
            if position < self.tokens:
                yield from self._forward(step, turn, request, position, chosen[0])
                answers.append((turn, request, position))
                turn += 1
        if self.speculate:  # how many turns there are nobody else knows
            yield Begin()
            over = yield Encode(Key("activation", step, turn))
            yield Send(over, 1, _TURN.pack(self.requests, 0))

    def _forward(self, step: int, turn: int, request: int, position: int, chosen: Any) -> Program:
        """Take what is new of a request through the first stage; `chosen`: the last stage's answer, if any."""
        number, guesses = request * self.tokens + position, self.guesses(position)
        if guesses:
            chosen = yield Work("draft", Key("draft", step, number), chosen)
        hidden = yield Work(self._pass(position), Key("forward", step, number), chosen)
        message = yield Encode(Key("activation", step, turn), hidden)
        yield Send(message, 1, _TURN.pack(request, position))
        if guesses:  # they have fewer stages to cross
            message = yield Encode(Key("guess", step, turn), chosen)
            yield Send(message, self.stages - 1)

    def _follow(self, place: int, step: int) -> Program:
        """Take the step's turns through a stage that is not the first."""
        last, turn = place == self.stages - 1, 0
        while self.speculate or turn < self.requests * self.tokens:
            yield Begin("F", turn)
            message = yield Receive(Key("activation", step, turn, origin=place - 1), place - 1)
            request, position = _TURN.unpack(message.note)
            if request == self.requests:
                if not last:
                    yield Send(message._replace(key=message.key._replace(origin=place)), place + 1, message.note)
                break
            came, key = [message], Key("forward", step, request * self.tokens + position)
            if guesses := self.guesses(position) if last else 0:
                came.append((yield Receive(Key("guess", step, turn), 0)))
            values = yield Decode(tuple(came))
            value = yield Work(self._pass(position), key, values[0])
            note, target = message.note, place + 1
            if last:
                accepted = (yield Work("verify", key, values[1])) if guesses else 0
                note, target = accepted.to_bytes(1, "little") if guesses else b"", 0
            onward = yield Encode(Key("token" if last else "activation", step, turn, origin=place), value)
            yield Send(onward, target, note)
            turn += 1

    def _pass(self, position: int) -> str:
        """Return what a turn computes: all that is there of a request, or one token and what is guessed after it."""
        return "forward" if self.cache and position else "prefill"
