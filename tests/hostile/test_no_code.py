"""Nothing that comes from outside is unpickled or evaluated."""

from __future__ import annotations

import ast
import functools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import testbed
from testbed.errors import SpecError
from testbed.workloads.weights import read_weights

ROOT = Path(testbed.__file__).parent
EXCEPTIONS = {"UnpicklingError"}
"""Of pickle, which torch raises for what weights_only refuses."""


@functools.cache
def _calls() -> list[tuple[str, ast.Call]]:
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node)
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8")))
        if isinstance(node, ast.Call)
    ]


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _states(call: ast.Call, keyword: str, value: object) -> bool:
    return any(
        each.arg == keyword and isinstance(each.value, ast.Constant) and each.value.value is value
        for each in call.keywords
    )


@pytest.mark.slow
def test_torch_loads_weights_only() -> None:
    loads = [(where, call) for where, call in _calls() if _name(call) == "torch.load"]
    assert loads
    assert [where for where, call in loads if not _states(call, "weights_only", True)] == []


@pytest.mark.slow
def test_numpy_loads_no_objects() -> None:
    loads = [
        (where, call)
        for where, call in _calls()
        if _name(call) in ("np.load", "numpy.load", "np.lib.format.open_memmap")
    ]
    assert loads
    assert [where for where, call in loads if any(each.arg == "allow_pickle" for each in call.keywords)] == []


@pytest.mark.slow
def test_nothing_is_evaluated_or_unpickled() -> None:
    wrong = (
        "eval",
        "exec",
        "compile",
        "__import__",
        "marshal.loads",
        "yaml.load",
        "pandas.read_pickle",
        "joblib.load",
        "dill.loads",
    )
    found = [
        where for where, call in _calls() if _name(call) in wrong or _name(call).startswith(("pickle.", "shelve."))
    ]
    assert found == []


@pytest.mark.slow
def test_pickle_is_imported_for_its_error_alone() -> None:
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pickle":
                assert node.attr in EXCEPTIONS, path


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    torch.save({"weight": _Bomb(ran)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(SpecError):
        read_weights(tmp_path, {"pytorch_model.bin": ["weight"]})
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": _Bomb(ran)}))
    with pytest.raises(SpecError):
        read_weights(tmp_path, {"pytorch_model.bin": ["weight"]})
    assert not ran.exists()


def test_an_array_that_would_run_code_is_refused(tmp_path: Path) -> None:
    """What `np.load` does where allow_pickle is not stated."""
    ran = tmp_path / "ran"
    np.save(tmp_path / "tokens.npy", np.array([_Bomb(ran)], dtype=object), allow_pickle=True)
    for mode in (None, "r"):
        with pytest.raises(ValueError, match=r"allow_pickle=False|Python objects"):
            np.load(tmp_path / "tokens.npy", mmap_mode=mode)
    assert not ran.exists()
