"""What a report says about codecs that are negative controls, that adapt to their link, or that wrap another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_tables import printed

from testbed.records import StepRecord
from testbed.report import collect
from testbed.report.bars import bytes_per_step
from testbed.report.collect import latest
from testbed.report.conclusions import conclusions
from testbed.report.lines import loss_against_steps
from testbed.report.remarks import CONTROL, MEASURES, labelled, remark, taken, wrapped_codecs
from testbed.report.tables import terminal_table
from testbed.results import Run
from tests.known import known
from tests.synthetic import Pipeline, cell, change_summary, pipe, profile, write_run

HOME = profile("home", pipe(80_000_000, 10_000_000), pipe(80_000_000, 10_000_000))
ADAPTIVE = "adaptive(10)"


def chose(run: Run, choices: dict[str, str]) -> None:
    """Write into a run's records which codec each micro-batch's frames went through."""
    summary = known(run.summary)
    for path in run.folder.glob("steps-*.jsonl"):
        records = [StepRecord.model_validate_json(line) for line in path.read_text().splitlines()]
        for number, record in enumerate(records):
            sent = [frame.model_copy(update={"choice": choices[str(frame.microbatch % 2)]}) for frame in record.sent]
            records[number] = record.model_copy(update={"sent": tuple(sent)})
        path.write_text("".join(one.model_dump_json() + "\n" for one in records))
    run.finish(summary)


@pytest.fixture(scope="module")
def results_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remarks")
    int4 = "int4(group=64)"
    for codec in ("fp32", int4, f"delta({int4})", f"delta-open({int4})", "subspace-free", ADAPTIVE):
        payload = 131_072 if codec == "fp32" else 16_640
        run = write_run(folder, cell(codec, HOME), Pipeline(HOME, payload_bytes=payload), error=0.01)
        if codec == ADAPTIVE:
            chose(run, {"0": "mild", "1": "strong"})
    return folder


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        ("int8", ""),
        ("delta(int8)", ""),
        ("delta-open(int8)", CONTROL),
        ("fwd=subspace-free, bwd=bf16", CONTROL),
        ("0: int8; rest: adaptive(5)", MEASURES),
        ("nobody.knows:It", ""),
        ("such a text has never been (", ""),
    ],
)
def test_what_is_said_follows_from_the_table(codec: str, said: str) -> None:
    assert remark(codec) == said
    assert (CONTROL in labelled(codec)) == (said == CONTROL)


def test_what_is_inside_and_what_a_choice_stands_for() -> None:
    assert "topk(0.1)" in wrapped_codecs("ef(topk(0.1))")
    assert wrapped_codecs("delta-int8") == {"int8"}
    assert wrapped_codecs("fwd=delta(int4), bwd=bf16") == wrapped_codecs("nobody.knows:It") == set()
    text = "0: bf16; 1: fwd=zstd(adaptive(5, mild=fp16)), bwd=fp32; rest: bf16"
    assert taken(text, 1, "forward", "mild") == "fp16"
    assert taken(text, 1, "backward", "mild") == "mild"


@pytest.mark.slow
def test_twins_controls_and_choices_are_named(results_folder: Path) -> None:
    (group,) = collect.groups(collect.read_runs(latest(results_folder)))
    text = " ".join(conclusions(group))
    assert "delta(int4(group=64)) and delta-open(int4(group=64)) send as many bytes as int4(group=64)" in text
    assert "not for use: delta-open(int4(group=64)) and subspace-free" in text
    mild, strong = (taken(ADAPTIVE, 0, "forward", name) for name in ("mild", "strong"))
    assert f"{ADAPTIVE} over home chose for its training messages: {mild} 50 % and {strong} 50 %" in text
    assert "(boundary 0 backward, 0 forward, 1 backward and 1 forward)" in text


def test_what_an_evaluation_without_the_codec_changes_is_said(tmp_path: Path) -> None:
    for codec in ("fp32", "int4", "autoencoder"):
        run = write_run(tmp_path, cell(codec, HOME), Pipeline(HOME), error=0.01)
        loss = change_summary(run).validation_loss
        assert loss is not None
        change = {"int4": -0.25, "autoencoder": 0.125}.get(codec)
        if change is not None:
            change_summary(run, uncompressed_loss=loss + change)
    (group,) = collect.groups(collect.read_runs(latest(tmp_path)))
    text = " ".join(conclusions(group))
    assert "instead of the codec, the loss changes by: " in text
    assert "int4 -0.2500" in text
    assert "autoencoder +0.1250" in text
    assert "made to the model remain" in text


@pytest.mark.slow
def test_tables_and_legends_have_the_label(results_folder: Path) -> None:
    (group,) = collect.groups(collect.read_runs(latest(results_folder)))
    lines = printed(terminal_table(latest(results_folder)), 130)
    table = " ".join(line.strip() for line in lines)
    assert f"\u2020 {CONTROL}: delta-open(int4(group=64)) over home, subspace-free over home" in table
    assert f"\u2020 {MEASURES}: {ADAPTIVE} over home" in table
    (legend,) = loss_against_steps(group, "", same_maths=True).figure.legends
    named = {one.get_text() for one in legend.get_texts()}
    assert f"subspace-free ({CONTROL})" in named
    assert "int4(group=64)" in named
    (legend,) = bytes_per_step(group, "").figure.legends
    assert f"{CONTROL}: delta-open(int4(group=64)), subspace-free" in {one.get_text() for one in legend.get_texts()}
