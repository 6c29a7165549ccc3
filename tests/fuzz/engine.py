"""Feeds a parser inputs that hypothesis draws: mutated examples, and bytes and texts of any kind.

An input may be refused with a TestbedError, or what the command line makes one, in 2 s of processor time and 1 GiB of
memory. Anything else is a find: hypothesis shrinks the input, and it is kept in corpus/PARSER/, which test_fuzz.py runs
again for ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from testbed.errors import explained
from tests.fuzz.parsers import PARSERS, Parser

CORPUS = Path(__file__).parent / "corpus"
SLOWEST_S = 2.0
"""Maximum processor time for one input."""
MEMORY_BYTES = 1 << 30
"""Maximum memory for one input, beyond what the process has."""
LARGEST_BYTES = 1 << 16
"""Maximum size of an input: time and memory may grow with it."""
ROUND = 100
"""Inputs that hypothesis draws at once."""
_NUMBERS = (
    *(b"0", b"-1", b"1e308", b"-1e308", b"1e-320", b"0.0000001", b"2147483648", b"4294967296", b"9223372036854775807"),
    *(b"18446744073709551616", b"1" + b"0" * 30, b"9" * 400, b"9" * 5000, b"1.5", b"nan", b"inf", b"NaN", b"Infinity"),
)
_TOKENS = (
    *(
        b"\0",
        b"\xff",
        b"\x1b[2J",
        b"\r\n",
        b"\n",
        b'"',
        b"'",
        b"[",
        b"]",
        b"{",
        b"}",
        b"(",
        b")",
        b",",
        b"=",
        b":",
        b";",
    ),
    *(b"true", b"null", b"[]", b"{}", b'""', b"2026-11-25", b"07:32:00", b"[/x]", b"..", b"/", b"a" * 20_000),
    *(b"[" * 3000, b'{"a":' * 3000, b"(" * 20, b"ef(" * 17, b"a." * 3000, "\u202e".encode(), b"\xed\xa0\x80"),
    *(b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", b"\x00\x00\x01\x00"),
)


class TooSlowError(Exception):
    """An input took more processor time than it may."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Limit the memory of this process, and warn nobody."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, before[1]))
    handler = signal.signal(signal.SIGPROF, _too_slow)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _too_slow(signum: int, frame: FrameType | None) -> None:
    raise TooSlowError(f"more than {SLOWEST_S:g} s of processor time")


def check(parser: Parser, raw: bytes) -> None:
    """Parse one input, within `limited`; a TestbedError is an answer, and can be printed."""
    signal.setitimer(signal.ITIMER_PROF, SLOWEST_S)
    try:
        parser.parse(raw)
    except Exception as error:
        if (told := explained(error)) is None:
            raise
        str(told).encode("utf8")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def where(error: BaseException) -> str:
    """Return the kind of an error, and the innermost line of ours that it passed: what makes two finds one."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "/testbed/" in each.filename]
    if isinstance(error, TooSlowError) or not frames:
        frames = frames[:1]
    place = f"{frames[-1].filename.rpartition('/testbed/')[2]}:{frames[-1].name}" if frames else "the parser"
    return f"{type(error).__name__} in {place}"


# ---------------------------------------------------------------------- inputs
@st.composite
def _mutated(draw: st.DrawFn, examples: Sequence[bytes]) -> bytes:
    """Draw an example with some changes."""
    raw = draw(st.sampled_from(examples))
    for _ in range(draw(st.integers(1, 4))):
        raw = draw(st.sampled_from(_CHANGES))(draw, raw, examples)[:LARGEST_BYTES]
    return raw


def _slice(draw: st.DrawFn, raw: bytes) -> tuple[int, int]:
    begin = draw(st.integers(0, len(raw)))
    return begin, min(len(raw), begin + draw(st.sampled_from((0, 1, 1, 2, 4, 8, 30, 300))))


def _deleted(draw: st.DrawFn, raw: bytes, _: Sequence[bytes]) -> bytes:
    begin, end = _slice(draw, raw)
    return raw[:begin] + raw[end:]


def _cut(draw: st.DrawFn, raw: bytes, _: Sequence[bytes]) -> bytes:
    return raw[: draw(st.integers(0, len(raw)))]


def _repeated(draw: st.DrawFn, raw: bytes, _: Sequence[bytes]) -> bytes:
    begin, end = _slice(draw, raw)
    return raw[:begin] + raw[begin:end] * draw(st.sampled_from((2, 3, 100, 3000))) + raw[end:]


def _replaced(draw: st.DrawFn, raw: bytes, _: Sequence[bytes]) -> bytes:
    begin, end = _slice(draw, raw)
    return raw[:begin] + draw(st.sampled_from(_TOKENS) | st.binary(max_size=8)) + raw[end:]


def _flipped(draw: st.DrawFn, raw: bytes, _: Sequence[bytes]) -> bytes:
    if not raw:
        return raw
    at, bit = draw(st.integers(0, len(raw) - 1)), draw(st.integers(0, 7))
    return raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]


def _renumbered(draw: st.DrawFn, raw: bytes, _: Sequence[bytes]) -> bytes:
    if not (numbers := list(re.finditer(rb"-?\d+(?:\.\d+)?", raw))):
        return raw
    number = draw(st.sampled_from(numbers))
    return raw[: number.start()] + draw(st.sampled_from(_NUMBERS)) + raw[number.end() :]


def _reworded(draw: st.DrawFn, raw: bytes, examples: Sequence[bytes]) -> bytes:
    """Replace a word or a value by another one of the examples."""
    words = [
        list(re.finditer(rb"[\w.]+|\"[^\"\n]*\"|\[[^\[\]\n]*\]|\{[^{}\n]*\}", each))
        for each in (raw, draw(st.sampled_from(examples)))
    ]
    if not all(words):
        return raw
    old, new = (draw(st.sampled_from(each)) for each in words)
    return raw[: old.start()] + new[0] + raw[old.end() :]


def _spliced(draw: st.DrawFn, raw: bytes, examples: Sequence[bytes]) -> bytes:
    other = draw(st.sampled_from(examples))
    return raw[: draw(st.integers(0, len(raw)))] + other[draw(st.integers(0, len(other))) :]


_CHANGES: Sequence[Callable[[st.DrawFn, bytes, Sequence[bytes]], bytes]] = (
    *(_deleted, _cut, _repeated, _replaced, _flipped, _renumbered, _renumbered, _reworded, _reworded, _spliced),
)


def inputs(examples: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Return a strategy for inputs; most are mutated examples."""
    texts = st.text(max_size=60).map(lambda text: text.encode("utf8", "surrogatepass"))
    mutated = _mutated(examples)
    return st.one_of(mutated, mutated, mutated, st.binary(max_size=120), texts)


# ---------------------------------------------------------------------- running
@dataclass
class Count:
    """What was done to one parser."""

    executions: int = 0
    cpu_s: float = 0.0
    """Processor time of inputs that hypothesis drew, hypothesis included."""
    guided_s: float = 0.0
    """Processor time of inputs that coverage guided (`guided.py`)."""
    rounds: int = 0
    finds: dict[str, str] = field(default_factory=dict)
    """Files in the corpus, by what was found."""


def keep_find(name: str, raw: bytes, error: BaseException, count: Count) -> None:
    """Keep an input in the corpus, unless another one was found to do the same."""
    if where(error) in count.finds:
        return
    path = CORPUS / name / f"{hashlib.sha256(raw).hexdigest()[:12]}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    count.finds[where(error)] = path.name


def fuzz(
    name: str, count: Count, *, rounds: int | None = None, seconds: float | None = None, keep: bool = True
) -> None:
    """Fuzz a parser for so many rounds, or seconds of processor time; `count` is continued, and decides the inputs.

    `keep`: keep finds in the corpus and go on; otherwise the first one is raised.
    """
    parser = PARSERS[name]
    examples = list(parser.examples())
    began, first = time.process_time(), count.rounds
    before_s, last = count.cpu_s, b""

    def one(raw: bytes) -> None:
        nonlocal last
        count.executions += 1
        try:
            check(parser, raw)
        except Exception as error:
            if where(error) in count.finds:
                return
            last = raw
            raise

    strategy = inputs(examples)
    with limited():
        for example in examples:
            check(parser, example)
        while count.rounds - first < (rounds or 1 << 60) and time.process_time() - began < (seconds or 1e9):
            drawn = hypothesis.given(strategy)(one)
            settings = hypothesis.settings(
                max_examples=ROUND,
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
                report_multiple_bugs=False,
                print_blob=False,
            )
            run = hypothesis.seed(count.rounds)(settings(drawn))
            count.rounds += 1
            try:
                run()
            except Exception as error:
                if not keep:
                    raise
                keep_find(name, last, error, count)
            count.cpu_s = before_s + time.process_time() - began
