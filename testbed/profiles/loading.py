"""Load `netem_profiles/NAME.toml` as a LinkProfile. Every error names the file, the key and the fault.

A file states every value, or `extends` another and states the differences. `--set up.rate=40Mbit` overrides a file.
`link(80Mbit, 10ms)` needs no file: see `link_text`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from testbed import paths
from testbed.directions import LINK_DIRECTIONS
from testbed.errors import SpecError, UnknownNameError
from testbed.frozen import Place, dotted, explain, parse_value, read_toml
from testbed.profiles import keys, link_text
from testbed.profiles.background import read_background
from testbed.profiles.keys import ProfileKey
from testbed.profiles.link_profile import LinkProfile
from testbed.profiles.pipe_reading import read_pipe

_FOLDERS = "trace folders"
"""Internal key under which a table stores, by direction, the folder of its trace. Files cannot set it, because their
keys are checked first."""
_INNER = {"loss": keys.LOSS, "slot": keys.SLOT, "trace": keys.TRACE}
_UNITS = ("_bps", "_ns", "_ms")
_SILENT = ("changes", "bernoulli", keys.GILBERT_ELLIOTT, "probability")
"""Fields of the record without a key in files."""
_WORDS = {"buffer_bytes": "buffer", "max_bytes": "bytes", "jitter_reorders": "reorder"}


def profile_files() -> dict[str, Path]:
    """Return the files of all profiles by name: `./netem_profiles` takes precedence over the shipped ones."""
    files: dict[str, Path] = {}
    for folder in reversed(paths.profile_folders()):
        files |= {path.stem: path for path in sorted(folder.glob("*.toml"))}
    return files


def load_profile(name: str, overrides: Sequence[str] = ()) -> LinkProfile:
    """Load a profile by name, by the path of its file, or from an inline link (`link_text`). A name or a path may be
    followed by changes, as in `cable, up.buffer=1s`.

    UnknownNameError suggests the nearest name. `overrides` as in `override`.
    """
    if link_text.is_link_text(name):
        return _read_link(name, overrides)
    base, *changes = link_text.split_text(name)
    return read_profile(_path_of(base, None), overrides, changes)


def read_profile(path: Path, overrides: Sequence[str] = (), changes: Sequence[str] = ()) -> LinkProfile:
    """Read one profile file, with changes that become part of its name. SpecError names file, key and fault."""
    where = f"profile {path}"
    try:
        table, extended = _extended(path, ())
    except (SpecError, UnknownNameError) as error:
        raise SpecError(f"{where}: {error}") from None
    if extended:
        where += f" (it extends {', which extends '.join(extended)})"
    if not changes:
        return _profile_of(table, path.stem, overrides, where)
    try:
        table = link_text.changed(table, changes, override)
    except (SpecError, UnknownNameError) as error:
        raise SpecError(f"{where}: {error}") from None
    stated = ", ".join(sorted(changes))
    for key, words in (("summary", f", with {stated}"), ("source", f" Changed: {stated}.")):
        if isinstance(table.get(key), str):
            table[key] += words
    return _profile_of(table, link_text.name_of([path.stem, *sorted(changes)]), overrides, where)


def _read_link(text: str, overrides: Sequence[str]) -> LinkProfile:
    where = f"profile {text!r}"
    try:
        name, table = link_text.link_table(text, override)
    except (SpecError, UnknownNameError) as error:
        raise SpecError(f"{where}: {error}") from None
    return _profile_of({_FOLDERS: {}, **table}, name, overrides, where)


def _profile_of(table: dict[str, Any], name: str, overrides: Sequence[str], where: str) -> LinkProfile:
    """Return the profile of a file's tables. SpecError that starts with `where`."""
    try:
        for text in overrides:
            table = override(table, text)
        if missing := [key.name for key in keys.TOP if key.required and key.name not in table]:
            raise SpecError(f"it lacks {', '.join(missing)}; set every value, or extend a profile that does")
        if overrides and isinstance(table["source"], str):
            table["source"] += f" Changed by --set: {', '.join(overrides)}."
        folders = table.pop(_FOLDERS)
        pipes = {side: read_pipe(side, table[side], folders.get(side, Path())) for side in LINK_DIRECTIONS}
        content = {key: value for key, value in table.items() if key != "extends"}
        if "background" in content:
            content["background"] = read_background(content["background"])
        return LinkProfile.model_validate(content | pipes | {"name": name})
    except ValidationError as error:
        raise explain(error, LinkProfile, where, _file_key) from None
    except (SpecError, UnknownNameError) as error:
        raise SpecError(f"{where}: {error}") from None


def _file_key(place: Place) -> str:
    """Return the key in a file for a field of the record: ("up", "schedule", "changes", 0, "rate_bps") ->
    'up.schedule[0].rate'.
    """
    words: list[int | str] = []
    for part in place:
        if isinstance(part, int):
            words.append(part)
        elif part not in _SILENT:
            unit = next((u for u in _UNITS if part.endswith(u)), "")
            words.append(_WORDS.get(part, part.removesuffix(unit)))
    return dotted(tuple(words)).replace(".schedule.repeat", ".repeat")


def _path_of(name: str, beside: Path | None) -> Path:
    """Find a profile: a path (relative to the referring file `beside`), a file next to that one, or a known name."""
    if name.endswith(".toml"):
        return beside.parent / name if beside else Path(name)
    if beside is not None and (neighbour := beside.parent / f"{name}.toml").is_file():
        return neighbour
    files = profile_files()
    if name not in files:
        raise UnknownNameError("profile", name, files)
    return files[name]


def _extended(path: Path, seen: tuple[Path, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a file's tables, merged over those of the file that it extends, and the names of all base files."""
    if path.resolve() in seen:
        circle = " -> ".join(p.stem for p in (*seen, path))
        raise SpecError(f"extends is circular: {circle}; remove one of these extends")
    table = read_toml(path)
    for key in table:
        if key not in keys.names(keys.TOP):
            raise UnknownNameError(f"key of {path.name}" if seen else "key", key, keys.names(keys.TOP))
    table[_FOLDERS] = {
        s: path.parent for s in LINK_DIRECTIONS if isinstance(table.get(s), dict) and "trace" in table[s]
    }
    if "extends" not in table:
        return table, ()
    name = table["extends"]
    if not isinstance(name, str):
        raise SpecError(f"extends must be the name of a profile, found {name!r}")
    base, below = _extended(_path_of(name, path), (*seen, path.resolve()))
    return _laid_over(base, table), (name, *below)


def _laid_over(base: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base) | dict(table)
    for key in (*LINK_DIRECTIONS, _FOLDERS):
        if isinstance(base.get(key), dict) and isinstance(table.get(key), dict):
            merged[key] = base[key] | table[key]
    return merged


def override(table: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Override one key of a file's tables: `up.rate=40Mbit`, `mtu=1400`, `down.loss=none`, `up.trace.offset=5s`.

    The value is parsed as TOML, or else taken as plain text. SpecError or UnknownNameError for an unknown key.
    """
    name, equals, word = (part.strip() for part in text.partition("="))
    if not equals or not word:
        raise SpecError(f"--set {text!r}: write KEY=VALUE, for example up.rate=40Mbit")
    value = parse_value(word)
    place = name.split(".")
    _must_be_known(place)
    changed = _with(table, place, value, text)
    if place[1:] in (["trace"], ["trace", "file"]):  # relative to the current folder
        changed[_FOLDERS] = {**table.get(_FOLDERS, {}), place[0]: Path()}
    return changed


def _must_be_known(place: Sequence[str]) -> None:
    known: tuple[ProfileKey, ...] = tuple(key for key in keys.TOP if key.name != "extends")
    for depth, part in enumerate(place):
        if part not in keys.names(known):
            where = "a profile" if not depth else ".".join(place[:depth])
            raise UnknownNameError(f"key of {where}", part, keys.names(known))
        known = keys.PIPE if part in LINK_DIRECTIONS else _INNER.get(part, ()) if depth == 1 else ()


def _with(table: Mapping[str, Any], place: Sequence[str], value: object, text: str) -> dict[str, Any]:
    key, *rest = place
    if not rest:
        return {**table, key: value}
    if not isinstance(inner := table.get(key, keys.NONE), dict):
        raise SpecError(f"--set {text!r}: {key} is {inner!r}, without a key {rest[0]}; write the whole table in a file")
    return {**table, key: _with(inner, rest, value, text)}
