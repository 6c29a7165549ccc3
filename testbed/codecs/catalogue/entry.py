"""What the table says of a codec. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

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
    """One parameter of a codec's constructor, given by name there.

    In text an argument without a name sets the first parameter of its sort (number, codec or free word) that is not set yet.
    """

    name: str
    kind: Kind
    default: Default
    """REQUIRED, or a value; for a codec its text."""
    doc: str
    choices: tuple[str, ...] = ()
    """Of a word. A bare word among the arguments that is one of them sets this parameter, wherever it stands."""
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One codec. `d` in a formula is the hidden size, the width of a token."""

    name: str
    forward: str
    """Class for activations, 'pkg.mod:Class', called with a `contract.Context` and all parameters by name. A function will do."""
    backward: str
    """Class for activation gradients."""
    parameters: tuple[Parameter, ...] = ()
    summary: str
    example: str = ""
    """A text that shows it in its usual surroundings; the shortest one where this is empty."""
    bits_per_element: str
    """On the wire, without the payload's header of 4 bytes and 4 an axis."""
    nominal_bits: Callable[[Mapping[str, Any]], float]
    """The same as a number, given every parameter; one that is a codec stands there as its own nominal bits. Links are certified
    with messages of about this size before a codec has sent any."""
    state: str
    """What each end remembers."""
    source: str
    law: Law
    """What decoding leaves of a tensor; `codecs check` tests it.

    identity: the fp32 values; bounded: each error within a bound; unbiased: bounded, and right in the mean over message keys; support:
    the values kept are right (or within the inner codec's bound), the others zero; residual: payload + residual = input;
    projection: idempotent; lossless: what the inner codec decodes, bit for bit; none.
    """
    hook: str | None = None
    """What it does to the model; None where it leaves the model alone."""
    measures: bool = False
    """It chooses by what it measures of its link, so the network touches the numbers: such a run cannot be replayed."""
    exact: bool = False
    """Changes the model so that nothing of its hidden states is lost."""
    control: bool = False
    """A negative control: here to show what goes wrong, not to be used."""

    pairs: bool = False
    """Gradients go by what the activations' instance knows (`contract.Paired`): the forward codec must then be of the same family."""

    def parameter(self, name: str) -> Parameter | None:
        """By name."""
        return next((one for one in self.parameters if one.name == name), None)

    def choosing(self, word: str) -> list[Parameter]:
        """Those that the bare word is a choice of: one at most, as the tests see to."""
        return [one for one in self.parameters if word in one.choices]
