"""One codec with its arguments: a tree of `notation` checked against the table, and its canonical text.

No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from testbed.codecs.catalogue import formula, table
from testbed.codecs.catalogue.notation import Argument, Call, Number, codec_tree, fault
from testbed.codecs.catalogue.row import REQUIRED, CodecRow, Parameter
from testbed.errors import SpecError, UnknownNameError
from testbed.message_key import Direction

Value: TypeAlias = "int | float | str | CodecSpec"


_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
_UNKNOWN_BITS = 8.0
"""Bits assumed for a codec whose row has no formula."""
FRAMING_BYTES = 32
"""Bytes that each codec in a text may add to a message beyond its formula: a header and rounding."""


@dataclass(frozen=True)
class CodecSpec:
    """Input of `make`. Equivalent texts have equal specs."""

    name: str
    arguments: tuple[tuple[str | None, Value], ...]
    """For our codecs: every parameter by name, including defaults, in the table's order. For user-defined codecs: as
    written."""

    @property
    def row(self) -> CodecRow:
        """Its row of the table."""
        return table.find_codec(self.name)

    @property
    def text(self) -> str:
        """Its canonical text: without defaults, required parameters without names, choices as bare words."""
        written = ", ".join(_our_arguments(self) if self.name in table.CODECS else _their_arguments(self))
        return f"{self.name}({written})" if written else self.name

    def bits(self, direction: Direction, shape: tuple[int, ...]) -> float:
        """Return the bits per element of a tensor of this shape, without axes of 0, by the table's formula.

        Headers and rounding to whole bytes add up to `FRAMING_BYTES` for each of its `parts` to a message.
        """
        return self._bits(direction, formula.sizes_of(shape))

    @property
    def nominal_bits(self) -> float:
        """Bits per element of a large tensor, in the direction that needs more.

        Links are certified with messages of about this size before the codec has sent any. A formula that vanishes for
        a large tensor, such as that of a low-rank factor, is evaluated for a typical one.
        """
        return self._most_bits(formula.LARGE) or self._most_bits(formula.TYPICAL)

    @property
    def control(self) -> bool:
        """Whether it, or a codec inside it, is a negative control."""
        return any(part.row.control for part in self.parts())

    @property
    def inner(self) -> CodecSpec | None:
        """The codec inside a wrapper; the first where there are several."""
        return next((value for _, value in self.arguments if isinstance(value, CodecSpec)), None)

    def parts(self) -> Iterator[CodecSpec]:
        """Yield the spec itself, and the codecs inside it."""
        yield self
        for _, value in self.arguments:
            if isinstance(value, CodecSpec):
                yield from value.parts()

    def term(self, name: str, known: Mapping[str, float], of_codec: Callable[[CodecSpec, str], float]) -> float:
        """Return the value of a name in a formula of its row: one of `known`, an argument, or a choice.

        For an argument that is a codec, `of_codec` gives the value from the codec and the part of the name after a dot.
        KeyError for an unknown name.
        """
        argument, _, part = name.partition(".")
        arguments = dict(self.arguments)
        if name in known:
            return known[name]
        if argument not in arguments:
            if part or not (choosing := self.row.choosing(name)):
                raise KeyError(name)
            return arguments[choosing[0].name] == name
        value = arguments[argument]
        if isinstance(value, int | float) and not part:
            return value
        inner = parse_codec(value) if isinstance(value, str) else value
        if not isinstance(inner, CodecSpec):
            raise KeyError(name)
        return of_codec(inner, part)

    def _most_bits(self, sizes: Mapping[str, float]) -> float:
        return max(self._bits(direction, sizes) for direction in _DIRECTIONS)

    def _bits(self, direction: Direction, sizes: Mapping[str, float]) -> float:
        row = self.row

        def bits_of(name: str, shape: Sequence[float]) -> float:
            inside = formula.sizes_of(shape)
            return self.term(name, {}, lambda inner, _: inner._bits(direction, inside)) if 0 not in shape else 0.0

        def look_up(name: str) -> float:
            return self.term(name, sizes, lambda inner, _: inner._bits(direction, sizes))

        if row.bits is None:
            return _UNKNOWN_BITS
        return formula.evaluate((row.backward_bits if direction == "backward" else None) or row.bits, look_up, bits_of)


def parse_codec(text: str) -> CodecSpec:
    """Parse one codec. UnknownNameError or SpecError with the position for an invalid text."""
    return bind(codec_tree(text), text)


def bind(call: Call, text: str) -> CodecSpec:
    """Check a tree of `text` against the table: names, kinds of arguments, ranges, required arguments."""
    try:
        row = table.find_codec(call.name)
    except UnknownNameError as error:
        if text.strip() == call.name:
            raise
        raise fault(text, call.at, str(error)) from None
    if call.name not in table.CODECS:
        for index, argument in enumerate(call.arguments):
            if argument.key is not None and any(argument.key == earlier.key for earlier in call.arguments[:index]):
                raise fault(text, argument.at, f"{argument.key} of {call.name} is set twice")
        return CodecSpec(call.name, tuple((each.key, _foreign(each.value, text)) for each in call.arguments))
    given: dict[str, Value] = {}
    for argument in call.arguments:
        parameter = _parameter(row, argument, given, text)
        if parameter.name in given:
            raise fault(text, argument.at, f"{parameter.name} of {row.name} is set twice")
        given[parameter.name] = _value(row, parameter, argument.value, text)
    for parameter in row.parameters:
        if parameter.name in given:
            continue
        if parameter.default is REQUIRED:
            needed = f"{row.name} needs {parameter.name}: {parameter.doc}; for example {row.example_text}"
            raise fault(text, call.at, needed)
        given[parameter.name] = _default(parameter)
    return CodecSpec(row.name, tuple((parameter.name, given[parameter.name]) for parameter in row.parameters))


def _foreign(value: Number | Call, text: str) -> Value:
    """Return an argument of a user-defined class: a bare word is a text, a codec has brackets or a module."""
    if isinstance(value, Number):
        return value.value
    return bind(value, text) if value.brackets or ":" in value.name else value.name


def _parameter(row: CodecRow, argument: Argument, given: dict[str, Value], text: str) -> Parameter:
    """Return the parameter that an argument sets."""
    value = argument.value
    if not row.parameters:
        raise fault(text, argument.at, f"{row.name} takes no arguments")
    if argument.key is not None:
        named = row.parameter(argument.key)
        if named is None:
            known = [parameter.name for parameter in row.parameters]
            raise fault(text, argument.at, str(UnknownNameError(f"parameter of {row.name}", argument.key, known)))
        return named
    if isinstance(value, Call) and not value.brackets and (choosing := row.choosing(value.name)):
        return choosing[0]
    sort = "a number" if isinstance(value, Number) else "a codec or a word"
    fit = [each for each in row.parameters if _needs_no_name(each, number=isinstance(value, Number))]
    if isinstance(value, Call) and not fit:
        words = [word for parameter in row.parameters for word in parameter.choices]
        raise fault(text, argument.at, str(UnknownNameError(f"word for {row.name}", value.name, words)))
    free = [parameter for parameter in fit if parameter.name not in given]
    if not free:
        takes = f"{sort} for {', '.join(parameter.name for parameter in fit)}" if fit else f"no {sort[2:]}"
        raise fault(text, argument.at, f"{row.name} takes only {takes}")
    return free[0]


def _needs_no_name(parameter: Parameter, *, number: bool) -> bool:
    """Return whether a parameter can be set without its name, by a number or by another value that is not a choice."""
    if number:
        return parameter.kind in ("int", "float")
    return parameter.kind == "codec" or (parameter.kind == "word" and not parameter.choices)


def _value(row: CodecRow, parameter: Parameter, value: Number | Call, text: str) -> Value:
    """Return an argument's value, checked."""

    def wrong(given: str, wanted: str) -> SpecError:
        return fault(text, value.at, f"{parameter.name} of {row.name} must be {wanted}, found {given}")

    if isinstance(value, Number):
        number = value.value
        if parameter.kind not in ("int", "float") or (parameter.kind == "int" and not isinstance(number, int)):
            raise wrong(str(number), parameter.allowed)
        if (parameter.least is not None and number < parameter.least) or (
            parameter.most is not None and number > parameter.most
        ):
            raise wrong(str(number), parameter.allowed)
        return float(number) if parameter.kind == "float" else number
    if parameter.kind == "codec":
        return bind(value, text)
    if parameter.kind != "word" or value.brackets or (parameter.choices and value.name not in parameter.choices):
        raise wrong(repr(value.name), parameter.allowed)
    return value.name


def _default(parameter: Parameter) -> Value:
    default = parameter.default
    assert isinstance(default, int | float | str)
    if isinstance(default, str):
        return parse_codec(default) if parameter.kind == "codec" else default
    return float(default) if parameter.kind == "float" else default


def _our_arguments(spec: CodecSpec) -> Iterator[str]:
    row, bare = spec.row, True
    sorts_with_defaults = {True: False, False: False}
    for (name, value), parameter in zip(spec.arguments, row.parameters, strict=True):
        number = parameter.kind in ("int", "float")
        required = parameter.default is REQUIRED
        # Without its name it must be the first unset parameter of its kind, so no earlier one may have its default.
        bare = required and not sorts_with_defaults[number]
        if _needs_no_name(parameter, number=number) and not required:
            sorts_with_defaults[number] = True
        if not required and value == _default(parameter):
            continue
        written = _written(value)
        if parameter.choices:
            yield written if len(row.choosing(written)) == 1 else f"{name}={written}"
        else:
            yield written if bare and not row.choosing(written) else f"{name}={written}"


def _their_arguments(spec: CodecSpec) -> Iterator[str]:
    for name, value in spec.arguments:
        written = _written(value)
        if isinstance(value, CodecSpec) and written == value.name and ":" not in written:
            written += "()"
        yield written if name is None else f"{name}={written}"


def _written(value: Value) -> str:
    return value.text if isinstance(value, CodecSpec) else value if isinstance(value, str) else repr(value)
