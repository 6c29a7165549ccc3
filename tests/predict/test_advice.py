"""Advice: predictions that hold when they are played, layouts that fit, refusals that say what to do, words that are
true.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from testbed.cli import make_app
from testbed.devices.device import load_device, write_device
from testbed.errors import SpecError, UnknownNameError
from testbed.jobs.loop import Loop
from testbed.predict import advice, cells
from testbed.predict.in_order import InOrderStar
from testbed.profiles import load_profile
from testbed.report.claims import proven_codecs, read_evidence
from testbed.trace.simulate import ideal_step_ns
from tests.commands import run_testbed
from tests.predict import held_out_advice as held_out

CODECS = ["bf16", "int6"]
FAST = ("gpt2-medium", "rtx-3090", 4, "link(300Mbit, 10ms)", 64)


def test_predicted_and_played_steps_agree() -> None:
    rows = held_out.read_rows()
    pipelines = [row for row in rows if row.layout.startswith("pipeline")]
    assert len(pipelines) >= len({row.set_up for row in rows}) > 0
    apart = [abs(row.predicted_s / row.played_s - 1) for row in pipelines if not math.isnan(row.played_s)]
    assert sorted(apart)[len(apart) // 2] < 0.05


def test_the_page_has_the_held_out_table() -> None:
    assert held_out.PAGE.read_text(encoding="utf8").split(held_out.MARK)[1] == held_out.draw_table(held_out.read_rows())


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", re.findall(r"^```\n\$ python -m testbed (.*?)^```$", held_out.PAGE.read_text(encoding="utf8"), re.M | re.S)
)
def test_the_page_says_what_the_command_says(block: str, tmp_path: Path) -> None:
    command, _, said = block.partition("\n")
    done = run_testbed(*shlex.split(command), folder=tmp_path, COLUMNS="120")
    lines = [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]
    assert lines == [line.rstrip() for line in said.splitlines()]


def test_the_first_choice_is_seldom_slower_than_what_was_played() -> None:
    lost = sorted(share for _, _, share, _ in held_out.losses(held_out.read_rows()))
    assert lost[len(lost) // 2] == 0
    assert lost[-1] <= 0.1


def test_a_loss_is_that_of_the_first_row_against_the_fastest() -> None:
    same = ("m", "d", "p", 2, 32)
    rows = [held_out.Row(1, *same, name, 1.0, played) for name, played in (("a", 1.1), ("b", 1.0), ("c", 2.0))]
    ((first, fastest, share, count),) = held_out.losses(rows)
    assert (first.layout, fastest.layout, count) == ("a", "b", 3)
    assert share == pytest.approx(0.1)
    rows[1] = rows[1]._replace(played_s=math.nan, predicted_s=2.0)
    ((_, fastest, share, count),) = held_out.losses(rows)
    assert (fastest.layout, share, count) == ("a", 0, 2)
    assert "In 1 others, predicted to take 2 to 2 times" in held_out.draw_table(rows)
    assert held_out.losses(rows[:2]) == [], "one layout alone is not compared"


# ------------------------------------------------------------------ links
class _Star:
    """Messages handed over at stated times, and when they arrived."""

    def __init__(self, sent: list[tuple[int, int, int, int]], links: InOrderStar) -> None:
        self.arrived = dict[tuple[int, int], int]()
        loop = Loop([], [], cost=lambda node, action: None)
        for now_ns, source, target, size in sent:
            loop.at(now_ns, self._send, loop, links, source, target, size)
        loop.run()

    def _send(self, loop: Loop, links: InOrderStar, source: int, target: int, size: int) -> None:
        links.carry(loop, source, target, size, lambda: self._came(loop, source, target))

    def _came(self, loop: Loop, source: int, target: int) -> None:
        self.arrived[source, target] = loop.now_ns


def _star(text: str) -> InOrderStar:
    return InOrderStar(load_profile(text))


def test_two_messages_that_meet_at_a_node_end_together() -> None:
    """Each of 1 MB at 80 Mbit/s takes 103.6 ms with headers; two into one downlink take twice that."""
    one = _Star([(0, 0, 2, 1_000_000)], _star("link(80Mbit, 10ms)")).arrived[0, 2]
    wire_ns = (1_000_000 + 52 * 691) * 100
    assert one == pytest.approx(wire_ns + 20_000_000 + 150_000, abs=10)
    met = _Star([(0, 0, 2, 1_000_000), (0, 1, 2, 1_000_000)], _star("link(80Mbit, 10ms)")).arrived
    assert met[0, 2] == met[1, 2] == one + wire_ns
    wide = _Star([(0, 0, 2, 1_000_000), (0, 1, 2, 1_000_000)], _star("link(80Mbit, 10ms, down.rate=160Mbit)")).arrived
    assert wide[0, 2] == wide[1, 2] == one - 75_000  # no queue, and the last packet takes half as long


def test_messages_of_one_node_leave_one_after_another() -> None:
    sent = _Star([(0, 0, 1, 1_000_000), (0, 0, 2, 1_000_000)], _star("link(80Mbit, 10ms)")).arrived
    assert sent[0, 2] - sent[0, 1] == (1_000_000 + 52 * 691) * 100


# ------------------------------------------------------------------ layouts
def test_every_further_micro_batch_takes_the_same_time() -> None:
    setting = advice.look_up(*FAST[:3], "consumer-80mbps", 256)
    simulated, fitting = advice.advise(setting, CODECS)
    assert len(simulated) < fitting
    for kind in ("pipeline", "hybrid"):
        layout = next(each for each in simulated if each.kind == kind)
        assert layout.microbatches > 4 * layout.job["in_flight"], "nothing is extrapolated"
        whole_s = ideal_step_ns(layout.shape().trace(2), InOrderStar(setting.link), 2) / 1e9 / layout.local_steps
        assert layout.batch_s == pytest.approx(whole_s, rel=0.005)


def test_the_first_is_the_fastest_simulated_and_every_kind_that_fits_is_there() -> None:
    simulated, _ = advice.advise(advice.look_up(*FAST), CODECS)
    times = [layout.batch_s for layout in simulated]
    assert times == sorted(times)
    assert {layout.kind for layout in simulated} == {"pipeline", "hybrid", "data parallel"}
    assert all(0 < layout.memory_bytes <= 0.9 * 24e9 for layout in simulated)
    assert {layout.local_steps for layout in simulated} <= {1, 8}


@pytest.mark.slow
def test_codecs_keep_as_many_bits_as_cost_no_time() -> None:
    setting = advice.look_up("gpt2", "rtx-3060", 4, "fibre", 256)
    for layout in {each.kind: each for each in advice.advise(setting, CODECS)[0]}.values():
        named = advice.with_most_bits(layout, setting, CODECS)
        assert named.batch_s <= 1.01 * layout.batch_s
        bits = {pair: _with(layout, pair).shape().payload_bytes for pair in itertools.product(CODECS, repeat=2)}
        more = [pair for pair in bits if layout.codecs and bits[pair] > bits[named.codecs]]
        assert all(advice.batch_s(_with(layout, pair), setting) > 1.01 * layout.batch_s for pair in more)
        assert named._replace(job={}, codecs=(), batch_s=0) == layout._replace(job={}, codecs=(), batch_s=0)


def _with(layout: advice.Layout, codecs: tuple[str, ...]) -> advice.Layout:
    return layout._replace(job={**layout.job, "codec": "fwd={}, bwd={}".format(*codecs)}) if layout.codecs else layout


def test_memory_is_weights_and_kept_activations() -> None:
    setting = advice.look_up("gpt2", "rtx-3090", 2, "cable", 2, 128)
    simulated, _ = advice.advise(setting, ["bf16"])
    whole = next(layout for layout in simulated if layout[:4] == ("data parallel", 2, 1, 1))
    weights, tokens = 163_037_184, 128
    kept = 12 * (16 * 768 + 6 * 3072) + 4 * 50257 + 2 * 768
    assert whole.memory_bytes == (18 + 4) * weights + 2 * tokens * kept


@pytest.mark.slow
def test_a_large_model_recomputes_activations_only_where_nothing_else_fits() -> None:
    small, _ = advice.advise(advice.look_up("gpt2", "rtx-4090", 8, "cable", 64), CODECS)
    large, _ = advice.advise(advice.look_up("llama-7b", "rtx-4090", 8, "cable", 64), CODECS)
    assert not any(layout.job.get("recompute") for layout in small if layout.job.get("in_flight") == layout.stages)
    assert {layout.kind for layout in large} == {"pipeline"}
    assert all(layout.job["recompute"] for layout in large)


def test_limits_add_up_and_delays_alone_are_latency() -> None:
    for profile, most in (("link(1Mbit, 1ms)", "rate"), ("link(100Gbit, 500ms)", "latency")):
        setting = advice.look_up("gpt2", "a100", 4, profile, 8, 64)
        (layout, *_), _ = advice.advise(setting, CODECS)
        shares = advice.limits(layout, setting)
        assert math.fsum(shares.values()) == pytest.approx(1)
        assert max(shares, key=lambda name: shares[name]) == most
        assert all(share >= 0 for share in shares.values())


def test_the_wait_of_messages_that_meet_is_rate_not_latency() -> None:
    setting = advice.look_up("llama-7b", "rtx-4090", 8, "link(80Mbit, 0ms)", 64)
    layout = next(each for each in advice.advise(setting, CODECS)[0] if each.stages == 8)
    shares = advice.limits(layout, setting)
    assert shares["latency"] == 0
    assert shares["rate"] > 0.5


# ------------------------------------------------------------------ cells
@pytest.mark.parametrize(
    ("profile", "loss"),
    [
        ("cable", "cable, buffer=8GB"),
        ("link(80Mbit, 10ms)", "link(80Mbit, 10ms, buffer=8GB)"),
        (" link(80Mbit, 10ms, loss=0.1%) ", "link(80Mbit, 10ms, loss=0.1%, buffer=8GB, loss=none)"),
        ("wifi", "wifi, buffer=8GB, loss=none, jitter=none"),
        ("wifi, queue=fq_codel", "wifi, queue=fq_codel, buffer=8GB, loss=none, jitter=none, queue=none"),
        ("reordering-80mbps", "reordering-80mbps, buffer=8GB, reorder=none, duplicate=none"),
    ],
)
def test_a_link_is_played_without_what_the_prediction_ignores(profile: str, loss: str) -> None:
    setting = advice.look_up("gpt2", "t4", 2, profile, 4, 64)
    assert setting.playable == loss
    played = load_profile(setting.playable)
    for pipe, own in zip(played.pipes, setting.link.pipes, strict=True):
        assert (pipe.rate_bps, pipe.delay_ns) == (own.rate_bps, own.delay_ns)
        assert pipe.buffer_bytes == 8_000_000_000
        assert (pipe.loss, pipe.jitter_ns, pipe.reorder, pipe.duplicate, pipe.queue, pipe.slot) == (
            None,
            0,
            0,
            0,
            None,
            None,
        )


@pytest.mark.parametrize("profile", [FAST[3], "3g"])
def test_the_experiment_has_a_cell_for_every_recommendation(profile: str, tmp_path: Path) -> None:
    setting = advice.look_up(*FAST[:3], profile, FAST[4])
    simulated, _ = advice.advise(setting, CODECS)
    one_each = list({layout.kind: layout for layout in reversed(simulated)}.values())
    file = tmp_path / "advice.toml"
    file.write_text(advice.experiment(setting, one_each), encoding="utf8")
    planned = cells.plan_cells(str(file))
    assert [each.cell.shape for each in planned] == [layout.shape() for layout in one_each]
    assert all(each.cell.play and each.cell.topology == "star" for each in planned)
    slowest = min(pipe.rate_bps for pipe in setting.link.pipes)
    assert all(slowest / each.cell.scale >= 8000 for each in planned), "no link can be that slow"


# ------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        (("gpt2", "t4", 1, "cable", 8), "--nodes is 1; state 2 to 64"),
        (("gpt2", "t4", 65, "cable", 65), "--nodes is 65"),
        (("gpt2", "t4", 8, "cable", 500), "--batch is 500; state a multiple of 8"),
        (("gpt2", "t4", 8, "cable", 0), "--batch is 0"),
        (("gpt2", "t4", 8, "cable", 8, 4096), "--sequence-length is 4096; gpt2 has a context of 1024"),
        (("gpt2", "laptop-cpu", 8, "cable", 8), "laptop-cpu has no memory"),
        (("gpt2", "t4", 8, "datacenter", 8), "no rate; state one like link"),
        (("gpt2", "t4", 8, "starlink", 8), "varies, has background flows"),
        (("gpt2", "t4", 8, "cable, background=call up", 8), "varies, has background flows"),
    ],
)
def test_what_cannot_be_advised_is_refused(asked: tuple[object, ...], fault: str) -> None:
    with pytest.raises(SpecError, match="cannot advise: ") as raised:
        advice.look_up(*asked)  # type: ignore[arg-type]
    assert fault in str(raised.value)


def test_a_device_without_the_cost_of_codecs_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "half.toml"
    file.write_text(write_device(load_device("t4").model_copy(update={"fp32": None})), encoding="utf8")
    with pytest.raises(SpecError, match="no speed in fp32, which codecs' cost needs"):
        advice.look_up("gpt2", str(file), 2, "cable", 8)


def test_a_model_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(SpecError, match="no layout of llama-13b on 2 nodes needs at most 90% of the memory of t4; use"):
        advice.advise(advice.look_up("llama-13b", "t4", 2, "cable", 8), CODECS)


@pytest.mark.parametrize(("number", "known"), [(0, "llama-7b"), (1, "rtx-4090"), (3, "consumer-80mbps")])
def test_an_unknown_name_is_answered_with_the_known_ones(number: int, known: str) -> None:
    asked = ["gpt2", "t4", 2, "cable", 8]
    asked[number] = "no-such"
    with pytest.raises(UnknownNameError, match=r"there is no .*no-such") as raised:
        advice.look_up(*asked)  # type: ignore[arg-type]
    assert known in str(raised.value)


# ------------------------------------------------------------------ the command
_COMMAND = [
    "advise",
    "--model=gpt2",
    "--device=t4",
    "--nodes=4",
    "--profile=consumer-80mbps",
    "--batch=32",
    "--explain",
]


def test_the_command_tells_what_is_known_and_what_is_not(tmp_path: Path) -> None:
    file = tmp_path / "advice.toml"
    told = CliRunner().invoke(make_app("advise"), [*_COMMAND, "--toml", str(file)])
    assert told.exit_code == 0, told.output
    assert told.output.startswith("1. pipeline")
    assert "layouts simulated, of" in told.output
    assert "none was played" in told.output
    assert "toy scale: 1.9 of your 163 M parameters" in told.output
    assert "left out: int4(group=64): not resolved" in told.output
    assert "the speed of t4 with this model: its file assumes a share of the peak" in told.output
    bar = next(line for line in told.output.splitlines() if line.strip().startswith("limits"))
    assert all(word in bar for word in ("compute", "codec", "rate", "latency"))
    assert len(cells.plan_cells(str(file))) == 3


def test_json_has_the_same_answer(tmp_path: Path) -> None:
    told = CliRunner().invoke(make_app("advise"), [*_COMMAND, "--json"])
    found = json.loads(told.output)["recommendations"]
    assert len(found) == 3
    assert [one["batch_s"] for one in found] == sorted(one["batch_s"] for one in found)
    assert all(one["loss"] and one["unknown"] for one in found)
    assert all(math.isclose(one["token_s"], one["batch_s"] / 32 / 1024, rel_tol=1e-3) for one in found)


def test_a_mistake_ends_with_status_2(tmp_path: Path) -> None:
    done = run_testbed(*_COMMAND[:-1], "--nodes", "1", folder=tmp_path)
    assert done.returncode == 2
    assert "error: cannot advise: --nodes is 1" in done.stderr


def test_every_setting_has_its_claim_and_only_those_that_hold_are_advised() -> None:
    evidence = read_evidence()
    assert {name for name in evidence if "steps" in name} == {"8 local steps", "32 local steps"}
    assert all(claim.grade in "AB" for _, claim, _ in evidence.values())
    assert proven_codecs() == [name for name, (_, claim, _) in evidence.items() if claim.verdict == "holds"]
    assert "int4(group=64)" not in proven_codecs()
