"""Wrapping every process group changes nothing that a job computes, and never breaks `import torch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from testbed.errors import CapabilityError
from testbed.torch import process_group

_ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which testbed's entry point is seen as that of an installed package."""
    about = tmp_path / "packages" / "testbed_entry-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: testbed-entry\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[torch.backends]\ntestbed = testbed.torch.autoload:load\n")
    return {**os.environ, "PYTHONPATH": f"{_ROOT}:{about.parent}"}


def _python(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_importing_torch_does_nothing_unless_asked(installed: dict[str, str]) -> None:
    code = "import sys, torch; print([m for m in sys.modules if m.startswith('testbed.')])"
    done = _python(code, installed)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(eval(done.stdout)) <= {"testbed.torch", "testbed.torch.autoload"}


@pytest.mark.slow
def test_importing_torch_wraps_groups_without_the_lab(installed: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import sys, torch, torch.distributed as dist\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/meet', rank=0, world_size=1)\n"
        "print(type(dist.group.WORLD).__name__, dist.get_backend())\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('transformers', 'datasets', 'pydantic', 'pyroute2')])\n"
    )
    done = _python(code, {**installed, "TESTBED_TORCH": json.dumps({"folder": str(tmp_path)})})
    assert done.stdout.splitlines() == ["ObservedGroup gloo", "[]"], done.stderr
    assert (tmp_path / "rank-0.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "runs"),
    [
        ("not JSON", False),
        ('{"color": 1}', True),
        ('{"codec": "no such codec("}', False),
        ('{"folder": "/proc/nowhere"}', True),
        ('{"pace": {"mode": "recorded", "file": "/nowhere"}}', False),
    ],
)
def test_importing_torch_never_fails(wanted: str, runs: bool, installed: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import torch, torch.distributed as dist; print('imported', flush=True)\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/meet', rank=0, world_size=1)\n"
        "dist.barrier(); print('ran')\n"
    )
    done = _python(code, {**installed, "TESTBED_TORCH": wanted})
    assert done.stdout.split() == ["imported", *(["ran"] if runs else [])], done.stderr
    assert f"testbed: cannot do as TESTBED_TORCH={wanted} says" in done.stderr


def test_this_torch_has_every_private_name() -> None:
    assert process_group.missing_names() == []


@pytest.mark.parametrize("name", process_group.PRIVATE_NAMES)
def test_a_torch_without_a_private_name_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("_world."):
        monkeypatch.setattr(distributed_c10d, "_world", _Without(distributed_c10d._world, name.partition(".")[2]))
    else:
        monkeypatch.delattr(distributed_c10d, name)
    with pytest.raises(CapabilityError, match=f"has no torch.distributed.distributed_c10d.{name}; use a torch that"):
        process_group.install()


class _Without:
    def __init__(self, owner: Any, missing: str) -> None:
        self._owner, self._missing = owner, missing

    def __getattr__(self, name: str) -> Any:
        if name == self._missing:
            raise AttributeError(name)
        return getattr(self._owner, name)
