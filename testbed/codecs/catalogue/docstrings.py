"""A codec's documentation, read from its source without running it: no torch here, and no user code."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from testbed.codecs.catalogue import table
from testbed.errors import SpecError

_Documented: TypeAlias = ast.ClassDef | ast.FunctionDef


class ClassDocs(NamedTuple):
    """Docstrings without indentation; None where missing."""

    of_class: str | None
    """Docstring of the class, or of the nearest base class in its module; of the function, if one makes the codec."""
    of_module: str | None


def class_docs(path: str) -> ClassDocs:
    """Read the docstrings of a class, named as 'pkg.mod:Class'.

    SpecError for a module without source, or without this class.
    """
    module, _, name = path.partition(":")
    if (tree := table.class_source(path)) is None:
        raise SpecError(f"codec {path!r}: the module {module} has no source to read its documentation from")
    known = {node.name: node for node in tree.body if isinstance(node, _Documented)}
    if name not in known:
        raise SpecError(f"codec {path!r}: there is no class {name} in {module}")
    return ClassDocs(_of_class(known, name), _clean(ast.get_docstring(tree)))


def _of_class(known: Mapping[str, _Documented], name: str) -> str | None:
    seen: set[str] = set()
    while name in known and name not in seen:
        seen.add(name)
        node = known[name]
        if docstring := _clean(ast.get_docstring(node)):
            return docstring
        above = [base.id for base in node.bases if isinstance(base, ast.Name)] if isinstance(node, ast.ClassDef) else []
        name = above[0] if above else ""
    return None


def _clean(text: str | None) -> str | None:
    return inspect.cleandoc(text) if text else None
