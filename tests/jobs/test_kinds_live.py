"""Jobs of a table `job` over sockets: what they compute, when, how they end, and what is said where they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from testbed.errors import SpecError, TransportError
from testbed.jobs.actions import (
    Begin,
    Decode,
    Encode,
    EndStep,
    Fork,
    Key,
    Meet,
    Program,
    Receive,
    Send,
    Wait,
    Work,
)
from testbed.jobs.kind import JobKind, Said, Setting
from testbed.nodes.coded import CodedNode
from testbed.spec import Cell, Measured, Stated, recipe_of
from testbed.sweep.trainings import load_training
from testbed.training.alone import AloneJob, train_alone
from tests.jobs.recording import job_recipe
from tests.over_loopback import run_places
from tests.small_replicas import live_cell

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, WORK_NS = 4, 5_000_000


class Round(JobKind):
    """A value goes round all places, each of which changes it, under a name of its own; then they meet."""

    members: int = 3
    breaks: bool = False
    strays: bool = False

    @property
    def places(self) -> Sequence[str]:
        return tuple(f"member {number}" for number in range(self.members))

    def program(self, place: int, first_step: int = 0) -> Program:
        step, goes_on, value = first_step, True, None
        after, before = (place + 1) % self.members, (place - 1) % self.members
        while goes_on:
            yield Begin("F", 0)
            if place:
                (value,) = yield Decode(((yield Receive(Key(f"from {before}", step), before)),))
            value = yield Work("change", Key("change", step), value)
            yield Send((yield Encode(Key(f"from {place}", step), value)), self.members if self.strays else after)
            yield Begin()
            if not place:
                (value,) = yield Decode(((yield Receive(Key(f"from {before}", step), before)),))
            assert (yield Meet(place)) == list(range(self.members))
            goes_on = yield EndStep(step)
            step += 1

    def node(self, place: int, setting: Setting) -> Member:
        return Member(place, self, setting)


class Member(CodedNode):
    def __init__(self, place: int, kind: Round, setting: Setting) -> None:
        super().__init__(setting)
        self.place, self.kind, self.value = place, kind, torch.zeros(())
        self.weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(place))

    def change(self, key: Key, value: Any) -> torch.Tensor:
        if self.kind.breaks and (key.step, self.place) == (2, 1):
            raise ArithmeticError("member 1 has had enough")
        self.weight += 0.1
        self.value = self.weight if value is None else value.reshape(8, 8) @ self.weight
        return self.value

    def said(self, step: int, phase: str) -> Said:
        return Said(loss=float(self.value.sum()), tokens=1)  # the last place's is the run's


class Beside(Round):
    """Places that learn from each other on a lane of their own, and wait for a message."""

    def program(self, place: int, first_step: int = 0) -> Program:
        for step in range(first_step, STEPS):
            yield Fork("beside", Key("beside", step), self._beside(step))
            if (step, place) == (2, 1):
                yield Receive(Key("never", step), 0)
            yield Wait(Key("beside", step))
            yield Meet()
            yield EndStep(step)

    def _beside(self, step: int) -> Program:
        yield Work("change", Key("change", step))


class Unheard(Round):
    """The first place sends what nobody receives, or works on what no node has a method for."""

    does: str = "change"

    def program(self, place: int, first_step: int = 0) -> Program:
        for step in range(first_step, STEPS):
            yield Begin("F", 0)
            value = yield Work(self.does, Key("change", step))
            if place == 0:
                yield Send((yield Encode(Key("extra", step), value)), 1)
            yield EndStep(step)


def cell_of(kind: str = "Round", compute: Any = None, codec: str = "int8", **job: Any) -> Cell:
    return live_cell(
        job_recipe({"kind": f"tests.jobs.test_kinds_live:{kind}", **job}, codec, steps=STEPS),
        compute=compute or Stated(work_ns={"change": WORK_NS}, source="stated"),
        codec_cost="host",
    )


def train(cell: Cell, tokens: str, folder: Path) -> None:
    """Train the cell's recipe in one process."""
    train_alone(
        AloneJob(recipe=recipe_of(cell), vocabulary=4096, tokens=tokens, folder=str(folder)), lambda message: None
    )


@pytest.mark.parametrize("compute", [None, Measured()], ids=["stated", "measured"])
def test_losses_and_sizes_are_those_of_training_in_one_process(tokens: str, tmp_path: Path, compute: Any) -> None:
    cell = cell_of(compute=compute)
    ran = run_places(cell)
    assert ran.ended == ["steps"] * 3
    train(cell, tokens, tmp_path / "trained")
    for live, alone in zip(ran.records, load_training(tmp_path / "trained"), strict=True):
        assert [record.loss for record in live] == [record.loss for record in alone]
        assert [[one.frame_bytes for one in record.sent] for record in live] == [
            [one.frame_bytes for one in record.sent] for record in alone
        ]
    assert [message.loss for message in ran.told] == [record.loss for record in ran.records[2]]
    assert len({message.loss for message in ran.told}) == STEPS


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, r"member 0 sends the extra of step 0 \(.*\) to member 1, which never receives it \(4 unreceived messages"),
        ({"does": "walk"}, "Member has no method 'walk', which its program calls in step 0"),
    ],
)
def test_what_a_program_forgot_is_named(tokens: str, tmp_path: Path, asked: dict[str, str], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        train(cell_of("Unheard", **asked), tokens, tmp_path / "trained")


def test_work_is_held_to_its_durations() -> None:
    stated = Stated(work_ns={"change": WORK_NS}, source="stated", dilation=3)
    ran = run_places(cell_of(compute=stated))
    for records in ran.records:
        for record in records:
            (action,) = record.actions
            assert action.computed_ns - action.decoded_ns >= 3 * WORK_NS
            assert record.end_ns - record.start_ns >= 3 * 3 * WORK_NS  # each in turn


def test_where_a_person_asks_all_places_end_after_one_step() -> None:
    cell = cell_of()
    cell = cell.model_copy(update={"training": cell.training.model_copy(update={"steps": 500})})
    ran = run_places(cell, asked=lambda place: True)
    assert ran.ended == ["asked"] * 3
    assert {len(records) for records in ran.records} == {len(ran.records[0])}
    assert len(ran.records[0]) < 20


@pytest.mark.parametrize("kind", ["Round", "Beside"])
def test_a_node_that_raises_ends_the_job_with_its_error_whatever_its_place_waits_for(kind: str) -> None:
    ran = run_places(cell_of(kind, breaks=True))
    assert isinstance(ran.errors[1], ArithmeticError)
    assert all(isinstance(ran.errors[place], TransportError) for place in (0, 2))
    assert all(len(records) <= 2 for records in ran.records)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"compute": Stated(work_ns={"walk": 1}, source="stated")}, "no duration for 'change', which member"),
        ({"strays": True}, "place 0 has no connection to place 3"),
    ],
)
def test_what_cannot_run_says_why(asked: dict[str, Any], said: str) -> None:
    ran = run_places(cell_of(**asked))
    assert isinstance(ran.errors[0], SpecError)
    assert said in str(ran.errors[0])
