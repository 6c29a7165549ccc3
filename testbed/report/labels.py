"""Places short labels next to the marks of a figure, so that none covers a mark or another label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from testbed.report import style

_TOGETHER = 4.0
"""Distance below which marks share a label, in points of the page."""
_MARK, _DIGIT, _LINE = 4.0, 3.9, 7.0
"""Half the size of a mark, and the width and height of a label's character, in points of the page."""


class Mark(NamedTuple):
    """A data point, its label and the label's colour."""

    x: float
    y: float
    label: str
    colour: str


class _Spot(NamedTuple):
    """Position of marks that share a label, in points of the page."""

    x: float
    y: float
    marks: list[Mark]

    @property
    def box(self) -> Bbox:
        return Bbox.from_bounds(self.x - _MARK, self.y - _MARK, 2 * _MARK, 2 * _MARK)


def label_marks(panel: Axes, marks: Sequence[Mark]) -> None:
    """Label the marks of a panel whose scales and limits are set, if they have text. Overlapping ones share a label."""
    figure = panel.get_figure(root=True)
    assert figure is not None  # `canvas` made the panel
    figure.draw_without_rendering()  # computes the layout, which determines the free places next to marks
    spots: list[_Spot] = []
    for mark in marks:
        across, up = (float(value) for value in panel.transData.transform((mark.x, mark.y)) * 72 / panel.figure.dpi)
        near = next((spot for spot in spots if max(abs(spot.x - across), abs(spot.y - up)) < _TOGETHER), None)
        if near is None:
            spots.append(_Spot(across, up, [mark]))
        else:
            near.marks.append(mark)
    taken = [spot.box for spot in spots]
    for spot in spots:
        if not (text := ", ".join(mark.label for mark in spot.marks if mark.label)):
            continue
        box = _free(spot, _DIGIT * len(text), taken)
        taken.append(box)
        first = spot.marks[0]
        across, up = (box.x0 + box.x1) / 2 - spot.x, (box.y0 + box.y1) / 2 - spot.y
        far = max(abs(across) - box.width / 2, abs(up)) > 3 * _MARK
        note = panel.annotate(
            text,
            (first.x, first.y),
            xytext=(box.x0 - spot.x, box.y0 - spot.y + 1),
            textcoords="offset points",
            size=7,
            color=first.colour if len({mark.colour for mark in spot.marks}) == 1 else style.INK,
            arrowprops={"arrowstyle": "-", "color": style.MUTED, "lw": 0.5} if far else None,
        )
        note.set_in_layout(False)


def _free(spot: _Spot, width: float, taken: list[Bbox]) -> Bbox:
    """Return the nearest free place for a label of that width next to a spot; the last one tried if there is none."""
    box = spot.box
    for distance in (_MARK + 1, 2 * _MARK, 4 * _MARK, 6 * _MARK, 8 * _MARK):
        for across, up in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1)):
            left = spot.x + across * distance - (width if across < 0 else 0 if across else width / 2)
            bottom = spot.y + up * distance - (_LINE if up < 0 else 0 if up else _LINE / 2)
            box = Bbox.from_bounds(left, bottom, width, _LINE)
            if not any(box.fully_overlaps(other) for other in taken):
                return box
    return box
