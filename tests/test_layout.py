"""How the code is laid out: names that tell things apart, and modules that one can read at once."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "testbed"
MODULES = {path.relative_to(PACKAGE): path.read_text(encoding="utf8") for path in sorted(PACKAGE.rglob("*.py"))}
TWICE = 8
"""Class names that may stand twice."""
LONGEST = 400
LONGER = {"spec.py": "what a cell is, in one place"}
"""Modules that may be longer, and why."""


def test_hardly_a_class_name_stands_twice() -> None:
    trees = (ast.parse(text) for text in MODULES.values())
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    twice = sorted(name for name, count in names.items() if count > 1)
    assert len(twice) <= TWICE, twice


@pytest.mark.slow
def test_no_module_is_too_long_to_read() -> None:
    def lines(text: str) -> int:
        tree = ast.parse(text)
        said = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
        prose = {at for node in said for at in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        numbered = enumerate(text.splitlines(), 1)
        return sum(at not in prose and line.strip()[:1] not in ("", "#") for at, line in numbered)

    long = {str(path) for path, text in MODULES.items() if lines(text) > LONGEST}
    assert long == set(LONGER)
