"""What a guest kernel consists of: files in a folder, and a manifest by which they are known to be whole.

linux (the kernel, an ordinary program that is linked statically and has everything built in) and manifest.json:
versions of the packages, size and SHA-256 of every file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 1
"""Goes up when a folder made by an older testbed can no longer be used."""


@dataclass(frozen=True, kw_only=True)
class GuestKernel:
    """A guest kernel whose files were complete when it was looked up."""

    folder: Path
    version: str
    """Release of the kernel, as `uname -r` prints it inside."""
    packages: Mapping[str, str]
    """Debian package -> version."""
    recipe: str = ""
    """What it was built from (build.py)."""

    @property
    def linux(self) -> Path:
        """The kernel: a program that is started through launch.py."""
        return self.folder / "linux"


def find_kernel(folder: Path) -> GuestKernel | None:
    """Return the kernel in `folder`, or None when there is none or it is not whole, by the hashes in its manifest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        if manifest["format"] != FORMAT or not all(
            _same(folder / name, entry) for name, entry in manifest["files"].items()
        ):
            return None
        if "linux" not in manifest["files"]:
            return None
        return GuestKernel(
            folder=folder.resolve(),
            version=manifest["version"],
            packages=manifest["packages"],
            recipe=manifest.get("recipe", ""),
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return None


def seal(folder: Path, version: str, packages: Mapping[str, str], recipe: str) -> None:
    """Write the manifest of a complete folder: the last step of a build."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    about = {"format": FORMAT, "version": version, "packages": dict(packages)}
    manifest = {**about, "clock": "virtual", "recipe": recipe, "files": files}  # older testbeds ask for the clock
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")


def _same(path: Path, entry: Mapping[str, Any]) -> bool:
    return [path.stat().st_size, _sha256(path)] == [entry["bytes"], entry["sha256"]]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
