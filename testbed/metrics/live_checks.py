"""The live checks of a sweep: a few of its played cells are run live too, and the report says how far the two are apart
here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from testbed import results
from testbed.spec import Calibrated, Cell, Engine, Measured

CHECK_STEPS = 8
"""Measured steps of a live check: enough for a median, and soon over."""


def live_twin(cell: Cell, engine: Engine) -> Cell:
    """Return the live cell that a played one stands for: as it is, over real links, with torch and TCP together."""
    compute = Measured() if isinstance(cell.compute, Calibrated) else cell.compute
    means = {"timing": "live", "clock": "real", "engine": engine, "compute": compute, "codec_cost": "host"}
    return Cell(**{**{name: getattr(cell, name) for name in Cell.model_fields}, **means})


def checks(cells: Sequence[Cell], count: int, engine: Engine) -> tuple[Cell, ...]:
    """Choose `count` of the played cells and return short live twins of them.

    Taken are cells over shaped links, from different networks and with different codecs as long as there are such,
    beginning with the first and the last. Their codecs cost what they cost here, so cells with another rule are left
    out.
    """
    able = [cell for cell in cells if cell.timing == "played" and cell.codec_cost == "host"]
    able = [cell for cell in able if cell.shaped] or able
    chosen: list[Cell] = []
    while able and len(chosen) < count:
        cell = able[0 if len(chosen) % 2 == 0 else -1]
        chosen.append(cell)
        able = [other for other in able if other.id != cell.id]
        fresh = [o for o in able if o.profiles != cell.profiles and o.codec != cell.codec]
        able = fresh or able
    return tuple(_shortened(live_twin(cell, engine)) for cell in chosen)


def _shortened(cell: Cell) -> Cell:
    steps = min(cell.training.steps, cell.training.warmup_steps + CHECK_STEPS)
    short = {"steps": steps, "evaluate_every": 0, "target_loss": None, "budget_s": None}
    return cell.model_copy(update={"training": cell.training.model_copy(update=short)})


def timed_both_ways(experiment: Path) -> Iterator[tuple[results.Run, results.Run]]:
    """Yield the newest live run and the newest played run of every cell in a result folder that has good runs of both.

    A live run may be shorter than the played one.
    """
    played = {}
    for folder in sorted(experiment.glob("*/")):
        run = results.finished(experiment, folder.name)
        if run is not None and (cell := run.cell).timing == "played":
            for twin in (live_twin(cell, engine) for engine in ("netem", "relay")):
                played[twin.id] = run
                played[_shortened(twin).id] = run
    for folder in sorted(experiment.glob("*/")):
        live = results.finished(experiment, folder.name) if folder.name in played else None
        if live is not None:
            yield live, played[folder.name]
