"""The list of codecs, for readers and for the command line. No torch here.

A codec is a class for each direction, named as 'pkg.mod:Class'; the same notation names user-defined codecs.
"""

from __future__ import annotations

import ast
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

from testbed.codecs.catalogue.row import CodecRow
from testbed.codecs.catalogue.row_files import read_rows
from testbed.errors import SpecError, UnknownNameError

FAMILIES: dict[str, tuple[CodecRow, ...]] = {
    family: read_rows(family) for family in ("dense", "sparse", "low_rank", "memory", "wrappers", "in_model")
}
ROWS: tuple[CodecRow, ...] = sum(FAMILIES.values(), ())
CODECS: dict[str, CodecRow] = {row.name: row for row in ROWS}

_CLASS_PATH = re.compile(r"(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<attribute>[^\W\d]\w*)")


def find_codec(name: str) -> CodecRow:
    """Return the row of a name; for 'pkg.mod:Class' a row that uses the class both ways. Nothing is imported.

    UnknownNameError for a name that is not in the table, SpecError for a missing module.
    """
    if ":" not in name:
        if name not in CODECS:
            raise UnknownNameError("codec", name, CODECS)
        return CODECS[name]
    if not (match := _CLASS_PATH.fullmatch(name)):
        raise SpecError(f"codec {name!r} is not of the form 'pkg.mod:Class'")
    locate_module(match["module"], name)
    return CodecRow(
        name=name,
        forward=name,
        summary="user-defined",
        bits=None,
        state="see its documentation",
        source=name,
        law="none",
    )


def class_source(path: str) -> ast.Module | None:
    """Return the source of a class's module, 'pkg.mod:Class', without running it; None if it has no source.

    SpecError for a module that cannot be found or read.
    """
    origin = locate_module(path.partition(":")[0], path).origin
    if origin is None or not origin.endswith(".py"):
        return None
    try:
        return ast.parse(Path(origin).read_text(encoding="utf8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise SpecError(f"codec {path!r}: cannot read {origin}: {error}") from None


def codec_modules() -> list[str]:
    """Return the modules of all codecs of the table, for loading before a run."""
    return sorted({path.partition(":")[0] for row in CODECS.values() for path in (row.forward, row.backward)})


def locate_module(module: str, name: str) -> ModuleSpec:
    """Find a codec's module without running user code. SpecError that names the codec if it is missing."""
    # importlib.util.find_spec would run the parent packages' code, possibly as root. As in `paths.import_named`, the
    # current folder is the last one.
    path = [*sys.path, str(Path.cwd())]
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth, part in enumerate(parts):
        qualified = ".".join(parts[: depth + 1])
        spec = next((s for finder in sys.meta_path if (s := finder.find_spec(qualified, path)) is not None), None)
        if spec is None:
            where = f"in {', '.join(path) or parts[depth - 1]}" if depth else "on the module search path"
            raise SpecError(
                f"codec {name!r}: there is no module {part!r} {where}; run in its folder, or set PYTHONPATH"
            )
        path = list(spec.submodule_search_locations or [])
    assert spec is not None
    return spec
