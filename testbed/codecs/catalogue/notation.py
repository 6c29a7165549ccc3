"""The grammar of codecs: a text as a tree. `codec_spec` and `placement` resolve the names. No torch here.

    placement   rule {";" rule}                         0: int8; 1-3: fwd=int4, bwd=int8; rest: bf16
    rule        [(number ["-" number] | "rest") ":"] both
    both        codec | "fwd=" codec "," "bwd=" codec   in either order
    codec       name ["(" argument {"," argument} ")"]  ef(topk(0.1)), mypkg.mod:MyCodec(x=3)
    argument    [word "="] (number | codec)             a bare word is read as a codec without brackets

Blanks are allowed between tokens. Every error is a SpecError with the text and the character.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from testbed.errors import SpecError

_NAME = re.compile(r"[^\W\d][\w-]*(?:\.[^\W\d]\w*)*(?::[^\W\d]\w*)?")
_KEY = re.compile(r"([^\W\d]\w*)\s*=")
_NUMBER = re.compile(r"[+-]?(?:\d+(?P<point>\.\d*)?|(?P<dot>\.\d+))(?P<power>[eE][+-]?\d+)?(?![\w.])")
_PLACES = re.compile(r"(?:(?P<first>\d+)(?:\s*-\s*(?P<last>\d+))?|(?P<rest>rest))\s*:")
_BLANK = re.compile(r"\s*")
_DEEPEST = 8
"""Maximum depth of codecs inside each other: a closed loop holds two of what it wraps, so depth n makes 2**n."""
_HIGHEST = 10_000
_LONGEST = 4_000
"""Maximum number of characters of a codec's text."""


@dataclass(frozen=True)
class Number:
    """An int, or a float if written with a point or an exponent."""

    value: int | float
    at: int


@dataclass(frozen=True)
class Call:
    """A codec, or a bare word that may have another meaning."""

    name: str
    arguments: tuple[Argument, ...]
    brackets: bool
    at: int


@dataclass(frozen=True)
class Argument:
    """`key=value` or `value`."""

    key: str | None
    value: Number | Call
    at: int


@dataclass(frozen=True)
class Both:
    """The codecs of both directions; the same where the text names one."""

    forward: Call
    backward: Call


@dataclass(frozen=True)
class Rule:
    """The codecs of the boundaries `first` to `last`; of all boundaries without a rule where `first` is None."""

    first: int | None
    last: int | None
    both: Both
    at: int


def fault(text: str, at: int, message: str) -> SpecError:
    """Make an error in a codec's text, with its position."""
    where = f"character {at + 1}" if at < len(text) else "at its end"
    return SpecError(f"codec {text!r}, {where}: {message}")


def codec_tree(text: str) -> Call:
    """Return the tree of one codec."""
    reader = _CodecReader(text)
    call = reader.call()
    reader.end()
    return call


def placement_tree(text: str) -> tuple[Rule, ...]:
    """Return the rules of a placement, in the order written. A text without boundaries is one rule for the rest."""
    reader = _CodecReader(text)
    rules = [reader.rule()]
    while reader.accept(";"):
        rules.append(reader.rule())
    reader.end()
    return tuple(rules)


class _CodecReader:
    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise SpecError(f"codec {text[:40]!r}...: it has {len(text):,} characters; the limit is {_LONGEST:,}")
        self._text, self._at, self._depth = text, 0, 0
        self._skip()

    def rule(self) -> Rule:
        at, places = self._at, self._match(_PLACES)
        if places is None or places["rest"]:
            return Rule(None, None, self._both(), at)
        ends = [word.lstrip("0") or "0" for word in (places["first"], places["last"] or places["first"])]
        first, last = (int(word) if len(word) < len(str(_HIGHEST)) else _HIGHEST for word in ends)
        if not first <= last < _HIGHEST:
            words = f"boundaries {ends[0][:20]} to {ends[1][:20]} are not a range below {_HIGHEST}"
            raise fault(self._text, at, f"{words}; boundary 0 lies between the stages 0 and 1")
        return Rule(first, last, self._both(), at)

    def _both(self) -> Both:
        stated: dict[str, Call] = {}
        at = self._at
        while (key := self._peek(_KEY)) is not None:
            direction = key[1]
            if direction not in ("fwd", "bwd") or direction in stated:
                again = "is given twice" if direction in stated else "is not a direction"
                raise self._fault(f"{direction!r} {again}; write fwd=CODEC, bwd=CODEC, or one codec for both")
            self._match(_KEY)
            stated[direction] = self.call()
            if len(stated) == 2:
                return Both(stated["fwd"], stated["bwd"])
            if not self.accept(","):
                break
        if stated:
            missing = "bwd" if "fwd" in stated else "fwd"
            hint = "" if self._peek(_NAME) is None else f" before {self._text[self._at :]!r}"
            raise fault(self._text, self._at if hint else at, f"{missing}=CODEC is missing{hint}; give both directions")
        call = self.call()
        return Both(call, call)

    def call(self) -> Call:
        at, name = self._at, self._match(_NAME)
        if name is None:
            raise self._fault(f"expected the name of a codec, found {self._next()}")
        if not self.accept("("):
            return Call(name[0], (), False, at)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise fault(self._text, at, f"codecs are nested more than {_DEEPEST} deep")
        arguments: list[Argument] = []
        if not self.accept(")"):
            arguments.append(self._argument())
            while not self.accept(")"):
                if not self.accept(","):
                    raise self._fault(f"expected ',' or ')' in the brackets of {name[0]}, found {self._next()}")
                arguments.append(self._argument())
        self._depth -= 1
        return Call(name[0], tuple(arguments), True, at)

    def _argument(self) -> Argument:
        at, key = self._at, self._match(_KEY)
        where = self._at
        if (number := self._match(_NUMBER)) is not None:
            whole = not (number["point"] or number["dot"] or number["power"])
            value = float(number[0])
            if not math.isfinite(value):
                raise fault(self._text, where, f"{number[0]} is too large")
            return Argument(key and key[1], Number(int(number[0]) if whole else value, where), at)
        if self._peek(_NAME) is None:
            raise self._fault(f"expected a number, a word or a codec, found {self._next()}")
        return Argument(key and key[1], self.call(), at)

    def accept(self, sign: str) -> bool:
        """Consume the sign if it is next."""
        if not self._text.startswith(sign, self._at):
            return False
        self._at += len(sign)
        self._skip()
        return True

    def end(self) -> None:
        if self._at < len(self._text):
            raise self._fault(f"expected the end, found {self._next()}")

    def _peek(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return pattern.match(self._text, self._at)

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = self._peek(pattern)
        if match is not None:
            self._at = match.end()
            self._skip()
        return match

    def _skip(self) -> None:
        blank = _BLANK.match(self._text, self._at)
        assert blank is not None
        self._at = blank.end()

    def _next(self) -> str:
        return "nothing more" if self._at >= len(self._text) else repr(self._text[self._at : self._at + 20])

    def _fault(self, message: str) -> SpecError:
        return fault(self._text, self._at, message)
