"""Collects runs from result folders into groups of comparable runs, with their order and names.

All runs of one codec over one network form an entry, regardless of seeds and repeats. Entries are comparable if their
cells differ only in codec and link profiles; any other difference (engine, timing, topology, schedule, micro-batches in
flight) makes a separate group, whose label names it. Optimiser settings with a value per codec, tuned or stated, do not
separate groups; every figure lists them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from testbed import results
from testbed.codecs.catalogue import placement
from testbed.errors import UserError
from testbed.frozen import canonical_json, flatten
from testbed.metrics.compare import CodecComparison, compare
from testbed.profiles import LinkProfile
from testbed.proofs import Proof, proofs_in
from testbed.report.entry import Entry, Result
from testbed.results import Run
from testbed.spec import Cell, ImagesSpec

BASELINE = "fp32"
"""The codec that speed-ups and losses are compared with."""
SECOND_BASELINE = "bf16"
"""The codec that costs nothing to use: any other must be faster to be worthwhile."""
_SEED = "training.seed"
_AS_CHOSEN = "as chosen"
"""Label of a setting with a value per codec, next to groups that state one value for all."""
_CODEC_ORDER = (BASELINE, "bf16", "int8", "delta-int8")


Links = tuple[LinkProfile, ...]
"""The profiles of a network: one for all links, or one per link."""


class Group(NamedTuple):
    """Entries that differ only in codec and network."""

    label: str
    """Difference from the other groups; empty if there is only one."""
    networks: dict[str, Links]
    """Display name -> profiles, fastest uplink first."""
    codecs: tuple[str, ...]
    cells: dict[tuple[str, str], Entry]
    """(name of the network, codec) -> its runs."""
    own: dict[str, dict[str, Any]]
    """Setting -> codec -> value, for settings with a value per codec."""
    palette: tuple[str, ...]
    """The codecs of all groups, which share their colours."""

    def row(self, network: str) -> list[Entry]:
        """Return the entries over one network, in the order of the codecs."""
        return [self.cells[network, codec] for codec in self.codecs if (network, codec) in self.cells]

    def finished(self, network: str) -> list[Entry]:
        return [entry for entry in self.row(network) if entry.ok]

    def baseline(self, network: str, codec: str = BASELINE) -> Entry | None:
        """Return the entry of fp32, or of another codec, over that network; None without a successful run."""
        entry = self.cells.get((network, codec))
        return entry if entry is not None and entry.ok else None

    def compared(self, network: str, entry: Entry, codec: str = BASELINE) -> CodecComparison | None:
        """Compare an entry with that codec over the same network; None if either has no successful run.

        There is no speed-up if either was contended.
        """
        base = self.baseline(network, codec)
        if base is None or not entry.ok:
            return None
        comparison = _compare(entry, base)
        contended = entry.contended or base.contended
        return comparison._replace(speed_up=None, separable=False) if contended else comparison

    def at_most(self, count: int) -> tuple[Group, list[str]]:
        """Return the group restricted to at most `count` networks, spread evenly from the fastest to the slowest, and
        the omitted networks.
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
        """The unit that a loss is averaged over, and that throughput counts."""
        return "image" if any(isinstance(entry.cell.workload, ImagesSpec) for entry in self.entries) else "token"


@functools.lru_cache(maxsize=4096)
def _compare(ours: Entry, base: Entry) -> CodecComparison:
    # Cached, because table, figures and sentences need the same ones, and each resamples thousands of series.
    return compare(ours.steps, base.steps)


def latest(experiment: Path, cell_ids: Collection[str] | None = None) -> list[Run]:
    """Return the successful runs of every cell, or of these, oldest first; if a cell has none, its newest run. Altered
    runs are excluded (`left_out`).
    """
    by_cell: dict[str, list[tuple[Run, Proof]]] = {}
    for run in _of_cells(experiment, cell_ids):
        if (proof := run.proof).state != "altered":
            by_cell.setdefault(run.folder.parent.name, []).append((run, proof))
    proofs_in(experiment).keep()
    chosen = []
    for proved in by_cell.values():
        several = ((run, run.summary_by(proof)) for run, proof in proved if len(proved) > 1)
        good = [run for run, summary in several if summary is not None and summary.status == "ok"]
        chosen += good or [proved[-1][0]]
    return chosen


def left_out(experiment: Path, cell_ids: Collection[str] | None = None) -> list[str]:
    """Return a sentence for each altered run of every cell, or of these; such runs are listed, but not used."""
    proofs = ((run.folder, run.proof) for run in _of_cells(experiment, cell_ids))
    return [
        f"Excluded: {folder.parent.name}/{folder.name}: {proof.why}; {results.MADE_AGAIN}."
        for folder, proof in proofs
        if proof.state == "altered"
    ]


def _of_cells(experiment: Path, cell_ids: Collection[str] | None) -> Iterator[Run]:
    wanted = None if cell_ids is None else set(cell_ids)
    return (run for run in results.runs(experiment) if wanted is None or run.folder.parent.name in wanted)


def read_runs(runs: Iterable[Run]) -> list[Result]:
    """Read each run's cell and summary, and the sweep's notes on its tuning."""
    return list(read_each(runs))


def read_each(runs: Iterable[Run]) -> Iterator[Result]:
    """Yield what `read_runs` returns, which of 100,000 runs needs 2 GiB."""
    last_sweep = functools.cache(results.last_sweep)
    stated_in = functools.cache(lambda experiment: frozenset(last_sweep(experiment).stated))
    for run in runs:
        cell_id, experiment, proof = run.folder.parent.name, run.folder.parent.parent, run.proof
        tuning, stated = last_sweep(experiment).marks.get(cell_id, ""), cell_id in stated_in(experiment)
        yield Result(run, run.cell, run.summary_by(proof), tuning, stated, proof.state)


@functools.cache
def codec_order(codec: str) -> tuple[int, float, str]:
    """Return a sorting key: the baselines, then the others from wide to narrow, negative controls, unreadable texts."""
    if codec in _CODEC_ORDER:
        return _CODEC_ORDER.index(codec), 0.0, codec
    others = len(_CODEC_ORDER)
    try:
        chosen = placement.parse_placement(codec)
    except UserError:  # a result may be older than the table, or use a class that is not installed
        return others + 2, 0.0, codec
    return others + chosen.control, -chosen.nominal_bits, codec


def _network_order(links: Links) -> tuple[float, float, str]:
    """Return a sorting key: the slowest uplink."""
    ups = [(-link.up.rate_bps, link.up.delay_ns) if link.up else (-math.inf, 0) for link in links]
    return (*max(ups), links[0].name)


def _settings(cell: Cell) -> dict[str, Any]:
    """Return the fields of a cell that separate groups, by dotted name; lists become text, which is hashable."""
    fields = flatten(cell.model_dump(mode="json", exclude={"codec", "outside", "profiles", "sites", "fault"}))
    return {"fault": cell.fault_words} | {
        name: json.dumps(value) if isinstance(value, list) else value for name, value in fields
    }


def _text(cell: Cell) -> str:
    """Return the text that identifies a network, apart from its topology."""
    return " ".join(map(canonical_json, (*cell.profiles, *(cell.sites or ()))))


def _network_names(runs_read: Sequence[Result]) -> dict[str, str]:
    """Return the display name for each network's text; a profile file that changed between runs adds a mark."""
    texts = {_text(result.cell): result.cell.network for result in runs_read}
    marks = {text: hashlib.blake2b(text.encode(), digest_size=2).hexdigest() for text in texts}
    count = Counter(texts.values())
    return {text: name if count[name] == 1 else f"{name} [{marks[text]}]" for text, name in texts.items()}


def _own(
    runs_read: Sequence[Result], settings: Sequence[Mapping[str, Any]], varying: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Return the optimiser settings with a value per codec: setting -> codec -> value. Ignores cells that state their
    own value, which form a separate group.
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
    """Group comparable runs. If a run is listed twice, the later one counts."""
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
    networks = {names[_text(result.cell)]: result.cell.all_profiles for result in members}
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
