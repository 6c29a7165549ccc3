"""The table's entry for one codec. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

Kind = Literal["int", "float", "word", "codec"]
Law = Literal["identity", "bounded", "unbiased", "support", "residual", "projection", "lossless", "none"]


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Final = _Required()
"""Default of a required parameter."""

Default: TypeAlias = int | float | str | _Required


@dataclass(frozen=True)
class Parameter:
    """One parameter of a codec's constructor, which receives it by name.

    In a text, an argument without a name sets the first unset parameter of its kind (number, codec or free word).
    """

    name: str
    kind: Kind
    default: Default
    """REQUIRED, or a value; a codec's default is its text."""
    doc: str
    choices: tuple[str, ...] = ()
    """Allowed words: each, as a bare argument, sets this parameter."""
    least: float | None = None
    most: float | None = None

    @property
    def allowed(self) -> str:
        """Description of the allowed values."""
        if self.kind == "word":
            return f"one of {', '.join(self.choices)}" if self.choices else "a word"
        if self.kind == "codec":
            return "a codec"
        sort = "a whole number" if self.kind == "int" else "a number"
        if self.least is not None and self.most is not None:
            return f"{sort} from {self.least:g} to {self.most:g}"
        if self.least is not None:
            return f"{sort} of at least {self.least:g}"
        return sort if self.most is None else f"{sort} of at most {self.most:g}"


class Counts(NamedTuple):
    """A device's work to encode, or to decode, one message: formulas in the terms of `formula.py`, per value.

    `counting.py` has the rules of counting.
    """

    reads: str
    """Bytes read from memory."""
    writes: str
    """Bytes written to memory."""
    operations: str
    """Arithmetic operations."""


class CodecWork(NamedTuple):
    """Work of the sender and of the receiver in one direction."""

    encode: Counts
    decode: Counts

    def around(self, encode: str, decode: str) -> CodecWork:
        """Add the costs of an inner codec at either end to each count, given by these terms."""
        ends = zip(self, (encode, decode), strict=True)
        return CodecWork(
            *(Counts(*(f"{count} + {inside}".removeprefix("0 + ") for count in end)) for end, inside in ends)
        )


@dataclass(frozen=True, kw_only=True)
class CodecRow:
    """One codec."""

    name: str
    forward: str
    """The class for activations, 'pkg.mod:Class', called with a `contract.Context` and all parameters by name. A
    function is also allowed."""
    backward: str = ""
    """The class for gradients of activations; default: the same."""
    parameters: tuple[Parameter, ...] = ()
    summary: str
    example: str = ""
    """A typical text that uses it; if empty, `example_text` makes the shortest one."""
    bits: str | None
    """A formula, in the terms of `formula.py`, for the bits per element on the wire without the payload's header. It
    gives the size without torch: the list prints it, `predict` and link certificates evaluate it, and the conformance
    tests compare real payloads with it, within `codec_spec.FRAMING_BYTES` for each codec in a text. None if unknown."""
    backward_bits: str | None = None
    """The formula for gradients, if it differs."""
    at_most: bool = False
    """Whether the formula is an upper bound: the actual size depends on values or earlier messages, see `size_note`."""
    size_note: str = ""
    """Remark on what the formula omits."""
    state: str = ""
    """State at each end; default: none, or that of the inner codec."""
    source: str
    law: Law
    """The law of its errors, tested by `codecs check`.

    identity: the fp32 values; bounded: each error within a bound; unbiased: bounded, and exact in the mean over message
    keys; support: kept values are exact (or within the inner codec's bound), the others zero; residual: payload +
    residual = input; projection: idempotent; lossless: bit-identical to the inner codec's result; none.
    """
    work: CodecWork | str | None = None
    """A device's work per value, from the algorithm; a text gives the reason why it cannot be counted. None: a
    user-defined codec, whose class may state it (`counting.py`)."""
    backward_work: CodecWork | None = None
    """Work for gradients, if it differs."""
    hook: str | None = None
    """Its change to the model, if any."""
    measures: bool = False
    """Whether it adapts to its measured link, so that results depend on the network and runs cannot be replayed."""
    linear: bool = False
    """Whether it only rounds each value, so that partial sums may pass through it at every hop of a ring."""
    for_gradients: bool = False
    """Whether it is designed for gradients that workers exchange rather than for activations."""
    exact: bool = False
    """Whether it changes the model so that hidden states are transmitted without loss."""
    control: bool = False
    """Whether it is a negative control: included to demonstrate a failure, not for use."""
    pairs: bool = False
    """Whether gradients depend on the activations' instance (`contract.Paired`), so that the forward codec must be of
    the same family."""

    def __post_init__(self) -> None:
        wraps = any(parameter.kind == "codec" for parameter in self.parameters)
        object.__setattr__(self, "backward", self.backward or self.forward)
        object.__setattr__(self, "state", self.state or ("the inner codec's" if wraps else "none"))

    @property
    def size(self) -> str:
        """Description of its bits per element."""
        if self.bits is None:
            return "see its documentation"
        backward = f"; backward {self.backward_bits}" if self.backward_bits else ""
        return f"{self.bits}{backward}" + (f"; {self.size_note}" if self.size_note else "")

    @property
    def example_text(self) -> str:
        """A text with all required parameters, shown in help and messages and tested by the conformance tests."""
        if self.example:
            return self.example
        samples = {"codec": "int8", "float": "{}=0.1", "int": "{}=64", "word": "{}=WORD"}
        required = (parameter for parameter in self.parameters if parameter.default is REQUIRED)
        written = ", ".join(samples[each.kind].format(each.name) for each in required)
        return f"{self.name}({written})" if written else self.name

    def parameter(self, name: str) -> Parameter | None:
        """Return the parameter of that name."""
        return next((parameter for parameter in self.parameters if parameter.name == name), None)

    def choosing(self, word: str) -> list[Parameter]:
        """Return the parameters with this word among their choices: at most one, as tests ensure."""
        return [parameter for parameter in self.parameters if word in parameter.choices]
