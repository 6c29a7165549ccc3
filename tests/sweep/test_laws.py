"""The laws that make the instrument trustworthy, all looked for in one sweep: labs, training, certificates, results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from test_trainings import Heard

from testbed import results
from testbed.net.machine.capabilities import resolve_engine
from testbed.records import Summary
from testbed.results import Run
from testbed.spec import recipe_of
from testbed.sweep.controller import prepare
from testbed.sweep.trainings import load_training, train_missing
from tests.commands import Command, losses
from tests.known import known

pytestmark = pytest.mark.slow

_OWN_CODECS = """
import os, time
from testbed.codecs.dense.cast import Fp32

class Mine(Fp32):
    pass

class Crashes(Fp32):
    def encode(self, tensor, slot):
        if slot.step == 2:
            os.abort()
        return super().encode(tensor, slot)

class Raises(Fp32):
    def decode(self, payload, slot):
        if slot.step == 2:
            raise ValueError("this codec is broken")
        return super().decode(payload, slot)
"""


class Network(NamedTuple):
    """One lab. The cells of a sweep that share one share its stage hosts."""

    stages: int
    profile: str
    topology: str = "star"
    codecs: tuple[str, ...] = ("fp32",)

    def variants(self) -> list[str]:
        profile = json.dumps(self.profile.split("+") if "+" in self.profile else self.profile)
        return [
            f'{{ codec = "{codec}", profile = {profile}, topology = "{self.topology}", '
            f"pipeline.stages = {self.stages} }}"
            for codec in self.codecs
        ]


_EXACT = ("fp32", "mycodecs:Mine")
"""Codecs that send what they are given."""
_BROKEN = {"mycodecs:Raises": "this codec is broken", "mycodecs:Crashes": "SIGABRT"}
_NETWORKS = {
    "relay": (
        Network(1, "datacenter"),
        Network(2, "datacenter", codecs=("mycodecs:Raises", "mycodecs:Mine", "mycodecs:Crashes")),
        Network(3, "consumer-80mbps", codecs=("fp32", "delta-int8")),
        Network(3, "bursty-80mbps+varying-80mbps", "line", codecs=("fp32", "delta-int8")),
    ),
    "netem": (
        Network(1, "datacenter"),
        Network(3, "datacenter"),
        Network(3, "consumer-80mbps"),
        Network(3, "lossy-80mbps"),
        Network(3, "cable+wifi+varying-80mbps"),
        Network(3, "bursty-80mbps+dsl", "line"),
    ),
}


class Laws(NamedTuple):
    """One sweep over all networks, which the tests of its laws look at."""

    command: Command
    networks: tuple[Network, ...]
    folder: Path
    """Of its results."""
    output: str

    def run(self, network: Network, codec: str = "fp32") -> tuple[Run, Summary]:
        """The last run of a cell."""
        runs = [
            run
            for run in results.runs(self.folder)
            if run.cell.codec == codec
            and (run.cell.pipeline.stages, run.cell.network, run.cell.topology) == network[:3]
        ]
        run = max(runs, key=lambda run: run.number)
        return run, known(run.summary)

    def on(self, profile: str, stages: int = 3) -> Network:
        """The network of this profile."""
        (network,) = (one for one in self.networks if (one.profile, one.stages) == (profile, stages))
        return network


@pytest.fixture(
    scope="module",
    params=[pytest.param("relay", marks=pytest.mark.root), pytest.param("netem", marks=pytest.mark.netem)],
)
def laws(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laws]:
    networks = _NETWORKS[request.param]
    variants = "\n".join(f"  {variant}," for network in networks for variant in network.variants())
    with Command.standing(tmp_path_factory.mktemp("laws"), request.param) as command:
        (command.folder / "mycodecs.py").write_text(_OWN_CODECS, encoding="utf8")
        folder = command.write_experiment(f"variants = [\n{variants}\n]", "", '{ mode = "calibrated" }')
        broken = any(codec in _BROKEN for network in networks for codec in network.codecs)
        output = command.finish("sweep", "sweep.toml", "--engine", command.engine, status=int(broken))
        assert "Traceback" not in output
        yield Laws(command, networks, folder, output)


RELAY = pytest.mark.parametrize("laws", [pytest.param("relay", marks=pytest.mark.root)], indirect=True)
"""For what is the same under every engine."""


def test_the_network_never_changes_the_maths(laws: Laws) -> None:
    """Losses of 12 steps and of the evaluations, bit for bit: on every number of stages, over every network."""
    first = losses(laws.run(laws.networks[0])[0])
    assert len(first) == 14
    assert None not in first
    assert first[-1] < first[0]  # type: ignore[operator]
    for network in laws.networks:
        for codec in {*network.codecs} & {*_EXACT}:
            run, summary = laws.run(network, codec)
            assert (summary.status, summary.steps) == ("ok", 12)
            assert len(run.lab.links) == network.stages - (network.topology == "line")
            assert losses(run) == first, (network, codec)


@RELAY
def test_nor_does_it_change_what_a_codec_with_a_memory_does_to_it(laws: Laws) -> None:
    first, other = (losses(laws.run(net, "delta-int8")[0]) for net in laws.networks if "delta-int8" in net.codecs)
    assert first == other
    assert None not in first
    assert first != losses(laws.run(laws.networks[0])[0])


@RELAY
def test_training_without_a_network_has_the_same_losses(laws: Laws, tmp_path: Path) -> None:
    run, _ = laws.run(laws.on("consumer-80mbps"), "delta-int8")
    recipe = recipe_of(run.cell)
    trained = train_missing([recipe], tmp_path, prepare=prepare, progress=Heard())
    assert [record.loss for record in load_training(trained.folders[recipe.id])[-1]] == losses(run)


def test_every_byte_on_the_wire_is_accounted_for(laws: Laws) -> None:
    """fp32: what the interfaces counted is payload, frame headers and TCP/IP headers, and nothing else."""
    run, summary = laws.run(laws.on("consumer-80mbps"))
    assert summary.compression_ratio == pytest.approx(1, rel=1e-2)
    explained = known(summary.payload_bytes_per_step) + known(summary.header_bytes_per_step)
    assert summary.wire_bytes_per_step == pytest.approx(explained, rel=1e-2)
    assert {socket.congestion_control for step in run.steps(1) for socket in step.sockets} == {"cubic"}


@RELAY
def test_a_run_leaves_records_that_describe_themselves(laws: Laws) -> None:
    run, summary = laws.run(laws.on("consumer-80mbps"), "delta-int8")
    engine = laws.command.engine
    assert summary.engine == run.lab.engine == engine == resolve_engine(engine)[0]  # type: ignore[arg-type]
    assert {link.shaper for link in run.lab.links} == {engine}
    assert run.certificates.after is not None
    assert {m.quantity for m in known(run.certificates.before).measurements} >= {"rtt", "rate", "message"}
    assert 0 < known(summary.ideal_step_s) <= known(summary.step_s) * 1.02
    assert (run.folder / "environment.json").exists()
    samples = list(run.samples())
    steps = [step for stage in range(3) for step in run.steps(stage)]
    assert known(run.lab.played_at_ns) <= samples[0].at_ns <= min(step.start_ns for step in steps)
    assert max(step.end_ns for step in steps) <= samples[-1].at_ns
    assert {socket.node for sample in samples for socket in sample.sockets} == {"node-0", "node-1", "node-2"}
    # What the links carried is what the stage's device counted, until its last step's end at least.
    for stage in range(3):
        carried = samples[-1].links[f"node-{stage}"]["up"].bytes - samples[0].links[f"node-{stage}"]["up"].bytes
        assert carried == pytest.approx(known(run.steps(stage)[-1].counters).sent_bytes, rel=0.02)


@RELAY
def test_sizes_of_a_certificate_are_those_that_the_run_sends(laws: Laws) -> None:
    run, _ = laws.run(laws.on("consumer-80mbps"), "delta-int8")
    sent = sorted(frame.frame_bytes for stage in range(3) for step in run.steps(stage) for frame in step.sent)
    before, after = (
        {int(m.detail.split()[0]) for m in certificate.measurements if m.quantity == "message"}
        for certificate in (run.certificates.before, run.certificates.after)
        if certificate is not None
    )
    values = 2 * 32 * 64  # sequences of a micro-batch, tokens, width
    assert before == {values, 4 * values}
    assert after == {sent[0]}
    assert sent[-1] < 1.1 * sent[0]


@RELAY
def test_a_strangers_codec_runs_and_a_broken_one_fails_with_its_reason(laws: Laws) -> None:
    network = laws.on("datacenter", stages=2)
    assert laws.run(network, "mycodecs:Mine")[1].status == "ok"
    for codec, reason in _BROKEN.items():
        assert laws.run(network, codec)[1].status == "failed"
        assert reason in laws.output
    assert laws.run(network, "mycodecs:Crashes")[1].steps == 2


@RELAY
def test_a_sweep_goes_on_past_failed_cells_and_the_next_one_does_only_what_is_missing(laws: Laws) -> None:
    cells = sum(len(network.codecs) for network in laws.networks)
    assert (laws.folder / "report.html").stat().st_size > 10_000
    runs = [(run.cell.codec, run.number) for run in results.runs(laws.folder)]
    assert len(runs) == cells
    assert {codec for codec, _ in runs} > set(_BROKEN)
    assert {number for _, number in runs} == {1}
    left = laws.command.finish("plan", "sweep.toml", "--engine", laws.command.engine)
    assert f"{cells - len(_BROKEN)} cells finished, {len(_BROKEN)} runs to make" in " ".join(left.split())
