"""Experiment files to cells. Pure: reads files, starts nothing, resolves every number. experiments/README.md has the
format.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, StrictFloat, StrictInt, ValidationError, model_validator

from testbed import paths
from testbed.errors import SpecError, TestbedError, UnknownNameError
from testbed.frozen import Frozen, explain, flatten, read_toml
from testbed.profiles import load_profile
from testbed.results import CompareSpec, Order
from testbed.spec import Cell, Clock, Engine
from testbed.sweep import filters
from testbed.sweep.fields import Tables, merge, nest, parse_assignment
from testbed.sweep.resolve import resolve_cell

AskedEngine = Literal["auto", "netem", "relay"]
AskedClock = Literal["auto", "virtual", "real"]
_QUICK = ("cell", "axes", "variants", "repeats", "tune")
ENOUGH_VALUES, ENOUGH_SEEDS = 5, 2
"""Of [tune], unless it is a short form's."""


class TuneSpec(Frozen):
    """[tune]: before the sweep, the value of one field is chosen for each arm by short runs; see `sweep.tune`."""

    field: str
    """Dotted, for example optimiser.learning_rate."""
    values: Annotated[tuple[StrictInt | StrictFloat, ...], Field(min_length=1)]
    """Positive, ascending; five at least, or no best value of them can be said to lie between others."""
    seeds: Annotated[tuple[StrictInt, ...], Field(min_length=1)]
    """Two at least: one seed's ranking is that seed's."""
    steps: Annotated[StrictInt, Field(ge=1)] | None = None
    """Steps of each run; None: as many as the training has. Fewer are checked to rank alike."""
    over: str | list[str] = "datacenter"
    """As `profile`: the network of live trials. Played ones are trained without a network."""
    arm: Annotated[tuple[str, ...], Field(min_length=1)] = ("codec",)
    """Fields whose every combination gets a value of its own."""
    widen: Annotated[StrictInt, Field(ge=0)] = 4
    """Values that an arm may have beyond the list, in the direction in which its best value is the list's end."""
    quick: bool = False
    """A short form, whose choice says nothing: any number of values and seeds will do, and no value is added."""

    @model_validator(mode="after")
    def _shows_something(self) -> TuneSpec:
        low_to_high = all(before < after for before, after in itertools.pairwise(self.values))
        if not low_to_high or self.values[0] <= 0 or not math.isfinite(self.values[-1]):
            raise ValueError(f"values must be positive and ascend, found {list(self.values)}")
        if self.quick:
            return self
        if len(self.values) < ENOUGH_VALUES:
            raise ValueError(
                f"{len(self.values)} values cannot show that the best lies between others; state at least "
                f"{ENOUGH_VALUES}, or quick = true for a short form whose choice says nothing"
            )
        if len(set(self.seeds)) < ENOUGH_SEEDS:
            raise ValueError(
                f"seeds are {list(self.seeds)}, and a ranking by one seed is that seed's; state at least "
                f"{ENOUGH_SEEDS}, or quick = true for a short form whose choice says nothing"
            )
        return self


class Experiment(Frozen):
    """An experiment file, read but not yet resolved."""

    name: str
    path: Path
    question: str
    engine: AskedEngine
    """Of runs on the real clock."""
    clock: AskedClock = "auto"
    """Of played cells; auto: virtual where that is possible."""
    live_checks: Annotated[StrictInt, Field(ge=0)] = 2
    """Played cells that are run live too, at the end of the sweep, where this machine allows it."""
    repeats: Annotated[StrictInt, Field(ge=1)] = 1
    """Good runs that each cell is to have."""
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
    """What the command line changes in an experiment."""

    quick: bool = False
    overrides: Sequence[str] = ()
    """`field=value`; one for an axis replaces that axis."""
    only: Sequence[str] = ()
    """`field=value`; all must hold, and of several for one field one must."""
    exclude: Sequence[str] = ()
    """`field=value`; none may hold."""
    repeats: int | None = None
    cells: Sequence[str] = ()
    """Ids of cells; empty: all."""


class Combination(NamedTuple):
    """One point of the axes."""

    label: str
    """What the axes have there, for messages."""
    fields: Tables
    stated: frozenset[str] = frozenset()
    """Dotted names of the fields that an axis or a variant states here."""
    mark: str = ""
    """What must be known of a value that [tune] chose for it; empty where nothing must."""

    def arm(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the values of some fields here, by name; None where one is not stated."""
        stated = dict(flatten(self.fields))
        return {name: stated.get(name) for name in names}


def experiment_files() -> dict[str, Path]:
    """List every experiment by name: `./experiments` before the shipped ones."""
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
    """Raise SpecError where [compare] names arms that the file, as it was written, does not have."""
    where = f"[compare] of {experiment.path}"
    points = [combination.fields for combination in combinations(experiment, Choice())]
    sides = [nest("codec", codec) for codec in asked.baselines]
    sides += [side for claim in asked.claims for side in (claim.ours, claim.baseline)]
    for side in sides:
        condition = filters.read_condition(side, where)
        filters.check_used(condition, points, where)
        if not any(filters.holds(condition, fields) for fields in points):
            raise SpecError(f"{where}: no cell has {', '.join(f'{n} = {v}' for n, v in flatten(side))} all together")


def read_experiment(content: Mapping[str, Any], where: str) -> Experiment:
    """Make an experiment of what a file says. SpecError, which names the file by `where`."""
    try:
        return Experiment(**content)
    except ValidationError as error:
        raise explain(error, Experiment, where) from None


def apply_choice(experiment: Experiment, choice: Choice) -> Experiment:
    """Return the experiment with what --quick, --set and --repeats change in it."""
    where = str(experiment.path)
    content = dict(experiment)
    if choice.quick:
        if not experiment.quick:
            raise SpecError(f"{where} has no [quick] table, so --quick has no meaning for it")
        if unknown := set(experiment.quick) - set(_QUICK):
            raise UnknownNameError(f"key of [quick] in {where}:", unknown.pop(), _QUICK)
        tune = None if experiment.tune is None else experiment.tune.model_dump()
        short = merge({"cell": experiment.cell, "axes": {}, "tune": tune or {}}, experiment.quick, where)
        tuned = short["tune"] | {"quick": True} if short["tune"] else None
        content |= {**short, "axes": experiment.axes | short["axes"], "tune": tuned}
    content["axes"] = dict(content["axes"])
    for text in choice.overrides:
        name, value = parse_assignment(text, "--set")
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
    """Return the product of the axes, the first varying slowest and the variants fastest, without what is filtered out.

    `experiment` is one to which `apply_choice` was applied. SpecError where nothing is left.
    """
    where = str(experiment.path)
    axes = [[nest(name, value) for value in values] for name, values in experiment.axes.items()]
    for name, values in experiment.axes.items():
        if not values:
            raise SpecError(f"{where}: axis {name} must be a list with at least one value, found {values!r}")
        if any(name in dict(flatten(variant)) for variant in experiment.variants):
            raise SpecError(f"{where}: {name} is an axis and stands in [[variants]] too; state it in one of them")
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
        raise SpecError(f"{where}: no cell is left of {len(points)}: only and exclude leave all of them out")
    return left


def resolve_cells(points: Iterable[Combination], engine: Engine, where: str, clock: Clock = "real") -> list[Cell]:
    """Make a cell for each combination."""
    cells = []
    load = functools.cache(load_profile)  # a trace takes 0.1 s to read, and a network has many cells
    for combination in points:
        try:
            cells.append(resolve_cell(combination.fields, engine, where, clock, load))
        except TestbedError as error:
            raise SpecError(f"cell {combination.label}: {error}") from None
    return cells


def untuned(points: Sequence[Combination], tune: TuneSpec | None) -> list[Combination]:
    """Return the combinations with the first value that [tune] will try in place: what can be checked and shown before
    the choice. One that states the field keeps its own.
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
    """Return the cells of an experiment, each once, in the file's order, before anything is tuned.

    `engine` and `clock` are what `auto` resolved to; the rest is a `Choice`'s.
    """
    chosen = Choice(**choice)
    asked = apply_choice(experiment, chosen)
    return unique(resolve_cells(untuned(combinations(asked, chosen), asked.tune), engine, str(asked.path), clock))


def unique(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Return each cell once, in order."""
    return tuple({cell.id: cell for cell in cells}.values())
