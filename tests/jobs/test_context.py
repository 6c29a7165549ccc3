"""Context parallel training: whatever the exchange, the nodes and the links, it is the model that one node trains."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from testbed.errors import UserError
from testbed.jobs.actions import Encode, Key, Message, Send
from testbed.jobs.kind import Setting
from testbed.jobs.loop import Loop
from testbed.jobs.recorder import StepRecorder
from testbed.nodes.context_node import FAMILIES, ContextNode, _halves, bases
from testbed.nodes.optimise import Optimiser, learning_rate
from testbed.runtime.gather import global_norm
from testbed.runtime.step_log import OnHostClock, Records
from testbed.spec import Recipe
from testbed.workloads.build_stage import build_stage, empty_model
from testbed.workloads.data import Data
from testbed.workloads.models import workload_size
from tests.jobs.recording import DelayedLinks, Recording, job_recipe
from tests.known import known

STEPS, LENGTH, VOCABULARY = 3, 26, 4096
LAYERS = {"gpt2-nano": 3, "llama-nano": 6}


def recipe(model: str = "gpt2-nano", codec: str = "fp32", **job: Any) -> Recipe:
    batches = job.setdefault("validation_batches", 0)
    table = {"kind": "context", "nodes": 3, "layers": LAYERS[model], **job}
    text = {"sequence_length": LENGTH, "batch_size": 2, "validation_batches": max(1, batches)}
    return job_recipe(table, codec, model=model, steps=STEPS, **text)


SLOW = DelayedLinks(lambda source, target, size: size * (1 + 7 * source % 5) + 1000 * target)


class Trained(NamedTuple):
    records: list[dict[str, Any]]
    nodes: Sequence[ContextNode]
    seen: Recording

    @property
    def payloads(self) -> dict[tuple[int, Key], bytes]:
        """Those that were encoded, by node."""
        return {(node, action.key): bytes(value.payload) for node, _, action, value, *_ in self.seen.of(Encode)}

    @property
    def sent(self) -> list[tuple[int, int, Message]]:
        """Messages: sender, receiver."""
        return [(node, action.peer, action.message) for node, _, action, *_ in self.seen.of(Send)]

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records]

    @property
    def norms(self) -> list[float]:
        return [record["gradient_norm"] for record in self.records]

    @property
    def weights(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.nodes[0].learned]


def trained(tokens: str, of: Recipe, links: Any = None) -> Trained:
    kind, setting = of.job, Setting(of, VOCABULARY, tokens)
    places = range(len(kind.places))
    nodes = [kind.node(place, setting) for place in places]
    outputs, seen = [io.StringIO() for _ in places], Recording()
    records = Records(nodes, outputs, 0, lambda message: None, lambda done: done[-1][1])
    recorder = StepRecorder(records.write, kind.named, 32)
    programs = [kind.program(place) for place in places]
    Loop(
        programs,
        nodes,
        links=links,
        observers=[OnHostClock(recorder), seen],
        goes_on=lambda place, step: step + 1 < STEPS,
    ).run()
    for node in nodes[1:]:
        assert all(map(torch.equal, node.learned, nodes[0].learned))
    return Trained([json.loads(line) for line in outputs[-1].getvalue().splitlines()], nodes, seen)


def unsplit(tokens: str, of: Recipe, chunks: int) -> tuple[list[float], list[float], list[Tensor]]:
    """Train the model on one node, in one graph, with so many chunks of queries; returns losses, norms and weights."""
    spec = of.workload
    size, data = workload_size(spec), Data(np.load(tokens), spec, of.training.seed)
    model = build_stage(spec, stage=0, stages=1, seed=of.training.seed, vocabulary=VOCABULARY)
    drawn = bases(of.job, size, of.training.seed)
    learned = [*model.parameters(), *(basis for basis in drawn if basis.requires_grad)]
    layers, optimiser = FAMILIES[spec.family](model), Optimiser(learned, of.optimiser)
    cuts = [slice(LENGTH * chunk // chunks, LENGTH * (chunk + 1) // chunks) for chunk in range(chunks)]
    losses, norms = [], []

    def heads(states: Tensor, count: int) -> Tensor:
        return states.view(*states.shape[:2], count, -1).transpose(1, 2)

    for step in range(STEPS):
        batch = data.train(step, 0, 1)
        hidden = [layers.embed(batch.inputs[:, cut], cut.start) for cut in cuts]
        for layer in range(size.layers):
            # an alias for each chunk: what a chunk uses twice adds up for it first
            spans = [[basis.view_as(basis) for basis in drawn[2 * layer : 2 * layer + 2]] for _ in cuts]
            projected = [list(layers.project(layer, each)) for each in hidden]
            for states, span in zip(projected, spans, strict=True) if drawn else ():
                states[1:] = [state @ basis for state, basis in zip(states[1:], span, strict=True)]
            for chunk, cut in enumerate(cuts):
                query = layers.rotate(heads(projected[chunk][0], size.heads), cut.start)
                pair = [torch.cat([each[n] for each in projected[: chunk + 1]], 1) for n in (1, 2)]
                if drawn:
                    pair = [state @ basis.T for state, basis in zip(pair, spans[chunk], strict=True)]
                keys, values = (heads(state, size.key_heads) for state in pair)
                allowed = torch.arange(cut.stop) <= torch.arange(cut.start, cut.stop)[:, None]
                mixed = nn.functional.scaled_dot_product_attention(
                    query, layers.rotate(keys, 0), values, allowed, enable_gqa=True
                )
                hidden[chunk] = layers.finish(layer, hidden[chunk], mixed.transpose(1, 2).flatten(2))
        parts = [
            nn.functional.cross_entropy(
                model.head(each).flatten(0, 1), batch.targets[:, cut].flatten(), reduction="sum"
            )
            / spec.batch_tokens
            for each, cut in zip(hidden, cuts, strict=True)
        ]
        torch.autograd.backward(parts)
        losses.append(math.fsum(part.item() for part in parts))
        norms.append(global_norm(optimiser.squares()))
        optimiser.update(norms[-1], learning_rate(of.optimiser, step, STEPS))
    return losses, norms, [parameter.detach() for parameter in learned]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "nodes", "more"),
    [
        ("gpt2-nano", 2, {}),
        ("gpt2-nano", 4, {"exchange": "chain"}),
        ("gpt2-nano", 3, {"subspace": 6}),
        ("gpt2-nano", 3, {"subspace": 6, "fixed": True, "exchange": "chain"}),
        ("llama-nano", 3, {}),
        ("llama-nano", 3, {"exchange": "chain", "subspace": 8}),
    ],
)
def test_it_is_one_node_with_the_same_chunks_of_queries(
    tokens: str, model: str, nodes: int, more: dict[str, Any]
) -> None:
    of = recipe(model, nodes=nodes, **more)
    run = trained(tokens, of)
    losses, norms, weights = unsplit(tokens, of, nodes)
    assert run.losses == losses
    assert run.norms == norms
    assert all(map(torch.equal, run.weights, weights))


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["direct", "chain"])
def test_links_change_nothing(tokens: str, exchange: str) -> None:
    of = recipe(nodes=4, exchange=exchange, validation_batches=2, codec="int8")
    alone, slow = trained(tokens, of), trained(tokens, of, SLOW)
    assert alone.losses == slow.losses
    assert alone.payloads == slow.payloads
    assert all(map(torch.equal, alone.weights, slow.weights))


@pytest.mark.parametrize("model", LAYERS)
def test_its_losses_are_transformers(tokens: str, model: str) -> None:
    of = recipe(model, nodes=3, validation_batches=2)
    run = trained(tokens, of)
    assert [record["phase"] for record in run.records] == ["train"] * STEPS + ["evaluation"]
    spec = of.workload
    data, whole = Data(np.load(tokens), spec, of.training.seed), empty_model(spec).to_empty(device="cpu")
    first = build_stage(spec, stage=0, stages=1, seed=of.training.seed, vocabulary=VOCABULARY)
    for parameters, batches, found in (
        (first.state_dict(), [data.train(0, 0, 1)], run.losses[0]),
        (run.nodes[1].model.state_dict(), [data.validation(number, 0, 1) for number in range(2)], run.losses[-1]),
    ):
        whole = type(whole)(whole.config)  # what is in no checkpoint, such as rotations, is made with the model
        whole.load_state_dict({name: value for name, value in parameters.items() if name in whole.state_dict()})
        losses = []
        for batch in batches:
            with torch.no_grad():
                logits = whole(batch.inputs).logits
            losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).item())
        assert found == pytest.approx(math.fsum(losses) / len(losses), abs=1e-5)


@pytest.fixture(scope="module")
def exact(tokens: str) -> Trained:
    return trained(tokens, recipe(nodes=2, weights="bf16"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "more"),
    [
        ("int4", {}),
        ("lowrank(int8, 8)", {"exchange": "chain"}),
        ("ef(topk(0.1))", {"nodes": 3, "exchange": "chain"}),
        ("delta(int4)", {"nodes": 3}),
        ("0: fp32; rest: bf16", {}),
    ],
)
def test_codecs_repeat_and_learn(tokens: str, exact: Trained, codec: str, more: dict[str, Any]) -> None:
    of = recipe(codec=codec, **({"nodes": 2, "weights": "bf16", "validation_batches": 1} | more))
    run, again = trained(tokens, of), trained(tokens, of)
    assert run.payloads == again.payloads
    assert run.losses == again.losses
    assert run.losses[:STEPS] != exact.losses
    assert run.losses[:STEPS] == pytest.approx(exact.losses, abs=0.1)


def test_messages_and_actions_have_names_of_their_own(tokens: str) -> None:
    of = recipe(nodes=4, validation_batches=2)
    run = trained(tokens, of)
    assert len({(sender, peer, message.key) for sender, peer, message in run.sent}) == len(run.sent)
    for record in run.records:
        assert len({(each["kind"], each["microbatch"]) for each in record["actions"]}) == len(record["actions"])
        sent = [(each["direction"], each["microbatch"], each["peer"]) for each in record["sent"]]
        assert len(set(sent)) == len(sent)
    kinds = [each["kind"] for each in run.records[0]["actions"]]  # of the last node, after three others
    assert kinds == ["F"] * (2 * 3 + 1) + ["B"] * (3 * (2 + 3) + 1) + ["A"] * 3
    assert {each["tokens"] for each in run.records} == {2 * LENGTH, 4 * LENGTH}


def test_gradients_have_the_codec_of_their_direction_and_noise_of_their_own(tokens: str) -> None:
    run = trained(tokens, recipe(nodes=2, codec="fwd=int4, bwd=fp32"))
    sizes = {
        word: {len(payload) for (_, key), payload in run.payloads.items() if key.what.startswith(word)}
        for word in ("keys", "gradient")
    }
    assert max(sizes["keys"]) < min(sizes["gradient"]) / 6
    kind = known(recipe(nodes=2).job)
    what = {key.what: key for key in (key for _, key in run.payloads)}
    for key in what.values():
        assert {kind.named(half).direction for half in _halves(key)} == {kind.named(key).direction}


@pytest.mark.slow
def test_bytes_are_those_of_the_exchanges(tokens: str) -> None:
    """Each of 6 pairs of 4 nodes gets keys and values once a layer, and gives their gradients back."""
    spec, n = recipe().workload, 4
    values = sum(parameter.numel() for parameter in trained(tokens, recipe(nodes=1)).weights)
    for exchange in ("direct", "chain"):
        messages = [message for *_, message in trained(tokens, recipe(nodes=n, exchange=exchange)).sent]
        sent = sum(len(message.payload) for message in messages) / STEPS
        chunks = [LENGTH * (chunk + 1) // n - LENGTH * chunk // n for chunk in range(n)]
        of_chunks = sum(chunk * (n - 1 - number) for number, chunk in enumerate(chunks))
        coded = 2 * 3 * of_chunks * 2 * spec.batch_size * 64 * 4
        assert coded + 2 * (n - 1) * values * 4 <= sent < 1.01 * (coded + 2 * (n - 1) * values * 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": 4}, "job.layers is 4, but gpt2-nano has 3"),
        ({"nodes": LENGTH + 1}, "evenly over job.nodes = 27"),
        ({"weights": "int9"}, "int9"),
    ],
)
def test_what_does_not_fit_is_refused(tokens: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        trained(tokens, recipe(**change))
