"""The node of context parallel training (`jobs.context`): all weights, and its chunk of every sequence.

Each chunk of queries has one softmax over all gathered keys that it attends to, so with identity codecs every exchange
is bit-identical to one node that computes the same chunks of queries. In a softmax rescaled block by block, rounding
would depend on the order of the blocks. Keys are sent before they are rotated to their positions, so that they lie in
the subspace that the layer's weights span. A node attends to its own keys and values uncoded.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import rotate_half

from testbed.codecs.contract import Context
from testbed.codecs.make import make
from testbed.errors import CodecError, SpecError
from testbed.jobs.actions import Encoded, Key
from testbed.jobs.context import ContextParallel
from testbed.jobs.kind import Setting
from testbed.jobs.recorder import Said
from testbed.message_key import Phase
from testbed.nodes.coded import CodedNode
from testbed.nodes.optimise import Optimiser, learning_rate
from testbed.runtime import failures
from testbed.runtime.gather import global_norm
from testbed.spec import TextSpec
from testbed.workloads.build_stage import build_stage
from testbed.workloads.data import Batch, Data
from testbed.workloads.models import ModelSize, workload_size

_LENGTH: Final = struct.Struct("<I")
_WEIGHTS: Final = ("weights", "sum")
_HALVES: Final = ("keys", "values")
Pair = tuple[Tensor, Tensor]
"""Keys and values of a chunk, or their gradients, (b, n, k) each."""


class Gpt2Layers:
    """A GPT-2 split into the parts before and after attention in each layer."""

    def __init__(self, model: Any) -> None:
        self._tables, self._blocks = model.transformer, list(model.transformer["h"].values())

    def embed(self, ids: Tensor, first: int) -> Tensor:
        """Compute hidden states (b, n, d) from token ids (b, n) int64 at the positions from `first` on."""
        positions = torch.arange(first, first + ids.shape[1])
        hidden: Tensor = self._tables["wte"](ids) + self._tables["wpe"](positions)
        return hidden

    def project(self, layer: int, hidden: Tensor) -> Sequence[Tensor]:
        """Compute queries (b, n, d), keys and values (b, n, k) from hidden states (b, n, d)."""
        block = self._blocks[layer]
        return block.attn.c_attn(block.ln_1(hidden)).split(hidden.shape[-1], -1)  # type: ignore[no-any-return]

    def rotate(self, states: Tensor, first: int) -> Tensor:
        """Rotate queries or keys (b, h, n, d/h) to their positions, from `first` on."""
        return states

    def finish(self, layer: int, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Compute the layer's output from its input and the attention's output."""
        block = self._blocks[layer]
        hidden = block.attn.c_proj(mixed) + hidden
        return hidden + block.mlp(block.ln_2(hidden))  # type: ignore[no-any-return]


class LlamaLayers:
    """A Llama split likewise."""

    def __init__(self, model: Any) -> None:
        self._table, self._rotary = model.model["embed_tokens"], model.rotary
        self._blocks = list(model.model["layers"].values())

    def embed(self, ids: Tensor, first: int) -> Tensor:
        return self._table(ids)  # type: ignore[no-any-return]

    def project(self, layer: int, hidden: Tensor) -> Sequence[Tensor]:
        attention = self._blocks[layer].self_attn
        hidden = self._blocks[layer].input_layernorm(hidden)
        return attention.q_proj(hidden), attention.k_proj(hidden), attention.v_proj(hidden)

    def rotate(self, states: Tensor, first: int) -> Tensor:
        positions = torch.arange(first, first + states.shape[2]).unsqueeze(0)
        cos, sin = (table.unsqueeze(1) for table in self._rotary(states, position_ids=positions))
        return states * cos + rotate_half(states) * sin  # type: ignore[no-any-return]

    def finish(self, layer: int, hidden: Tensor, mixed: Tensor) -> Tensor:
        block = self._blocks[layer]
        hidden = hidden + block.self_attn.o_proj(mixed)
        return hidden + block.mlp(block.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


FAMILIES: Final[dict[str, Any]] = {"gpt2": Gpt2Layers, "llama": LlamaLayers}
"""How to split a model, by the workload's family."""


class _KeptLayer(NamedTuple):
    """Tensors that a layer's forward pass keeps for its backward pass."""

    source: Tensor
    """The layer's input; in the first layer with the embedding's graph."""
    hidden: Tensor
    """The input as the leaf of this layer's graph."""
    residual: Tensor
    """The input as a leaf of the graph after attention."""
    projected: Sequence[Tensor]
    """Queries, keys and values, with their graph."""
    own: Sequence[Tensor]
    """The same tensors as leaves of attention's graph."""
    earlier: Sequence[Pair] = ()
    """Keys and values of earlier chunks, by chunk."""
    outputs: Tensor | None = None


class ContextNode(CodedNode):
    """One node. Keys and values are two tensors of one message, each with its own codec; so are their gradients. A
    layer is a boundary.
    """

    keeps = ("learned", "_optimiser")

    def __init__(self, place: int, kind: ContextParallel, setting: Setting) -> None:
        """SpecError for a workload that contradicts the job's table or does not support context parallel training."""
        super().__init__(setting)
        spec, seed = setting.recipe.workload, setting.recipe.training.seed
        _check(kind, spec)
        make(kind.weights, Context(seed, place, "backward"))
        assert isinstance(spec, TextSpec)
        self._place, self._job, self._spec, self._size = place, kind, spec, workload_size(spec)
        cuts = [spec.sequence_length * chunk // kind.nodes for chunk in (place, place + 1)]
        self._first, self._chunk = cuts[0], slice(*cuts)
        self.model = build_stage(spec, stage=0, stages=1, seed=seed, vocabulary=setting.vocabulary)
        self._layers = FAMILIES[spec.family](self.model)
        self._data = Data(np.load(setting.tokens, mmap_mode="r"), spec, seed)
        self._bases = bases(kind, self._size, seed)
        self.learned = [*self.model.parameters(), *(basis for basis in self._bases if basis.requires_grad)]
        """Trained parameters, identical at every node."""
        self._optimiser = Optimiser(self.learned, setting.recipe.optimiser, tables=self.model.by_token())
        self._kept: dict[int, _KeptLayer] = {}
        self._now = self._loss_of_chunk = torch.empty(0)
        """The hidden states that the next layer reads, or their gradient."""
        self._batch: Batch
        self._added: dict[int, Pair] = {}
        self._flat: Sequence[Tensor] = ()
        self._losses: list[float] = []
        self._said = Said()

    def weights(self) -> dict[str, Tensor]:
        """Return the trained tensors, by their number in the model."""
        return {f"{number:06}": parameter for number, parameter in enumerate(self.learned)}

    def said(self, step: int, phase: Phase) -> Said:
        """Return the record's part of the step or evaluation that has just ended."""
        return self._said

    # ------------------------------------------------------------------ forward
    def project(self, key: Key, value: None) -> Pair:
        """Compute a layer's queries, keys and values of this node's chunk; returns the last two."""
        training, layer = key.phase == "train", key.origin
        with torch.set_grad_enabled(training):
            if layer == 0:
                read = self._data.train if training else self._data.validation
                self._batch = read(key.step, 0, 1)
                self._now = self._layers.embed(self._batch.inputs[:, self._chunk], self._first)
            hidden = _leaf(self._now)
            projected = list(self._layers.project(layer, hidden))
            for number, basis in enumerate(self._bases_of(layer), 1):
                projected[number] = projected[number] @ basis
        own = [_leaf(tensor) for tensor in projected]
        self._kept[layer] = _KeptLayer(self._now, hidden, _leaf(hidden), projected, own)
        return own[1].detach(), own[2].detach()

    def attend(self, key: Key, values: Sequence[Pair]) -> None:
        """Compute a layer's output; `values`: keys and values of earlier chunks, nearest first."""
        layer = key.origin
        kept = self._kept[layer]
        earlier = [(_leaf(k), _leaf(v)) for k, v in reversed(values)]
        with torch.set_grad_enabled(key.phase == "train"):
            query, *own = kept.own
            pair = [torch.cat(each, 1) for each in zip(*earlier, own, strict=True)]
            for number, basis in enumerate(self._bases_of(layer)):
                pair[number] = pair[number] @ basis.T
            mixed = self._attention(query, *pair)
            outputs = self._layers.finish(layer, kept.residual, mixed)
        self._kept[layer] = kept._replace(earlier=earlier, outputs=outputs)
        self._now = outputs.detach()

    def _bases_of(self, layer: int) -> Sequence[Tensor]:
        """Return the bases of a layer's keys and values, if they lie in subspaces."""
        return self._bases[2 * layer : 2 * layer + 2]

    def _attention(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from queries of the last positions to keys and values of all positions."""
        q, k, v = (
            tensor.view(*tensor.shape[:2], heads, -1).transpose(1, 2)
            for tensor, heads in (
                (query, self._size.heads),
                (keys, self._size.key_heads),
                (values, self._size.key_heads),
            )
        )
        allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        mixed = nn.functional.scaled_dot_product_attention(
            self._layers.rotate(q, self._first), self._layers.rotate(k, 0), v, allowed, enable_gqa=True
        )
        return mixed.transpose(1, 2).flatten(2)

    def loss(self, key: Key, value: None) -> float:
        """Return this node's contribution to the mean losses since the last `note`. StageError for a NaN or infinite
        loss.
        """
        hidden = _leaf(self._now)
        with torch.set_grad_enabled(key.phase == "train"):
            logits = self.model.head(hidden).flatten(0, 1)
            targets = self._batch.targets[:, self._chunk].flatten()
            loss = nn.functional.cross_entropy(logits, targets, reduction="sum") / self._spec.batch_tokens
        self._now, self._loss_of_chunk = hidden, loss
        self._losses.append(loss.item())
        if not math.isfinite(self._losses[-1]):
            raise self._diverged("loss", self._losses[-1], key)
        return math.fsum(self._losses)

    # ------------------------------------------------------------------ backward
    def loss_backward(self, key: Key, value: None) -> None:
        """Start a backward pass."""
        self._loss_of_chunk.backward()  # type: ignore[no-untyped-call]
        self._now = _gradient(self._now)

    def attend_backward(self, key: Key, value: None) -> None:
        """Compute the gradients of a layer's queries, keys and values, including earlier chunks'."""
        kept = self._kept[key.origin]
        assert kept.outputs is not None
        kept.outputs.backward(self._now)  # type: ignore[no-untyped-call]
        self._added = {chunk: (_gradient(k), _gradient(v)) for chunk, (k, v) in enumerate(kept.earlier)}

    def add(self, key: Key, later: Pair | None) -> Pair:
        """Return this node's gradients of a chunk's keys and values, added to those of later nodes if any."""
        return _sum([later, self._added.pop(key.part)] if later else [self._added.pop(key.part)])

    def project_backward(self, key: Key, came: Sequence[Pair]) -> None:
        """Propagate a layer's gradient to its input; `came`: the gradients from later nodes, last node first."""
        kept = self._kept.pop(key.origin)
        query, keys, values = map(_gradient, kept.own)
        # The input's own gradient is added first, as in a layer with a single graph.
        gradients = [_gradient(kept.residual), query, *_sum([*came, (keys, values)])]
        torch.autograd.backward([kept.hidden, *kept.projected], gradients)
        self._now = _gradient(kept.hidden)
        if key.origin == 0:
            kept.source.backward(self._now)  # type: ignore[no-untyped-call]
            flat = torch.cat([_gradient(parameter).flatten() for parameter in self.learned])
            self._flat = flat.tensor_split(self._job.nodes)

    # ------------------------------------------------------------------ update
    def part(self, key: Key, value: None) -> Tensor:
        """Return the part of the weight gradients that a node sums."""
        return self._flat[key.part]

    def sum(self, key: Key, came: Sequence[Tensor]) -> Tensor:
        """Sum this node's part of the weight gradients; `came`: those of the other nodes, last node first."""
        here = len(came) - self._place
        return functools.reduce(torch.add, [*came[:here], self._flat[self._place], *came[here:]])

    def update(self, key: Key, sums: Sequence[Tensor]) -> None:
        """Update with the summed gradients, by part. StageError for a NaN or infinite norm."""
        recipe, parameters = self._setting.recipe, self.learned
        gradients = torch.split(torch.cat(list(sums)), [parameter.numel() for parameter in parameters])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.view_as(parameter).clone()  # for torch's alignment
        norm = global_norm(self._optimiser.squares())
        rate = learning_rate(recipe.optimiser, key.step, recipe.training.steps)
        if not math.isfinite(norm):
            raise self._diverged("gradient norm", norm, key)
        self._optimiser.update(norm, rate)
        self._said = Said(gradient_norm=norm, learning_rate=rate)

    def note(self, key: Key, losses: Sequence[float]) -> None:
        """End a step or an evaluation, given the losses of all nodes."""
        batches, self._losses = len(self._losses), []
        said = self._said if key.phase == "train" else Said()
        self._said = said._replace(loss=math.fsum(losses) / batches, tokens=batches * self._spec.batch_tokens)

    def _diverged(self, what: str, value: float, key: Key) -> Exception:
        return failures.diverged(self._job.places[self._place], what, value, f"at {key.phase} step {key.step}")

    # ------------------------------------------------------------------ messages
    def encode(self, key: Key, value: Any) -> Encoded:
        """Return the payload of keys and values, or of a part of the weights. Raises the codecs' CodecError."""
        if key.what in _WEIGHTS:
            return super().encode(key, value)
        first, second = (super(ContextNode, self).encode(*each) for each in zip(_halves(key), value, strict=True))
        payload = b"".join((_LENGTH.pack(len(first.payload)), first.payload, second.payload))  # type: ignore[arg-type]
        return Encoded(payload, first.raw_bytes + second.raw_bytes)

    def _decoded(self, key: Key, payload: Any) -> Any:
        if key.what in _WEIGHTS:
            return super()._decoded(key, payload)
        view = memoryview(payload)
        if len(view) < _LENGTH.size:
            raise CodecError(f"cannot decode two tensors from {key.what} with {len(view)} bytes")
        ends = _LENGTH.size, _LENGTH.size + _LENGTH.unpack_from(view)[0]
        halves = view[ends[0] : ends[1]], view[ends[1] :]
        return tuple(super(ContextNode, self)._decoded(*each) for each in zip(_halves(key), halves, strict=True))

    def codec_of(self, what: str) -> str:
        return self._job.weights if what in _WEIGHTS else super().codec_of(what)


def bases(kind: ContextParallel, size: ModelSize, seed: int) -> Sequence[nn.Parameter]:
    """Draw an orthonormal basis (k, r) for the keys and one for the values of each layer; empty without subspaces."""
    if kind.subspace is None:
        return []
    draw = torch.Generator().manual_seed(seed)
    width = size.width // size.heads * size.key_heads
    drawn = [torch.randn(width, kind.subspace, generator=draw) for _ in range(2 * size.layers)]
    return [nn.Parameter(torch.linalg.qr(each).Q.contiguous(), requires_grad=not kind.fixed) for each in drawn]


def _check(kind: ContextParallel, spec: Any) -> None:
    if not isinstance(spec, TextSpec):
        raise SpecError("a job of kind 'context' splits sequences of text: set workload.text")
    if spec.dropout or spec.precision != "fp32":
        raise SpecError("a job of kind 'context' supports only fp32 without dropout; remove both")
    if (layers := workload_size(spec).layers) != kind.layers:
        raise SpecError(f"job.layers is {kind.layers}, but {spec.model} has {layers} layers")
    if kind.nodes > spec.sequence_length:
        raise SpecError(f"cannot split {spec.sequence_length} tokens evenly over job.nodes = {kind.nodes}")
    if kind.validation_batches not in (0, spec.validation_batches):
        raise SpecError(
            f"job.validation_batches is {kind.validation_batches}, but the workload has {spec.validation_batches}; set "
            "the same number, or 0"
        )


def _leaf(tensor: Tensor) -> Tensor:
    """Return a tensor as the leaf of a new graph."""
    return tensor.detach().requires_grad_()


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _sum(pairs: Sequence[Pair]) -> Pair:
    """Sum pairs, in order."""
    keys, values = (functools.reduce(torch.add, each) for each in zip(*pairs, strict=True))
    return keys, values


def _halves(key: Key) -> Sequence[Key]:
    """Return the keys for the two parts of a message, keys and values: with one name both would be rounded with the
    same noise.
    """
    return [key._replace(what=f"{key.what} {half}", part=2 * key.part + n) for n, half in enumerate(_HALVES)]
