"""Autoregressive decoding by a causal language model whose layers are split over nodes, as in Petals, exo or llama.cpp.

A step decodes `requests` requests, each a batch of sequences, from their prompts to their last tokens. The first stage
embeds tokens, activations go from stage to stage, and the last one sends the chosen tokens back to the first. Requests
take turns: while one is in flight, stages work on others. Turn t of a step carries one request through all stages; the
first turns are the requests' prompts. A note names the request and its current number of tokens, so that a stage knows
which keys and values are still valid.

With a draft model on the first node (speculative decoding, Leviathan et al., arXiv 2211.17192; over slow links DSD,
arXiv 2511.11733) a turn also carries `speculate` guesses, which go directly to the last stage. It accepts guesses up to
the first that it would not have chosen itself, and returns their number in the note of its reply. All sequences of a
batch advance by the smallest number accepted.
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
"""The note of a turn: its request and that request's number of tokens. An invalid request number ends the step."""


class Decoding(JobKind):
    """Stages that decode together."""

    unit = "stage"
    counts = "turn"

    stages: int = Field(ge=2)
    layers: tuple[int, ...] | None = None
    """Layers of each stage; by default as even as possible."""
    requests: int = Field(default=1, ge=1, le=60_000)
    """Concurrent requests of a step, which take turns. Each has `workload.batch_size` sequences."""
    prompt: int = Field(ge=1)
    """Tokens per prompt, from held-out text."""
    tokens: int = Field(ge=1, le=60_000)
    """Tokens decoded per sequence."""
    cache: bool = True
    """Whether stages cache keys and values. Without a cache, each turn carries and recomputes the whole prefix."""
    draft: str | None = None
    """The draft model, on the first node: a named size or a checkpoint, with the workload's tokenizer."""
    speculate: int = Field(default=0, ge=0, le=255)
    """Tokens that it guesses per turn."""

    @model_validator(mode="after")
    def _draft_guesses(self) -> Decoding:
        if (self.draft is None) != (self.speculate == 0):
            raise ValueError("job.draft (a model) and job.speculate (tokens that it guesses) must be set together")
        return self

    @property
    def places(self) -> Sequence[str]:
        """The names of the stages."""
        return tuple(f"stage {stage}" for stage in range(self.stages))

    @property
    def needs_star(self) -> bool:
        return len(self.places) > 2

    @property
    def in_short(self) -> tuple[str, str]:
        guesses = f", {self.speculate} guesses" if self.speculate else ""
        return f"{self.stages} stages", f"{self.requests} requests of {self.prompt} + {self.tokens} tokens{guesses}"

    def named(self, key: Key) -> Named:
        return Named("forward" if key.what == "activation" else "backward", key.part)

    def node(self, place: int, setting: Setting) -> Node:
        # Imported here, because nodes import this module and torch.
        node: Node = importlib.import_module("testbed.nodes.decode_node").DecodingNode(place, self, setting)
        return node

    def guesses(self, position: int) -> int:
        """Return the number of guesses in a turn that starts at `position` tokens; the last token is never guessed."""
        return 0 if position == 0 else min(self.speculate, self.tokens - position - 1)

    def program(self, place: int, first_step: int = 0) -> Program:
        """Return the program of a stage, from that step on."""
        step, goes_on = first_step, True
        while goes_on:
            yield from self._lead(step) if place == 0 else self._follow(place, step)
            goes_on = yield EndStep(step)
            step += 1

    def _lead(self, step: int) -> Program:
        """Decode a step's requests as the first stage; each reply starts the next turn of its request."""
        answers = deque[tuple[int, int, int]]()
        """Pending replies, in order: turn, request, and the request's number of tokens."""
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
        if self.speculate:  # only this stage knows the number of turns
            yield Begin()
            over = yield Encode(Key("activation", step, turn))
            yield Send(over, 1, _TURN.pack(self.requests, 0))

    def _forward(self, step: int, turn: int, request: int, position: int, chosen: Any) -> Program:
        """Run the new tokens of a request through the first stage; `chosen`: the last stage's reply, if any."""
        number, guesses = request * self.tokens + position, self.guesses(position)
        if guesses:
            chosen = yield Work("draft", Key("draft", step, number), chosen)
        hidden = yield Work(self._pass(position), Key("forward", step, number), chosen)
        message = yield Encode(Key("activation", step, turn), hidden)
        yield Send(message, 1, _TURN.pack(request, position))
        if guesses:  # sent first, because they skip the stages in between
            message = yield Encode(Key("guess", step, turn), chosen)
            yield Send(message, self.stages - 1)

    def _follow(self, place: int, step: int) -> Program:
        """Run the step's turns through a stage other than the first."""
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
        """Return the work of a turn: all tokens of a request, or one token and the guesses after it."""
        return "forward" if self.cache and position else "prefill"
