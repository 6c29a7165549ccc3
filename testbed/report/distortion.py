"""One figure of a benchmark: bits a value against relative error, a panel a direction, every codec a numbered point."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from testbed.codecs.entries import casts_quantisers, delta_wrappers, model, sparse_lowrank
from testbed.codecs.measured import Benchmark, Measured
from testbed.report import figures, style
from testbed.report.canvas import Drawing, Handle, canvas
from testbed.spec import Direction

_FAMILIES = {
    "casts and quantisers": (casts_quantisers.ENTRIES, "#0072b2", "s"),
    "sparse and low rank": (sparse_lowrank.ENTRIES, "#d55e00", "^"),
    "differences and wrappers": (delta_wrappers.ENTRIES, "#009e73", "D"),
    "in the model": (model.ENTRIES, "#7b4fa3", "P"),
}
_OTHER = ("other packages, or someone's own", "#767d86", "o")
_TITLES: dict[Direction, str] = {"forward": "activations X", "backward": "gradients G"}
_TOGETHER = 4.0
"""Points of the page within which codecs share a label."""
_MARK, _DIGIT, _LINE = 4.0, 3.9, 7.0
"""Half a marker, and a label's character and height, in points of the page."""
_FLOOR = 1e-5
"""Where a codec without any error is drawn."""


def _family(one: Measured) -> tuple[str, str, str]:
    name = one.codec.partition("(")[0]
    for title, (entries, colour, marker) in _FAMILIES.items():
        if not one.package and any(entry.name == name for entry in entries):
            return title, colour, marker
    return _OTHER


def _label(one: Measured) -> str:
    return f"{one.codec} [{one.package}]" if one.package else one.codec


def draw(found: Benchmark) -> Drawing:
    """Both panels have log axes; the line is what no codec can beat on independent Gaussian values, 2 to the minus bits."""
    labels = list(dict.fromkeys(_label(one) for one in found.results))
    number = {label: index for index, label in enumerate(labels, start=1)}
    used = {family[0]: family for family in map(_family, found.results)}
    legend: list[Handle] = [Line2D([], [], color=c, marker=m, ls="none", label=title) for title, c, m in used.values()]
    legend.append(Line2D([], [], color=style.MUTED, ls="--", lw=1, label="2^-bits: the best for independent Gaussian values"))
    key = "   ".join(f"{index} {label}".replace(" ", "\u00a0") for label, index in number.items())
    settings = f"{key}\n{found.tensors}; a codec without error is drawn at {_FLOOR:g}"
    with style.applied():
        figure, axes = canvas("Bits a value against error", 4.6, legend, settings, 2, columns=2)
        for panel, direction in zip(axes, _TITLES, strict=True):
            shown = [one for one in found.results if one.direction == direction]
            panel.set_title(_TITLES[direction])
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xlabel("bits a value on the wire, headers too")
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
        "Bits a value against error",
        "Every codec on the same saved tensors. Nearer the lower left is better; a codec of gradients that rounds stochastically "
        "has more error and no bias.",
        figure,
    )


class _Box(NamedTuple):
    """A rectangle on the page, in points."""

    left: float
    bottom: float
    width: float
    height: float

    def meets(self, other: _Box) -> bool:
        return (
            self.left < other.left + other.width
            and other.left < self.left + self.width
            and self.bottom < other.bottom + other.height
            and other.bottom < self.bottom + self.height
        )


class _Spot(NamedTuple):
    """Where points lie that share a label."""

    x: float
    y: float
    members: list[Measured]

    @property
    def box(self) -> _Box:
        return _Box(self.x - _MARK, self.y - _MARK, 2 * _MARK, 2 * _MARK)


def _points(panel: Axes, shown: list[Measured], number: dict[str, int]) -> None:
    spots: list[_Spot] = []
    for one in shown:
        _, colour, marker = _family(one)
        x, y = one.bits_per_value, max(one.relative_error, _FLOOR)
        panel.plot([x], [y], marker=marker, color=colour, ls="none", ms=5, mec=style.PAPER, mew=0.4)
        across, up = (float(value) for value in panel.transData.transform((x, y)) * 72 / panel.figure.dpi)
        near = next((spot for spot in spots if max(abs(spot.x - across), abs(spot.y - up)) < _TOGETHER), None)
        if near is None:
            spots.append(_Spot(across, up, [one]))
        else:
            near.members.append(one)
    taken = [spot.box for spot in spots]
    for spot in spots:
        text = ", ".join(str(number[_label(one)]) for one in spot.members)
        box = _free(spot, _DIGIT * len(text), taken)
        taken.append(box)
        first = spot.members[0]
        far = max(abs(box.left + box.width / 2 - spot.x) - box.width / 2, abs(box.bottom + box.height / 2 - spot.y)) > 3 * _MARK
        panel.annotate(
            text,
            (first.bits_per_value, max(first.relative_error, _FLOOR)),
            xytext=(box.left - spot.x, box.bottom - spot.y + 1),
            textcoords="offset points",
            size=7,
            color=_family(first)[1] if len({_family(one) for one in spot.members}) == 1 else style.INK,
            arrowprops={"arrowstyle": "-", "color": style.MUTED, "lw": 0.5} if far else None,
        )


def _free(spot: _Spot, width: float, taken: list[_Box]) -> _Box:
    """The nearest place for a label of that width beside a spot that meets nothing, the last one tried if there is none."""
    box = spot.box
    for distance in (_MARK + 1, 2 * _MARK, 4 * _MARK, 6 * _MARK, 8 * _MARK):
        for across, up in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1)):
            left = spot.x + across * distance - (width if across < 0 else 0 if across else width / 2)
            bottom = spot.y + up * distance - (_LINE if up < 0 else 0 if up else _LINE / 2)
            box = _Box(left, bottom, width, _LINE)
            if not any(box.meets(other) for other in taken):
                return box
    return box


def save(found: Benchmark, target: Path) -> None:
    """TARGET.png and TARGET.svg; a suffix that is there is left out."""
    figures.save(draw(found), target.absolute().parent, target.stem)
