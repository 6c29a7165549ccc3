"""Make a codec from its name: the one place that imports a codec's class."""

from __future__ import annotations

import importlib

from testbed.codecs import table
from testbed.codecs.base import Codec, Context
from testbed.errors import SpecError


def make(name: str, context: Context) -> Codec:
    """A fresh instance for one boundary, direction and end.

    UnknownNameError for a name that is not in the table; SpecError when a 'pkg.mod:Class' cannot be imported or called, or
    lacks one of the two methods.
    """
    entry = table.find(name)
    path = entry.forward if context.direction == "forward" else entry.backward
    module_name, _, attribute = path.partition(":")
    try:
        kind = getattr(importlib.import_module(module_name), attribute)
        codec = kind(context)
    except Exception as error:  # a stranger's module and constructor may raise anything
        raise SpecError(f"codec {name!r}: cannot make {path} with {context}: {type(error).__name__}: {error}") from error
    if missing := [method for method in ("encode", "decode") if not callable(getattr(codec, method, None))]:
        raise SpecError(f"codec {name!r}: {path} has no method {' and no method '.join(missing)}; a codec has encode and decode")
    return codec  # type: ignore[no-any-return]
