"""A manifest: the last file written to a folder, with the size and SHA-256 of the others. Runs, trainings and prepared
data end with one, so that a later reader can verify that they are complete and unaltered.

It detects accidents (a truncated file, a full disk, an editor mishap), not forgery: anyone who can change a file can
also rewrite its manifest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError

import testbed
from testbed import paths
from testbed.errors import SpecError
from testbed.frozen import Frozen, canonical_json

NAME = "manifest.json"
ENDING = f".{NAME}"
"""Suffix of manifests that cover only some files of a folder."""
ASIDE = ".aside"
"""Suffix of files and folders that were set aside."""
_SETTLED_NS = 2_000_000_000
"""Age from which a file's change time identifies its version: kernels advance it only every few milliseconds."""


class FileEntry(Frozen):
    """One file."""

    bytes: int
    sha256: str


class Manifest(Frozen):
    """manifest.json."""

    testbed: str
    """Version of testbed that wrote it."""
    subject: str
    """SHA-256 of the files' subject: the cell of a run, the recipe of a training, the sources of a text."""
    files: dict[str, FileEntry]
    """By name, relative to the manifest's folder."""
    seal: str
    """SHA-256 of the three fields above."""


def subject_of(record: Frozen) -> str:
    """Return the full digest of a record."""
    return hashlib.sha256(canonical_json(record).encode()).hexdigest()


def write_manifest(path: Path, subject: str, files: Iterable[Path]) -> None:
    """Write the manifest of files in its folder, except itself and drafts (names that begin with a dot); return once
    all of them are on the disk.
    """
    entries = {}
    for each in sorted(file for file in files if file != path and not file.name.startswith(".")):
        with each.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
            entries[each.name] = FileEntry(bytes=file.tell(), sha256=digest)
    paths.write_atomically(path, _text(testbed.__version__, subject, entries), durable=True)


def find_fault(path: Path, subject: Callable[[], str]) -> str:
    """Return the first difference from a manifest: an altered, truncated or missing file, or the manifest itself. Empty
    if there is none. `subject` returns the expected subject; it is called once the files are verified.
    """
    try:
        text = path.read_text(encoding="utf8")
        manifest = Manifest.model_validate_json(text)
    except OSError as error:
        return f"cannot read {path.name}: {error.strerror}"
    except (ValidationError, UnicodeDecodeError):
        return f"{path.name} is cut off or altered"
    if text != _text(manifest.testbed, manifest.subject, manifest.files):
        return f"{path.name} is altered"
    for name, entry in manifest.files.items():
        file = path.parent / name
        if not file.is_file():  # so that a named pipe is never opened
            return f"{name} is missing"
        try:
            if (size := file.stat().st_size) != entry.bytes:
                return f"{name} has {size:,} bytes, but {entry.bytes:,} were written"
            if digest(file) != entry.sha256:
                return f"{name} is altered"
        except (OSError, SpecError) as error:
            return f"cannot read {name}: {error}"
    return "" if subject() == manifest.subject else f"{path.name} belongs to another subject"


def version_of(folder: Path, name: str = "") -> tuple[str, bool]:
    """Return a digest that changes when files of a folder do, or that file, and whether all changes are old enough for
    that.
    """
    lines, newest_ns = list[str](), 0
    with contextlib.suppress(OSError):
        for each in [name] if name else sorted([entry.name for entry in os.scandir(folder)]):
            stat = os.lstat(f"{folder}/{each}")
            newest_ns = max(newest_ns, stat.st_ctime_ns)
            lines.append(f"{each} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}\n")
    version = hashlib.blake2b(os.fsencode("".join(lines)), digest_size=16).hexdigest()
    return version, time.time_ns() - newest_ns > _SETTLED_NS


def set_aside(path: Path) -> Path:
    """Rename a file or folder, instead of deleting it, to the first unused name with the suffix ASIDE; return that."""
    names = itertools.chain([f"{path.name}{ASIDE}"], (f"{path.name}{ASIDE}-{count}" for count in itertools.count(2)))
    target = next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))
    return path.rename(target)


def _text(version: str, subject: str, files: Mapping[str, FileEntry]) -> str:
    unsealed = Manifest(testbed=version, subject=subject, files=dict(files), seal="")
    return unsealed.model_copy(update={"seal": subject_of(unsealed)}).model_dump_json(indent=1) + "\n"


def digest(path: Path) -> str:
    """Return the SHA-256 of a file; an unchanged file is read only once. SpecError if it cannot be read."""
    try:
        stat = path.stat()
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None
    version = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    read = _known if time.time_ns() - stat.st_ctime_ns > _SETTLED_NS else _known.__wrapped__
    return read(path, *version)


@functools.lru_cache(maxsize=1 << 14)
def _known(path: Path, *version: int) -> str:
    return paths.digest(path)
