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
    ("words", "messages"),
    [
        ("sweep --set trainin.steps=3", ["there is no key 'trainin' (did you mean 'training'?)"]),
        ("sweep slip.toml --quick", ["is not TOML"]),
        ("run --codec int9", ["did you mean 'int8'?"]),
        ("run --text nowhere.txt", ["no file 'nowhere.txt'"]),
        ("run --set workload.text=hub:nobody/nothing:none", ["nobody/nothing"]),
        ("plan --results file/deeper", ["choose another with --results", "is not a folder"]),
        ("run --results file/deeper", ["choose another with --results", "is not a folder"]),
    ],
)
def test_what_cannot_be_is_said_and_leaves_nothing(command: Command, words: str, messages: list[str]) -> None:
    (command.folder / "slip.toml").write_text("question = ", encoding="utf8")
    (command.folder / "file").write_text("", encoding="utf8")
    own_cache = {"XDG_CACHE_HOME": "cache"} if "hub:" in words else {}
    output = command.finish(*words.split(), "--engine", command.engine, status=2, **own_cache)
    for message in (*messages, "testbed: error: "):
        assert message in " ".join(output.split())
    assert "Traceback" not in output
    if not own_cache:  # it finds out when it prepares the text
        assert not (command.folder / "results").exists()


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
    fields = ("workload.model=gpt2-midi", "workload.sequence_length=512", "workload.batch_size=100")
    one = ("pipeline.stages=1", "pipeline.microbatches=1", "pipeline.in_flight=1")
    cell = command.cell(*fields, *one, steps=3)
    output = command.finish(*cell, status=1, before=("prlimit", f"--as={3 << 30}"))
    assert "out of memory" in output
    assert "try smaller micro-batches" in output
    assert "Traceback" not in output
    assert command.last()[1].status == "failed"
