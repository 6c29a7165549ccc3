"""Decoding over nodes chooses the tokens that the whole model chooses: any cut, any link, any requests in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from testbed.errors import SpecError
from testbed.jobs.actions import Action, Decode, Encode, EndStep, Key, Message, Send, Work
from testbed.jobs.kind import Setting
from testbed.jobs.loop import Loop
from testbed.message_key import Phase
from testbed.nodes.decode_node import DecodingNode
from testbed.records import Calibration
from testbed.replay.cells import played_job
from testbed.runtime.ending import Ending
from testbed.runtime.frame import HEADER_BYTES
from testbed.spec import Stated
from testbed.sweep.trainings import load_training
from testbed.trace.format import SEND
from testbed.training.alone import AloneJob, train_alone
from testbed.workloads.build_stage import build_stage
from tests.jobs.recording import DelayedLinks, job_recipe
from tests.over_loopback import over_loopback
from tests.small_replicas import cell_of

VOCABULARY, BATCH, TIE = 4096, 2, 1e-4
torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def models_built_once() -> Iterator[None]:
    """Nothing here changes weights, so that nodes may share them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("testbed.nodes.decode_node.build_stage", cache(build_stage))
        yield


def setting_of(text: str, /, codec: str = "fp32", model: str = "gpt2-nano", batch: int = BATCH, **job: Any) -> Setting:
    table = {"kind": "decode", "stages": 2, "prompt": 6, "tokens": 9, **job}
    recipe = job_recipe(table, codec, model=model, steps=2, sequence_length=24, batch_size=batch, validation_batches=4)
    return Setting(recipe, VOCABULARY, text)


def works(node: int, action: Action) -> int | None:
    return 300 * (1 + node) if isinstance(action, Work | Encode | Decode) else None


UNEVEN = DelayedLinks(lambda source, target, size: 1000 * (1 + source) + 7 * size)
OVER_LINKS: dict[str, Any] = {"links": UNEVEN, "cost": works}


class Run:
    """Some steps of a job, and what they chose."""

    def __init__(
        self,
        setting: Setting,
        steps: int = 1,
        make: Callable[..., DecodingNode] = DecodingNode,
        **loop: Any,
    ) -> None:
        self.kind, self.sends = setting.recipe.job, list[Send]()
        self.tokens: dict[tuple[int, int], Tensor] = {}
        """What the last stage chose, by step and request; the first stage has the same, up to its last answer."""
        self.accepted: list[int] = []
        self.nodes = [make(place, self.kind, setting) for place in range(self.kind.stages)]
        self.accuracy: list[float] = []
        Loop(
            [self.kind.program(place) for place in range(self.kind.stages)],
            self.nodes,
            observers=[self],
            goes_on=lambda place, step: step + 1 < steps,
            **loop,
        ).run()

    def did(self, lane: Any, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        match action:
            case Send():
                self.sends.append(action)
            case Work("verify"):
                self.accepted.append(value)
            case EndStep() if lane.node == self.kind.stages - 1:
                for number, request in self.nodes[lane.node].requests.items():
                    self.tokens[action.number, number] = request.ids
                self.accuracy.append(self.nodes[lane.node].accuracy())

    @property
    def loss(self) -> float:
        return float(self.nodes[-1].said(0, "train").loss or 0)

    @property
    def sent(self) -> list[Message]:
        return [each.message for each in self.sends]

    @property
    def turns(self) -> int:
        return sum(message.key.what == "token" for message in self.sent)


@cache
def unsplit(tokens: str, model: str) -> list[tuple[Tensor, Tensor]]:
    """What transformers' whole model chooses, by held-out batch, all computed again for every token; and by how much
    each token's logit is above the next one's.
    """
    setting = setting_of(tokens, model=model)
    whole = build_stage(setting.recipe.workload, stage=0, stages=1, seed=3, vocabulary=VOCABULARY)  # type: ignore[arg-type]
    node = DecodingNode(0, setting.recipe.job, setting)  # type: ignore[arg-type]
    found = []
    for batch in range(4):
        ids, margins = node.held_out(batch).inputs[:, :6], []
        for _ in range(9):
            with torch.no_grad():
                best = whole.eval()(ids)[:, -1].topk(2)
            margins.append(best.values[:, 0] - best.values[:, 1])
            ids = torch.cat((ids, best.indices[:, :1]), 1)
        found.append((ids[:, 6:], torch.stack(margins, 1)))
    return found


def ties(chosen: Tensor, whole: tuple[Tensor, Tensor]) -> int:
    """Count the sequences that leave the whole model's at a tie; others must be the same."""
    count = 0
    for own, theirs, margins in zip(chosen, *whole, strict=True):
        if (different := (own != theirs).nonzero()).numel():
            assert margins[different[0]] < TIE
            count += 1
    return count


CUTS = [
    ("gpt2-nano", {"stages": 2}),
    ("gpt2-nano", {"stages": 3}),
    ("gpt2-nano", {"stages": 2, "layers": [1, 2]}),
    ("llama-nano", {"stages": 2}),
    ("llama-nano", {"stages": 5}),
    ("llama-nano", {"stages": 3, "layers": [1, 4, 1]}),
]


@pytest.mark.slow
@pytest.mark.parametrize("over", [{}, OVER_LINKS], ids=["together", "links"])
@pytest.mark.parametrize(("model", "cut"), CUTS)
def test_any_cut_and_any_link_choose_what_the_whole_model_does(
    tokens: str, model: str, cut: dict[str, Any], over: dict[str, Any]
) -> None:
    whole = unsplit(tokens, model)
    for cached in (False, True):
        run = Run(setting_of(tokens, model=model, requests=2, cache=cached, **cut), steps=2, **over)
        assert run.turns == 2 * 2 * 9
        assert run.accuracy == [1, 1]
        different = sum(ties(chosen, whole[2 * step + number]) for (step, number), chosen in run.tokens.items())
        assert different == 0 if not cached else different <= 1


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_requests_in_flight_change_no_token(tokens: str, codec: str) -> None:
    alone = Run(setting_of(tokens, codec=codec), steps=4)
    together = Run(setting_of(tokens, codec=codec, requests=4), **OVER_LINKS)
    for number in range(4):
        assert torch.equal(together.tokens[0, number], alone.tokens[number, 0])


class Mistaken(DecodingNode):
    """Its guesses are the draft model's but for some, which differ between sequences."""

    def draft(self, key: Key, chosen: Tensor) -> Tensor:
        guesses = super().draft(key, chosen)
        for sequence in range(len(guesses)):
            guesses[sequence, (key.part + sequence) % 3 :] += (key.part + sequence) % 4 == 0
        return guesses.clamp(max=VOCABULARY - 1)


@pytest.mark.parametrize(
    ("draft", "make", "stages", "cached", "over"),
    [
        ("gpt2-nano", DecodingNode, 2, True, {}),
        ("gpt2-nano", DecodingNode, 3, False, OVER_LINKS),
        ("gpt2-nano", Mistaken, 3, True, OVER_LINKS),
        ("gpt2-nano", Mistaken, 2, False, {}),
        ("gpt2-micro", DecodingNode, 3, True, {}),
        ("llama-nano", DecodingNode, 2, True, OVER_LINKS),
    ],
)
def test_guesses_change_no_token(
    tokens: str, draft: str, make: type[DecodingNode], stages: int, cached: bool, over: dict[str, Any]
) -> None:
    whole = unsplit(tokens, "gpt2-nano")
    guessing: dict[str, Any] = {"draft": draft, "speculate": 3, "stages": stages, "cache": cached, "requests": 2}
    run = Run(setting_of(tokens, **guessing), make=make, **over)
    assert sum(ties(chosen, whole[number]) for (_, number), chosen in run.tokens.items()) == 0
    answers = [message for message in run.sent if message.key.what == "guess"]
    assert len(run.accepted) == len(answers)
    # Each turn is of a token that the last stage chose itself, and the others were guessed.
    assert run.turns + sum(run.accepted) == 2 * 9
    if draft == "gpt2-nano" and make is DecodingNode:
        assert run.turns == 2 * 3  # the prompt's, then all three guesses and one more, twice


class TwoSteps(Ending):
    """Ends a live run after two steps."""

    def goes_on(self, number: int, phase: Phase, end_ns: int) -> bool:
        return number < 1


@pytest.mark.slow
@pytest.mark.parametrize("guessing", [{}, {"draft": "llama-nano", "speculate": 3}], ids=["plain", "guessing"])
def test_over_sockets_the_tokens_are_the_same(tokens: str, guessing: dict[str, Any]) -> None:
    setting = setting_of(tokens, codec="int4", model="llama-nano", requests=2, stages=3, **guessing)
    together, nodes = Run(setting, steps=2), [DecodingNode(place, setting.recipe.job, setting) for place in range(3)]  # type: ignore[arg-type]
    ran = over_loopback(
        together.kind,
        nodes,
        names=("activation", "guess", "token"),
        ending=TwoSteps(lambda: False),
    )
    assert ran.errors == [None] * 3
    for number in range(2):
        assert torch.equal(nodes[2].requests[number].ids, together.tokens[1, number])


@pytest.mark.slow
def test_a_trace_has_the_messages_and_decisions_of_the_training(tokens: str, tmp_path: Path) -> None:
    # Where activations are coded the draft model is wrong now and then.
    setting = setting_of(
        tokens, codec="int4", draft="llama-nano", model="llama-nano", speculate=3, requests=2, stages=3
    )
    trained = Run(setting, steps=2)
    job = AloneJob(recipe=setting.recipe, vocabulary=VOCABULARY, tokens=tokens, folder=str(tmp_path / "trained"))
    train_alone(job, lambda message: None)
    training = load_training(tmp_path / "trained")
    assert [one.value for record in training[2] for one in record.decided] == trained.accepted
    assert len(set(trained.accepted)) > 1
    stated = Stated(work_ns=dict.fromkeys(("prefill", "forward", "draft", "verify"), 10**6), source="stated")
    cell = cell_of(setting.recipe).model_copy(update={"compute": stated})
    trace = played_job(cell, training, Calibration(taken_at="", machine={}, recipes={})).trace()
    sizes = sorted(
        value for lane in trace.lanes for kind, value in zip(lane.kind, lane.value, strict=True) if kind == SEND
    )
    assert sizes == sorted(len(each.message.payload) + len(each.note) + HEADER_BYTES for each in trained.sends)


@pytest.mark.slow
def test_what_is_coded_is_smaller_and_costs_quality(tokens: str) -> None:
    runs = {
        codec: Run(setting_of(tokens, codec=codec, model="llama-nano", stages=3)) for codec in ("fp32", "int8", "int4")
    }
    size = {
        codec: sum(len(message.payload) for message in run.sent if message.key.what == "activation")
        for codec, run in runs.items()
    }
    assert size["int4"] < size["int8"] < size["fp32"] / 2
    loss = {codec: run.loss for codec, run in runs.items()}
    assert 0 < abs(loss["int8"] - loss["fp32"]) < abs(loss["int4"] - loss["fp32"])
    # In tokens that come back nothing is lost: they are numbers of 8 bytes.
    answers = [message for message in runs["int4"].sent if message.key.what == "token"]
    assert {len(message.payload) for message in answers} == {8 * BATCH}


def test_the_loss_is_the_whole_models_on_held_out_text(tokens: str) -> None:
    setting = setting_of(tokens, model="llama-nano", stages=3)
    run = Run(setting)
    whole = build_stage(setting.recipe.workload, stage=0, stages=1, seed=3, vocabulary=VOCABULARY)  # type: ignore[arg-type]
    losses = []
    for batch in range(4):
        inputs = run.nodes[0].held_out(batch).inputs
        with torch.no_grad():
            logits = whole.eval()(inputs[:, :15])[:, 5:14]
        losses.append(torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), inputs[:, 6:15].reshape(-1)))
    assert run.loss == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)


def test_without_a_cache_each_turn_carries_the_prefix(tokens: str) -> None:
    sizes = {}
    for cached in (True, False):
        sent = Run(setting_of(tokens, cache=cached, batch=1)).sent
        sizes[cached] = [len(message.payload) for message in sent if message.key.what == "activation"]
    assert sizes[True][0] == sizes[False][0]
    assert len(set(sizes[True][1:])) == 1
    grown = np.diff(sizes[False])
    assert set(grown) == {64 * 4}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"draft": "gpt2-nano"}, "job.speculate"),
        ({"speculate": 2}, "job.draft"),
        ({"stages": 1}, "stages"),
        ({"tokens": 0}, "tokens"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tokens: str, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        setting_of(tokens, **wrong)


def test_a_prompt_that_the_text_is_too_short_for_is_refused(tokens: str) -> None:
    setting = setting_of(tokens, prompt=20)
    with pytest.raises(SpecError, match="sequence_length"):
        DecodingNode(0, setting.recipe.job, setting)  # type: ignore[arg-type]
