"""Put what the stages learned together again, into a folder that transformers loads and that a workload's `model` can name."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from testbed.spec import WorkloadSpec
from testbed.workloads import prepare
from testbed.workloads.build import empty


def save(spec: WorkloadSpec, states: Iterable[Mapping[str, Tensor]], folder: Path) -> None:
    """Write a checkpoint from the `state_dict()` of each stage: config.json, model.safetensors and tokenizer.json.

    The two embeddings have learned apart, so both are saved, and the configuration says that they are not tied. SpecError when
    the workload's model is not to be had; RuntimeError for states that are not, together, that model's.
    """
    whole = empty(spec)
    whole.load_state_dict({name: value for state in states for name, value in state.items()}, assign=True)
    whole.save_pretrained(folder)
    shutil.copyfile(prepare.tokenizer_file(spec.model), folder / "tokenizer.json")
