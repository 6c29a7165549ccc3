"""A benchmark of codecs as a table: rows that a terminal and a Markdown page share, and the page."""

from __future__ import annotations

from testbed.codecs.bench.results import FAST_BPS, SLOW_BPS, CodecBenchmark
from testbed.report import markdown

NUMBERS = ("bits", "error", "encode", "decode", "in model", "GB/s", "80 Mbit/s", "1 Gbit/s", "share", "pays to")
HEADINGS = ("codec", "of", *NUMBERS, "package")


def rows(found: CodecBenchmark) -> list[tuple[str, ...]]:
    """Under HEADINGS, a codec and direction each."""
    return [
        (
            one.codec,
            "X" if one.direction == "forward" else "G",
            f"{one.bits_per_value:.3g}",
            "-" if one.relative_error is None else f"{one.relative_error:.1e}",
            f"{1e3 * one.encode_s:.2f}",
            f"{1e3 * one.decode_s:.2f}",
            "-" if one.layers_s is None else f"{1e3 * one.layers_s:.2f}",
            f"{one.bytes_per_s / 1e9:.2f}",
            f"{1e3 * one.wire_s(SLOW_BPS):.1f}",
            f"{1e3 * one.wire_s(FAST_BPS):.2f}",
            f"{one.share_of_wire:.1%}" + (" !" if one.share_of_wire > 0.1 and not one.package else ""),
            f"{one.break_even_bps / 1e9:.2g}" if one.break_even_bps else "-",
            one.package or "testbed",
        )
        for one in found.results
    ]


def legend(found: CodecBenchmark) -> str:
    """What was measured, where, and what the columns say."""
    values = found.results[0].values if found.results else 0
    return (
        f"{found.machine}; {found.tensors}; messages of {values} values, activations X and gradients G. Times are milliseconds: "
        "encode, decode, what of both is a codec's layers in the model (its work once a step is not counted), the payload on "
        "links of 80 Mbit/s and 1 Gbit/s. GB/s: fp32 bytes through encode and decode. share: of the tensor's bf16 time at 80 "
        "Mbit/s that encode and decode take, at most 10 % (! is more). pays to: Gbit/s up to which it is faster than bf16."
    )


def page(found: CodecBenchmark, figure: str | None) -> str:
    """Markdown; `figure`: the picture's path as seen from the page."""
    parts = [
        "# What codecs cost, and how wrong they are\n",
        "Printed by `python -m testbed bench codecs --page docs/codecs.md --figure docs/images/rate-distortion`.\n",
        legend(found) + "\n",
    ]
    if figure:
        parts.append(f"![Bits a value against error]({figure})\n")
    parts.append(markdown.table(HEADINGS, rows(found), right=NUMBERS))
    return "\n".join(parts)
