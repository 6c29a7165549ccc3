"""Reads the rows of codecs from rows/FAMILY.toml, whose tables `codecs.NAME` have the fields of `row.CodecRow`.

A row's parameters are tables with the fields of `row.Parameter`, or names of those that several rows share, in the
file's table `parameters`. A parameter with choices has the first as its default. `work` states the counts to `encode`
and to `decode`, and the terms of `CodecWork.around`. A row that is `like` an earlier one of its file has its fields
where it states none of its own. No torch here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.codecs.catalogue.row import REQUIRED, CodecRow, CodecWork, Counts, Parameter

_FOLDER = Path(__file__).with_name("rows")


def read_rows(family: str) -> tuple[CodecRow, ...]:
    """Return the rows of a family in the order of its file.

    TypeError for a field that is unknown or missing, KeyError for an unknown shared parameter or earlier row.
    """
    file = tomllib.loads((_FOLDER / f"{family}.toml").read_text(encoding="utf8"))
    tables: dict[str, dict[str, Any]] = {}
    for name, table in file["codecs"].items():
        tables[name] = {**(tables[table.pop("like")] if "like" in table else {}), **table}
    return tuple(_row(name, table, file.get("parameters", {})) for name, table in tables.items())


def _row(name: str, table: Mapping[str, Any], shared: Mapping[str, Any]) -> CodecRow:
    parameters = [shared[each] if isinstance(each, str) else each for each in table.get("parameters", ())]
    stated = {key: table[key] for key in ("work", "backward_work") if isinstance(table.get(key), Mapping)}
    work = {key: _work(**counts) for key, counts in stated.items()}
    return CodecRow(**{**table, **work, "name": name, "parameters": tuple(map(_parameter, parameters))})


def _parameter(table: Mapping[str, Any]) -> Parameter:
    choices = tuple(table.get("choices", ()))
    return Parameter(**{"default": choices[0] if choices else REQUIRED, **table, "choices": choices})


def _work(encode: Sequence[str], decode: Sequence[str], around: Sequence[str] | None = None) -> CodecWork:
    work = CodecWork(Counts(*encode), Counts(*decode))
    return work if around is None else work.around(*around)
