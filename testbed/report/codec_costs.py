"""The benchmark of codecs: a table for the terminal and its page, and a figure of bits per value against error."""

from __future__ import annotations

import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from testbed.codecs.bench.results import FAST_BPS, SLOW_BPS, CodecBenchmark, CodecCost
from testbed.codecs.catalogue.rows import dense, low_rank, memory, sparse, wrappers
from testbed.message_key import Direction
from testbed.report import style
from testbed.report.canvas import Drawing, Handle, canvas, save_drawing
from testbed.report.labels import Mark, label_marks
from testbed.report.numbers import markdown_table

NUMBERS = ("bits", "error", "encode", "decode", "in model", "GB/s", "80 Mbit/s", "1 Gbit/s", "share", "pays to")
HEADINGS = ("codec", "of", *NUMBERS, "package")


def cost_rows(benchmark: CodecBenchmark) -> list[tuple[str, ...]]:
    """Return one row per codec and direction, under HEADINGS."""
    return [
        (
            cost.codec,
            "X" if cost.direction == "forward" else "G",
            f"{cost.bits_per_value:.3g}",
            "-" if cost.relative_error is None else f"{cost.relative_error:.1e}",
            f"{1e3 * cost.encode_s:.2f}",
            f"{1e3 * cost.decode_s:.2f}",
            "-" if cost.layers_s is None else f"{1e3 * cost.layers_s:.2f}",
            f"{cost.bytes_per_s / 1e9:.2f}",
            f"{1e3 * cost.wire_s(SLOW_BPS):.1f}",
            f"{1e3 * cost.wire_s(FAST_BPS):.2f}",
            f"{cost.share_of_wire:.1%}" + (" !" if cost.share_of_wire > 0.1 and not cost.package else ""),
            f"{cost.break_even_bps / 1e9:.2g}" if cost.break_even_bps else "-",
            cost.package or "testbed",
        )
        for cost in benchmark.results
    ]


def costs_legend(benchmark: CodecBenchmark) -> str:
    """Say what was measured, where, and what the columns hold."""
    values = benchmark.results[0].values if benchmark.results else 0
    return (
        f"{benchmark.machine}; {benchmark.tensors}; messages of {values} values, activations X and gradients G. Times "
        "are in milliseconds: encode, decode, the part of both that a codec's layers in the model take (without its "
        "work once per step), and the payload on links of 80 Mbit/s and 1 Gbit/s. GB/s: fp32 bytes through encode and "
        "decode. share: encode and decode over the tensor's bf16 time at 80 Mbit/s, at most 10 % (! is more). pays "
        "to: the rate in Gbit/s up to which the codec is faster than bf16."
    )


def costs_page(benchmark: CodecBenchmark, figure: str | None) -> str:
    """Draw the Markdown page; `figure` is the picture's path as seen from the page."""
    parts = ["# What codecs cost, and how wrong they are\n", textwrap.fill(_verdict(benchmark), 120) + "\n"]
    if figure:
        parts.append(f"![Bits per value against error]({figure})\n")
    parts += [
        markdown_table(HEADINGS, cost_rows(benchmark), right=NUMBERS),
        _ELSEWHERE,
        "## How it was measured\n",
        textwrap.fill(costs_legend(benchmark), 120) + "\n",
        "Drawn by `python -m testbed bench codecs --page docs/codecs.md --figure docs/images/rate-distortion`.\n",
    ]
    return "\n".join(parts)


_ELSEWHERE = """\
A model that has learned may have outlier channels, where errors are others:
[outlier_channels](../experiments/outlier_channels/README.md) has them, at each boundary of three models. `--model NAME`
makes this page of one model's tensors.
"""


def _verdict(benchmark: CodecBenchmark) -> str:
    """Say how many of our codecs keep the rule of a tenth, and which do not."""
    ours = [cost for cost in benchmark.results if not cost.package]
    slow = [cost for cost in ours if cost.share_of_wire > 0.1]
    names = ", ".join(f"{cost.codec} ({'X' if cost.direction == 'forward' else 'G'})" for cost in slow)
    return (
        f"Encode and decode take at most a tenth of the time that the tensor takes as bf16 at 80 Mbit/s in "
        f"{len(ours) - len(slow)} of {len(ours)} measurements of our codecs, activations (X) and gradients (G) apart. "
        f"{f'They take more in {names}. ' if slow else ''}"
        "`bits` are per value, `error` is the relative error of what is decoded."
    )


_FAMILIES = {
    "casts and quantisers": (dense.ROWS, "#0072b2", "s"),
    "sparse and low rank": (sparse.ROWS + low_rank.ROWS, "#d55e00", "^"),
    "differences and wrappers": (memory.ROWS + wrappers.ROWS, "#009e73", "D"),
}
_OTHER = ("other packages, or someone's own", "#767d86", "o")
_TITLES: dict[Direction, str] = {"forward": "activations X", "backward": "gradients G"}
_FLOOR = 1e-5
"""The relative error at which a codec without any error is drawn."""


def codec_family(name: str) -> tuple[str, str, str]:
    """Return the title, colour and marker of the family of one of our codecs; those of strangers where it is none."""
    for title, (rows, colour, marker) in _FAMILIES.items():
        if any(row.name == name for row in rows):
            return title, colour, marker
    return _OTHER


def _family(cost: CodecCost) -> tuple[str, str, str]:
    return _OTHER if cost.package else codec_family(cost.codec.partition("(")[0])


def _label(cost: CodecCost) -> str:
    return f"{cost.codec} [{cost.package}]" if cost.package else cost.codec


def draw_rate_distortion(benchmark: CodecBenchmark) -> Drawing:
    """Draw bits per value against relative error: one panel per direction, every codec a numbered point, log axes.

    The line is what no codec can beat on independent Gaussian values, 2 to the minus bits.

    Codecs that change the model are left out: what they lose depends on what the model has learned with them.
    """
    drawn = [cost for cost in benchmark.results if cost.layers_s is None]
    labels = list(dict.fromkeys(map(_label, drawn)))
    number = {label: index for index, label in enumerate(labels, start=1)}
    used = {family[0]: family for family in map(_family, drawn)}
    legend: list[Handle] = [Line2D([], [], color=c, marker=m, ls="none", label=title) for title, c, m in used.values()]
    legend.append(
        Line2D([], [], color=style.MUTED, ls="--", lw=1, label="2^-bits: the best for independent Gaussian values")
    )
    key = "   ".join(f"{index} {label}".replace(" ", "\u00a0") for label, index in number.items())
    left_out = "" if len(drawn) == len(benchmark.results) else "; codecs in the model are not drawn"
    settings = f"{key}\n{benchmark.tensors}; a codec without error is drawn at {_FLOOR:g}{left_out}"
    with style.applied():
        figure, axes = canvas("Bits per value against error", 4.6, legend, settings, 2, columns=2)
        for panel, direction in zip(axes, _TITLES, strict=True):
            shown = [cost for cost in drawn if cost.direction == direction]
            panel.set_title(_TITLES[direction])
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xlabel("bits per value on the wire, headers included")
            panel.set_ylabel("relative error |decoded - x| / |x|")
            ticks = [0.25, 0.5, 1, 2, 4, 8, 16, 32]
            panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            panel.set_xlim(0.18, 40)
            panel.set_ylim(_FLOOR / 2, 6)
            bits = [0.2 * 1.1**step for step in range(56)]
            panel.plot(bits, [max(2.0**-b, _FLOOR / 10) for b in bits], color=style.MUTED, ls="--", lw=1)
            _points(panel, shown, number)
    return Drawing(
        "rate-distortion",
        "Bits per value against error",
        "Every codec on the same saved tensors. Nearer the lower left is better; a codec of gradients that rounds "
        "stochastically has more error and no bias.",
        figure,
    )


def _points(panel: Axes, shown: list[CodecCost], number: dict[str, int]) -> None:
    marks = []
    for cost in shown:
        _, colour, marker = _family(cost)
        x, y = cost.bits_per_value, max(cost.relative_error or 0.0, _FLOOR)
        panel.plot([x], [y], marker=marker, color=colour, ls="none", ms=5, mec=style.PAPER, mew=0.4)
        marks.append(Mark(x, y, str(number[_label(cost)]), colour))
    label_marks(panel, marks)


def save_rate_distortion(benchmark: CodecBenchmark, target: Path) -> None:
    """Write TARGET.png and TARGET.svg; a suffix of `target` is replaced."""
    save_drawing(draw_rate_distortion(benchmark), target.absolute().parent, target.stem)
