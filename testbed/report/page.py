"""The report: one self-contained HTML page, with its figures beside it as PNG and SVG.

Reads results, starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from testbed import __version__, paths, results
from testbed.errors import ResultsError, UnknownNameError
from testbed.profiles import LinkProfile
from testbed.records import Measurement, RunCertificates
from testbed.report import collect, gantt, style, tables
from testbed.report.bars import bytes_per_step, efficiency, step_time
from testbed.report.canvas import Drawing, group_looks, inline_svg, link_words, save_drawing
from testbed.report.certificates import asked_against_measured, measurement_cells, run_bound_words, share_text
from testbed.report.collect import Group
from testbed.report.comparison import ComparisonTable, comparison_table
from testbed.report.conclusions import conclusions, same_maths
from testbed.report.entry import Result
from testbed.report.lines import loss_against_steps, loss_against_time
from testbed.report.live import live_sentences
from testbed.report.numbers import MISSING
from testbed.report.settings import settings_words
from testbed.report.utilisation import utilisation


class _Figure(NamedTuple):
    stem: str
    title: str
    caption: str
    svg: Markup


class _Section(NamedTuple):
    group: Group
    sentences: list[str]
    table: tables.ResultTable
    comparison: ComparisonTable
    figures: list[_Figure]


class _Check(NamedTuple):
    """One quantity of one link, before and after a run."""

    link: str
    quantity: str
    asked: str
    before: str
    after: str
    moves: str
    verdict: str
    note: str


class _Certified(NamedTuple):
    result: Result
    checks: list[_Check]
    verdict: str
    missing: str
    """When the links were not measured: 'before', 'after' or 'before or after'; empty where they were both times."""
    again: str
    """What failed in another attempt; empty where nothing did."""
    bound: str
    """What all deviations together do to the step, and what was late during the run; empty where nothing is known."""


def write_report(experiment: Path, page: Path) -> Path:
    """Write the report of an experiment's last sweep to `page` (an .html file), its figures to the folder `figures`
    beside it.

    `experiment` is a result folder. Of each cell all runs that ended well count; where none did, the newest is listed
    with its error. Returns `page`. ResultsError when there is no run at all or a file cannot be read; SpecError when
    the page cannot be written.
    """
    sweep = results.last_sweep(experiment)
    runs_read = collect.read_runs(collect.latest(experiment, sweep.cells))
    if not runs_read:
        raise ResultsError(
            f"{experiment} holds no run of its last sweep, so there is nothing to report; run the sweep again"
        )
    folder = results.make_folder(results.make_folder(page.parent) / "figures")
    groups = collect.groups(runs_read)
    shown = zip(groups, tables.result_tables(groups), strict=True)
    sections = [
        _section(*pair, folder, "" if len(groups) == 1 else f"{number}-") for number, pair in enumerate(shown, 1)
    ]
    title = experiment.resolve().name
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("page.html.j2")
    text = template.render(
        title=title,
        question=sweep.question,
        command=sweep.command,
        sections=sections,
        live=live_sentences(experiment, sweep),
        certified=[_certified(result) for group in groups for entry in group.entries for result in entry.results],
        failed=[result for result in runs_read if not result.ok],
        environment=_environment(runs_read),
        engines=_engines(runs_read),
        words={name: link_words(links) for group in groups for name, links in group.networks.items()},
        profiles=_profiles(groups),
        experiment=experiment,
        taken=_taken(runs_read),
        version=__version__,
    )
    draft = page.with_name(f".{page.name}.draft")
    draft.write_text(text, encoding="utf8")
    paths.give_to_user(draft)
    return draft.replace(page)


def draw_gantt(experiment: Path, cell_id: str, folder: Path) -> Path:
    """Draw one step of a cell's run as PNG and SVG into `folder`, which is made; return the PNG.

    UnknownNameError for a cell that has no run in `experiment`, ResultsError where none ended well.
    """
    wanted = {*results.last_sweep(experiment).cells, cell_id}  # all of the sweep, whose codecs share their colours
    groups = collect.groups(collect.read_runs(collect.latest(experiment, wanted)))
    for group in groups:
        for entry in group.entries:
            chosen = entry.only(cell_id)
            if chosen is not None:
                with style.applied():
                    look = group_looks(group)[chosen.cell.codec]
                    drawing = gantt.gantt(chosen.typical, look, settings_words(group), f"gantt-{cell_id}")
                save_drawing(drawing, results.make_folder(folder), drawing.name)
                return folder / f"{drawing.name}.png"
    raise UnknownNameError(
        "cell", cell_id, (result.cell.id for group in groups for e in group.entries for result in e.results)
    )


def draw_figures(group: Group, settings: str, *, same_maths: bool) -> list[Drawing]:
    """Draw all figures of a group, in the order in which they are read.

    `settings` stands below each picture. `same_maths`: each codec's losses are the same over every network.
    """
    with style.applied():
        links = asked_against_measured(group, settings)
        return [
            step_time(group, settings),
            loss_against_time(group, settings),
            loss_against_steps(group, settings, same_maths=same_maths),
            bytes_per_step(group, settings),
            efficiency(group, settings),
            *gantt.usual(group, settings),
            *utilisation(group, settings),
            *([] if links is None else [links]),
        ]


def _section(group: Group, table: tables.ResultTable, folder: Path, prefix: str) -> _Section:
    drawn = []
    if any(entry.ok for entry in group.entries):
        for drawing in draw_figures(group, settings_words(group), same_maths=same_maths(group)):
            stem = prefix + drawing.name
            svg = save_drawing(drawing, folder, stem)
            drawn.append(_Figure(stem, drawing.title, drawing.caption, Markup(inline_svg(svg, stem, drawing.title))))
    return _Section(group, conclusions(group), table, comparison_table(group), drawn)


def _certified(result: Result) -> _Certified:
    certificates = result.certificates
    if certificates is None:
        return _Certified(result, [], "none", "before or after", "", "")
    both = (("before", certificates.before), ("after", certificates.after))
    missing = [when for when, certificate in both[: len(certificates.needed)] if certificate is None]
    again = [
        f"{when}: {_said(certificate.rejected)}"
        for when, certificate in both
        if certificate is not None and certificate.rejected
    ]
    return _Certified(
        result,
        _checks(certificates),
        certificates.verdict,
        " or ".join(missing),
        "; ".join(again),
        run_bound_words(certificates),
    )


def _said(rejected: Sequence[Measurement]) -> str:
    words = []
    for measurement in rejected:
        asked, measured, _ = measurement_cells(measurement)
        words.append(
            f"{measurement.link} {measurement.direction} {measurement.quantity} {measured} where {asked} was asked"
        )
    return ", ".join(words)


def _checks(certificates: RunCertificates) -> list[_Check]:
    """Pair the measurements before and after. Where one is missing (only a run tells message sizes) there is a '-'."""
    pairs: dict[tuple[str, str, str, str], dict[str, Measurement]] = {}
    for when, certificate in (("before", certificates.before), ("after", certificates.after)):
        for measurement in certificate.measurements if certificate else ():
            pairs.setdefault((measurement.link, measurement.direction, measurement.quantity, measurement.detail), {})[
                when
            ] = measurement
    checks = []
    for (link, direction, quantity, detail), pair in pairs.items():
        measurement = next(iter(pair.values()))
        asked, _, _ = measurement_cells(measurement)
        bounds = [m.bound for m in pair.values() if m.bound is not None]
        before, after = (measurement_cells(pair[w])[1] if w in pair else MISSING for w in ("before", "after"))
        verdict = "FAIL" if any(m.verdict == "FAIL" for m in pair.values()) else "PASS"
        notes = dict.fromkeys(m.note for m in pair.values() if m.note)
        checks.append(
            _Check(
                f"{link} {direction}",
                f"{quantity} {detail}".strip(),
                asked,
                before,
                after,
                share_text(max(bounds, default=None)),
                verdict,
                "; ".join(notes),
            )
        )
    return checks


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = MISSING if item is None else str(item)
    return flat


def _profiles(groups: Sequence[Group]) -> list[tuple[str, LinkProfile, str]]:
    """Return every profile of every network once, with the name to show and its numbers in words."""
    names: dict[LinkProfile, str] = {}
    for group in groups:
        for name, links in group.networks.items():
            for link in links:
                names.setdefault(link, name if len(links) == 1 else link.name)
    return [(name, link, link_words((link,))) for link, name in names.items()]


def _environment(runs: Sequence[Result]) -> dict[str, str]:
    """Return every key of the runs' environments; values that changed from run to run as 'first … last'."""
    values: dict[str, set[str]] = {}
    for result in runs:
        for key, value in _flat(result.run.environment).items():
            values.setdefault(key, set()).add(value)
    shown = {}
    for key, several in sorted(values.items()):
        ordered = sorted(several)
        more = f" ({len(ordered)} different)" if len(ordered) > 2 else ""
        shown[key] = ordered[0] if len(ordered) == 1 else f"{ordered[0]} … {ordered[-1]}{more}"
    return shown


def _engines(runs: Sequence[Result]) -> list[str]:
    """Return 'relay: why it was chosen', once each."""
    records = [result.run.lab for result in runs if (result.run.folder / "lab.json").exists()]
    return list(dict.fromkeys(f"{record.engine}: {record.engine_reason}" for record in records))


def _taken(runs: Sequence[Result]) -> str:
    """Say when the first and the last certificate were taken."""
    moments = sorted(
        certificate.taken_at
        for result in runs
        if (both := result.certificates) is not None
        for certificate in (both.before, both.after)
        if certificate is not None
    )
    return f"{moments[0]} to {moments[-1]}" if moments else ""
