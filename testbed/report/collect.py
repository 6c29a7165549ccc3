"""Collect runs from result folders into comparable groups: which runs stand side by side, in which order, under which
name.

Runs of one codec over one network are one entry, whatever their seeds and however often they were repeated. Entries are
compared with each other when their cells differ in nothing but the codec and the links' profiles; any other difference
(engine, timing, topology, schedule, micro-batches in flight) makes another group, which says what sets it apart.
Optimiser settings for which each codec has a value of its own, because they were tuned or stated so, do not set groups
apart; every figure names them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from testbed import results
from testbed.codecs.catalogue import placement
from testbed.errors import UserError
from testbed.frozen import canonical_json, flatten
from testbed.metrics.compare import CodecComparison, compare
from testbed.profiles import LinkProfile
from testbed.report.entry import Entry, Result
from testbed.results import Run
from testbed.spec import Cell, ImagesSpec

BASELINE = "fp32"
"""The codec that speed-ups and losses are compared with."""
SECOND_BASELINE = "bf16"
"""The codec that costs nothing to use: another one must be faster to be worth its trouble."""
_SEED = "training.seed"
_AS_CHOSEN = "as chosen"
"""Stands for a setting of which each codec has a value of its own, beside groups that state one for all."""
_CODEC_ORDER = (BASELINE, "bf16", "int8", "delta-int8")


Links = tuple[LinkProfile, ...]
"""The profiles of a network: one for all links, or one per link."""


class Group(NamedTuple):
    """Entries that differ only in codec and network."""

    label: str
    """What sets it apart from the other groups; empty when there is only one."""
    networks: dict[str, Links]
    """Name to show -> profiles, fastest uplink first."""
    codecs: tuple[str, ...]
    cells: dict[tuple[str, str], Entry]
    """(name of the network, codec) -> its runs."""
    own: dict[str, dict[str, Any]]
    """Setting -> codec -> value, where each codec has a value of its own."""
    palette: tuple[str, ...]
    """The codecs of all groups, which share their colours."""

    def row(self, network: str) -> list[Entry]:
        """Return the entries over one network, in the order of the codecs."""
        return [self.cells[network, codec] for codec in self.codecs if (network, codec) in self.cells]

    def finished(self, network: str) -> list[Entry]:
        return [entry for entry in self.row(network) if entry.ok]

    def baseline(self, network: str, codec: str = BASELINE) -> Entry | None:
        """Return the entry of fp32, or of another codec, over that network if a run of it ended well."""
        entry = self.cells.get((network, codec))
        return entry if entry is not None and entry.ok else None

    def compared(self, network: str, entry: Entry, codec: str = BASELINE) -> CodecComparison | None:
        """Compare an entry with that codec over the same network; None where either has no run that ended well.

        There is no speed-up where either was contended.
        """
        base = self.baseline(network, codec)
        if base is None or not entry.ok:
            return None
        comparison = _compare(entry, base)
        contended = entry.contended or base.contended
        return comparison._replace(speed_up=None, separable=False) if contended else comparison

    def at_most(self, count: int) -> tuple[Group, list[str]]:
        """Return the group over so many of its networks at most, spread evenly from the fastest to the slowest, and
        those that are left out.
        """
        names = list(self.networks)
        if len(names) <= count:
            return self, []
        kept = {names[round(place * (len(names) - 1) / (count - 1))] for place in range(count)}
        few = self._replace(
            networks={name: links for name, links in self.networks.items() if name in kept},
            cells={key: entry for key, entry in self.cells.items() if key[0] in kept},
        )
        return few, [name for name in names if name not in kept]

    @property
    def entries(self) -> list[Entry]:
        return [entry for network in self.networks for entry in self.row(network)]

    @property
    def token(self) -> str:
        """What a loss is the mean over, and throughput counts."""
        return "image" if any(isinstance(entry.cell.workload, ImagesSpec) for entry in self.entries) else "token"


@functools.lru_cache(maxsize=4096)
def _compare(ours: Entry, base: Entry) -> CodecComparison:
    # Table, figures and sentences ask for the same ones, and each is thousands of resampled series.
    return compare(ours.steps, base.steps)


def latest(experiment: Path, cell_ids: Collection[str] | None = None) -> list[Run]:
    """Return, for every cell or for these, the runs that ended well, oldest first; where none did, the newest run."""
    by_cell: dict[str, list[Run]] = {}
    for run in results.runs(experiment):
        if cell_ids is None or run.folder.parent.name in cell_ids:
            by_cell.setdefault(run.folder.parent.name, []).append(run)
    return [run for cell_id, runs in by_cell.items() for run in results.finished_runs(experiment, cell_id) or runs[-1:]]


def read_runs(runs: Iterable[Run]) -> list[Result]:
    """Read each run's cell and summary, and what the sweep says of how it was tuned."""
    last_sweep = functools.cache(results.last_sweep)
    read = []
    for run in runs:
        cell_id, sweep = run.folder.parent.name, last_sweep(run.folder.parent.parent)
        read.append(Result(run, run.cell, run.summary, sweep.marks.get(cell_id, ""), cell_id in sweep.stated))
    return read


@functools.cache
def codec_order(codec: str) -> tuple[int, float, str]:
    """Return a sorting key: the oldest codecs, then the others from wide to narrow, negative controls, unreadable
    texts.
    """
    if codec in _CODEC_ORDER:
        return _CODEC_ORDER.index(codec), 0.0, codec
    others = len(_CODEC_ORDER)
    try:
        chosen = placement.parse_placement(codec)
    except UserError:  # a result may be older than the table, or of a class that is not at hand
        return others + 2, 0.0, codec
    return others + chosen.control, -chosen.nominal_bits, codec


def _network_order(links: Links) -> tuple[float, float, str]:
    """Return a sorting key: the slowest uplink."""
    ups = [(-link.up.rate_bps, link.up.delay_ns) if link.up else (-math.inf, 0) for link in links]
    return (*max(ups), links[0].name)


def _settings(cell: Cell) -> dict[str, Any]:
    """Return the fields of a cell that set groups apart, by dotted name; lists become text, which is hashable."""
    fields = flatten(cell.model_dump(mode="json", exclude={"codec", "profiles"}))
    return {name: json.dumps(value) if isinstance(value, list) else value for name, value in fields}


def _text(cell: Cell) -> str:
    """Return all that decides a network, apart from its topology."""
    return " ".join(map(canonical_json, cell.profiles))


def _network_names(runs_read: Sequence[Result]) -> dict[str, str]:
    """Return the name to show for each network's text; a profile file that changed between runs adds a mark."""
    texts = {_text(result.cell): result.cell.network for result in runs_read}
    marks = {text: hashlib.blake2b(text.encode(), digest_size=2).hexdigest() for text in texts}
    count = Counter(texts.values())
    return {text: name if count[name] == 1 else f"{name} [{marks[text]}]" for text, name in texts.items()}


def _own(
    runs_read: Sequence[Result], settings: Sequence[Mapping[str, Any]], varying: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Return the optimiser settings that follow from the codec: setting -> codec -> value. What states its own is left
    out of account: it stands apart.
    """
    own = {}
    for key in varying:
        values: dict[str, set[Any]] = {}
        for result, setting in zip(runs_read, settings, strict=True):
            if not result.stated:
                values.setdefault(result.cell.codec, set()).add(setting.get(key))
        if key.startswith("optimiser.") and values and all(len(seen) == 1 for seen in values.values()):
            own[key] = {codec: next(iter(values[codec])) for codec in sorted(values, key=codec_order)}
    return own


def groups(runs_read: Sequence[Result]) -> list[Group]:
    """Group comparable runs. Where a run is listed twice, the later one counts."""
    names = _network_names(runs_read)
    settings = [_settings(result.cell) for result in runs_read]
    every = {key for setting in settings for key in setting}
    varying = {key for key in every if len({setting.get(key) for setting in settings}) > 1} - {_SEED}
    own = _own(runs_read, settings, varying)
    apart = sorted(varying - set(own)) + sorted(own) * any(result.stated for result in runs_read)
    together: dict[tuple[Any, ...], list[Result]] = {}
    for result, setting in zip(runs_read, settings, strict=True):
        chosen = [key in own and not result.stated for key in apart]
        values = [_AS_CHOSEN if own_value else setting.get(key) for key, own_value in zip(apart, chosen, strict=True)]
        together.setdefault(tuple(values), []).append(result)
    palette = tuple(sorted({result.cell.codec for result in runs_read}, key=codec_order))
    made = []
    for place, members in sorted(together.items(), key=lambda item: [_value_order(value) for value in item[0]]):
        label = ", ".join(f"{key} = {value}" for key, value in zip(apart, place, strict=True))
        made.append(_group(label, members, names, own, palette))
    return made


def _value_order(value: Any) -> tuple[float, str]:
    return (value, "") if isinstance(value, int | float) else (float("inf"), str(value))


def _group(
    label: str,
    members: list[Result],
    names: Mapping[str, str],
    own: dict[str, dict[str, Any]],
    palette: tuple[str, ...],
) -> Group:
    networks = {names[_text(result.cell)]: result.cell.profiles for result in members}
    cells: dict[tuple[str, str], dict[Path, Result]] = {}
    for result in members:
        cells.setdefault((names[_text(result.cell)], result.cell.codec), {})[result.run.folder] = result
    return Group(
        label=label,
        networks=dict(sorted(networks.items(), key=lambda item: _network_order(item[1]))),
        codecs=tuple(sorted({result.cell.codec for result in members}, key=codec_order)),
        cells={key: Entry(tuple(several.values())) for key, several in cells.items()},
        own=own,
        palette=palette,
    )
