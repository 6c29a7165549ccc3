"""Predicted experiments: jobs from shapes alone (`play.shapes`), played on the virtual clock; nothing is trained.

`cells.toml` lies where a sweep.toml does otherwise; experiments/README.md has the format. A cell is played once, and
what came of it is kept under its content: a program that was interrupted goes on with what is missing, and a cell that
stands in two grids is played once.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator

from testbed import paths, results, units
from testbed.errors import LabError, SpecError, UnknownNameError
from testbed.frozen import Frozen, canonical_json, explain, flatten, read_toml
from testbed.metrics.links import InboundWire, Pipes
from testbed.metrics.wires import HEADER_BYTES
from testbed.net.lab import LabSpec
from testbed.play.data_parallel import DataParallelShape, DataParallelTable, resolve_data_parallel
from testbed.play.guests import Progress, play_jobs
from testbed.play.hybrid import HybridShape, HybridTable, access_links, resolve_hybrid
from testbed.play.job import PlayJob
from testbed.play.played import read_played
from testbed.play.scenarios import load_scenario
from testbed.play.shapes import PipelineTable, Shape, resolve_shape
from testbed.play.split import drift, seen_to_repeat, step_split
from testbed.play.unlinked import ideal_steps_ns
from testbed.profiles import LinkProfile, Pipe, load_profile
from testbed.spec import Topology, link_count
from testbed.sweep.environment import hold_folder
from testbed.sweep.fields import merge
from testbed.sweep.plan import Choice, apply_choice, combinations, read_experiment

if TYPE_CHECKING:
    import pandas

    from testbed.vm import GuestKernel

FILE = "cells.toml"
Duplex = Literal["full", "inbound"]
_FOLDER, _ASIDE = "predicted", ".playing-"
_MTU = 1500
_IDEAL_STEPS = 3
SETTLED = 0.01
"""By what share of a step steps may still drift when they count as settled."""


class DrawnLinks(Frozen):
    """A link for each node of a star, or boundary of a line, whose rate is drawn."""

    rates: tuple[str, str]
    """The slowest and the fastest; uniform between them."""
    delay: str
    buffer: str = "60s"
    """The time that it takes to drain."""
    seed: int
    """Another seed, other rates."""


class PlayTable(Frozen):
    """What a file states of a cell beside its job: its links, and how it is played."""

    links: str | tuple[str, ...] | DrawnLinks
    """A profile or `link(80Mbit, 10ms)`; one for all, or one per link."""
    topology: Topology = "line"
    duplex: Duplex = "full"
    """inbound: computed, not played; see `metrics.links.InboundWire`; rate and delay are the uplinks'."""
    play: bool = True
    """Else only the ideal is computed."""
    packets: Annotated[int, Field(ge=1)] | None = None
    """When the cell is played, rates, buffers and messages are divided by one number, such that the smaller message is
    about so many packets. That leaves every time as it is but a packet's own, where no packet is lost. None: by 1."""
    steps: Annotated[int, Field(ge=2)] = 4
    """To play at most; fewer where they are proved to repeat."""
    link_seed: Annotated[int, Field(ge=0)] = 0
    label: dict[str, str | float] = Field(default={})
    """For people and for figures: what the paper calls it, what it published."""


class PipelineCellTable(PipelineTable, PlayTable):
    """A cell that is a pipeline."""


class DataParallelCellTable(DataParallelTable, PlayTable):
    """A cell that is data parallel training: `parallelism = "data"`."""


class ChurnTable(Frozen):
    """Trainings of a cell whose sites come and go."""

    seeds: Annotated[int, Field(ge=1, strict=True)]
    """With absences of their own: seeds 0, 1 ..."""
    steps: Annotated[int, Field(ge=3, strict=True)]
    """Of each."""
    in_turn: Annotated[int, Field(ge=0, strict=True)] = 0
    """So many of them are also played step after step, as one trace."""


class HybridCellTable(HybridTable, PlayTable):
    """A cell that is pipelines within replicas and data parallel across them: `parallelism = "hybrid"`. Its links are
    those of its scenario's sites.
    """

    topology: Literal["star"] = "star"
    churn: ChurnTable | None = None
    """None: nobody leaves. Else its sites come and go, see `churned.py`: the cell itself is played as if nobody did."""

    @model_validator(mode="after")
    def _churn_can_be_played(self) -> HybridCellTable:
        if self.churn is None:
            return self
        if self.rounds:
            raise ValueError("state rounds or churn: with churn, rounds follow from who is there")
        if self.staleness:
            raise ValueError(f"churn is of steps that wait for their exchange, and staleness is {self.staleness}")
        if not self.play or self.duplex != "full":
            why = f"duplex is {self.duplex}" if self.play else "play is false"
            raise ValueError(f"churn is of a cell that is played, and {why}")
        if not any(device.churn for device in load_scenario(self.scenario).devices()[: sum(self.replicas)]):
            raise ValueError(
                f"churn is of sites that come and go, and at those of {self.scenario} that it uses everybody stays; "
                "state stays and away in the scenario's row, or no churn"
            )
        return self


AnyShape = Shape | DataParallelShape | HybridShape


class _Kind(NamedTuple):
    """How a table becomes a cell."""

    table: type[PlayTable]
    resolve: Callable[[Mapping[str, Any], str], AnyShape]
    links: Callable[[Mapping[str, Any], str], tuple[str, ...]] | None = None
    """Where links follow from the job; None: the table states them."""


_KINDS: Mapping[str, _Kind] = {
    "pipeline": _Kind(PipelineCellTable, resolve_shape),
    "data": _Kind(DataParallelCellTable, resolve_data_parallel),
    "hybrid": _Kind(HybridCellTable, resolve_hybrid, access_links),
}


class PredictionCell(Frozen):
    """One cell with every number resolved: what decides its result, and nothing else."""

    shape: AnyShape
    topology: Topology
    profiles: tuple[LinkProfile, ...]
    duplex: Duplex
    play: bool
    scale: int
    steps: int
    link_seed: int

    @property
    def id(self) -> str:
        """Return what its result is kept under."""
        return hashlib.sha256(canonical_json(self).encode()).hexdigest()[:12]


class Planned(NamedTuple):
    """A cell, and where it stands in the file."""

    grid: str
    stated: dict[str, Any]
    """What the file says of it, by dotted name."""
    cell: PredictionCell
    fields: Mapping[str, Any]
    """The same as tables."""


class PredictionResult(Frozen):
    """What came of a cell. Times are of a step in the steady state, where one was reached."""

    ideal_ns: int | None
    """Over the links as formulas, `metrics.links`; None in results of before these knew of flows that share a link."""
    unlinked_ns: int
    """Where messages take no time."""
    step_ns: float | None
    """Played: the shape's `steady_ns` of the steps that count; None: not played."""
    steps_ns: tuple[int, ...] = ()
    """Those that count."""
    first: int | None = None
    """The first of them."""
    repeats: bool = False
    """They were proved to repeat to the nanosecond; of a job whose steps overlap, they were seen to, and the step is
    the mean over what repeats."""
    drift: float | None = None
    """Of a job whose steps overlap: `play.split.drift`. None: of others, and of results that were made without it."""
    wire_bytes: float | None = None
    """IP packets of all nodes in a step, of what was played: `scale` times fewer than the cell's."""
    retransmitted_bytes: int | None = None
    """In all steps that were played."""
    kernel: str | None = None

    @property
    def unsettled(self) -> bool:
        """Whether its steps neither repeat nor stay within `SETTLED` of each other, so that more would say otherwise.

        Steps that stay so for a while may still change later: only those that repeat are known not to.
        """
        return not self.repeats and (self.drift or 0.0) > SETTLED


def cell_files() -> dict[str, Path]:
    """List every predicted experiment by name: `./experiments` before the shipped ones."""
    folders = reversed(paths.experiment_folders())
    return {path.parent.name: path for folder in folders for path in sorted(folder.glob(f"*/{FILE}"))}


def plan_cells(name: str, *, quick: bool = False) -> list[Planned]:
    """Return the cells of an experiment, by name or by the path of its cells.toml, in the file's order.

    `quick`: only the grids that have a short form, in that. SpecError or UnknownNameError for what makes no cells.
    """
    path = Path(name).resolve() if name.endswith(".toml") else cell_files().get(name)
    if path is None:
        raise UnknownNameError("predicted experiment", name, cell_files())
    content = read_toml(path)
    if unknown := set(content) - {"question", "cell", "grid"}:
        raise UnknownNameError(f"key of {path}:", unknown.pop(), ("question", "cell", "grid"))
    grids = content.get("grid", {})
    if not isinstance(grids, Mapping) or not grids:
        raise SpecError(f"{path} has no [grid.NAME] with axes or variants, so it has no cells")
    planned: list[Planned] = []
    for grid, table in grids.items():
        planned += _grid(path, str(grid), content, table, quick)
    if not planned:
        raise SpecError(f"{path} has no [grid.NAME.quick], so --quick has no meaning for it")
    return planned


def _grid(path: Path, grid: str, content: Mapping[str, Any], table: Mapping[str, Any], quick: bool) -> list[Planned]:
    where = f"{path}, grid {grid}"
    if unknown := set(table) - {"cell", "axes", "variants", "quick"}:
        raise UnknownNameError(f"key of {where}:", unknown.pop(), ("cell", "axes", "variants", "quick"))
    if quick and "quick" not in table:
        return []
    stated = {
        "question": str(content.get("question", "")),
        "axes": {},
        **table,
        "cell": merge(content.get("cell", {}), table.get("cell", {}), where),
    }
    experiment = read_experiment({"name": grid, "path": path, "engine": "netem", **stated}, where)
    choice = Choice(quick=quick)
    points = combinations(apply_choice(experiment, choice), choice)
    load = functools.cache(load_profile)
    return [
        Planned(
            grid, dict(flatten(point.fields)), _resolve(point.fields, f"{where}: {point.label}", load), point.fields
        )
        for point in points
    ]


def changed(planned: Planned, changes: Mapping[str, Any]) -> Planned:
    """Return the cell that has other fields; those that are None it does not state. SpecError as from `plan_cells`."""
    fields = {name: value for name, value in {**planned.fields, **changes}.items() if value is not None}
    cell = _resolve(fields, f"grid {planned.grid}, like cell {planned.cell.id}", load_profile)
    return planned._replace(stated=dict(flatten(fields)), cell=cell, fields=fields)


def _resolve(fields: Mapping[str, Any], where: str, load: Callable[[str], LinkProfile]) -> PredictionCell:
    parallelism = str(fields.get("parallelism", "pipeline"))
    if parallelism not in _KINDS:
        raise UnknownNameError(f"{where}: parallelism", parallelism, _KINDS)
    kind = _KINDS[parallelism]
    job = {name: value for name, value in fields.items() if name not in {*PlayTable.model_fields, "churn"}}
    if kind.links is not None:
        if "links" in fields:
            raise SpecError(f"{where}: links are those of the scenario; state none, or change the scenario")
        fields = {**fields, "links": kind.links(job, where)}
    try:
        table = kind.table.model_validate(fields)
    except ValidationError as error:
        raise explain(error, kind.table, where) from None
    shape = kind.resolve(job, where)
    if table.steps < (least := shape.least_steps):
        raise SpecError(f"{where}: steps is {table.steps}; its steady cycle shows in no fewer than {least}")
    small = max(1, min(shape.message_bytes) // ((table.packets or 1) * (_MTU - HEADER_BYTES)))
    return PredictionCell(
        shape=shape,
        profiles=_profiles(table, shape.nodes, load),
        play=table.play and table.duplex == "full",
        scale=small if table.packets else 1,
        **{name: getattr(table, name) for name in ("topology", "duplex", "steps", "link_seed")},
    )


def _profiles(table: PlayTable, nodes: int, load: Callable[[str], LinkProfile]) -> tuple[LinkProfile, ...]:
    if isinstance(table.links, DrawnLinks):
        slow, fast = (units.parse_rate(rate) for rate in table.links.rates)
        draw = random.Random(table.links.seed)
        rates = [draw.randint(slow // 8, fast // 8) * 8 for _ in range(link_count(table.topology, nodes))]
        return tuple(load(f"link({rate}bit, {table.links.delay}, buffer={table.links.buffer})") for rate in rates)
    names = [table.links] if isinstance(table.links, str) else table.links
    return tuple(load(name) for name in names)


# ------------------------------------------------------------------ playing
def play_missing(
    planned: Iterable[Planned], folder: Path, kernel: GuestKernel, *, say: Callable[[str], None], guests: int = 1
) -> None:
    """Make the results that are missing in `folder`. LabError where a cell cannot be played; the others are kept."""
    (folder / _FOLDER).mkdir(parents=True, exist_ok=True)
    errors = list[str]()

    def done(progress: Progress) -> None:
        if (outcome := progress.outcome) is None:
            return
        cell = cells[progress.job]
        if outcome.output is None:
            errors.append(f"cell {cell.id}: {outcome.error}")
            return
        result = _result(cell, outcome.output, kernel)
        results.write_json(_file(folder, cell), result)
        outcome.output.unlink()
        assert result.step_ns is not None
        ideal = "not known" if result.ideal_ns is None else units.format_time(result.ideal_ns)
        say(f"{cell.id}: {units.format_time(result.step_ns)}, ideal {ideal}, {outcome.host_seconds:.1f} s here")

    with hold_folder(folder):
        missing = _missing(planned, folder)
        say(f"{len(missing)} cells are missing")
        for cell in missing:
            if not cell.play:
                results.write_json(_file(folder, cell), PredictionResult(**compute_ideal(cell), step_ns=None))
        for left in folder.glob(f"{_ASIDE}*"):  # by a program that was killed: we hold the folder
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_ASIDE, dir=folder) as aside:
            cells = [cell for cell in missing if cell.play]
            jobs = [_job(cell, Path(aside)) for cell in cells]
            if jobs:
                work = Path(aside) / "work"
                play_jobs(jobs, clock="virtual", folder=work, kernel=kernel, guests=guests, progress=done)
    if errors:
        raise LabError(f"{len(errors)} of {len(cells)} cells could not be played: {errors[0]}")


def _job(cell: PredictionCell, aside: Path) -> PlayJob:
    trace = aside / f"{cell.id}.trace"
    cell.shape.trace(cell.steps, cell.scale).write(trace)
    lab = LabSpec(
        topology=cell.topology,
        profiles=tuple(_scaled(profile, cell.scale) for profile in cell.profiles),
        nodes=cell.shape.nodes,
        engine="netem",
        engine_reason="all that the guest has",
    )
    prove = cell.steps >= 2 * (cell.shape.period or 1)  # in less nothing is there again
    output = aside / f"{cell.id}.played"
    return PlayJob(trace=trace, lab=lab, link_seed=cell.link_seed, output=output, prove_steady=prove)


def _result(cell: PredictionCell, output: Path, kernel: GuestKernel) -> PredictionResult:
    trace, played = cell.shape.trace(cell.steps, cell.scale), read_played(output)
    split = step_split(trace, played, cell.shape.period or 1)
    step_ns, cycle, drifts = cell.shape.steady_ns(split.steps_ns), None, None
    if played.steady is not None:
        step_ns = split.step_ns
    elif not isinstance(cell.shape, Shape) and cell.shape.period is None:
        drifts = drift(trace, played, cell.shape.staleness + 1)
        if (cycle := seen_to_repeat(trace, played)) is not None:
            step_ns = fmean(split.steps_ns[-1 - cycle : -1])
    return PredictionResult(
        **compute_ideal(cell),
        step_ns=step_ns,
        steps_ns=split.steps_ns,
        first=split.first,
        repeats=played.steady is not None or cycle is not None,
        drift=drifts,
        wire_bytes=split.sent_bytes,
        retransmitted_bytes=sum(state.bytes_retransmitted for state in played.sockets[-1]),
        kernel=kernel.version,
    )


def compute_ideal(cell: PredictionCell) -> dict[str, int | None]:
    """Return the ideal times of a result."""
    period = cell.shape.period
    steps = cell.steps if period is None else _IDEAL_STEPS - 1 + period
    trace = cell.shape.trace(steps)
    if cell.duplex == "inbound":
        (pipe,) = {profile.up for profile in cell.profiles}
        if pipe is None:
            raise SpecError(f"cell {cell.id}: an inbound wire has the rate of the links' uplinks, and they have none")
        links: InboundWire | Pipes = InboundWire(pipe.rate_bps, pipe.delay_ns)
    else:
        links = Pipes(cell.topology, cell.profiles, cell.shape.nodes)
    ideal, unlinked = (
        cell.shape.steady_ns(spans if period is None else spans[-period:])
        for spans in (ideal_steps_ns(trace, over, steps) for over in (links, None))
    )
    return {"ideal_ns": round(ideal), "unlinked_ns": round(unlinked)}


def _scaled(profile: LinkProfile, scale: int) -> LinkProfile:
    """Return the link at a fraction of its rate, with a buffer that takes as long to drain."""

    def scaled(pipe: Pipe | None) -> Pipe | None:
        if pipe is None or scale == 1:
            return pipe
        rate_bps = max(8, round(pipe.rate_bps / scale / 8) * 8)
        return pipe.model_copy(update={"rate_bps": rate_bps, "buffer_bytes": max(2 * 1514, pipe.buffer_bytes // scale)})

    return profile.model_copy(update={"up": scaled(profile.up), "down": scaled(profile.down)})


def _file(folder: Path, cell: PredictionCell) -> Path:
    return folder / _FOLDER / f"{cell.id}.json"


# ------------------------------------------------------------------ results
def result_of(cell: PredictionCell, folder: Path) -> PredictionResult | None:
    """Return what came of a cell; None where `folder` has no result of it."""
    file = _file(folder, cell)
    return results.read_json(file, PredictionResult) if file.exists() else None


def count_missing(planned: Iterable[Planned], folder: Path) -> int:
    """Return how many cells have no result in `folder`."""
    return len(_missing(planned, folder))


def _missing(planned: Iterable[Planned], folder: Path) -> list[PredictionCell]:
    return list({each.cell.id: each.cell for each in planned if not _file(folder, each.cell).exists()}.values())


def predictions(planned: Sequence[Planned], folder: Path) -> pandas.DataFrame:
    """Return a row for each cell that has a result: grid, id, what the file states of it where not all cells agree, and
    what came of it, in seconds, bytes of the cell as it is (not as scaled), and tokens per second. What it states of
    churn is no part of it: `churned.py` has that.
    """
    import pandas

    names = sorted({name for each in planned for name in each.stated if not name.startswith("churn.")})
    rows = []
    for each in planned:
        if (found := result_of(each.cell, folder)) is None:
            continue
        shape = each.cell.shape
        step_ns = found.ideal_ns if found.step_ns is None else found.step_ns
        rows.append(
            {
                "grid": each.grid,
                "cell": each.cell.id,
                **{name: _plain(each.stated.get(name)) for name in names},
                **shape.columns(),
                "payload_bytes_per_step": shape.payload_bytes,
                "wire_bytes_per_step": None if found.wire_bytes is None else found.wire_bytes * each.cell.scale,
                "step_s": math.nan if found.step_ns is None else found.step_ns / 1e9,
                "ideal_s": math.nan if found.ideal_ns is None else found.ideal_ns / 1e9,
                "no_network_s": found.unlinked_ns / 1e9,
                "formula_s": shape.formula_s(each.cell.topology, each.cell.profiles),
                "tokens_per_s": math.nan if step_ns is None else shape.tokens * 1e9 / step_ns,
                "repeats": found.repeats,
                "drift": math.nan if found.drift is None else found.drift,
                "unsettled": found.unsettled,
                "steps_counted": len(found.steps_ns),
                "retransmitted_bytes": found.retransmitted_bytes,
            }
        )
    frame = pandas.DataFrame(rows)
    agreed = [name for name in names if name in frame and frame[name].nunique(dropna=False) == 1]
    return frame.drop(columns=agreed)


def _plain(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value
