"""Experiment files to cells. Pure: reads files, starts nothing, resolves every number.

[cell]    the fields that all cells share, as tables
[axes]    dotted field name = list of values; the cells are the product, the first axis varying slowest
          profile: the name of a profile, which all links have, or a list: one a stage in a star, one a boundary in a line
[quick]   what --quick replaces, in the same layout
"""

from __future__ import annotations

import copy
import itertools
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from testbed import paths
from testbed.codecs import table as codecs
from testbed.errors import SpecError, TestbedError, UnknownNameError
from testbed.frozen import Frozen, explain, read_toml
from testbed.net import relay, topology
from testbed.profiles import LinkProfile, load_profile
from testbed.spec import Cell, Engine
from testbed.workloads import table as workloads

AskedEngine = Literal["auto", "netem", "relay"]


class Experiment(Frozen):
    """An experiment file, read but not yet resolved."""

    name: str
    path: Path
    question: str
    engine: AskedEngine
    cell: dict[str, Any]
    axes: dict[str, list[Any]]
    quick: dict[str, Any]


def experiment_files() -> dict[str, Path]:
    """Every experiment by name: `./experiments` before the shipped ones."""
    folders = reversed(paths.experiment_folders())
    return {path.parent.name: path for folder in folders for path in sorted(folder.glob("*/sweep.toml"))}


def load_experiment(name: str) -> Experiment:
    """An experiment by name, or by the path of its sweep.toml."""
    if name.endswith(".toml"):
        path = Path(name).resolve()
    else:
        files = experiment_files()
        if name not in files:
            raise UnknownNameError("experiment", name, files)
        path = files[name]
    content = read_toml(path)
    try:
        return Experiment(**{"name": path.parent.name, "path": path, "quick": {}, **content})
    except ValidationError as error:
        raise explain(error, Experiment, str(path)) from None


def _merge(base: dict[str, Any], change: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A copy of nested tables with the leaves of `change` put in."""
    merged = copy.deepcopy(base)
    for key, value in change.items():
        if isinstance(value, Mapping):
            if not isinstance(merged.setdefault(key, {}), dict):
                raise SpecError(f"{where}: {key} is a value, not a table")
            merged[key] = _merge(merged[key], value, f"{where}.{key}")
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _nest(dotted: str, value: Any) -> dict[str, Any]:
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return dict(value)


def _lookup(tables: Mapping[str, Any], dotted: str) -> Any:
    value: Any = tables
    for part in dotted.split("."):
        value = value[part]
    return value


def parse_override(text: str) -> dict[str, Any]:
    """`training.steps=20` -> nested tables. The value is read as TOML, and as a plain word where that fails."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SpecError(f"--set {text!r} is not of the form field=value, for example training.steps=20")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    return _nest(key.strip(), parsed)


def resolve_cell(fields: Mapping[str, Any], engine: Engine, where: str) -> Cell:
    """One cell from nested tables: profiles by name, everything checked that can be checked without starting anything."""
    content = dict(fields)
    if "profiles" in content:
        raise UnknownNameError(f"key of {where}", "profiles", ("profile",))
    if not isinstance(content.get("codec"), str):
        raise SpecError(f"{where}: codec must be a name, found {content.get('codec')!r}")
    content["profiles"] = [profile.model_dump() for profile in _profiles(content.pop("profile", None), where)]
    workload = content.get("workload")
    if isinstance(workload, dict) and isinstance(workload.get("model"), str) and "family" not in workload:
        content["workload"] = {**workload, "family": workloads.size_of(workload["model"]).family}
    try:
        # Through JSON, so that 1 and 1.0 and true are not confused, and strictly: no text is taken for a number.
        cell = Cell.model_validate_json(json.dumps({**content, "engine": engine}), strict=True)
    except ValidationError as error:
        raise explain(error, Cell, where) from None
    _check_network(cell, where)
    codecs.find(cell.codec)
    workloads.check(cell.workload, cell.pipeline.stages, cell.pipeline.layers)
    if cell.pipeline.schedule == "1f1b" and cell.pipeline.in_flight < min(cell.pipeline.stages, cell.pipeline.microbatches):
        raise SpecError(
            f"{where}: pipeline.in_flight is {cell.pipeline.in_flight}; {cell.pipeline.stages} stages need at least "
            f"{min(cell.pipeline.stages, cell.pipeline.microbatches)} micro-batches in flight to be busy at once"
        )
    return cell


def _profiles(names: Any, where: str) -> list[LinkProfile]:
    """The profiles of a cell's links: of one name, or of a list of names."""
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) for name in listed):
        raise SpecError(f"{where}: profile must be a name, or a list of names, one a link; found {names!r}")
    known = {name: load_profile(name) for name in dict.fromkeys(listed)}
    return [known[name] for name in listed]


def _check_network(cell: Cell, where: str) -> None:
    """What the lab itself would find out: that it can be laid out, and that its engine can carry out every pipe."""
    lay_out = topology.star if cell.topology == "star" else topology.line
    try:
        lay_out(cell.profiles, cell.pipeline.stages, cell.engine)
        for profile in cell.profiles if cell.engine == "relay" else ():
            for pipe in (profile.up, profile.down):
                relay.asked(pipe)
    except SpecError as error:
        raise SpecError(f"{where}: network {cell.network}: {error}") from None


def cells(experiment: Experiment, engine: Engine, *, quick: bool = False, overrides: Sequence[str] = ()) -> tuple[Cell, ...]:
    """The cells of an experiment, in the order in which they will run; each once.

    `engine` is what `auto` resolved to. `overrides` are `field=value` texts; one for an axis replaces that axis.
    """
    where = str(experiment.path)
    base, axes = experiment.cell, dict(experiment.axes)
    if quick:
        if not experiment.quick:
            raise SpecError(f"{where} has no [quick] table, so --quick has no meaning for it")
        if unknown := set(experiment.quick) - {"cell", "axes"}:
            raise UnknownNameError("key of [quick]", unknown.pop(), ("cell", "axes"))
        base = _merge(base, experiment.quick.get("cell", {}), where)
        axes |= experiment.quick.get("axes", {})
    for text in overrides:
        change = parse_override(text)
        name = text.partition("=")[0].strip()
        if name in axes:
            value = _lookup(change, name)
            axes[name] = value if isinstance(value, list) else [value]
        else:
            base = _merge(base, change, "--set")
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise SpecError(f"{where}: axis {name} must be a list with at least one value, found {values!r}")
    found: dict[str, Cell] = {}
    for combination in itertools.product(*axes.values()):
        fields = base
        for name, value in zip(axes, combination, strict=True):
            fields = _merge(fields, _nest(name, value), where)
        try:
            cell = resolve_cell(fields, engine, where)
        except TestbedError as error:
            label = ", ".join(f"{name}={value}" for name, value in zip(axes, combination, strict=True))
            raise SpecError(f"cell {label}: {error}") from None
        found.setdefault(cell.id, cell)
    return tuple(found.values())
