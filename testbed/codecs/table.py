"""The list of codecs, to be read by people and by the command line. Imports no torch.

A codec here is a class for each direction, named as 'pkg.mod:Class'; the same notation names anyone else's codec.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from testbed.errors import SpecError, UnknownNameError


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One codec. `d` in a formula is the hidden size, the width of a token."""

    name: str
    forward: str
    """Class for activations, 'pkg.mod:Class', called with a `base.Context`."""
    backward: str
    """Class for activation gradients."""
    summary: str
    bits_per_element: str
    """On the wire, without the payload's header of 4 bytes and 4 an axis."""
    nominal_bits: int
    """The same as a round number: links are certified with messages of about this size before a codec has sent any."""
    state: str
    """What each end remembers."""
    source: str


_INT8_BACKWARD = "testbed.codecs.quantise:Int8Stochastic"

CODECS: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="fp32",
            forward="testbed.codecs.cast:Fp32",
            backward="testbed.codecs.cast:Fp32",
            summary="the tensor as it is: the reference of every ratio",
            bits_per_element="32",
            nominal_bits=32,
            state="none",
            source="IEEE 754 binary32",
        ),
        Entry(
            name="bf16",
            forward="testbed.codecs.cast:Bf16",
            backward="testbed.codecs.cast:Bf16",
            summary="rounded to bfloat16, both directions",
            bits_per_element="16",
            nominal_bits=16,
            state="none",
            source="torch.bfloat16, round to nearest even",
        ),
        Entry(
            name="int8",
            forward="testbed.codecs.quantise:Int8Nearest",
            backward=_INT8_BACKWARD,
            summary="8 bits and a scale per token; gradients rounded stochastically",
            bits_per_element="8 + 32/d",
            nominal_bits=8,
            state="none",
            source="symmetric absmax quantisation; stochastic rounding: Gupta et al., ICML 2015",
        ),
        Entry(
            name="delta-int8",
            forward="testbed.codecs.delta:DeltaInt8",
            backward=_INT8_BACKWARD,
            summary="difference from the previous step's tensor of the same micro-batch, as int8; gradients as int8",
            bits_per_element="8 + 32/d",
            nominal_bits=8,
            state="one fp32 tensor per micro-batch and phase, forward",
            source="activation delta (Bedoya and Zhang), closed loop",
        ),
    )
}

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
    _locate(match["module"], name)
    return Entry(
        name=name,
        forward=name,
        backward=name,
        summary="not one of ours",
        bits_per_element="see its documentation",
        nominal_bits=8,
        state="see its documentation",
        source=name,
    )


def _locate(module: str, name: str) -> None:
    # importlib.util.find_spec would run the parent packages' code, in a process that may be root's.
    path: list[str] | None = None
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
