"""Result folders to comparable groups: which runs stand side by side, in which order, under which name.

Runs are compared with each other when their cells differ in nothing but codec and the links' profiles; any other difference
(engine, topology, schedule, micro-batches in flight, seed) makes another group, which says what sets it apart.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from testbed import results
from testbed.errors import ResultsError
from testbed.frozen import canonical_json
from testbed.metrics import LossPoint, loss_curve, validation_curve
from testbed.profiles import LinkProfile
from testbed.records import RunCertificates, Summary
from testbed.results import Run
from testbed.spec import Cell

BASELINE = "fp32"
"""The codec that speed-ups and losses are compared with."""
_CODEC_ORDER = (BASELINE, "bf16", "int8", "delta-int8")


Links = tuple[LinkProfile, ...]
"""The profiles of a network: one that all links have, or one a link."""


class Result(NamedTuple):
    """One run, read back."""

    run: Run
    cell: Cell
    summary: Summary | None
    """None: the run has not ended, or was cut off."""

    @property
    def ok(self) -> bool:
        return self.summary is not None and self.summary.status == "ok"

    @property
    def certified(self) -> bool:
        return self.summary is not None and self.summary.certificate == "PASS"

    @property
    def measured(self) -> Summary:
        """The summary of a run that ended well. ResultsError for any other."""
        if self.summary is None or not self.ok:
            raise ResultsError(f"{self.run.folder} holds no run that ended well")
        return self.summary

    @property
    def outcome(self) -> str:
        """'ok', or why there are no numbers, in one line."""
        if self.summary is None:
            return "has not ended, or was cut off"
        if self.ok:
            return "ok"
        reason = (self.summary.error or "no reason was recorded").strip().splitlines()[0]
        return f"{self.summary.status}: {reason}"

    @property
    def certificates(self) -> RunCertificates | None:
        return self.run.certificates if (self.run.folder / "certificate.json").exists() else None

    @property
    def environment(self) -> dict[str, Any]:
        """environment.json; empty where there is none. ResultsError when it cannot be read."""
        path = self.run.folder / "environment.json"
        if not path.exists():
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf8"))
        except (OSError, ValueError) as error:
            raise ResultsError(f"cannot read {path}: {error}") from None
        if not isinstance(found, dict):
            raise ResultsError(f"{path} does not hold a table of names and values")
        return found


class Curves(NamedTuple):
    """The loss curves of one run."""

    train: list[LossPoint]
    validation: list[LossPoint]


class Group(NamedTuple):
    """Runs that differ in codec and network only."""

    label: str
    """What sets it apart from the other groups; empty when there is only one."""
    networks: dict[str, Links]
    """Name to show -> profiles, fastest uplink first."""
    codecs: tuple[str, ...]
    cells: dict[tuple[str, str], Result]
    """(name of the network, codec) -> its run."""

    def row(self, network: str) -> list[Result]:
        """The runs over one network, in the order of the codecs."""
        return [self.cells[network, codec] for codec in self.codecs if (network, codec) in self.cells]

    def finished(self, network: str) -> list[Result]:
        return [result for result in self.row(network) if result.ok]

    def baseline(self, network: str) -> Summary | None:
        """The fp32 run over the same network, if it ended well."""
        found = self.cells.get((network, BASELINE))
        return found.summary if found is not None and found.ok else None

    @property
    def results(self) -> list[Result]:
        return [result for network in self.networks for result in self.row(network)]


def latest(experiment: Path, cell_ids: Collection[str] | None = None) -> list[Run]:
    """Of every cell (or of these), the newest run that ended well; where none did, the newest run."""
    newest: dict[str, Run] = {}
    for run in results.runs(experiment):
        cell_id = run.folder.parent.name
        if cell_ids is None or cell_id in cell_ids:
            newest[cell_id] = results.finished(experiment, cell_id) or run
    return list(newest.values())


def read(runs: Iterable[Run]) -> list[Result]:
    """Cell and summary of each run."""
    return [Result(run, run.cell, run.summary) for run in runs]


def curves(result: Result) -> Curves:
    """The loss curves of a run, from its step records."""
    stages = [result.run.steps(stage) for stage in range(result.cell.pipeline.stages)]
    return Curves(loss_curve(stages), validation_curve(stages))


def codec_order(codec: str) -> tuple[int, str]:
    """Sorting key: the built-in codecs from wide to narrow, then the others by name."""
    return (_CODEC_ORDER.index(codec) if codec in _CODEC_ORDER else len(_CODEC_ORDER), codec)


def _network_order(links: Links) -> tuple[float, float, str]:
    """By the slowest uplink."""
    ups = [(-link.up.rate_bps, link.up.delay_ns) if link.up else (-math.inf, 0) for link in links]
    return (*max(ups), links[0].name)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _text(cell: Cell) -> str:
    """All that decides a network, apart from its topology."""
    return " ".join(map(canonical_json, cell.profiles))


def _network_names(results: Sequence[Result]) -> dict[str, str]:
    """Text of each network -> the name to show; a file that was changed between runs gets a mark."""
    texts = {_text(result.cell): result.cell.network for result in results}
    names = list(texts.values())
    return {
        text: name if names.count(name) == 1 else f"{name} [{hashlib.blake2b(text.encode(), digest_size=2).hexdigest()}]"
        for text, name in texts.items()
    }


def groups(results: Sequence[Result]) -> list[Group]:
    """Comparable runs together. The same cell twice: the later run in the list counts."""
    names = _network_names(results)
    settings = [_flat(result.cell.model_dump(mode="json", exclude={"codec", "profiles"})) for result in results]
    varying = sorted({key for one in settings for key in one if any(other.get(key) != one[key] for other in settings)})
    found: dict[tuple[Any, ...], list[Result]] = {}
    for result, setting in zip(results, settings, strict=True):
        found.setdefault(tuple(setting.get(key) for key in varying), []).append(result)
    return [
        _group(", ".join(f"{key} = {value}" for key, value in zip(varying, values, strict=True)), members, names)
        for values, members in sorted(found.items(), key=lambda item: [_value_order(value) for value in item[0]])
    ]


def _value_order(value: Any) -> tuple[float, str]:
    return (value, "") if isinstance(value, int | float) else (float("inf"), str(value))


def _group(label: str, members: list[Result], names: Mapping[str, str]) -> Group:
    networks = {names[_text(result.cell)]: result.cell.profiles for result in members}
    return Group(
        label=label,
        networks=dict(sorted(networks.items(), key=lambda item: _network_order(item[1]))),
        codecs=tuple(sorted({result.cell.codec for result in members}, key=codec_order)),
        cells={(names[_text(result.cell)], result.cell.codec): result for result in members},
    )
