"""Cost on a device of encoding and decoding one message: bytes of memory traffic and arithmetic operations, from the
rows' formulas. No torch here, and no user code is run.

Counting rules, common to all rows. They describe plain kernels on a device with the tensor in its memory, not this
package's own code, which runs on the host:

1. The tensor is fp32 in memory, 4 bytes a value. Encoding ends with the payload in memory and decoding begins there;
   copies to or from the socket are not counted for any codec.
2. A pass reads each value once, does all work that needs no other value, and writes. Results stay in registers until
   the end of the pass. Quantities of many values (a group's maximum, a norm, a histogram) need a separate pass, after
   which the tensor is read again: int8 reads 4 bytes for the maximum and 4 to quantise.
3. A gather from a tensor reads all of it, because memory is read in lines of 32 to 128 bytes; positions ascend, so
   a decoder writes each value of the tensor once, zeros included. The k largest values are found by radix select: four
   passes over the tensor, one for each byte of the key, and one to gather (Alabi et al., ACM JEA 2012).
4. Addition, multiplication, comparison, maximum, absolute value, rounding, conversion, shift and mask and a table
   look-up are one operation each; logarithm and square root are four. Packing codes of fewer than 8 bits takes two per
   value (shift, or), unpacking two (shift, mask); twice as many for 3 and 6 bits, which consist of two parts.
5. Random numbers come from a counter-based generator in registers: Philox-4x32-10 (Salmon et al., SC 2011) takes 10
   rounds of 10 operations for 16 bytes, 6.25 a byte. Rounding stochastically draws one byte per value.
6. A product of (m, k) and (k, n) is 2 m k n operations, and each factor is read once.
7. A codec around another is a separate kernel: data passed between them is written to memory and read again. The inner
   codec's work is counted per value at the outer tensor's width.
8. State at one or both ends is read and written as fp32. Counts are for a message that is not the first of its key.
9. Not counted: checks of values and of received bytes, allocation, kernel launches, work done only once per row or
   column (scales), and work done once per step.

A codec that changes the model also counts its layers, forward and backward, because a device's durations come from the
unchanged model's FLOPs. A user-defined class states its counts per value as literals in its body, for both directions:
`device_encode = ("8", "1", "5")` and `device_decode`, the formulas of `row.Counts`, which may use its arguments by
name.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

from testbed.codecs.catalogue import formula, table
from testbed.codecs.catalogue.codec_spec import CodecSpec
from testbed.codecs.catalogue.row import CodecWork, Counts
from testbed.errors import SpecError
from testbed.message_key import Direction

_STATED = ("device_encode", "device_decode")


class Counted(NamedTuple):
    """What one end does for one message."""

    read_bytes: float
    written_bytes: float
    operations: float

    @property
    def moved_bytes(self) -> float:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes


def count_work(spec: CodecSpec, direction: Direction, shape: tuple[int, ...]) -> tuple[Counted, Counted]:
    """Count what encoder and decoder do for a tensor of this shape, without axes of 0.

    SpecError, which says what to do, for a codec whose work nobody can count.
    """
    sizes = formula.sizes_of(shape)

    def of(end: str) -> Counted:
        return Counted(*(sizes["n"] * _count(spec, direction, shape, end, kind) for kind in Counts._fields))

    return of("encode"), of("decode")


def _count(spec: CodecSpec, direction: Direction, shape: tuple[int, ...], end: str, kind: str) -> float:
    """Return one count of one end, per value."""
    known = {**formula.sizes_of(shape), "gradients": float(direction == "backward")}
    if spec.row.bits is not None:
        known["payload"] = spec.bits(direction, shape) / 8

    def of_codec(inner: CodecSpec, inner_end: str) -> float:
        if inner_end not in ("encode", "decode"):
            raise KeyError(f"{inner.text}.{inner_end}")
        return _count(inner, direction, shape, inner_end, kind)

    counts = getattr(_work_of(spec, direction), end)
    try:
        return formula.evaluate(getattr(counts, kind), lambda name: spec.term(name, known, of_codec))
    except (ValueError, ArithmeticError) as error:
        if spec.name in table.CODECS:
            raise
        raise SpecError(f"codec {spec.text!r}: device_{end}: {error}") from None


def _work_of(spec: CodecSpec, direction: Direction) -> CodecWork:
    row = spec.row
    work = (row.backward_work if direction == "backward" else None) or row.work
    if spec.name not in table.CODECS:
        work = _stated_by_class(spec.name)
    if isinstance(work, CodecWork):
        return work
    raise SpecError(
        f"cannot say what {spec.text} costs on a device: {work}; set codec_cost = 'host' (as measured on this machine) "
        "or 'zero'"
    )


def _stated_by_class(path: str) -> CodecWork | str:
    """Return what a class says of itself, read from its source; or why that says nothing."""
    tree, name = table.class_source(path), path.partition(":")[2]
    stated: dict[str, Counts] = {}
    for node in tree.body if tree is not None else ():
        for line in node.body if isinstance(node, ast.ClassDef) and node.name == name else ():
            match line:
                case (
                    ast.Assign(targets=[ast.Name(id=key)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=key), value=ast.expr() as value)
                ) if key in _STATED:
                    stated[key] = _counts(value, key, path)
    if len(stated) == len(_STATED):
        return CodecWork(*(stated[key] for key in _STATED))
    return f"its class states no {' and '.join(_STATED)}"


def _counts(node: ast.expr, key: str, path: str) -> Counts:
    match node:
        case ast.Tuple(elts=[ast.Constant(str(reads)), ast.Constant(str(writes)), ast.Constant(str(operations))]):
            return Counts(reads, writes, operations)
    raise SpecError(
        f"codec {path!r}: {key} must be three formulas in quotes, bytes read, bytes written and operations per value, "
        f"for example ('8', '1', '5'); found {ast.unparse(node)}"
    )
