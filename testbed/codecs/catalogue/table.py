"""The list of codecs, to be read by people and by the command line. Imports no torch.

A codec here is a class for each direction, named as 'pkg.mod:Class'; the same notation names anyone else's codec. A name here is
one codec's; how codecs are put together in a line of text is `language`'s business.
"""

from __future__ import annotations

import re
import sys
from importlib.machinery import ModuleSpec

from testbed.codecs.catalogue import dense, in_model, memory_and_wrappers, sparse_and_low_rank
from testbed.codecs.catalogue.entry import REQUIRED, Entry, Parameter
from testbed.errors import SpecError, UnknownNameError

__all__ = ["CODECS", "LISTS", "REQUIRED", "Entry", "Parameter", "find", "locate", "modules"]

LISTS = (dense.ENTRIES, sparse_and_low_rank.ENTRIES, memory_and_wrappers.ENTRIES, in_model.ENTRIES)
CODECS: dict[str, Entry] = {entry.name: entry for entries in LISTS for entry in entries}

_CLASS_PATH = re.compile(r"(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<attribute>[^\W\d]\w*)")


def find(name: str) -> Entry:
    """The entry of a name, or one for 'pkg.mod:Class', which then serves both directions. Imports nothing.

    UnknownNameError for a name that is not in the table, SpecError for a module that cannot be found.
    """
    if ":" not in name:
        if name not in CODECS:
            raise UnknownNameError("codec", name, CODECS)
        return CODECS[name]
    if not (match := _CLASS_PATH.fullmatch(name)):
        raise SpecError(f"codec {name!r} is not of the form 'pkg.mod:Class'")
    locate(match["module"], name)
    return Entry(
        name=name,
        forward=name,
        backward=name,
        summary="not one of ours",
        bits_per_element="see its documentation",
        nominal_bits=lambda _: 8,
        state="see its documentation",
        source=name,
        law="none",
    )


def modules() -> list[str]:
    """The modules of all codecs of the table, to be loaded before a run."""
    return sorted({path.partition(":")[0] for entry in CODECS.values() for path in (entry.forward, entry.backward)})


def locate(module: str, name: str) -> ModuleSpec:
    """Where a codec's module is; runs nobody's code. SpecError, which names the codec, where there is none."""
    # importlib.util.find_spec would run the parent packages' code, in a process that may be root's.
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth, part in enumerate(parts):
        qualified = ".".join(parts[: depth + 1])
        spec = next((s for finder in sys.meta_path if (s := finder.find_spec(qualified, path)) is not None), None)
        if spec is None:
            where = f"in {', '.join(path) or parts[depth - 1]}" if path is not None else "on the module search path"
            raise SpecError(
                f"codec {name!r}: there is no module {part!r} {where}; run where it can be imported, or set PYTHONPATH"
            )
        path = list(spec.submodule_search_locations or [])
    assert spec is not None
    return spec
