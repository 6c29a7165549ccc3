"""The live checks of a sweep: a few of its played cells are run live too, and the report says how far the two are apart
here.
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
"""Measured steps of a live check: enough for a median, and soon over."""
_WARMUP_STEPS = 2


def live_twin(cell: Cell, engine: Engine, costs: Sequence[StageCosts] | None = None, cores: int = 1) -> Cell:
    """Return the live cell that a played one stands for: as it is, over real links, with torch and TCP together.

    Where the played cell's durations are this machine's (`costs`, by stage), the live one's stages are held to them,
    and everything takes so many times as long that their maths needs two thirds of the `cores`: what is checked is what
    messages do, and not how stages share processors.
    """
    compute = cell.compute
    if isinstance(compute, Calibrated):
        compute = Measured() if costs is None else _held(costs, cores)
    means: dict[str, Any] = {"timing": "live", "clock": "real", "engine": engine, "compute": compute}
    means |= {"codec_cost": "host", "played_steps": None}
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
    """Choose `count` of the played cells and return short live twins of them, by the played cells' ids.

    `costs`: by the id of a recipe, as for `live_twin`.

    Taken are cells over shaped links, from different networks and with different codecs as long as there are such,
    beginning with the first and the last. Their codecs cost what they cost here, so cells with another rule are left
    out.
    """
    able = [cell for cell in cells if cell.timing == "played" and cell.codec_cost == "host"]
    able = [cell for cell in able if isinstance(cell.parallelism, PipelineSpec)]
    able = [cell for cell in able if cell.shaped] or able
    chosen: list[Cell] = []
    while able and len(chosen) < count:
        networks, codecs = {cell.profiles for cell in chosen}, {cell.codec for cell in chosen}
        fresh = [cell for cell in able if cell.profiles not in networks and cell.codec not in codecs] or able
        chosen.append(fresh[0 if len(chosen) % 2 == 0 else -1])
        able = [cell for cell in able if cell.id != chosen[-1].id]
    return {cell.id: _shortened(live_twin(cell, engine, costs.get(recipe_of(cell).id), cores)) for cell in chosen}


def _shortened(cell: Cell) -> Cell:
    warmup = min(cell.training.warmup_steps, _WARMUP_STEPS)
    steps = min(cell.training.steps, warmup + CHECK_STEPS)
    short = {"steps": steps, "warmup_steps": warmup, "evaluate_every": 0, "target_loss": None, "budget_s": None}
    return cell.model_copy(update={"training": cell.training.model_copy(update=short)})


def timed_both_ways(experiment: Path) -> Iterator[tuple[results.Run, results.Run]]:
    """Yield the newest live and the newest played run of every cell in a result folder that has good runs of both."""
    for folder in sorted(experiment.glob("*/")):
        played = results.finished(experiment, folder.name)
        if played is None or (cell := played.cell).timing != "played":
            continue
        for engine in get_args(Engine):
            if live := results.finished(experiment, live_twin(cell, engine).id):
                yield live, played
