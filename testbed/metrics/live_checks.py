"""Choose the live checks of a sweep: some played cells also run live, and the report states the difference on this
machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from testbed import results
from testbed.records import StageCosts
from testbed.spec import Calibrated, Cell, Engine, Measured, Paced, PipelineSpec, recipe_of

_SHARE_OF_CORES = 2 / 3
CHECK_STEPS = 4
"""Measured steps of a live check: enough for a median, and quick."""
_WARMUP_STEPS = 2


def live_twin(cell: Cell, engine: Engine, costs: Sequence[StageCosts] | None = None, cores: int = 1) -> Cell:
    """Return the live counterpart of a played cell: real links, with torch and TCP together.

    Where the played cell's durations are this machine's (`costs`, by stage), the live stages are paced to them, and
    time is dilated until their maths needs two thirds of the `cores`: the check is about messages, not about how stages
    share processors.
    """
    compute = cell.compute
    if isinstance(compute, Calibrated):
        compute = Measured() if costs is None else _held(costs, cores)
    means: dict[str, Any] = {"timing": "live", "clock": "real", "engine": engine, "compute": compute}
    means |= {"codec_cost": "host", "played_steps": None}
    means["training"] = cell.training.model_copy(update={"checkpoint_every": None})
    return Cell(**{**{name: getattr(cell, name) for name in Cell.model_fields}, **means})


def _held(costs: Sequence[StageCosts], cores: int) -> Paced:
    busy = [cost.forward.ns + cost.backward.ns for cost in costs]
    return Paced(
        forward_ns=tuple(cost.forward.ns for cost in costs),
        backward_ns=tuple(cost.backward.ns for cost in costs),
        update_ns=max(cost.clip.ns + cost.update.ns for cost in costs),
        source="calibrated",
        dilation=max(1, math.ceil(sum(busy) / max(busy) / (_SHARE_OF_CORES * cores))),
    )


def checks(
    cells: Sequence[Cell], count: int, engine: Engine, costs: Mapping[str, Sequence[StageCosts]], cores: int
) -> dict[str, Cell]:
    """Choose `count` of the played cells and return their short live twins, by the played cells' ids.

    `costs`: by recipe id, as for `live_twin`.

    Chooses cells over shaped links, varying network and codec as far as possible, starting with the first and the last.
    Live codecs have their real cost here, so cells with another cost rule are excluded, and those whose durations vary,
    of which a few steps say little.
    """
    able = [cell for cell in cells if cell.timing == "played" and cell.codec_cost == "host" and not cell.compute.varied]
    able = [cell for cell in able if isinstance(cell.parallelism, PipelineSpec)]
    able = [cell for cell in able if cell.shaped] or able
    chosen: list[Cell] = []
    while able and len(chosen) < count:
        networks, codecs = {(cell.profiles, cell.sites) for cell in chosen}, {cell.codec for cell in chosen}
        fresh = [
            cell for cell in able if (cell.profiles, cell.sites) not in networks and cell.codec not in codecs
        ] or able
        chosen.append(fresh[0 if len(chosen) % 2 == 0 else -1])
        able = [cell for cell in able if cell.id != chosen[-1].id]
    return {cell.id: _shortened(live_twin(cell, engine, costs.get(recipe_of(cell).id), cores)) for cell in chosen}


def _shortened(cell: Cell) -> Cell:
    warmup = min(cell.training.warmup_steps, _WARMUP_STEPS)
    steps = min(cell.training.steps, warmup + CHECK_STEPS)
    short = {"steps": steps, "warmup_steps": warmup, "evaluate_every": 0, "target_loss": None, "budget_s": None}
    return cell.model_copy(update={"training": cell.training.model_copy(update=short)})


def timed_both_ways(experiment: Path) -> Iterator[tuple[results.Run, results.Run]]:
    """Yield the newest live and the newest played run of every cell in a result folder that has successful runs of
    both.
    """
    for folder in sorted(experiment.glob("*/")):
        played = results.finished(experiment, folder.name)
        if played is None or (cell := played.cell).timing != "played" or cell.compute.varied:
            continue
        for engine in get_args(Engine):
            if live := results.finished(experiment, live_twin(cell, engine).id):
                yield live, played
