"""The files of a guest kernel: a folder with the kernel, and a manifest that proves it intact.

linux (the kernel, a statically linked ordinary program with all drivers built in) and manifest.json: versions of the
packages, size and SHA-256 of every file. The folder clock_kernel/ beside this module holds the bundled kernel,
compressed, with its configuration and our patch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from testbed import paths
from testbed.errors import SpecError

MANIFEST = "manifest.json"
FORMAT = 1
"""Incremented when folders made by an older testbed become unusable."""

SHIPPED = Path(__file__).with_name("clock_kernel")
CONFIG = SHIPPED / "time-travel.config"
PATCH = SHIPPED / "time-travel.patch"


@dataclass(frozen=True, kw_only=True)
class GuestKernel:
    """A guest kernel as described by its manifest. `check` compares the file with it."""

    folder: Path
    version: str
    """Release of the kernel, as `uname -r` prints it inside."""
    packages: Mapping[str, str]
    """Versions of its source (a Debian package) and of the tools that compiled it."""
    recipe: str = ""
    """Identifies our build inputs: `recipe` of the testbed that built it."""
    sha256: str = ""
    """SHA-256 of the file `linux`."""

    @property
    def linux(self) -> Path:
        """The kernel: a program that is started through launch.py."""
        return self.folder / "linux"

    @property
    def origin(self) -> str:
        """Its origin, for messages: bundled, or the user's own."""
        return f"your own, in {self.folder}" if self.folder == own_folder().resolve() else "bundled with testbed"

    def is_whole(self) -> bool:
        """Whether the file's SHA-256 matches the manifest."""
        return self.linux.is_file() and paths.digest(self.linux) == self.sha256

    def check(self) -> None:
        """Raise SpecError, with a remedy, if the file is altered or truncated."""
        if not self.is_whole():
            raise SpecError(
                f"the guest kernel {self.linux} was altered or truncated, and will not be started: its SHA-256 is not "
                f"{self.sha256}; remove it to use the bundled one: rm -r {self.folder}"
            )


def recipe() -> str:
    """Return the hash of our build inputs, which with source and compiler determines the kernel."""
    return hashlib.sha256(CONFIG.read_bytes() + PATCH.read_bytes()).hexdigest()[:16]


def own_folder() -> Path:
    """Return the folder in the user's cache for a kernel that the user built or imported; one folder per recipe."""
    return paths.cache_folder() / f"clock-kernel-{recipe()}"


def find_kernel(folder: Path) -> GuestKernel | None:
    """Return the kernel described by the manifest in `folder`; None without a manifest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        if manifest["format"] != FORMAT:
            return None
        return GuestKernel(
            folder=folder.resolve(),
            version=manifest["version"],
            packages=manifest["packages"],
            recipe=manifest["recipe"],
            sha256=manifest["files"]["linux"]["sha256"],
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return None


def seal(folder: Path, version: str, packages: Mapping[str, str]) -> None:
    """Write the manifest of a folder with a complete kernel: the last step of a build."""
    linux = folder / "linux"
    about = {"format": FORMAT, "version": version, "packages": dict(packages)}
    files = {"linux": {"bytes": linux.stat().st_size, "sha256": paths.digest(linux)}}
    manifest = {**about, "clock": "virtual", "recipe": recipe(), "files": files}  # older testbeds require the clock
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
