"""The grid of link accuracy: tables for terminal and page, and the Markdown page."""

from __future__ import annotations

from collections.abc import Sequence

from testbed import units
from testbed.directions import LINK_DIRECTIONS
from testbed.net.certificate.accuracy import (
    AGREEMENT,
    AGREEMENT_MS,
    Accuracy,
    AccuracyColumn,
    Agreement,
    GridPoint,
    PointResult,
    agreement,
    column_measurements,
)
from testbed.records import Certificate, Measurement
from testbed.report.numbers import markdown_table, percent

FAILED = " !"
"""The mark after a cell that is out of tolerance."""
_COLUMNS: tuple[AccuracyColumn, ...] = ("rtt", "goodput", "256 KiB", "4 MiB", "queue")
HEADINGS = ("rate", "delay", "processors", "RTT", "goodput", "256 KiB", "4 MiB", "queue", "verdict")
_LOSS, _BURST = ("asked", "lost up", "lost down"), ("burst asked", "burst up", "burst down")
LOSS_HEADINGS = ("loss model", "processors", *_LOSS, *_BURST, "verdict")
AGREEMENT_HEADINGS = ("quantity", "compared", "furthest apart", "at", "verdict")


VIRTUAL_HEADINGS = ("rate", "delay", "direction", "quantity", "of", "unit", "ideal", "found", "deviation_percent")


def virtual_rows(points: Sequence[GridPoint], certificates: Sequence[Certificate]) -> list[tuple[str, ...]]:
    """Return a row for each quantity of each link of a grid on the virtual clock."""
    return [
        (
            units.format_rate(point.rate_bps),
            units.format_time(point.delay_ns),
            m.direction,
            m.quantity,
            m.detail,
            m.unit,
            f"{m.expected:.9g}",
            f"{m.measured:.9g}",
            f"{100 * (m.measured / m.expected - 1):+.4f}",
        )
        for point, certificate in zip(points, certificates, strict=True)
        for m in certificate.measurements
        if m.expected and m.measured is not None
    ]


def _worst(measurements: Sequence[Measurement]) -> Measurement | None:
    """Return the direction with the largest deviation, relative to its tolerance."""

    def distance(m: Measurement) -> float:
        if m.measured is None or m.expected is None:
            return float("inf") if m.verdict == "FAIL" else 0.0
        return abs(m.measured - m.expected) / (m.tolerance or 1e-12)

    return max(measurements, key=lambda m: (m.verdict == "FAIL", distance(m)), default=None)


def _deviation(measurements: Sequence[Measurement]) -> str:
    worst = _worst(measurements)
    if worst is None or worst.measured is None or worst.expected is None:
        return "none" + (FAILED if worst is None or worst.verdict == "FAIL" else "")
    difference = worst.measured - worst.expected
    share = percent(difference / worst.expected, "{:+.2f}")
    text = f"{difference:+.2f} ms" if worst.quantity == "rtt" else share
    return text + (FAILED if worst.verdict == "FAIL" else "")


def _processors(result: PointResult) -> str:
    return "busy" if result.point.busy else "idle"


def _verdict(result: PointResult) -> str:
    if result.certificate is None:
        return f"FAIL: {result.error}"
    return ("PASS" if result.passed else "FAIL") + (", second attempt" if result.certificate.rejected else "")


def accuracy_rows(accuracy: Accuracy) -> list[tuple[str, ...]]:
    """Return rows under HEADINGS: the deviation of each quantity from the ideal, in the worse direction."""
    return [
        (
            units.format_rate(result.point.rate_bps),
            units.format_time(result.point.delay_ns),
            _processors(result),
            *(_deviation(column_measurements(result, column)) for column in _COLUMNS),
            _verdict(result),
        )
        for result in accuracy.ordered()
        if result.point.loss is None
    ]


def loss_accuracy_rows(accuracy: Accuracy) -> list[tuple[str, ...]]:
    """Return rows under LOSS_HEADINGS: shares of packets with their statistical tolerance, mean bursts in packets."""
    return [
        (
            result.point.loss.model,
            _processors(result),
            f"{result.point.loss.mean:.3%}",
            *(_count(result, "loss", way, "{:.3%}") for way in LINK_DIRECTIONS),
            f"{result.point.loss.mean_burst:.2f}",
            *(_count(result, "burst", way, "{:.2f}") for way in LINK_DIRECTIONS),
            _verdict(result),
        )
        for result in accuracy.ordered()
        if result.point.loss is not None
    ]


def _count(result: PointResult, column: AccuracyColumn, way: str, form: str) -> str:
    measurement = next((m for m in column_measurements(result, column) if m.direction == way), None)
    if measurement is None or measurement.measured is None:
        return "-" if measurement is None else "none" + FAILED
    known = [value for value in (measurement.measured, measurement.tolerance) if value is not None]
    return " ± ".join(map(form.format, known)) + (FAILED if measurement.verdict == "FAIL" else "")


def agreement_rows(first: Accuracy, second: Accuracy) -> list[tuple[str, ...]]:
    """Return rows under AGREEMENT_HEADINGS: a comparison of the engines, one row per quantity."""
    kinds: dict[str, list[Agreement]] = {}
    for pair in agreement(first, second):
        kinds.setdefault(pair.detail.split(",")[0] if pair.quantity == "message" else pair.quantity, []).append(pair)
    rows: list[tuple[str, ...]] = []
    for kind, group in kinds.items():
        worst = max(group, key=lambda pair: (not pair.holds, pair.share))
        apart = f"{worst.share:.2%}" + (f" ({abs(worst.first - worst.second):.2f} ms)" if worst.unit == "ms" else "")
        place = f"{worst.point.name}, {worst.direction}"
        rows.append((kind, str(len(group)), apart, place, "PASS" if all(pair.holds for pair in group) else "FAIL"))
    return rows


def machine_line(accuracy: Accuracy) -> str:
    """Describe where and when the grid was measured, in one line."""
    about = accuracy.machine
    guest, taken = " (the guest kernel)" if about.get("guest_kernel") else "", str(about.get("taken_at"))[:10]
    cores = about.get("cores")
    processor = f"{about.get('cpu_model') or 'unknown processor'}, {cores} processor{'' if cores == 1 else 's'}"
    return f"engine {accuracy.engine}: {processor}, Linux {about.get('kernel')}{guest}, {taken}"


_METHOD = f"""# Accuracy of the links

The tables are made by `bench links --busy -o FILE` per engine, and `--compare OTHER --page docs/accuracy.md`, on the
machines named below.

Each row is a lab of one node and one link with the same profile in both directions, measured with the full form of the
certificate; runs on the real clock use its quick form. `delay` is one way. TCP is cubic, without slow start after idle.
The buffer holds two round trips, at least 50 ms, so that the link limits the rate, and not a window. Each cell is the
deviation from the ideal in the worse direction. The ideal follows from the profile alone: rate x payload / packet for
goodput, delay and serialisation for the RTT and for a message. Accepted deviations: 0.3 ms or 1 % for the RTT of an
84-byte packet; 1 % for goodput over 3 s; 3 % or 0.5 ms for a message (median of three, one second apart); 10 % for
`queue`, the delay of a packet behind a full buffer. `busy`: every processor also runs a busy loop. `{FAILED.strip()}`
marks a value out of tolerance, `second attempt` a link that was measured twice, as certificates allow. Losses have the
interval that their number of packets permits.
"""


def accuracy_page(grids: Sequence[Accuracy]) -> str:
    """Generate docs/accuracy.md."""
    parts = [_METHOD]
    for grid in grids:
        table = markdown_table(HEADINGS, accuracy_rows(grid))
        parts.append(f"## Engine {grid.engine}\n\n{machine_line(grid)}\n\n{table}")
        if lossy := loss_accuracy_rows(grid):
            parts.append(markdown_table(LOSS_HEADINGS, lossy))
    if len(grids) == 2:
        accepted = f"Within {AGREEMENT:.0%} of each other, or {AGREEMENT_MS} ms"
        compared = f"{accepted}, in times and rates of the links that passed with both:"
        table = markdown_table(AGREEMENT_HEADINGS, agreement_rows(*grids))
        parts.append(f"## The engines against each other\n\n{compared}\n\n{table}")
    return "\n".join(parts)
