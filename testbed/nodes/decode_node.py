"""The node of a decoding stage (`jobs.decode`): its layers, the requests' keys, values and tokens, a draft model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from testbed.errors import SpecError
from testbed.jobs.actions import Key, Message
from testbed.jobs.decode import Decoding
from testbed.jobs.kind import Setting
from testbed.jobs.recorder import Said
from testbed.message_key import Phase
from testbed.nodes.coded import CodedNode
from testbed.spec import TextSpec
from testbed.workloads import models
from testbed.workloads.build_stage import build_stage
from testbed.workloads.data import Batch, Data
from testbed.workloads.precision import autocast
from testbed.workloads.stage_model import StageModel


class KeysAndValues:
    """The interface that attention expects of transformers' caches: keys and values (b, heads, n, d) so far, by
    layer.
    """

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens to a layer's cache; returns all."""
        if layer in self._layers:
            before = self._layers[layer]
            keys, values = torch.cat((before[0], keys), 2), torch.cat((before[1], values), 2)
        self._layers[layer] = keys, values
        return keys, values

    def crop(self, tokens: int) -> None:
        """Keep only the first `tokens` tokens."""
        self._layers = {layer: (k[:, :, :tokens], v[:, :, :tokens]) for layer, (k, v) in self._layers.items()}


class Layers:
    """Layers of a model, one stage's or all, which process the new tokens of a sequence."""

    def __init__(self, spec: TextSpec, setting: Setting, stage: int, stages: int, cut: tuple[int, ...] | None) -> None:
        """`spec` names the model. Raises SpecError like `build_stage`."""
        self.model: StageModel = build_stage(
            spec,
            stage=stage,
            stages=stages,
            seed=setting.recipe.training.seed,
            vocabulary=setting.vocabulary,
            layers=cut,
        ).eval()
        self._bf16 = spec.precision == "bf16"

    def compute(self, inputs: Tensor, before: int, kept: KeysAndValues | None) -> Tensor:
        """Return the hidden states (b, m, d) fp32 of the m tokens after the first `before`.

        `inputs`: their hidden states from the previous stage; at the first stage the ids (b, before + m) of all tokens.
        `kept` has the keys and values of earlier tokens and receives the new ones; None, allowed if `before` is 0,
        keeps none.
        """
        with torch.no_grad(), autocast("cpu", bf16=self._bf16):
            hidden = self.model.embed(inputs)[:, before:] if self.model.first else inputs
            length, more = before + hidden.shape[1], dict[str, Any]()
            if kept is not None:
                kept.crop(before)
                more["past_key_values"] = kept
            if before and hidden.shape[1] > 1:  # otherwise attention is causal without a mask
                more["attention_mask"] = torch.ones(hidden.shape[1], length, dtype=torch.bool).tril(before)[None, None]
            # A stage's layers are built for a whole sequence; use only the positions of the new tokens.
            for block in self.model.blocks(hidden[:1, :1].expand(1, length, -1)):
                whole = cast("partial[Tensor]", block)
                stated = {name: _from(before, value) for name, value in whole.keywords.items()}
                hidden = whole.func(hidden, **stated | more)
            return hidden.float()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (b, m, v) fp32 of the last layer's hidden states (b, m, d)."""
        with torch.no_grad(), autocast("cpu", bf16=self._bf16):
            return self.model.head(hidden).float()


def _from(before: int, stated: Any) -> Any:
    """Return the entries of a per-position tensor, (1, n) or (1, n, d), after the first `before` positions."""
    if isinstance(stated, tuple):
        return tuple(_from(before, each) for each in stated)
    return stated[:, before:] if isinstance(stated, Tensor) else stated


@dataclass
class Request:
    """A stage's state of one request of a step."""

    batch: int
    """Number of the held-out batch that it comes from."""
    ids: Tensor
    """(b, n) int64: at the first stage its tokens, at the last the chosen ones."""
    kept: KeysAndValues | None
    draft: KeysAndValues = field(default_factory=KeysAndValues)
    drafted: int = 0
    """Number of tokens that the draft model has seen; the last of them may be rejected guesses."""
    chosen: Tensor | None = None
    """(b, m) int64: tokens that the last stage chose in this turn."""


class DecodingNode(CodedNode):
    """One stage: a `jobs.actions.Node` for `jobs.decode.Decoding`.

    The recorded loss is the mean negative log-likelihood of held-out continuations, given the text so far, under the
    split model with its codecs. It involves no generated tokens, so cells are comparable. The accuracy is the share of
    tokens, by position, that the whole model without codecs chooses as well. The last stage computes both.
    """

    def __init__(self, place: int, kind: Decoding, setting: Setting) -> None:
        """SpecError for a model or text that is unavailable, or too short for the prompt and its continuation."""
        super().__init__(setting)
        spec = setting.recipe.workload
        assert isinstance(spec, TextSpec)
        if kind.prompt + kind.tokens > spec.sequence_length:
            raise SpecError(
                f"job.prompt {kind.prompt} + job.tokens {kind.tokens} exceed workload.sequence_length "
                f"{spec.sequence_length}"
            )
        self._place, self._job, self._spec = place, kind, spec
        self._data = Data(np.load(setting.tokens, mmap_mode="r"), spec, setting.recipe.training.seed)
        self._layers = Layers(spec, setting, place, kind.stages, kind.layers)
        self._draft = None
        if kind.draft is not None and place == 0:
            family = models.model_size(kind.draft).family
            drawn = spec.model_copy(update={"model": kind.draft, "family": family, "weights": None})
            self._draft = Layers(drawn, setting, 0, 1, None)
            if self._draft.model.context < kind.prompt + kind.tokens:
                raise SpecError(
                    f"job.draft {kind.draft} has a context of {self._draft.model.context} tokens, "
                    f"too short for this workload"
                )
        self.requests: dict[int, Request] = {}
        """Requests of this step, by number."""
        self._whole: dict[int, Tensor] = {}
        """Choices of the whole model without codecs, (b, tokens), by held-out batch."""

    # ------------------------------------------------------------------ kinds of work
    def integers(self, what: str) -> bool:
        return what != "activation"

    def prefill(self, key: Key, value: Any) -> Tensor:
        """Compute all tokens of a request; see `forward`."""
        number, position = divmod(key.part, self._job.tokens)
        if position == 0:
            batch = (key.step * self._job.requests + number) % self._spec.validation_batches
            first = self._place == 0
            self.requests[number] = Request(
                batch=batch,
                ids=self.held_out(batch).inputs[:, : self._job.prompt if first else 0],
                kept=self._cache(),
            )
        return self.forward(key, value)

    def forward(self, key: Key, value: Any) -> Tensor:
        """Compute the new tokens of a request: hidden states, or at the last stage the chosen tokens, (b, m) int64.

        `value`: hidden states from the previous stage; at the first stage guesses, or the tokens that the last stage
        chose.
        """
        number, position = divmod(key.part, self._job.tokens)
        request, guesses = self.requests[number], self._job.guesses(position)
        before = self._job.prompt + position - 1 if position and request.kept is not None else 0
        if self._place == 0:
            if position and not guesses:
                self._learn(request, position, value)
            more = [self._by_sequence(value)] if guesses else []
            return self._layers.compute(torch.cat((request.ids, *more), 1), before, request.kept)
        hidden = self._layers.compute(value, before, request.kept)
        if self._place < self._job.stages - 1:
            return hidden
        request.chosen = self._layers.logits(hidden[:, -1 - guesses :]).argmax(2)
        if not guesses:
            self._accept(request, 0)
        return request.chosen

    def draft(self, key: Key, chosen: Tensor) -> Tensor:
        """Guess the tokens that follow the last stage's choice, (b, m) int64."""
        number, position = divmod(key.part, self._job.tokens)
        request = self.requests[number]
        assert self._draft is not None
        self._learn(request, position, chosen)
        ids, before = request.ids, min(request.drafted, request.ids.shape[1] - 1)
        for _ in range(self._job.guesses(position)):
            hidden = self._draft.compute(ids, before, request.draft)
            before = ids.shape[1]
            ids = torch.cat((ids, self._draft.logits(hidden[:, -1:]).argmax(2)), 1)
        request.drafted = before
        return ids[:, request.ids.shape[1] :]

    def verify(self, key: Key, guessed: Tensor) -> int:
        """Return the number of guesses that the last stage accepts in every sequence."""
        request = self.requests[key.part // self._job.tokens]
        assert request.chosen is not None
        right = request.chosen[:, :-1] == self._by_sequence(guessed)
        accepted = int(right.int().cumprod(1).sum(1).min())
        self._accept(request, accepted)
        return accepted

    # ------------------------------------------------------------------ records
    def said(self, step: int, phase: Phase) -> Said:
        """Return the record's part of the step that has just ended."""
        tokens = len(self.requests) * self._spec.batch_size * self._job.tokens
        last = self._place == self._job.stages - 1
        return Said(self._loss, accuracy=self.accuracy(), tokens=tokens) if last else Said(tokens=tokens)

    def accuracy(self) -> float:
        """Return the share of this step's tokens that the whole model without codecs chooses as well; at the last
        stage.
        """
        same = [each.ids == self._chosen_whole(each.batch) for each in self.requests.values()]
        return float(torch.cat(same).float().mean())

    @cached_property
    def _loss(self) -> float:
        """Return the recorded loss: messages are split as in decoding, and each batch starts with fresh caches."""
        job, losses, wire = self._job, list[Tensor](), CodedNode(self._setting)
        stages = [Layers(self._spec, self._setting, stage, job.stages, job.layers) for stage in range(job.stages)]
        for batch in range(self._spec.validation_batches):
            ids = self.held_out(batch).inputs
            kept = [self._cache() for _ in stages]
            for position in range(job.tokens):
                length = job.prompt + position
                before, value = length - 1 if position and job.cache else 0, ids[:, :length]
                for stage, layers in enumerate(stages):
                    if stage > 0:
                        key = Key("activation", batch, position, origin=stage - 1)
                        (value,) = wire.decode((Message(key, wire.encode(key, value).payload),))
                    value = layers.compute(value, before, kept[stage])
                logits = stages[-1].logits(value[:, -1])
                losses.append(torch.nn.functional.cross_entropy(logits, ids[:, length]))
        return float(torch.stack(losses).mean())

    def _chosen_whole(self, batch: int) -> Tensor:
        if batch not in self._whole:
            whole = Layers(self._spec, self._setting, 0, 1, None)
            ids, kept, before = self.held_out(batch).inputs[:, : self._job.prompt], self._cache(), 0
            for _ in range(self._job.tokens):
                hidden = whole.compute(ids, before, kept)
                before = 0 if kept is None else ids.shape[1]
                ids = torch.cat((ids, whole.logits(hidden[:, -1:]).argmax(2)), 1)
            self._whole[batch] = ids[:, self._job.prompt :]
        return self._whole[batch]

    def _cache(self) -> KeysAndValues | None:
        return KeysAndValues() if self._job.cache else None

    # ------------------------------------------------------------------ tokens
    def held_out(self, batch: int) -> Batch:
        """Return the text from which prompts are taken."""
        return self._data.validation(batch, 0, 1)

    def _by_sequence(self, ids: Tensor) -> Tensor:
        """Reshape ids received from another stage, (b * m,), to (b, m)."""
        return ids.reshape(self._spec.batch_size, -1)

    def _learn(self, request: Request, position: int, chosen: Tensor) -> None:
        """Append, at the first stage, the tokens of the last turn: the accepted guesses and the chosen token after
        them.
        """
        new = self._job.prompt + position - request.ids.shape[1]
        request.ids = torch.cat((request.ids, self._by_sequence(chosen)[:, :new]), 1)

    def _accept(self, request: Request, guesses: int) -> None:
        """Append, at the last stage, its choices: the accepted guesses and the token after them."""
        assert request.chosen is not None
        request.ids = torch.cat((request.ids, request.chosen[:, : guesses + 1]), 1)
