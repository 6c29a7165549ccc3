"""What a guest kernel consists of: files in a folder, and a manifest by which they are known to be whole.

linux (the kernel, an ordinary program) and manifest.json: versions of the packages, size and SHA-256 of every file. One
that was fetched also has ld.so and libc.so.6 (it needs a newer C library than most machines have) and modules/; one
that was built is static and has everything built in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from testbed import paths

MANIFEST = "manifest.json"
FORMAT = 1
"""Goes up when a folder made by an older testbed can no longer be used."""

_PROGRAMS = {"real": ("linux", "ld.so", "libc.so.6"), "virtual": ("linux",)}
"""What a kernel consists of, by its clock: one with a virtual clock is built here, static and without modules."""
_OLD_INTERPRETER = b"/lib64/ld-linux-x86-64.so.2"

LOADER_FD = 3
"""Descriptor on which the kernel program finds its own ld.so when it starts; launch.py puts it there."""


@dataclass(frozen=True, kw_only=True)
class GuestKernel:
    """A guest kernel whose files were complete when it was looked up."""

    folder: Path
    version: str
    """Release of the kernel, as `uname -r` prints it inside."""
    packages: Mapping[str, str]
    """Debian package -> version."""
    clock: Literal["real", "virtual"] = "real"
    """virtual: it can be booted with a clock that stands still while programs compute."""
    recipe: str = ""
    """What it was built from, for one that was built (build.py)."""

    @property
    def linux(self) -> Path:
        """The kernel: a program that is started through launch.py."""
        return self.folder / "linux"

    @property
    def loader(self) -> Path | None:
        """The dynamic loader that goes with libc.so.6. None: the kernel is linked statically and needs none."""
        return None if self.clock == "virtual" else self.folder / "ld.so"

    @property
    def modules(self) -> Path | None:
        """Folder with modules.dep, modules.alias and kernel/. None: all that the kernel has is built in."""
        return None if self.clock == "virtual" else self.folder / "modules" / self.version


def default_folder() -> Path:
    """Return where a fetched kernel lies: in the invoking user's cache."""
    return paths.cache_folder() / "guest-kernel"


def find_kernel(folder: Path | None = None) -> GuestKernel | None:
    """Return the kernel in `folder` (default: the user's cache), or None when there is none or it is not whole.

    Sizes of all files are compared with the manifest, and SHA-256 of the programs.
    """
    folder = folder or default_folder()
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        if manifest["format"] != FORMAT or not all(
            _same(folder / name, entry) for name, entry in manifest["files"].items()
        ):
            return None
        clock: Literal["real", "virtual"] = "virtual" if manifest.get("clock") == "virtual" else "real"
        if not set(_PROGRAMS[clock]) <= set(manifest["files"]):
            return None
        return GuestKernel(
            folder=folder.resolve(),
            version=manifest["version"],
            packages=manifest["packages"],
            clock=clock,
            recipe=manifest.get("recipe", ""),
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return None


def seal(folder: Path, version: str, packages: Mapping[str, str], **more: str) -> None:
    """Write the manifest of a complete folder: the last step of a fetch. `more`: clock and recipe of a built kernel."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    manifest = {"format": FORMAT, "version": version, "packages": dict(packages), **more, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")


def with_own_loader(program: bytes) -> bytes:
    """Change the kernel program to take its dynamic loader from descriptor LOADER_FD.

    ValueError unless it names its loader exactly once. The path of the loader stands in the file, in a field of 27
    bytes; /proc/self/fd/3 fits wherever the cache lies, and unlike a symbolic link with a short name it cannot be
    planted by another user. (`ld.so linux` does not work: user-mode Linux lays out its memory behind its own break.)
    """
    if (count := program.count(_OLD_INTERPRETER + b"\0")) != 1:
        raise ValueError(f"the loader's path {_OLD_INTERPRETER.decode()} stands in it {count} times instead of once")
    new = f"/proc/self/fd/{LOADER_FD}".encode()
    return program.replace(_OLD_INTERPRETER + b"\0", new.ljust(len(_OLD_INTERPRETER) + 1, b"\0"))


def _same(path: Path, entry: Mapping[str, Any]) -> bool:
    return path.stat().st_size == entry["bytes"] and (
        path.name not in _PROGRAMS["real"] or _sha256(path) == entry["sha256"]
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
