"""Which codec stands at which boundary, in which direction: what a cell's `codec` says. No torch here."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from testbed.codecs.catalogue.codec_spec import CodecSpec, bind
from testbed.codecs.catalogue.notation import Both, fault, placement_tree
from testbed.errors import SpecError, UserError
from testbed.message_key import Direction


class CodecPair(NamedTuple):
    """The codecs of one boundary."""

    forward: CodecSpec
    backward: CodecSpec

    @property
    def text(self) -> str:
        """The canonical text, which names one codec where both are the same."""
        return (
            self.forward.text if self.forward == self.backward else f"fwd={self.forward.text}, bwd={self.backward.text}"
        )

    @property
    def fault(self) -> str | None:
        """Why gradients that go by their activations' codec cannot do so here; None where nothing is wrong."""
        for part in self.backward.parts():
            if not part.row.pairs:
                continue
            masks = [mask for mask in self.forward.parts() if mask.row.backward == part.row.backward]
            if not masks:
                return (
                    f"gradients of {part.name} go by its activations, which go through {self.forward.text}; "
                    f"name {part.name} for both"
                )
            if all(_share(mask) != _share(part) for mask in masks):
                return (
                    f"gradients of {part.text} go where the activations of {masks[0].text} went; "
                    "give both the same share"
                )
        for spec in self:
            for part in spec.parts():
                inside = [inner for inner in part.parts() if inner.row.pairs] if part.row.measures else []
                if inside:
                    return (
                        f"gradients of {inside[0].name} go by its activations; "
                        f"{part.name} may have sent those through another"
                    )
        return None


class Placement(NamedTuple):
    """What a cell's `codec` says.

    Two are equal whenever two texts choose the same codecs, once `over` has seen how many boundaries there are.
    """

    numbered: tuple[tuple[int, CodecPair], ...]
    """The boundaries that have codecs of their own, in order."""
    rest: CodecPair | None
    """The codecs of all other boundaries; None where each must have its own."""

    @property
    def text(self) -> str:
        """The canonical text: neighbours with the same codecs as a range, the rest last."""
        if not self.numbered and self.rest is not None:
            return self.rest.text
        rules = [
            f"{first}: {pair.text}" if first == last else f"{first}-{last}: {pair.text}"
            for first, last, pair in _ranges(self.numbered)
        ]
        return "; ".join([*rules, *([] if self.rest is None else [f"rest: {self.rest.text}"])])

    def at(self, boundary: int, direction: Direction) -> CodecSpec:
        """Return the codec that stands there. SpecError where there is none."""
        pair = dict(self.numbered).get(boundary, self.rest)
        if pair is None:
            raise SpecError(f"codec {self.text!r} says nothing of boundary {boundary}; name it, or say 'rest: CODEC'")
        return pair.forward if direction == "forward" else pair.backward

    def over(self, boundaries: int) -> Placement:
        """Return the canonical form for a pipeline of `boundaries` boundaries: the commonest pair is the rest.

        SpecError for a boundary that has no codec, or that the pipeline does not have.
        """
        own = dict(self.numbered)
        if beyond := [number for number in own if number >= boundaries]:
            there = f"has the boundaries 0 to {boundaries - 1}" if boundaries else "of one stage has no boundary"
            raise SpecError(f"codec {self.text!r} speaks of boundary {beyond[0]}; the pipeline {there}")
        for boundary in range(boundaries):
            self.at(boundary, "forward")
        pairs = [own.get(boundary, self.rest) for boundary in range(boundaries)]
        if not pairs:
            return self
        common = Counter(pairs).most_common()
        most = max((pair for pair, count in common if count == common[0][1]), key=lambda pair: _last(pairs, pair))
        return Placement(tuple((i, pair) for i, pair in enumerate(pairs) if pair is not None and pair != most), most)

    @property
    def nominal_bits(self) -> float:
        """Bits per element: the largest of any boundary and direction."""
        return max(spec.nominal_bits for spec in self.specs())

    @property
    def control(self) -> bool:
        """Whether a negative control is among its codecs."""
        return any(spec.control for spec in self.specs())

    @property
    def measures(self) -> bool:
        """Whether one of its codecs chooses by what it measures of its link."""
        return any(part.row.measures for spec in self.specs() for part in spec.parts())

    def specs(self) -> Iterator[CodecSpec]:
        """Yield all its codecs, some perhaps more than once."""
        for pair in (*(pair for _, pair in self.numbered), self.rest):
            if pair is not None:
                yield from pair


def parse_placement(text: str) -> Placement:
    """Read a cell's `codec`. UnknownNameError or SpecError, with the place, for what cannot be made."""
    numbered: dict[int, CodecPair] = {}
    rest: CodecPair | None = None
    for rule in placement_tree(text):
        pair = _pair(rule.both, text)
        if rule.first is None or rule.last is None:
            if rest is not None:
                raise fault(text, rule.at, "two rules are for the rest; give one a number, as in '0: int8'")
            rest = pair
            continue
        for boundary in range(rule.first, rule.last + 1):
            if boundary in numbered:
                raise fault(text, rule.at, f"boundary {boundary} has a codec already")
            numbered[boundary] = pair
    return Placement(tuple(sorted(numbered.items(), key=lambda item: item[0])), rest)


def canonical_text(text: str) -> str:
    """Return the canonical text, as far as it shows without the number of boundaries.

    A text that cannot be read stays as it is.
    """
    try:
        return parse_placement(text).text
    except UserError:
        return text


def _pair(both: Both, text: str) -> CodecPair:
    forward = bind(both.forward, text)
    pair = CodecPair(forward, forward if both.backward is both.forward else bind(both.backward, text))
    if pair.fault is not None:
        raise fault(text, both.backward.at, pair.fault)
    return pair


def _share(spec: CodecSpec) -> object:
    return dict(spec.arguments).get("share")


def _ranges(numbered: tuple[tuple[int, CodecPair], ...]) -> Iterator[tuple[int, int, CodecPair]]:
    """Yield the first and the last of neighbours that have the same codecs, and those."""
    for (_, pair), run in itertools.groupby(enumerate(numbered), key=lambda each: (each[1][0] - each[0], each[1][1])):
        numbers = [number for _, (number, _) in run]
        yield numbers[0], numbers[-1], pair


def _last(pairs: list[CodecPair | None], pair: CodecPair | None) -> int:
    return max(index for index, other in enumerate(pairs) if other == pair)
