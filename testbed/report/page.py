"""The report of a sweep: an HTML page, its figures as PNG and SVG, and a page for each cell.

Reads results, runs nothing. The pages need neither network nor server.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from testbed import __version__, results
from testbed.errors import ResultsError, UnknownNameError
from testbed.profiles import LinkProfile
from testbed.report import collect, gantt, style, tables
from testbed.report.bars import bytes_per_step, efficiency, step_time
from testbed.report.canvas import Drawing, group_looks, inline_svg, link_words, save_drawing
from testbed.report.cell_page import cell_pages, certified, engines, write_cell_pages
from testbed.report.certificates import asked_against_measured
from testbed.report.collect import Group
from testbed.report.comparison import ComparisonTable, comparison_table
from testbed.report.conclusions import conclusions, same_maths
from testbed.report.entry import Result
from testbed.report.lines import loss_against_steps, loss_against_time
from testbed.report.live_checked import live_sentences
from testbed.report.settings import flat, settings_line, settings_words
from testbed.report.templates import write_page
from testbed.report.utilisation import utilisation
from testbed.results import CompareSpec

_MOST_NETWORKS = 9
"""Maximum number of networks in the figures of a group; the table has all."""
_INSIDE = 700_000
"""Maximum size of inline figures in a page, in characters; the browser loads further ones lazily."""


class _Figure(NamedTuple):
    stem: str
    caption: str
    details: tuple[str, ...]
    picture: Markup
    """The figure itself, or a reference to its file."""


class _Section(NamedTuple):
    group: Group
    sentences: list[str]
    table: tables.ResultTable
    comparison: ComparisonTable
    figures: list[_Figure]


def write_report(experiment: Path, page: Path, index: Path | None = None) -> Path:
    """Write the report of an experiment's last sweep to `page` (an .html file), its figures to the folder `figures`
    next to it, and a page for each cell to the folder `cells`.

    `experiment` is a result folder. All successful runs of each cell count; without one, the newest run is listed with
    its error. `index`: the page of all results, to link to. Returns `page`. ResultsError if there are no runs or a file
    cannot be read; SpecError if the page cannot be written.
    """
    sweep = results.last_sweep(experiment)
    runs_read = collect.read_runs(collect.latest(experiment, sweep.cells))
    if not runs_read:
        lost = "holds no run of its last sweep, so there is nothing to report; run the sweep again"
        raise ResultsError(f"{experiment} {lost}")
    folder = results.make_folder(page.parent / "figures", "choose another with --output")
    groups = collect.groups(runs_read)
    shown = tables.result_tables(groups)
    room, sections = _INSIDE, []
    for number, (group, table) in enumerate(zip(groups, shown, strict=True), 1):
        sections.append(_section(group, table, folder, f"{number}-" if len(groups) > 1 else "", room))
        room -= sum(len(figure.picture) for figure in sections[-1].figures)
    certificates = [certified(result) for group in groups for entry in group.entries for result in entry.results]
    write_cell_pages(experiment, sweep, groups, shown, page)
    return write_page(
        page,
        "report",
        title=experiment.resolve().name,
        question=sweep.question,
        command=sweep.command,
        index="" if index is None else os.path.relpath(index, page.parent),
        sections=sections,
        verdicts=_verdicts(experiment, sweep.compare) if any(result.ok for result in runs_read) else [],
        columns=shown[0].columns,
        labelled=len(groups) > 1,
        pages=cell_pages(groups),
        live=[*collect.left_out(experiment, sweep.cells), *live_sentences(experiment, sweep)],
        passed=sum(one.verdict == "PASS" for one in certificates),
        runs=len(certificates),
        uncertified=[one for one in certificates if one.verdict != "PASS"],
        failed=[result for result in runs_read if not result.ok],
        environment=_environment(runs_read),
        engines=engines(runs_read),
        words={name: link_words(links) for group in groups for name, links in group.networks.items()},
        profiles=_profiles(groups),
        experiment=experiment,
        taken=_taken(runs_read),
        version=__version__,
    )


def _verdicts(experiment: Path, asked: CompareSpec | None) -> list[list[str]]:
    """Return the requested comparisons as rows of text, headings first, with the same numbers as an experiment's
    comparisons.csv. Empty if there is nothing to compare.
    """
    if asked is None:
        return []
    # importing pandas takes half a second, so only sweeps with comparisons do it
    from testbed.report import experiment_tables, experiment_verdicts, experiments

    seeds = experiment_tables.seeds_frame(experiment, experiments.runs_frame(experiment))
    compared = experiment_verdicts.compared(seeds, asked)
    if compared.empty:
        return []
    shown = experiment_verdicts.verdict_table(compared)
    rows = [["" if value != value else str(value) for value in row] for row in shown.itertuples(index=False)]
    return [list(map(str, shown.columns)), *rows]


def draw_gantt(experiment: Path, cell_id: str, folder: Path) -> Path:
    """Draw one step of a cell's run as PNG and SVG into `folder`, which is created; return the PNG.

    UnknownNameError for a cell without runs in `experiment`, ResultsError if none succeeded.
    """
    wanted = {*results.last_sweep(experiment).cells, cell_id}  # all cells, for consistent colours of codecs
    groups = collect.groups(collect.read_runs(collect.latest(experiment, wanted)))
    for group in groups:
        for entry in group.entries:
            chosen = entry.only(cell_id)
            if chosen is not None:
                with style.applied():
                    look = group_looks(group)[chosen.cell.codec]
                    drawing = gantt.gantt(chosen.typical, look, settings_line(group), f"gantt-{cell_id}")
                save_drawing(drawing, results.make_folder(folder), drawing.name)
                return folder / f"{drawing.name}.png"
    entries = [entry for group in groups for entry in group.entries]
    raise UnknownNameError("cell", cell_id, (result.cell.id for entry in entries for result in entry.results))


def draw_figures(group: Group, foot: str, *, same_maths: bool) -> list[Drawing]:
    """Draw all figures of a group, in reading order.

    `foot` is the small print of each. `same_maths`: each codec's losses are equal over every network.
    """
    with style.applied():
        links = asked_against_measured(group, foot)
        return [
            step_time(group, foot),
            loss_against_time(group, foot),
            loss_against_steps(group, foot, same_maths=same_maths),
            bytes_per_step(group, foot),
            efficiency(group, foot),
            *gantt.usual(group, foot),
            *utilisation(group, foot),
            *([] if links is None else [links]),
        ]


def _section(group: Group, table: tables.ResultTable, folder: Path, prefix: str, room: int) -> _Section:
    """Draw a group; its figure files begin with `prefix`, and as many as fit into `room` are inlined."""
    drawn: list[_Figure] = []
    few, left_out = group.at_most(_MOST_NETWORKS)
    words = f"{len(few.networks)} of {len(group.networks)} networks; the table has all." if left_out else ""
    if any(entry.ok for entry in few.entries):
        for drawing in draw_figures(few, settings_line(group), same_maths=same_maths(group)):
            stem = prefix + drawing.name
            svg = save_drawing(drawing, folder, stem)
            picture = Markup(inline_svg(svg, stem, drawing.title))
            if len(picture) > room:
                picture = Markup('<img loading="lazy" src="figures/{}.svg" alt="{}">').format(stem, drawing.title)
            room -= len(picture)
            drawn.append(_Figure(stem, words, (drawing.caption, *settings_words(group).splitlines()), picture))
    return _Section(group, conclusions(group), table, comparison_table(group), drawn)


def _profiles(groups: Sequence[Group]) -> list[tuple[str, LinkProfile, str]]:
    """Return every profile of every network once, with its display name and its numbers as text."""
    names: dict[LinkProfile, str] = {}
    for group in groups:
        for name, links in group.networks.items():
            for link in links:
                names.setdefault(link, name if len(links) == 1 else link.name)
    return [(name, link, link_words((link,))) for link, name in names.items()]


def _environment(runs: Sequence[Result]) -> dict[str, str]:
    """Return every key of the runs' environments; a value that differs between runs as 'first … last'."""
    values: dict[str, set[str]] = {}
    for result in runs:
        for key, value in flat(result.run.environment).items():
            values.setdefault(key, set()).add(value)
    shown = {}
    for key, several in sorted(values.items()):
        ordered = sorted(several)
        more = f" ({len(ordered)} different)" if len(ordered) > 2 else ""
        shown[key] = ordered[0] if len(ordered) == 1 else f"{ordered[0]} … {ordered[-1]}{more}"
    return shown


def _taken(runs: Sequence[Result]) -> str:
    """Return when the first and the last certificate were taken."""
    moments = sorted(certificate.taken_at for result in runs for _, certificate in result.taken)
    return f"{moments[0]} to {moments[-1]}" if moments else ""
