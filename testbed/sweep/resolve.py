"""One cell from nested tables: names looked up, everything checked that can be checked without starting anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from testbed import devices
from testbed.codecs.catalogue import placement as codecs
from testbed.errors import SpecError, UnknownNameError
from testbed.frozen import explain
from testbed.net.relay.client import refuse_unsupported
from testbed.net.topology import plan_lab
from testbed.profiles import LinkProfile, load_profile
from testbed.spec import Cell, Engine
from testbed.workloads import models as workloads


def resolve_cell(
    fields: Mapping[str, Any], engine: Engine, where: str, load: Callable[[str], LinkProfile] = load_profile
) -> Cell:
    """Make the cell that the tables describe. UserError, which names the field, for what cannot be run.

    `load` finds a profile by its name; who resolves many cells gives one that remembers.

    A file says `profile` where the cell has profiles, and may name a device where the cell has durations.
    """
    content = dict(fields)
    if "profiles" in content:
        raise UnknownNameError(f"key of {where}", "profiles", ("profile",))
    if not isinstance(content.get("codec"), str):
        raise SpecError(
            f"{where}: codec must be a text, for example int8 or ef(topk(0.1)); found {content.get('codec')!r}"
        )
    content["profiles"] = [profile.model_dump() for profile in _profiles(content.pop("profile", None), where, load)]
    compute = content.pop("compute", None)
    if compute is None:
        raise SpecError(f"{where}: compute is not stated; for example compute.mode = 'measured'")
    workload = content.get("workload")
    if isinstance(workload, dict) and isinstance(workload.get("model"), str) and "family" not in workload:
        content["workload"] = {**workload, "family": workloads.model_size(workload["model"]).family}
    try:
        # Through JSON, so that 1 and 1.0 and true are not confused, and strictly: no text is taken for a number.
        text = json.dumps({**content, "engine": engine, "compute": {"mode": "measured"}})
        cell = Cell.model_validate_json(text, strict=True)
        workloads.check_workload(cell.workload, cell.pipeline.stages, cell.pipeline.layers)
        # After the check: it takes a workload that is known to be one.
        durations = devices.compute_of(compute, cell.workload, cell.pipeline, where)
        # Two texts for the same codecs are one cell.
        codec = codecs.parse_placement(cell.codec).over(cell.pipeline.stages - 1)
        cell = Cell(
            **{**{name: getattr(cell, name) for name in Cell.model_fields}, "codec": codec.text, "compute": durations}
        )
    except ValidationError as error:
        raise explain(error, Cell, where) from None
    _check_network(cell, where)
    if codec.measures and cell.timing == "replay":
        raise SpecError(
            f"{where}: codec {cell.codec} chooses by what it measures of its link, so over other links it trains "
            'otherwise and cannot be replayed; set timing = "full"'
        )
    if cell.pipeline.schedule == "1f1b" and cell.pipeline.in_flight < min(
        cell.pipeline.stages, cell.pipeline.microbatches
    ):
        raise SpecError(
            f"{where}: pipeline.in_flight is {cell.pipeline.in_flight}; {cell.pipeline.stages} stages need at least "
            f"{min(cell.pipeline.stages, cell.pipeline.microbatches)} micro-batches in flight to be busy at once"
        )
    return cell


def _profiles(names: Any, where: str, load: Callable[[str], LinkProfile]) -> list[LinkProfile]:
    """Load the profiles of a cell's links, from one name, or of a list of names."""
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) for name in listed):
        raise SpecError(f"{where}: profile must be a name, or a list of names, one a link; found {names!r}")
    known = {name: load(name) for name in dict.fromkeys(listed)}
    return [known[name] for name in listed]


def _check_network(cell: Cell, where: str) -> None:
    """Check what the lab itself would find out: that it can be laid out, and that its engine can do every pipe."""
    try:
        plan_lab(cell.topology, cell.links, cell.pipeline.stages, cell.engine)
        for profile in cell.links if cell.engine == "relay" else ():
            for pipe in (profile.up, profile.down):
                refuse_unsupported(pipe)
    except SpecError as error:
        raise SpecError(f"{where}: network {cell.network}: {error}") from None
