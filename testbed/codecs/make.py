"""Make a codec from its text: the one place that imports a codec's class."""

from __future__ import annotations

from typing import Any

from testbed import paths
from testbed.codecs.catalogue import placement
from testbed.codecs.catalogue.codec_spec import CodecSpec
from testbed.codecs.contract import Codec, Context
from testbed.errors import SpecError


def make(text: str, context: Context) -> Codec:
    """Make a fresh instance for one boundary, direction and end: what `text`, a cell's `codec`, names for them.

    UnknownNameError or SpecError for an invalid text or one without a rule for the boundary; SpecError when a class
    cannot be imported or called, or lacks one of the two methods.
    """
    return build_codec(placement.parse_placement(text).at(context.boundary, context.direction), context)


def build_codec(spec: CodecSpec, context: Context) -> Codec:
    """Make an instance of one codec, and of those inside it, for the same context. SpecError as in `make`."""
    row = spec.row
    path = row.forward if context.direction == "forward" else row.backward
    arguments: list[Any] = []
    named: dict[str, Any] = {}
    for name, value in spec.arguments:
        ready = build_codec(value, context) if isinstance(value, CodecSpec) else value
        if name is None:
            arguments.append(ready)
        else:
            named[name] = ready
    module_name, _, attribute = path.partition(":")
    try:
        kind = getattr(paths.import_named(module_name), attribute)
        codec = kind(context, *arguments, **named)
    except Exception as error:  # a third-party module or constructor may raise anything
        raise SpecError(
            f"codec {spec.text!r}: cannot make {path} with {context}: {type(error).__name__}: {error}"
        ) from error
    if missing := [method for method in ("encode", "decode") if not callable(getattr(codec, method, None))]:
        raise SpecError(
            f"codec {spec.text!r}: {path} has no method {' and no method '.join(missing)}; "
            "a codec has encode and decode"
        )
    return codec  # type: ignore[no-any-return]
