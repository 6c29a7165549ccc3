"""Writes a certificate as text: cells, sentences, a summary, and a table for the terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from testbed.records import BOUND, Certificate, Measurement, RunCertificates
from testbed.report.numbers import MISSING, percent

_SHOWN = {"bit/s": (1e-6, "Mbit/s"), "share": (100.0, "%")}
"""Unit of a record -> factor and unit for display."""


def measurement_cells(measurement: Measurement) -> tuple[str, str]:
    """Return (requested, measured) with their unit; '-' for a missing value."""
    factor, unit = _SHOWN.get(measurement.unit, (1.0, measurement.unit))

    def text(value: float | None, digits: int) -> str:
        return MISSING if value is None else f"{value * factor:.{digits}g} {unit}"

    return text(measurement.expected, 4), text(measurement.measured, 4)


def share_text(share: float | None) -> str:
    """Write a bound: '0.31 %', '< 0.01 %', '-'."""
    if share is None:
        return MISSING
    return "0 %" if share == 0 else "< 0.01 %" if share < 1e-4 else f"{share * 100:.2g} %"


def run_bound_words(certificates: RunCertificates) -> str:
    """Describe the bound of the step-time error of a run in sentences; empty if unknown."""
    words, during = [], certificates.during
    if certificates.bound is not None:
        ends = [c.bound for c in (certificates.before, certificates.after) if c is not None and c.bound is not None]
        told = f"All deviations change the step by at most {share_text(certificates.bound)}: deviations of the links"
        when = " before and ".join(map(share_text, ends)) + " after the run"
        words.append(f"{told} {when if len(ends) > 1 else f'{share_text(ends[0])}, on the virtual clock'}")
        if during is not None and during.bound is not None:
            words[-1] += f", lateness during the run {share_text(during.bound)}"
    if during is not None:
        what = "packets left the relay" if during.source == "relay" else "the sampler's sleeps ended"
        late = f"{during.mean_ms:.2f} ms late on average, {during.p99_ms:.1f} ms in the 99th percentile"
        words.append(f"During the run, {what} {late}; {share_text(during.stolen)} of the processors' time was stolen")
    return "".join(f"{sentence}. " for sentence in words).rstrip()


def certificate_table(certificate: Certificate) -> Table:
    """Make a table for the terminal: requested and measured, one row per quantity, with notes below."""
    table = Table(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", caption_justify="left", caption_style=""
    )
    for title in ("link", "", "quantity", "asked", "measured", "step change", "n", "verdict"):
        numeric = title in ("asked", "measured", "step change", "n")
        # On a narrow terminal, only the quantity's detail wraps.
        table.add_column(title, justify="right" if numeric else "left", overflow="fold", no_wrap=title != "quantity")
    notes: dict[str, list[str]] = {}
    for measurement in certificate.measurements:
        verdict = Text(measurement.verdict, style="green" if measurement.verdict == "PASS" else "bold red")
        quantity = f"{measurement.quantity}, {measurement.detail}" if measurement.detail else measurement.quantity
        direction = "" if measurement.direction == "both" else measurement.direction
        numbers = *measurement_cells(measurement), share_text(measurement.bound), str(measurement.samples)
        table.add_row(measurement.link, direction, Text(quantity), *numbers, verdict)
        if measurement.note:
            notes.setdefault(measurement.note, []).append(
                " ".join(part for part in (measurement.link, direction, measurement.quantity) if part)
            )
    if notes:
        table.caption = Text("\n".join(f"{', '.join(dict.fromkeys(who))}: {note}" for note, who in notes.items()))
    return table


def _furthest(certificate: Certificate) -> float | None:
    """Return the largest deviation of a certificate, as a share of the expected value."""
    shares = [abs(m.measured / m.expected - 1) for m in certificate.measurements if m.expected and m.measured]
    return max(shares, default=None)


def certificate_summary(name: str, certificate: Certificate) -> str:
    """Return the verdict in a line, followed by its reasons."""
    failed = [measurement for measurement in certificate.measurements if measurement.verdict == "FAIL"]
    amount = f"{len(certificate.measurements)} quantities in {certificate.seconds:.1f} s, {certificate.form} form"
    if certificate.clock == "virtual":
        amount = f"{len(certificate.measurements)} quantities on the virtual clock, taken at {certificate.taken_at}"
    lines = [f"{name}: {certificate.verdict}, {amount}"]
    lines += [f"  by construction, {words}" for words in certificate.by_construction]
    if certificate.clock == "virtual" and (worst := _furthest(certificate)) is not None:
        lines.append(f"  furthest from the ideal: {percent(worst, '{:.3f}')}")
    if certificate.step:
        if certificate.bound is None:
            lines.append("  no bound: a quantity could not be measured")
        else:
            within = "within" if certificate.bound <= BOUND else "more than"
            moved, most = share_text(certificate.bound), share_text(BOUND)
            lines.append(f"  bound of the step-time error by all deviations: {moved} ({within} {most})")
            lines.append(f"  the step: {certificate.step}")
    for measurement in failed:
        asked, measured = measurement_cells(measurement)
        lines.append(
            f"  {measurement.link} {measurement.direction} {measurement.quantity}: asked {asked}, measured {measured}: "
            f"{measurement.note}"
        )
    if certificate.rejected:
        first = ", ".join(dict.fromkeys(f"{one.link} {one.direction} {one.quantity}" for one in certificate.rejected))
        lines.append(f"  measured twice; failed in the worse attempt: {first}")
    return "\n".join(lines)
