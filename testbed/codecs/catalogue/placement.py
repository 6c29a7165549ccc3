"""The codec of each boundary and direction, from a cell's `codec`. No torch here."""

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
        """The canonical text, with a single codec if both are equal."""
        return (
            self.forward.text if self.forward == self.backward else f"fwd={self.forward.text}, bwd={self.backward.text}"
        )

    @property
    def fault(self) -> str | None:
        """Return why gradients cannot depend on their activations' codec here; None if they can."""
        for part in self.backward.parts():
            if not part.row.pairs:
                continue
            masks = [mask for mask in self.forward.parts() if mask.row.backward == part.row.backward]
            if not masks:
                return (
                    f"gradients of {part.name} depend on its activations, which use {self.forward.text}; use "
                    f"{part.name} for both"
                )
            if all(_share(mask) != _share(part) for mask in masks):
                return (
                    f"gradients of {part.text} use the positions of the activations of {masks[0].text}; give both the "
                    "same share"
                )
        for spec in self:
            for part in spec.parts():
                inside = [inner for inner in part.parts() if inner.row.pairs] if part.row.measures else []
                if inside:
                    return (
                        f"gradients of {inside[0].name} depend on its activations, but {part.name} may have sent "
                        "those through another codec"
                    )
        return None


class Placement(NamedTuple):
    """A parsed `codec` of a cell.

    After `over` with the number of boundaries, texts that choose the same codecs give equal placements.
    """

    numbered: tuple[tuple[int, CodecPair], ...]
    """Boundaries with their own codecs, in order."""
    rest: CodecPair | None
    """The codecs of all other boundaries; None if each must have its own."""

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
        """Return the codec of a boundary and direction. SpecError if there is none."""
        pair = dict(self.numbered).get(boundary, self.rest)
        if pair is None:
            raise SpecError(f"codec {self.text!r} has no rule for boundary {boundary}; add one, or 'rest: CODEC'")
        return pair.forward if direction == "forward" else pair.backward

    def over(self, boundaries: int) -> Placement:
        """Return the canonical form for a pipeline of `boundaries` boundaries: the most common pair becomes the rest.

        SpecError for a boundary without a codec, or a rule for a missing boundary.
        """
        own = dict(self.numbered)
        if beyond := [number for number in own if number >= boundaries]:
            there = f"has boundaries 0 to {boundaries - 1}" if boundaries else "of one stage has no boundary"
            raise SpecError(f"codec {self.text!r} has a rule for boundary {beyond[0]}, but the pipeline {there}")
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
        """Whether one of its codecs adapts to its measured link."""
        return any(part.row.measures for spec in self.specs() for part in spec.parts())

    def specs(self) -> Iterator[CodecSpec]:
        """Yield all its codecs, possibly with repetitions."""
        for pair in (*(pair for _, pair in self.numbered), self.rest):
            if pair is not None:
                yield from pair


def parse_placement(text: str) -> Placement:
    """Parse a cell's `codec`. UnknownNameError or SpecError with the position for an invalid text."""
    numbered: dict[int, CodecPair] = {}
    rest: CodecPair | None = None
    for rule in placement_tree(text):
        pair = _pair(rule.both, text)
        if rule.first is None or rule.last is None:
            if rest is not None:
                raise fault(text, rule.at, "there are two rules for the rest; give one a number, as in '0: int8'")
            rest = pair
            continue
        for boundary in range(rule.first, rule.last + 1):
            if boundary in numbered:
                raise fault(text, rule.at, f"boundary {boundary} has a codec already")
            numbered[boundary] = pair
    return Placement(tuple(sorted(numbered.items(), key=lambda item: item[0])), rest)


def canonical_text(text: str) -> str:
    """Return the canonical text, as far as possible without the number of boundaries.

    An invalid text is returned unchanged.
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
    """Yield ranges of neighbours with the same codecs: first, last and the codecs."""
    for (_, pair), run in itertools.groupby(enumerate(numbered), key=lambda each: (each[1][0] - each[0], each[1][1])):
        numbers = [number for _, (number, _) in run]
        yield numbers[0], numbers[-1], pair


def _last(pairs: list[CodecPair | None], pair: CodecPair | None) -> int:
    return max(index for index, other in enumerate(pairs) if other == pair)
