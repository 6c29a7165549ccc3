"""What the table says of one codec. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

Kind = Literal["int", "float", "word", "codec"]
Law = Literal["identity", "bounded", "unbiased", "support", "residual", "projection", "lossless", "none"]


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Final = _Required()
"""The default of a parameter that has none."""

Default: TypeAlias = int | float | str | _Required


@dataclass(frozen=True)
class Parameter:
    """One parameter of a codec's constructor, which receives it by name.

    In a text, an argument without a name sets the first parameter of its sort (number, codec or free word) that is
    not set yet.
    """

    name: str
    kind: Kind
    default: Default
    """REQUIRED, or a value; a codec's default is its text."""
    doc: str
    choices: tuple[str, ...] = ()
    """The words that it may be: each sets this parameter where it stands bare among the arguments."""
    least: float | None = None
    most: float | None = None

    @property
    def allowed(self) -> str:
        """What its value may be, for people."""
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


def word(name: str, choices: tuple[str, ...], doc: str, *, default: str | None = None) -> Parameter:
    """Return a parameter that is one of several words, the first of them unless another is the default."""
    return Parameter(name, "word", choices[0] if default is None else default, doc, choices)


def codec(name: str, doc: str, *, default: Default = REQUIRED) -> Parameter:
    """Return a parameter that is another codec."""
    return Parameter(name, "codec", default, doc)


class Counts(NamedTuple):
    """What a device does to encode, or to decode, one message: formulas in the terms of `formula.py`, per value.

    `counting.py` has the rules of counting.
    """

    reads: str
    """Bytes read from memory."""
    writes: str
    """Bytes written to memory."""
    operations: str
    """Arithmetic operations."""


class CodecWork(NamedTuple):
    """What the sender does of one direction, and what its receiver does."""

    encode: Counts
    decode: Counts

    def around(self, encode: str = "inner.encode", decode: str = "inner.decode") -> CodecWork:
        """Add to each count what a codec inside costs at either end, by these terms."""
        ends = zip(self, (encode, decode), strict=True)
        return CodecWork(
            *(Counts(*(f"{count} + {inside}".removeprefix("0 + ") for count in end)) for end, inside in ends)
        )


NO_WORK: Final = CodecWork(Counts("0", "0", "0"), Counts("0", "0", "0"))


@dataclass(frozen=True, kw_only=True)
class CodecRow:
    """One codec."""

    name: str
    forward: str
    """The class for activations, 'pkg.mod:Class', called with a `contract.Context` and all parameters by name. A
    function will do."""
    backward: str = ""
    """The class for the gradients of activations; not given: the same."""
    parameters: tuple[Parameter, ...] = ()
    summary: str
    example: str = ""
    """A text that shows it in its usual surroundings; where this is empty, `example_text` makes the shortest one."""
    bits: str | None
    """A formula, in the terms of `formula.py`, for the bits per element on the wire without the payload's header. It
    states the size for everyone who has no torch: the list prints it, `predict` and the certificates of links evaluate
    it, and the kit holds what the class sends to it, within `codec_spec.FRAMING_BYTES` for each codec in a text. None
    where nothing is known."""
    backward_bits: str | None = None
    """The formula for gradients, where theirs is another one."""
    at_most: bool = False
    """The formula is the most that a message takes: how much it takes depends on the values, or on what was sent
    before, as `size_note` says."""
    size_note: str = ""
    """What the formula leaves out, for people."""
    state: str = ""
    """What each end remembers; not given: nothing, or what a codec inside does."""
    source: str
    law: Law
    """What decoding leaves of a tensor; `codecs check` tests it.

    identity: the fp32 values; bounded: each error within a bound; unbiased: bounded, and right in the mean over
    message keys; support: the values kept are right (or within the inner codec's bound), the others zero; residual:
    payload + residual = input; projection: idempotent; lossless: what the inner codec decodes, bit for bit; none.
    """
    work: CodecWork | str | None = None
    """What a device does per value, from the algorithm; a text says why nobody can count that. None: the row is anyone
    else's, whose class may say it (`counting.py`)."""
    backward_work: CodecWork | None = None
    """For gradients, where theirs is other work."""
    hook: str | None = None
    """What it does to the model; None where it leaves the model alone."""
    measures: bool = False
    """It chooses by what it measures of its link, so the network touches the numbers: such a run cannot be replayed."""
    linear: bool = False
    """It rounds each value and does nothing else, so partial sums may go through it at every hop of a ring."""
    for_gradients: bool = False
    """It is made for the gradients that workers exchange, and says little of activations."""
    exact: bool = False
    """It changes the model so that nothing of its hidden states is lost."""
    control: bool = False
    """It is a negative control: here to show what goes wrong, not to be used."""
    pairs: bool = False
    """Gradients go by what the activations' instance knows (`contract.Paired`): the forward codec must then be of
    the same family."""

    def __post_init__(self) -> None:
        wraps = any(parameter.kind == "codec" for parameter in self.parameters)
        object.__setattr__(self, "backward", self.backward or self.forward)
        object.__setattr__(self, "state", self.state or ("the inner codec's" if wraps else "none"))

    @property
    def size(self) -> str:
        """Its bits per element, for people."""
        if self.bits is None:
            return "see its documentation"
        backward = f"; backward {self.backward_bits}" if self.backward_bits else ""
        return f"{self.bits}{backward}" + (f"; {self.size_note}" if self.size_note else "")

    @property
    def example_text(self) -> str:
        """A text with all that is required: help and messages show it, and the kit checks it."""
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
        """Return the parameters that have this word among their choices: one at most, as the tests ensure."""
        return [parameter for parameter in self.parameters if word in parameter.choices]
