from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest

import testbed
from testbed import notebook, results
from testbed.errors import ResultsError, UserError
from testbed.results import Run
from tests.synthetic import Pipeline, cell, pipe, profile, write_run

ROOT = Path(testbed.__file__).parent.parent
PAGES = [ROOT / "docs" / "running.md", ROOT / "testbed" / "export" / "README.md"]
LINK = profile("home", pipe(80_000_000, 10_000_000), pipe(80_000_000, 10_000_000))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = results.make_folder(tmp_path / "results" / "default")
    what = cell("int8", LINK)
    return write_run(folder, what, Pipeline(LINK, jitter=0.1))


def test_importing_testbed_is_cheap() -> None:
    heavy = ("pandas", "pyarrow", "numpy", "pydantic", "torch", "matplotlib")
    program = (
        f"import sys, testbed; assert 'run_cell' in dir(testbed); print([m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'run_sell'"):
        _ = testbed.run_sell


def test_a_step_is_a_row(run: Run) -> None:
    frame, stages = testbed.steps(run.folder), testbed.steps(run.folder, by_stage=True)
    records = [run.steps(stage) for stage in range(run.cell.pipeline.stages)]
    assert len(frame) == len(records[0])
    assert len(stages) == len(frame) * len(records)
    summary = run.summary
    assert frame[frame.measured].step_s.median() == pytest.approx(summary.step_s)
    assert frame[frame.measured].sent_payload_bytes.mean() == summary.payload_bytes_per_step
    assert frame[frame.phase == "train"].loss.iloc[-1] == summary.train_loss
    assert frame.overruns.isna().all()


def test_an_experiment_is_a_frame_of_runs(run: Run) -> None:
    frame = testbed.load(run.folder.parent.parent)
    assert list(frame.cell_id) == [run.cell.id]
    assert frame.codec.iloc[0] == "int8"
    with pytest.raises(ResultsError, match="no result folder"):
        testbed.load("nowhere")


@pytest.mark.slow
def test_a_command_that_fails_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"exit status 2.*no codec 'int9'; did you mean 'int8'"):
        testbed.run_cell("int9", folder=tmp_path, engine="relay", quiet=True)
    assert capfd.readouterr().out == ""


def _blocks() -> list[Any]:
    examples = []
    for page in PAGES:
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf8"), re.DOTALL)):
            if "import testbed" in block:
                examples.append(pytest.param(block, id=f"{page.parent.name}-{number}"))
    return examples


@pytest.mark.parametrize("block", _blocks())
def test_documented_lines_work(block: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line runs on existing results; no cell is run, but the call's arguments must fit."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    signature = inspect.signature(notebook.run_cell)

    def pretended(*args: Any, **kwargs: Any) -> pandas.DataFrame:
        signature.bind(*args, **kwargs)
        frame = notebook.steps(run.folder)
        frame.attrs["summary"] = run.summary.model_dump() if run.summary else {}
        return frame

    monkeypatch.chdir(run.folder.parent.parent.parent.parent)
    monkeypatch.setattr(notebook, "run_cell", pretended)
    names: dict[str, Any] = {}
    for statement in ast.parse(block).body:
        exec(compile(ast.Module([statement], []), "running.md", "exec"), names)  # noqa: S102
    assert any(isinstance(value, pandas.DataFrame) and len(value) for value in names.values())


@pytest.mark.clock_kernel
@pytest.mark.slow
def test_a_cell_runs_from_python(tmp_path: Path) -> None:
    fields = {"training.steps": 4, "training.warmup_steps": 1, "pipeline.stages": 2, "training.evaluate_every": 0}
    fields |= {"compute.mode": "paced", "compute.forward": "2ms", "compute.backward": "4ms", "codec_cost": "zero"}
    frame = testbed.run_cell("int8", "consumer-80mbps", folder=tmp_path, fields=fields, quiet=True)
    assert list(frame[frame.phase == "train"].step) == [0, 1, 2, 3]
    assert frame.attrs["summary"]["status"] == "ok"
    assert frame.attrs["summary"]["cell_id"] == Path(frame.attrs["folder"]).parent.name
    assert (Path(frame.attrs["folder"]) / "summary.json").exists()
