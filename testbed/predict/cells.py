"""Predicted experiments: jobs built from shapes alone (`predict.shapes`), played on the virtual clock, not trained.

`cells.toml` takes the place of a sweep.toml; experiments/README.md documents the format. Results are stored by the
content of their cell: an interrupted program resumes with the missing cells, and a cell of two grids is played once.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from testbed import paths, results, units
from testbed.errors import LabError, SpecError, UnknownNameError
from testbed.frozen import Frozen, canonical_json, flatten, is_none, read_toml, validated
from testbed.metrics.links import InboundWire, Pipes
from testbed.metrics.wires import HEADER_BYTES
from testbed.player.guests import PlayJobs, Progress, play_jobs
from testbed.player.play_job import PlayJob
from testbed.player.split import drift, seen_to_repeat, step_split
from testbed.player.virtual import guest_lab
from testbed.predict.data_parallel_shapes import DataParallelShape, DataParallelTable, resolve_data_parallel
from testbed.predict.hybrid_shapes import HybridShape, HybridTable, access_links, resolve_hybrid
from testbed.predict.scenarios import load_scenario
from testbed.predict.shapes import PipelineTable, Shape, resolve_shape
from testbed.profiles import LinkProfile, Pipe, load_profile
from testbed.spec import Sites, Topology, link_count, sites_fault
from testbed.sweep.environment import hold_folder
from testbed.sweep.fields import merge
from testbed.sweep.plan import Choice, apply_choice, combinations, read_experiment
from testbed.trace.played import read_played
from testbed.trace.simulate import ideal_step_ns, ideal_steps_ns, step_ends

if TYPE_CHECKING:
    import pandas

    from testbed.vm import GuestKernel

FILE = "cells.toml"
Duplex = Literal["full", "inbound"]
_FOLDER, _ASIDE = "predicted", ".playing-"
_MTU = 1500
_IDEAL_STEPS = 3
SETTLED = 0.01
"""Largest drift, as a share of a step, of steps that count as settled."""


class DrawnLinks(Frozen):
    """Links with random rates, one for each node of a star or boundary of a line."""

    rates: tuple[str, str]
    """Minimum and maximum rate, with a uniform distribution between them."""
    delay: str
    buffer: str = "60s"
    """Size of the buffer, as its drain time."""
    seed: int
    """Seed of the rates."""


class PlayTable(Frozen):
    """Fields of a cell besides its job: its links, and how to play it."""

    links: str | tuple[str, ...] | DrawnLinks
    """A profile or `link(80Mbit, 10ms)`; one for all, or one per link."""
    topology: Topology = "line"
    sites: Sites = None
    """Of a star: nodes behind a router whose link to the hub they share."""
    duplex: Duplex = "full"
    """inbound: computed instead of played, with the rate and delay of the uplinks; see `metrics.links.InboundWire`."""
    play: bool = True
    """Whether to play the cell; otherwise only the ideal is computed."""
    packets: Annotated[int, Field(ge=1)] | None = None
    """For play, divide rates, buffers and messages by a common factor, so that the smaller message has about this many
    packets. Without loss, this changes no time except that of a single packet. None: by 1."""
    steps: Annotated[int, Field(ge=2)] = 4
    """Maximum number of steps to play; fewer if they provably repeat."""
    link_seed: Annotated[int, Field(ge=0)] = 0
    label: dict[str, str | float] = Field(default={})
    """Labels for figures: the paper's name of the cell, its published numbers."""


class PipelineCellTable(PipelineTable, PlayTable):
    """A pipeline cell."""


class DataParallelCellTable(DataParallelTable, PlayTable):
    """A data parallel cell: `parallelism = "data"`."""


class ChurnTable(Frozen):
    """Trainings of a cell with churn, i.e. whose sites come and go."""

    seeds: Annotated[int, Field(ge=1, strict=True)]
    """Number of trainings, with absences from seeds 0, 1 ..."""
    steps: Annotated[int, Field(ge=3, strict=True)]
    """Number of steps per training."""
    in_turn: Annotated[int, Field(ge=0, strict=True)] = 0
    """Number of trainings that are also played as one continuous trace."""


class HybridCellTable(HybridTable, PlayTable):
    """A cell with pipelines within replicas and data parallel training across them: `parallelism = "hybrid"`. Its links
    are those of its scenario's sites.
    """

    topology: Literal["star"] = "star"
    churn: ChurnTable | None = None
    """None: no churn. Otherwise trainings with churn, see `churned.py`; the cell itself is played without churn."""

    @model_validator(mode="after")
    def _churn_can_be_played(self) -> HybridCellTable:
        if self.churn is None:
            return self
        if self.rounds:
            raise ValueError("rounds and churn exclude each other: churn determines the rounds; remove one")
        if self.staleness:
            raise ValueError(f"churn requires staleness 0, but it is {self.staleness}")
        if not self.play or self.duplex != "full":
            why = f"duplex is {self.duplex}" if self.play else "play is false"
            raise ValueError(f"churn requires a cell that is played, but {why}")
        if not any(device.churn for device in load_scenario(self.scenario).devices()[: sum(self.replicas)]):
            raise ValueError(
                f"churn requires sites that come and go, but those of scenario {self.scenario} always stay; state "
                "stays and away in the scenario's row, or remove churn"
            )
        return self


AnyShape = Shape | DataParallelShape | HybridShape


class _Kind(NamedTuple):
    """How to resolve the table of a kind of job."""

    table: type[PlayTable]
    resolve: Callable[[Mapping[str, Any], str], AnyShape]
    links: Callable[[Mapping[str, Any], str], tuple[str, ...]] | None = None
    """Derives the links from the job; None: the table states them."""


_KINDS: Mapping[str, _Kind] = {
    "pipeline": _Kind(PipelineCellTable, resolve_shape),
    "data": _Kind(DataParallelCellTable, resolve_data_parallel),
    "hybrid": _Kind(HybridCellTable, resolve_hybrid, access_links),
}


class PredictionCell(Frozen):
    """One cell with every number resolved: exactly the fields that determine its result."""

    shape: AnyShape
    topology: Topology
    profiles: tuple[LinkProfile, ...]
    sites: Sites = Field(default=None, exclude_if=is_none)
    duplex: Duplex
    play: bool
    scale: int
    steps: int
    link_seed: int

    @property
    def id(self) -> str:
        """Return the key of its stored result."""
        return hashlib.sha256(canonical_json(self).encode()).hexdigest()[:12]


class Planned(NamedTuple):
    """A cell, and its origin in the file."""

    grid: str
    stated: dict[str, Any]
    """Its fields in the file, by dotted name."""
    cell: PredictionCell
    fields: Mapping[str, Any]
    """The same as nested tables."""


class PredictionResult(Frozen):
    """Result of a cell. Times are step times, in the steady state if one was reached."""

    ideal_ns: int | None
    """Step time over formula links, `metrics.links`; None in results older than their model of shared links."""
    unlinked_ns: int
    """Step time if messages take no time."""
    step_ns: float | None
    """Played: the shape's `steady_ns` of the measured steps; None: not played."""
    steps_ns: tuple[int, ...] = ()
    """Durations of the measured steps."""
    first: int | None = None
    """Number of the first measured step."""
    repeats: bool = False
    """Whether they provably repeat to the nanosecond. For a job with overlapping steps: whether they were observed to,
    in which case the step time is the mean over a period."""
    drift: float | None = None
    """For a job with overlapping steps: `player.split.drift`. None for other jobs, and in old results."""
    wire_bytes: float | None = None
    """Bytes of IP packets per step as played, over all nodes: smaller than the cell's by `scale`."""
    retransmitted_bytes: int | None = None
    """Total over all played steps."""
    kernel: str | None = None

    @property
    def unsettled(self) -> bool:
        """Whether its steps neither repeat nor stay within `SETTLED`, so that more steps would change the result.

        Steps that stay within it may still change later; only repeating steps provably do not.
        """
        return not self.repeats and (self.drift or 0.0) > SETTLED


def cell_files() -> dict[str, Path]:
    """Return the file of every predicted experiment by name: `./experiments` before the shipped ones."""
    folders = reversed(paths.experiment_folders())
    return {path.parent.name: path for folder in folders for path in sorted(folder.glob(f"*/{FILE}"))}


def plan_cells(name: str, *, quick: bool = False) -> list[Planned]:
    """Return the cells of an experiment, by name or by the path of its cells.toml, in the file's order.

    `quick`: the short forms of the grids that have one. SpecError or UnknownNameError for an invalid file.
    """
    path = Path(name).resolve() if name.endswith(".toml") else cell_files().get(name)
    if path is None:
        raise UnknownNameError("predicted experiment", name, cell_files())
    content = read_toml(path)
    if unknown := set(content) - {"question", "cell", "grid"}:
        raise UnknownNameError(f"key of {path}:", unknown.pop(), ("question", "cell", "grid"))
    grids = content.get("grid", {})
    if not isinstance(grids, Mapping) or not grids:
        raise SpecError(f"{path} has no cells: add a [grid.NAME] with axes or variants")
    planned: list[Planned] = []
    for grid, table in grids.items():
        planned += _grid(path, str(grid), content, table, quick)
    if not planned:
        raise SpecError(f"{path} has no [grid.NAME.quick], so --quick does not apply; add one, or omit --quick")
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
    """Return the cell with changed fields; None removes a field. SpecError as from `plan_cells`."""
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
            raise SpecError(f"{where}: the scenario determines the links; remove links, or change the scenario")
        fields = {**fields, "links": kind.links(job, where)}
    table = validated(kind.table, fields, where)
    shape = kind.resolve(job, where)
    if table.steps < (least := shape.least_steps):
        raise SpecError(f"{where}: steps is {table.steps}; its steady state needs at least {least}")
    if fault := sites_fault(table.topology, shape.nodes, table.sites):
        raise SpecError(f"{where}: {fault}")
    small = max(1, min(shape.message_bytes) // ((table.packets or 1) * (_MTU - HEADER_BYTES)))
    cell = PredictionCell(
        shape=shape,
        profiles=_profiles(table, shape.nodes, load),
        play=table.play and table.duplex == "full",
        scale=small if table.packets else 1,
        **{name: getattr(table, name) for name in ("topology", "sites", "duplex", "steps", "link_seed")},
    )
    uplinks = {link.up and (link.up.rate_bps, link.up.delay_ns) for link in cell.profiles}
    if cell.duplex == "inbound" and (None in uplinks or len(uplinks) > 1):
        raise SpecError(f"{where}: duplex is inbound, which needs uplinks of one rate and delay; use duplex = 'full'")
    if cell.scale > 1 and any(
        link.background or any(pipe.schedule or pipe.trace for pipe in link.pipes)
        for link in (*cell.profiles, *(site.profile for site in table.sites or ()))
    ):
        raise SpecError(f"{where}: packets divides rates, but not those of background flows, schedules and traces")
    return cell


def _profiles(table: PlayTable, nodes: int, load: Callable[[str], LinkProfile]) -> tuple[LinkProfile, ...]:
    if isinstance(table.links, DrawnLinks):
        slow, fast = (units.parse_rate(rate) for rate in table.links.rates)
        if slow > fast:
            raise SpecError(f"links.rates are {list(table.links.rates)}; state the lower one first")
        draw = random.Random(table.links.seed)
        rates = [draw.randint(slow // 8, fast // 8) * 8 for _ in range(link_count(table.topology, nodes))]
        return tuple(load(f"link({rate}bit, {table.links.delay}, buffer={table.links.buffer})") for rate in rates)
    names = [table.links] if isinstance(table.links, str) else table.links
    if len(names) not in (1, count := link_count(table.topology, nodes)):
        raise SpecError(f"there are {len(names)} links for a {table.topology} of {nodes} nodes; state 1 or {count}")
    return tuple(load(name) for name in names)


# ------------------------------------------------------------------ playing
def play_missing(
    planned: Iterable[Planned],
    folder: Path,
    kernel: GuestKernel,
    *,
    say: Callable[[str], None],
    guests: int = 1,
    play: PlayJobs = play_jobs,
) -> None:
    """Play the cells without a result in `folder`. LabError if a cell cannot be played; the other results are kept.
    `play`: `play_jobs`, or what plays elsewhere.
    """
    results.make_folder(folder / _FOLDER)
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
        say(f"{len(missing)} cells to play")
        for cell in missing:
            if not cell.play:
                results.write_json(_file(folder, cell), PredictionResult(**compute_ideal(cell), step_ns=None))
        for left in folder.glob(f"{_ASIDE}*"):  # leftovers of a killed program: this one holds the folder's lock
            shutil.rmtree(left, ignore_errors=True)
        with paths.scratch_folder(_ASIDE, folder) as aside:
            cells = [cell for cell in missing if cell.play]
            jobs = [_job(cell, aside) for cell in cells]
            if jobs:
                work = aside / "work"
                play(jobs, clock="virtual", folder=work, kernel=kernel, guests=guests, progress=done)
    if errors:
        raise LabError(f"{len(errors)} of {len(cells)} cells could not be played: {errors[0]}")


def _job(cell: PredictionCell, aside: Path) -> PlayJob:
    trace = aside / f"{cell.id}.trace"
    cell.shape.trace(cell.steps, cell.scale).write(trace)
    profiles = [_scaled(profile, cell.scale) for profile in cell.profiles]
    sites = cell.sites and tuple(
        site.model_copy(update={"profile": _scaled(site.profile, cell.scale)}) for site in cell.sites
    )
    lab = guest_lab(cell.topology, profiles, cell.shape.nodes, sites)
    prove = cell.steps >= 2 * (cell.shape.period or 1)  # fewer steps cannot repeat
    output = aside / f"{cell.id}.played"
    return PlayJob(trace=trace, lab=lab, link_seed=cell.link_seed, output=output, prove_steady=prove)


def _result(cell: PredictionCell, output: Path, kernel: GuestKernel) -> PredictionResult:
    trace, played = cell.shape.trace(cell.steps, cell.scale), read_played(output)
    split = step_split(trace, played, cell.shape.period or 1)
    begins = [0, *step_ends(trace, played.lanes, played.steps)][: played.steps]
    step_ns, cycle, drifts = cell.shape.steady_ns(split.steps_ns), None, None
    if played.steady is not None:
        step_ns = split.step_ns
    elif not isinstance(cell.shape, Shape) and cell.shape.period is None:
        drifts = drift(trace, played, cell.shape.staleness + 1)
        if (cycle := seen_to_repeat(trace, played)) is not None:
            step_ns = fmean(split.steps_ns[-1 - cycle : -1])
    return PredictionResult(
        **compute_ideal(cell, [at for step, at in enumerate(begins) if step >= split.first]),
        step_ns=step_ns,
        steps_ns=split.steps_ns,
        first=split.first,
        repeats=played.steady is not None or cycle is not None,
        drift=drifts,
        wire_bytes=split.sent_bytes,
        retransmitted_bytes=sum(state.bytes_retransmitted for state in played.sockets[-1]),
        kernel=kernel.version,
    )


def compute_ideal(cell: PredictionCell, begins_ns: Sequence[int] = ()) -> dict[str, int | None]:
    """Compute the ideal times of a result. `begins_ns`: start of each measured step, which matters where links vary."""
    period = cell.shape.period
    varies = any(profile.varies for profile in (*cell.profiles, *(site.profile for site in cell.sites or ())))
    steps = cell.steps if period is None or varies else _IDEAL_STEPS - 1 + period
    trace = cell.shape.trace(steps)
    lab = cell.topology, cell.profiles, cell.shape.nodes, cell.sites
    if cell.duplex == "inbound":
        pipe = cell.profiles[0].up
        assert pipe is not None, "the cell was checked"
        links: InboundWire | Pipes = InboundWire(pipe.rate_bps, pipe.delay_ns)
    else:
        links = Pipes(*lab)
    ideal, unlinked = (
        cell.shape.steady_ns(spans if period is None or varies else spans[-period:])
        for spans in (ideal_steps_ns(trace, over, steps) for over in (links, None))
    )
    if varies and period == 1 and begins_ns:  # each step alone, from the moment at which it could begin
        alone = [ideal_step_ns(trace, Pipes(*lab, begins_ns=at), 1) for at in begins_ns]
        ideal = cell.shape.steady_ns(alone)
    return {"ideal_ns": round(ideal), "unlinked_ns": round(unlinked)}


def _scaled(profile: LinkProfile, scale: int) -> LinkProfile:
    """Return the link at a fraction of its rate, with the same drain time of its buffer."""

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
    """Return the result of a cell; None if `folder` has none."""
    file = _file(folder, cell)
    return results.read_json(file, PredictionResult) if file.exists() else None


def count_missing(planned: Iterable[Planned], folder: Path) -> int:
    """Return the number of cells without a result in `folder`."""
    return len(_missing(planned, folder))


def _missing(planned: Iterable[Planned], folder: Path) -> list[PredictionCell]:
    return list({each.cell.id: each.cell for each in planned if not _file(folder, each.cell).exists()}.values())


def predictions(planned: Sequence[Planned], folder: Path) -> pandas.DataFrame:
    """Return a row for each cell with a result: grid, id, the fields in which cells differ, and the result in seconds,
    unscaled bytes, and tokens per second. Without the fields of churn, which `churned.py` handles.
    """
    import pandas

    names = sorted({name for each in planned for name in each.stated if not name.startswith("churn.")})
    rows = []
    for each in planned:
        if (result := result_of(each.cell, folder)) is None:
            continue
        shape = each.cell.shape
        step_ns = result.ideal_ns if result.step_ns is None else result.step_ns
        rows.append(
            {
                "grid": each.grid,
                "cell": each.cell.id,
                **{name: _plain(each.stated.get(name)) for name in names},
                **shape.columns(),
                "payload_bytes_per_step": shape.payload_bytes,
                "wire_bytes_per_step": None if result.wire_bytes is None else result.wire_bytes * each.cell.scale,
                "step_s": math.nan if result.step_ns is None else result.step_ns / 1e9,
                "ideal_s": math.nan if result.ideal_ns is None else result.ideal_ns / 1e9,
                "no_network_s": result.unlinked_ns / 1e9,
                "formula_s": None if each.cell.sites else shape.formula_s(each.cell.topology, each.cell.profiles),
                "tokens_per_s": math.nan if step_ns is None else shape.tokens * 1e9 / step_ns,
                "repeats": result.repeats,
                "drift": math.nan if result.drift is None else result.drift,
                "unsettled": result.unsettled,
                "steps_counted": len(result.steps_ns),
                "retransmitted_bytes": result.retransmitted_bytes,
            }
        )
    frame = pandas.DataFrame(rows)
    agreed = [name for name in names if name in frame and frame[name].nunique(dropna=False) == 1]
    return frame.drop(columns=agreed)


def _plain(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value
