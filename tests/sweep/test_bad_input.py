"""What a person does wrong, or a machine cannot do: the message, the exit status, and that nothing is left running or
written.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.errors import UserError
from testbed.sweep.environment import hold_machine
from tests.commands import Command


def test_two_measurements_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):  # the second time, the first has let go
        with hold_machine(), pytest.raises(UserError, match="another testbed is measuring"), hold_machine():
            pass


@pytest.mark.root
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainin.steps=3", "there is no key 'trainin' (did you mean 'training'?)"),
        ("workload.batchsize=8", "there is no key 'workload.batchsize' (did you mean 'workload.batch_size'?)"),
        ("compute.mod=paced", "there is no key of compute 'mod'; did you mean 'mode'?"),
        ("pipeline.stages=30", "a model of 4 layers cannot be cut into 30 stages: each needs a layer"),
        ("pipeline.accumulation=3", "batch_size 16 cannot be cut into 12 equal micro-batches"),
        ("workload.text=nowhere.parquet", "nowhere.parquet"),
    ],
)
def test_a_field_that_cannot_be(command: Command, override: str, message: str) -> None:
    output = command.finish("sweep", "--engine", command.engine, "--set", override, status=2)
    assert message in output
    assert "Traceback" not in output
    assert not (command.folder / "results").exists()


@pytest.mark.root
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[axes]", "[axis]", "there is no key 'axis' (did you mean 'axes'?)"),
        ("[cell]", "[tune]\nfeld = 1\n[cell]", "there is no key 'tune.feld' (did you mean 'tune.field'?)"),
        ('question = "', "question = ", "is not TOML"),
    ],
)
def test_an_experiment_file_with_a_slip_in_it(command: Command, before: str, after: str, message: str) -> None:
    text = (command.shipped / "default" / "sweep.toml").read_text(encoding="utf8")
    assert before in text
    (command.folder / "sweep.toml").write_text(text.replace(before, after, 1), encoding="utf8")
    output = command.finish("sweep", "sweep.toml", "--quick", "--engine", command.engine, status=2)
    assert message in output.replace("\n", " ")
    assert "Traceback" not in output
    assert not (command.folder / "results").exists()


@pytest.mark.root
def test_a_data_set_that_is_not_here_is_said_with_what_to_do(command: Command) -> None:
    output = command.finish(
        "run",
        "--engine",
        command.engine,
        "--set",
        "workload.text=hub:nobody/nothing:none",
        status=2,
        XDG_CACHE_HOME="cache",
    )
    assert "nobody/nothing" in output
    assert "Traceback" not in output


@pytest.mark.root
def test_a_results_folder_that_cannot_be_written(command: Command) -> None:
    (command.folder / "file").write_text("", encoding="utf8")
    for verb in ("plan", "sweep"):
        output = command.finish(verb, "--engine", command.engine, "--results", "file/deeper", status=2)
        assert "choose another with --results" in output
        assert "is not a folder" in output


@pytest.mark.root
@pytest.mark.slow
def test_a_loss_that_is_not_finite(command: Command) -> None:
    fields = ("optimiser.learning_rate=1e6", "optimiser.clip_norm=1e9", "pipeline.stages=1")
    output = command.finish(*command.cell(*fields, steps=30), status=1)
    assert "training has diverged; try a lower optimiser.learning_rate" in output
    assert "Traceback" not in output
    run, summary = command.last()
    assert summary.status == "failed"
    assert run.certificates.before is not None


@pytest.mark.root
@pytest.mark.slow
def test_a_stage_that_runs_out_of_memory(command: Command) -> None:
    """Activations of gigabytes, where no process may have three: the kernel tells torch what a full machine would tell
    it.
    """
    fields = (
        "workload.model=gpt2-midi",
        "workload.sequence_length=512",
        "workload.batch_size=100",
        "pipeline.stages=1",
    )
    cell = command.cell(*fields, "pipeline.microbatches=1", "pipeline.in_flight=1", steps=3)
    output = command.finish(*cell, status=1, before=("prlimit", f"--as={3 << 30}"))
    assert "out of memory" in output
    assert "try smaller micro-batches" in output
    assert "Traceback" not in output
    assert command.last()[1].status == "failed"
