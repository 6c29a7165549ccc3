"""Traces of delivery opportunities in mahimahi's format: reading, checking, writing, conversion from rates, and
binning.

Each line is one opportunity: the millisecond, from the trace's start, by which one packet of up to 1500 bytes may have
left. Numbers may repeat but must not decrease. The last number is the trace's length.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from testbed import paths, units
from testbed.errors import SpecError
from testbed.profiles.link_profile import RateTrace
from testbed.profiles.ranges import LONGEST_NS

OPPORTUNITY_BYTES = 1500
"""Capacity of one opportunity, regardless of the MTU: mahimahi's unit."""
_PACKET = OPPORTUNITY_BYTES * 8 * 1000
"""One opportunity, in bits per second times milliseconds."""
_LONGEST_MS = LONGEST_NS // 1_000_000
_MOST = 5_000_000
"""Maximum number of opportunities in one trace: one minute at 1 Gbit/s. Each is an integer in memory."""

KEPT_SUFFIX = ".trace"
_known: dict[str, Path] = {}
"""Digest -> path from which this process read the trace, since a profile may be anywhere."""
_kept: dict[str, Path] = {}
"""Digest -> the copy next to results, named by the digest, with text as written by `format_trace`."""


class TraceFile(NamedTuple):
    """The content of a trace file."""

    times: tuple[int, ...]
    digest: str
    """Digest of the file's bytes."""


def parse_trace(text: str, where: str) -> tuple[int, ...]:
    """Parse a trace into its opportunities in ms.

    SpecError that starts with `where` and names the faulty line.
    """
    times: list[int] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not (word := line.strip()):
            continue
        if not (word.isascii() and word.isdigit()) or len(word) > 12:
            raise SpecError(f"{where}, line {number}: {word[:40]!r} is not a whole number of milliseconds")
        if times and int(word) < times[-1]:
            raise SpecError(f"{where}, line {number}: {word} follows {times[-1]}; a trace's times must not decrease")
        times.append(int(word))
        if len(times) > _MOST:
            raise SpecError(f"{where} has more than {_MOST:,} delivery opportunities; shorten it")
    if not times:
        raise SpecError(f"{where} has no delivery opportunity; write one time in ms per line")
    if times[-1] == 0:
        raise SpecError(
            f"{where}: all opportunities are at 0 ms, so the trace has no length; the last line must be its end"
        )
    if times[-1] > _LONGEST_MS:
        raise SpecError(f"{where} is {times[-1] / 3_600_000:.1f} hours long; shorten it to at most 24")
    return tuple(times)


def format_trace(times: Iterable[int]) -> str:
    """Write a trace as text: the inverse of `parse_trace`."""
    return "".join(f"{time}\n" for time in times)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=10).hexdigest()


def read_trace(path: Path) -> TraceFile:
    """Read a trace file. SpecError when it cannot be read or is not a trace."""
    try:
        content = path.read_bytes()
        times = parse_trace(content.decode("ascii"), f"trace {path}")
    except OSError as error:
        raise SpecError(f"cannot read the trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SpecError(f"trace {path} is not text; write one time in ms per line") from None
    digest = _digest(content)
    _known[digest] = path.resolve()
    return TraceFile(times, digest)


def load_trace(trace: RateTrace) -> tuple[int, ...]:
    """Return the opportunities of a profile's trace in ms.

    SpecError when no file has the content that it had when the profile was read.
    """
    return _load(trace.digest, trace.file)


@functools.lru_cache(maxsize=8)
def _load(digest: str, file: str) -> tuple[int, ...]:
    places = [*filter(None, [_known.get(digest)]), *(folder / file for folder in paths.profile_folders())]
    for path in places:
        if path.is_file() and _digest(content := path.read_bytes()) == digest:
            return parse_trace(content.decode("ascii"), f"trace {path}")
    if kept := _kept.get(digest):
        return parse_trace(kept.read_text(encoding="ascii"), f"trace {kept}")
    looked = ", ".join(map(str, places)) or "no folder of profiles"
    raise SpecError(f"cannot find the trace {file} with its content when the profile was read; searched {looked}")


def keep_trace(trace: RateTrace, folder: Path) -> Path:
    """Copy a trace into a results folder, so that results can be read without the profile.

    Raises SpecError like `load_trace`.
    """
    path = folder / f"{trace.digest}{KEPT_SUFFIX}"
    path.write_text(format_trace(load_trace(trace)), encoding="ascii")
    return path


def find_kept_traces(folder: Path) -> None:
    """Make the traces that `keep_trace` put into `folder` available to `load_trace`."""
    for path in folder.glob(f"*{KEPT_SUFFIX}"):
        _kept.setdefault(path.name.removesuffix(KEPT_SUFFIX), path)


def mean_rate_bps(times: Sequence[int]) -> float:
    """Return a trace's mean rate over its length, in bits per second."""
    return len(times) * _PACKET / times[-1]


def bins(times: Sequence[int], bin_ms: int) -> tuple[int, ...]:
    """Count the opportunities in each `bin_ms`; the last bin may be shorter.

    An opportunity at t ms counts towards the bin that ends at or after t, and one at 0 ms towards the first, so the
    bins add up to the trace.
    """
    counts = [0] * -(-times[-1] // bin_ms)
    for time in times:
        counts[max(0, (time - 1) // bin_ms)] += 1
    return tuple(counts)


def bin_rates(times: Sequence[int], bin_ms: int) -> tuple[float, ...]:
    """Return the rate of each bin of `bins`, in bits per second."""
    counts = bins(times, bin_ms)
    lengths = [bin_ms] * (len(counts) - 1) + [times[-1] - (len(counts) - 1) * bin_ms]
    return tuple(count * _PACKET / length for count, length in zip(counts, lengths, strict=True))


def trace_from_rates(steps: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Make a trace from (duration in ms, bits per second) steps.

    An opportunity is placed at the first millisecond at which the rate's integral has filled one more packet, in
    integer arithmetic, so that every machine makes the same trace. If the end lies between two packets, one more
    opportunity is placed there, because the last line is the trace's length. SpecError for a negative rate, or a trace
    of less than one packet.
    """
    times: list[int] = []
    credit = start = 0
    for duration_ms, rate_bps in steps:
        if rate_bps < 0 or duration_ms <= 0:
            raise SpecError(f"cannot make a trace of {rate_bps} bit/s over {duration_ms} ms; neither may be negative")
        if start + duration_ms > _LONGEST_MS:
            raise SpecError(f"the trace would be {(start + duration_ms) / 3_600_000:.3g} hours long; the limit is 24")
        filled = credit + rate_bps * duration_ms
        count = filled // _PACKET
        if len(times) + count > _MOST:
            raise SpecError(f"the trace would have more than {_MOST:,} packets; make it shorter or slower")
        times.extend(start - (credit - n * _PACKET) // rate_bps for n in range(1, count + 1))  # rounded up
        credit = filled - count * _PACKET
        start += duration_ms
    if not times:
        rate = units.format_rate(_PACKET / start) if start else "a rate"
        raise SpecError(
            f"not one packet of {OPPORTUNITY_BYTES} bytes fits into the trace; it needs at least {rate} over its length"
        )
    if times[-1] < start:
        times.append(start)
    return tuple(times)
