"""The script of docs/your-code.md runs as it stands there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.torch_codecs.ranks import in_processes

PAGE = Path(__file__).parents[2] / "docs" / "your-code.md"


def run_script() -> None:
    script = PAGE.read_text(encoding="utf8").split("```python\n")[1].split("```")[0]
    exec(compile(script, str(PAGE), "exec"), {"__name__": "__main__"})  # noqa: S102


def test_the_script_for_ddp_trains_alike_at_both_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    in_processes(run_script, tmp_path / "ranks")
    one, other = (torch.load(f"checkpoint-{rank}.pt", weights_only=True) for rank in range(2))
    assert one["hook"]["step"] == 10
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
