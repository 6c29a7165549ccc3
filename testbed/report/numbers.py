"""Numbers as text, in the terminal, on the page and in Markdown. A missing number is '-', never 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence

from testbed.metrics.statistics import Interval

MISSING = "-"
_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def three(value: float | None) -> str:
    """Write three significant digits without an exponent: 1234.5 -> '1234' (half to even), 1.234 -> '1.23', None ->
    '-'.
    """
    if value is None or not math.isfinite(value):
        return MISSING
    rounded = float(f"{value:.3g}")
    digits = 2 if rounded == 0 else max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{value:.{min(digits, 6)}f}"


def seconds(value: float | None) -> str:
    """Write a duration: 0.4123 -> '412 ms', 12.3 -> '12.3 s'."""
    if value is None:
        return MISSING
    return f"{three(value * 1e3)} ms" if value < 1 else f"{three(value)} s"


def size(value: float | None) -> str:
    """Write a size in bytes: 1_048_576 -> '1.05 MB'."""
    if value is None:
        return MISSING
    unit, name = next(((u, n) for u, n in _SIZES if value >= u), (1.0, "B"))
    return f"{three(value / unit)} {name}" if unit > 1 else f"{value:.0f} B"


def percent(share: float, form: str = "{:.1f}") -> str:
    """Write a share: 0.084 -> '8.4 %'."""
    return f"{form.format(100 * share)} %"


def listed(words: Sequence[str]) -> str:
    """Join words: 'a, b and c'; empty without words."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def interval(ends: Interval | tuple[float, float] | None, form: Callable[[float], str]) -> str:
    """Write an interval as '[1.32, 1.39]'; empty for None, and if both ends read the same."""
    texts = list(dict.fromkeys(map(form, ends or ())))
    return f"[{', '.join(texts)}]" if len(texts) > 1 else ""


def span(values: Iterable[float], form: Callable[[float], str], unit: str = "") -> str:
    """Write the range of values, '1.2 to 3.4 s'; a single number if both ends read the same."""
    known = list(values)
    ends = form(min(known)), form(max(known))
    return f"{' to '.join(dict.fromkeys(ends))}{unit}"


def byte_unit(values: Iterable[float | None]) -> tuple[float, str]:
    """Return the best unit for the largest value, as its factor and name."""
    largest = max((value for value in values if value is not None), default=0.0)
    return next(((unit, name) for unit, name in _SIZES if largest >= unit), _SIZES[-1])


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Container[str] = ()) -> str:
    """Write a table in Markdown; the columns named in `right` are right-aligned."""
    rule = ["---:" if heading in right else "---" for heading in headings]
    return "".join(f"| {' | '.join(line)} |\n" for line in (headings, rule, *rows))
