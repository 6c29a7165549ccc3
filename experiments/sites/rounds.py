"""Who is away when, as `python -m testbed predict sites` found it: rounds.csv, by layout."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from testbed import csv_rows, keyed
from testbed.errors import ResultsError
from testbed.predict import churned
from testbed.report import predicted
from testbed.studies.stacked_text import Absences


class Step(NamedTuple):
    """A step of a training: the batches between two exchanges, and the exchange."""

    end_s: float
    """When it ended; 0 is the training's beginning."""
    waited_s: float
    lasts_s: float
    in_turn_s: float | None
    """As it was played after the step before; None: it was not."""
    away: tuple[int, ...]
    returning: tuple[int, ...]


Trainings = Mapping[str, Mapping[int, list[Step]]]
"""By layout and seed."""


def trainings(folder: Path) -> Trainings:
    """Read a folder's rounds.csv and cells.csv. ResultsError without them."""
    rows = csv_rows.read_records(folder / churned.FILE)
    if not rows:
        raise ResultsError(f"{folder} has no {churned.FILE}; run: python -m testbed predict sites")
    names = {cell["cell"]: cell["label.method"] for cell in csv_rows.read_records(folder / predicted.FILE)}
    found: dict[str, dict[int, list[Step]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        begin_s, waited_s, lasts_s = (float(row[name]) for name in ("begin_s", "waited_s", "lasts_s"))
        in_turn_s = float(row["in_turn_s"]) if row["in_turn_s"] else None
        away, returning = (tuple(map(int, row[name].split())) for name in ("away", "returning"))
        step = Step(begin_s + lasts_s, waited_s, lasts_s, in_turn_s, away, returning)
        found[names[row["cell"]]][int(row["seed"])].append(step)
    return found


def absences(folder: Path) -> Mapping[str, Absences]:
    """Return who is away when, by layout. ResultsError as from `trainings`."""
    return {
        layout: {seed: [(step.away, step.returning) for step in steps] for seed, steps in by_seed.items()}
        for layout, by_seed in trainings(folder).items()
    }


def digest(away: Absences) -> str:
    """Return a few digits that differ where absences do."""
    return (
        f"{keyed.key(repr({seed: [tuple(map(tuple, step)) for step in away[seed]] for seed in sorted(away)}), 4):08x}"
    )
