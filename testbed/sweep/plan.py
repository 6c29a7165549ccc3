"""Turns experiment files into cells, with every number resolved. Pure: starts nothing. experiments/README.md documents
the format.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, StrictFloat, StrictInt, model_validator

from testbed import paths
from testbed.errors import SpecError, TestbedError, UnknownNameError
from testbed.frozen import Frozen, flatten, read_toml, validated
from testbed.profiles import load_profile
from testbed.results import CompareSpec, Order
from testbed.spec import Cell, Clock, Engine
from testbed.sweep import filters
from testbed.sweep.fields import Tables, merge, nest, parse_assignment
from testbed.sweep.resolve import resolve_cell

AskedEngine = Literal["auto", "netem", "relay"]
AskedClock = Literal["auto", "virtual", "real"]
_QUICK = ("cell", "axes", "variants", "repeats", "tune")
_MOST_CELLS = 100_000
ENOUGH_VALUES, ENOUGH_SEEDS = 5, 2
"""Minimum numbers of values and seeds in [tune], except in a short form."""


class TuneSpec(Frozen):
    """[tune]: before the sweep, trial runs choose the value of one field for each arm; see `sweep.tune`."""

    field: str
    """Dotted, for example optimiser.learning_rate."""
    values: Annotated[tuple[StrictInt | StrictFloat, ...], Field(min_length=1)]
    """Positive, ascending; at least five, so that the best one can lie between others."""
    seeds: Annotated[tuple[StrictInt, ...], Field(min_length=1)]
    """At least two: a ranking by one seed may hold for that seed only."""
    steps: Annotated[StrictInt, Field(ge=1)] | None = None
    """Steps of each trial; None: as many as the training has. With fewer, full-length runs check the ranking."""
    over: str | list[str] = "datacenter"
    """Network of live trials, in the form of `profile`. Played trials are trained without a network."""
    arm: Annotated[tuple[str, ...], Field(min_length=1)] = ("codec",)
    """Fields that define the arms: each combination of their values is tuned separately."""
    widen: Annotated[StrictInt, Field(ge=0)] = 4
    """Maximum number of values added to an arm's list, beyond the end at which its best value lies."""
    quick: bool = False
    """Short form with a meaningless choice: any number of values and seeds is allowed, and no value is added."""

    @model_validator(mode="after")
    def _shows_something(self) -> TuneSpec:
        low_to_high = all(before < after for before, after in itertools.pairwise(self.values))
        if not low_to_high or self.values[0] <= 0 or not math.isfinite(self.values[-1]):
            raise ValueError(f"values must be positive and ascending, found {list(self.values)}")
        if self.quick:
            return self
        if len(self.values) < ENOUGH_VALUES:
            raise ValueError(
                f"{len(self.values)} values cannot show that the best lies between others; state at least "
                f"{ENOUGH_VALUES}, or quick = true for a short form with a meaningless choice"
            )
        if len(set(self.seeds)) < ENOUGH_SEEDS:
            raise ValueError(
                f"seeds are {list(self.seeds)}, but a ranking by one seed may hold for that seed only; state at least "
                f"{ENOUGH_SEEDS}, or quick = true for a short form with a meaningless choice"
            )
        return self


class Experiment(Frozen):
    """An experiment file, read but not yet resolved."""

    name: str
    path: Path
    question: str
    engine: AskedEngine
    """Engine of runs on the real clock."""
    clock: AskedClock = "auto"
    """Clock of played cells; auto: virtual where possible."""
    live_checks: Annotated[StrictInt, Field(ge=0)] = 2
    """Number of played cells that are also run live at the end of the sweep, if this machine can."""
    repeats: Annotated[StrictInt, Field(ge=1)] = 1
    """Number of successful runs per cell."""
    order: Order = "grouped"
    order_seed: StrictInt = 0
    cell: dict[str, Any]
    axes: dict[str, list[Any]]
    variants: list[dict[str, Any]] = Field(default=[])
    exclude: list[dict[str, Any]] = Field(default=[])
    only: list[dict[str, Any]] = Field(default=[])
    tune: TuneSpec | None = None
    compare: CompareSpec | None = None
    quick: dict[str, Any] = Field(default={})


class Choice(NamedTuple):
    """Changes to an experiment from the command line."""

    quick: bool = False
    overrides: Sequence[str] = ()
    """`field=value`; an override of an axis replaces the axis."""
    only: Sequence[str] = ()
    """`field=value`; all fields must match, each with any of its values."""
    exclude: Sequence[str] = ()
    """`field=value`; none may match."""
    repeats: int | None = None
    cells: Sequence[str] = ()
    """Ids of cells; empty: all."""


class Combination(NamedTuple):
    """One point of the axes."""

    label: str
    """Values of the axes, for messages."""
    fields: Tables
    stated: frozenset[str] = frozenset()
    """Dotted names of the fields that an axis or a variant sets."""
    mark: str = ""
    """Caveat about the value that [tune] chose; empty if none."""

    def arm(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the values of these fields by name; None for a field that is not stated."""
        stated = dict(flatten(self.fields))
        return {name: stated.get(name) for name in names}


def experiment_files() -> dict[str, Path]:
    """Return the file of every experiment by name: `./experiments` before the shipped ones."""
    folders = reversed(paths.experiment_folders())
    return {path.parent.name: path for folder in folders for path in sorted(folder.glob("*/sweep.toml"))}


def load_experiment(name: str) -> Experiment:
    """Load an experiment by name, or by the path of its sweep.toml."""
    if name.endswith(".toml"):
        path = Path(name).resolve()
    else:
        files = experiment_files()
        if name not in files:
            raise UnknownNameError("experiment", name, files)
        path = files[name]
    experiment = read_experiment({"name": path.parent.name, "path": path, **read_toml(path)}, str(path))
    if experiment.compare is not None:
        _check_compared(experiment, experiment.compare)
    return experiment


def _check_compared(experiment: Experiment, asked: CompareSpec) -> None:
    """Raise SpecError if [compare] names arms that the file, without overrides, does not have."""
    where = f"[compare] of {experiment.path}"
    points = [combination.fields for combination in combinations(experiment, Choice())]
    sides = [nest("codec", codec) for codec in asked.baselines]
    sides += [side for claim in asked.claims for side in (claim.ours, claim.baseline)]
    for side in sides:
        condition = filters.read_condition(side, where)
        filters.check_used(condition, points, where)
        if not any(filters.holds(condition, fields) for fields in points):
            raise SpecError(f"{where}: no cell has all of {', '.join(f'{n} = {v}' for n, v in flatten(side))}")


def read_experiment(content: Mapping[str, Any], where: str) -> Experiment:
    """Parse the content of an experiment file. SpecError, naming the file by `where`."""
    return validated(Experiment, content, where)


def apply_choice(experiment: Experiment, choice: Choice) -> Experiment:
    """Return the experiment with the changes of --quick, --set and --repeats."""
    where = str(experiment.path)
    content = dict(experiment)
    if choice.quick:
        if not experiment.quick:
            raise SpecError(f"{where} has no [quick] table, so --quick does not apply; add one, or omit --quick")
        if unknown := set(experiment.quick) - set(_QUICK):
            raise UnknownNameError(f"key of [quick] in {where}:", unknown.pop(), _QUICK)
        if wrong := [key for key in ("cell", "axes", "tune") if not isinstance(experiment.quick.get(key, {}), dict)]:
            raise SpecError(f"{where}: {wrong[0]} of [quick] must be a table")
        tune = None if experiment.tune is None else experiment.tune.model_dump()
        short = merge({"cell": experiment.cell, "axes": {}, "tune": tune or {}}, experiment.quick, where)
        tuned = short["tune"] | {"quick": True} if short["tune"] else None
        content |= {**short, "axes": experiment.axes | short["axes"], "tune": tuned}
    content["axes"] = dict(content["axes"])
    for text in choice.overrides:
        name, value = parse_assignment(text, "--set")
        if experiment.tune is not None and name == experiment.tune.field:
            raise SpecError(f"--set {text}: {where} tunes {name}; use `run --like`, or change the values of [tune]")
        if any(name in dict(flatten(variant)) for variant in content["variants"]):
            raise SpecError(
                f"--set {text}: {name} is set by the [[variants]] of {where}; choose among them with --only"
            )
        if name in content["axes"]:
            content["axes"][name] = value if isinstance(value, list) else [value]
        else:
            content["cell"] = merge(content["cell"], nest(name, value), "--set")
    if choice.repeats is not None:
        content["repeats"] = choice.repeats
    return read_experiment(content, where)


def combinations(experiment: Experiment, choice: Choice) -> list[Combination]:
    """Return the filtered product of the axes; the first axis varies slowest, the variants fastest.

    `experiment` is a result of `apply_choice`. SpecError if the filters leave nothing.
    """
    where = str(experiment.path)
    axes = [[nest(name, value) for value in values] for name, values in experiment.axes.items()]
    for name, values in experiment.axes.items():
        if not values:
            raise SpecError(f"{where}: axis {name} must be a list with at least one value, found {values!r}")
        if any(name in dict(flatten(variant)) for variant in experiment.variants):
            raise SpecError(f"{where}: {name} is both an axis and a field of [[variants]]; remove one of them")
    if (count := math.prod(map(len, axes)) * max(1, len(experiment.variants))) > _MOST_CELLS:
        raise SpecError(f"{where}: the axes make {count:,} cells; the limit is {_MOST_CELLS:,}")
    points = []
    for changes in itertools.product(*axes, *([experiment.variants] if experiment.variants else [])):
        fields: Tables = experiment.cell
        for change in changes:
            fields = merge(fields, change, where)
        label = ", ".join(f"{name}={value}" for change in changes for name, value in flatten(change))
        points.append(Combination(label, fields, frozenset(name for change in changes for name, _ in flatten(change))))
    return _filtered(points, experiment, choice)


def _filtered(points: list[Combination], experiment: Experiment, choice: Choice) -> list[Combination]:
    where, fields = str(experiment.path), [combination.fields for combination in points]
    typed_only = filters.any_of(filters.read_flags(choice.only, "--only"))
    typed_exclude = filters.read_flags(choice.exclude, "--exclude")
    filters.check_used(typed_only, fields, "--only")
    for condition in typed_exclude:
        filters.check_used(condition, fields, "--exclude")
    keep = [filters.read_condition(table, f"[[only]] of {where}") for table in experiment.only]
    drop = [filters.read_condition(table, f"[[exclude]] of {where}") for table in experiment.exclude] + typed_exclude
    left = [
        point
        for point in points
        if (not keep or any(filters.holds(condition, point.fields) for condition in keep))
        and filters.holds(typed_only, point.fields)
        and not any(filters.holds(condition, point.fields) for condition in drop)
    ]
    if not left:
        raise SpecError(f"{where}: none of the {len(points)} cells is left: only and exclude filter out all of them")
    return left


def resolve_cells(points: Iterable[Combination], engine: Engine, where: str, clock: Clock = "real") -> list[Cell]:
    """Make a cell for each combination."""
    cells = []
    load = functools.cache(load_profile)  # reading a rate trace takes 0.1 s, and many cells share a network
    for combination in points:
        try:
            cells.append(resolve_cell(combination.fields, engine, where, clock, load))
        except TestbedError as error:
            raise SpecError(f"cell {combination.label}: {error}") from None
    return cells


def untuned(points: Sequence[Combination], tune: TuneSpec | None) -> list[Combination]:
    """Return the combinations with the first value of [tune], to check and show them before the choice. A combination
    that states the field keeps its value.
    """
    if tune is None:
        return list(points)
    return [
        point
        if tune.field in point.stated
        else Combination(point.label, merge(point.fields, nest(tune.field, tune.values[0]), "[tune]"))
        for point in points
    ]


def cells(experiment: Experiment, engine: Engine, clock: Clock = "real", **choice: Any) -> tuple[Cell, ...]:
    """Return the cells of an experiment, each once, in the file's order, before tuning.

    `engine` and `clock`: the resolved values, not `auto`; the rest are fields of a `Choice`.
    """
    chosen = Choice(**choice)
    asked = apply_choice(experiment, chosen)
    return unique(resolve_cells(untuned(combinations(asked, chosen), asked.tune), engine, str(asked.path), clock))


def unique(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Return each cell once, in order."""
    return tuple({cell.id: cell for cell in cells}.values())
