"""Jobs of a table `job` over sockets: what they compute, when, how they end, and what is said where they cannot."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from testbed.errors import SpecError, TransportError
from testbed.jobs.actions import (
    Begin,
    Collect,
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
from testbed.jobs.kind import JobKind, Said, Setting, job_of_table
from testbed.kinds.coded import CodedNode
from testbed.kinds.live import run_node
from testbed.kinds.train import train_alone
from testbed.pipeline.alone import AloneJob
from testbed.pipeline.gather import make_sockets
from testbed.pipeline.job import Limits, jobs
from testbed.profiles import load_profile
from testbed.records import StepRecord
from testbed.spec import Cell, Measured, OptimiserSpec, PipelineSpec, Stated, TextSpec, TrainingSpec, recipe_of
from testbed.sweep.trainings import load_training

STEPS, WORK_NS, SOON_S = 4, 5_000_000, 60.0


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
        return Said(loss=float(self.value.sum()) if self.place == self.kind.members - 1 else None, tokens=1)


class Poll(Round):
    """The last place takes what comes, and as it comes."""

    def program(self, place: int, first_step: int = 0) -> Program:
        last = self.members - 1
        for step in range(first_step, STEPS):
            yield Begin("F", 0)
            if place < last:
                yield Send(
                    (yield Encode(Key("value", step, origin=place), (yield Work("change", Key("", step))))), last
                )
            else:
                came: list[Any] = []
                while len(came) < last:
                    came += yield Collect(tuple(range(last)), at_least=1)
                assert {message.source for message in came} == set(range(last))
            yield Meet()
            yield EndStep(step)


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


@pytest.fixture(autouse=True)
def _as_in_a_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = sys.getswitchinterval(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    sys.setswitchinterval(before[0])
    torch.set_num_threads(before[1])
    torch.use_deterministic_algorithms(before[2])


def cell_of(kind: str = "Round", compute: Any = None, codec: str = "int8", **job: Any) -> Cell:
    return Cell(
        codec=codec,
        profiles=(load_profile("datacenter"),),
        topology="star",
        engine="relay",
        compute=compute or Stated(work_ns={"change": WORK_NS}, source="stated"),
        workload=TextSpec(
            family="gpt2", model="gpt2-nano", text="none", sequence_length=16, batch_size=4, validation_batches=1
        ),
        pipeline=PipelineSpec(stages=1, microbatches=1, schedule="gpipe", in_flight=1),
        job=job_of_table({"kind": f"tests.jobs.test_kinds_live:{kind}", **job}),
        optimiser=OptimiserSpec(learning_rate=0.001, weight_decay=0.0, beta1=0.9, beta2=0.95, clip_norm=1.0),
        training=TrainingSpec(steps=STEPS, warmup_steps=1, seed=3, evaluate_every=0),
    )


class Ran:
    """All places of a cell, each in a thread, with Unix and TCP sockets as in a lab."""

    def __init__(self, cell: Cell, folder: Path, asked: bool = False) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        work = jobs(
            cell,
            addresses=tuple(f"127.0.0.{place + 1}" for place in range(cell.nodes)),
            port=port,
            token="0" * 32,
            vocabulary=96,
            tokens="",
            folder=str(folder),
            devices=((),) * cell.nodes,
            overhead_bytes=0,
            limits=Limits(connect_s=SOON_S, message_s=SOON_S),
        )
        self.told: list[Any] = []
        self.ended: list[Any] = [None for _ in work]

        def run(place: int, sockets: Sequence[socket.socket]) -> None:
            # As it travels: a kind is found by its name.
            job = type(work[place]).model_validate_json(work[place].model_dump_json())
            try:
                self.ended[place] = run_node(job, sockets, self.told.append, lambda: asked)  # type: ignore[arg-type]
            except Exception as error:
                self.ended[place] = error

        threads = [threading.Thread(target=run, args=each) for each in enumerate(make_sockets(len(work)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.records = [
            [
                StepRecord.model_validate_json(line)
                for line in (folder / f"steps-{place}.jsonl").read_text().splitlines()
            ]
            for place in range(cell.nodes)
        ]


@pytest.mark.parametrize("compute", [None, Measured()], ids=["stated", "measured"])
def test_losses_and_sizes_are_those_of_training_in_one_process(tmp_path: Path, compute: Any) -> None:
    cell = cell_of(compute=compute)
    ran = Ran(cell, tmp_path)
    assert ran.ended == ["steps"] * 3
    np.save(tmp_path / "tokens.npy", np.arange(20_000, dtype=np.uint16) % 96)
    folder, tokens = str(tmp_path / "trained"), str(tmp_path / "tokens.npy")
    train_alone(AloneJob(recipe=recipe_of(cell), vocabulary=96, tokens=tokens, folder=folder), lambda message: None)
    for live, alone in zip(ran.records, load_training(tmp_path / "trained"), strict=True):
        assert [record.loss for record in live] == [record.loss for record in alone]
        assert [[one.frame_bytes for one in record.sent] for record in live] == [
            [one.frame_bytes for one in record.sent] for record in alone
        ]
    assert [message.loss for message in ran.told] == [record.loss for record in ran.records[2]]
    assert len({message.loss for message in ran.told}) == STEPS


def test_work_is_held_to_its_durations(tmp_path: Path) -> None:
    stated = Stated(work_ns={"change": WORK_NS}, source="stated", dilation=3)
    ran = Ran(cell_of(compute=stated), tmp_path)
    for records in ran.records:
        for record in records:
            (action,) = record.actions
            assert action.computed_ns - action.decoded_ns >= 3 * WORK_NS
            assert record.end_ns - record.start_ns >= 3 * 3 * WORK_NS  # each in turn


def test_what_comes_first_is_taken_first(tmp_path: Path) -> None:
    ran = Ran(cell_of("Poll"), tmp_path)
    assert [error for error in ran.ended if isinstance(error, Exception)] == []
    assert [len(record.received) for record in ran.records[2]] == [2] * STEPS


def test_where_a_person_asks_all_places_end_after_one_step(tmp_path: Path) -> None:
    cell = cell_of()
    cell = cell.model_copy(update={"training": cell.training.model_copy(update={"steps": 500})})
    ran = Ran(cell, tmp_path, asked=True)
    assert ran.ended == ["asked"] * 3
    assert {len(records) for records in ran.records} == {len(ran.records[0])}
    assert len(ran.records[0]) < 20


def test_a_node_that_raises_ends_the_job_with_its_error(tmp_path: Path) -> None:
    ran = Ran(cell_of(breaks=True), tmp_path)
    assert isinstance(ran.ended[1], ArithmeticError)
    assert all(isinstance(ran.ended[place], TransportError) for place in (0, 2))
    assert all(len(records) <= 2 for records in ran.records)


def test_what_fails_on_another_lane_ends_a_place_that_waits_for_a_message(tmp_path: Path) -> None:
    ran = Ran(cell_of("Beside", breaks=True), tmp_path)
    assert isinstance(ran.ended[1], ArithmeticError)
    assert all(isinstance(ran.ended[place], TransportError) for place in (0, 2))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"compute": Stated(work_ns={"walk": 1}, source="stated")}, "no duration for 'change', which member"),
        ({"strays": True}, "place 0 has no connection with place 3"),
    ],
)
def test_what_cannot_run_says_why(tmp_path: Path, asked: dict[str, Any], said: str) -> None:
    ran = Ran(cell_of(**asked), tmp_path)
    assert isinstance(ran.ended[0], SpecError)
    assert said in str(ran.ended[0])
