"""Download Debian's kernel source from apt's mirror, and install the result of the build.

apt runs with its own package lists in a temporary folder: the system's sources, lists and libraries stay unchanged, and
it needs no root. The folder is built under another name and renamed once it is complete.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from testbed import paths
from testbed.errors import CapabilityError, GuestKernelError

SOURCE = ("linux-source-7.2", "7.2.12-1")
"""Package and version that the bundled kernel is built from."""

SUITES = ("forky", "sid")
"""Debian suites, tried in this order. Older ones have kernels that fail on processors with AMX."""

_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_INDEX = re.compile(r"'(?P<mirror>[^']+?)/+dists/[^']+/InRelease'")
_SOURCE = re.compile(r"linux-source-(\d+(?:\.\d+)*)")
_INSTEAD = "use a machine whose kernel has sch_netem (docs/virtual-machines.md), or --engine relay"


def mirrors(listing: str) -> list[str]:
    """Return the package archives that `apt-get update --print-uris` lists, in order, without security updates."""
    archives = dict.fromkeys(match["mirror"] for match in _INDEX.finditer(listing))
    return [mirror for mirror in archives if "security" not in mirror]


def check_processor() -> None:
    """GuestKernelError if no guest kernel can run here."""
    if platform.machine() != "x86_64":
        raise GuestKernelError(
            f"the guest kernel supports x86-64 only, and this machine is {platform.machine()}; {_INSTEAD}"
        )


def check_machine(instead: str) -> None:
    """GuestKernelError if no guest kernel can run here, or no package can be downloaded. `instead`: the remedy then."""
    check_processor()
    if missing := [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]:
        raise GuestKernelError(
            f"the guest kernel is built from Debian's source, and this machine has no {' and no '.join(missing)}; "
            f"{instead}"
        )


def put_in_place(fresh: Path, folder: Path, work: Path) -> None:
    """Rename a sealed folder to its final name; a previous one moves to the folder `work`."""
    if user := paths.invoking_user():
        for path in (fresh, *fresh.rglob("*")):
            os.chown(path, *user, follow_symlinks=False)
    if folder.exists():
        folder.rename(work / "old")
    fresh.rename(folder)


def package_version(deb: Path) -> tuple[str, str]:
    """Return name and version of a package."""
    name, version = _run(["dpkg-deb", "--show", "--showformat", "${Package} ${Version}", str(deb)]).split()
    return name, version


def unpack(deb: Path, folder: Path) -> None:
    """Unpack a package's files into a folder, creating it if needed."""
    _run(["dpkg-deb", "--extract", str(deb), str(folder)])


def newest_source(names: Sequence[str]) -> str | None:
    """Choose the package with the newest kernel source from the names of packages."""
    versions = [
        (tuple(map(int, match[1].split("."))), name) for name in names if (match := _SOURCE.fullmatch(name)) is not None
    ]
    return max(versions)[1] if versions else None


def download(work: Path, *, exactly: bool) -> Path:
    """Download SOURCE, or the newest kernel source if no mirror has it, into `work`; return the package file.

    The first suite of the first mirror that has it wins. `exactly`: SOURCE only; CapabilityError if no mirror has it.
    GuestKernelError if no mirror has any kernel source.
    """
    for name in ("lists/partial", "cache/archives/partial", "debs"):
        (work / name).mkdir(parents=True)
    # The machine's own settings that would affect these lists (pins, a default release, other sources) are disabled.
    options = {
        "Dir::Etc::sourceparts": "-",
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::preferences": "-",
        "Dir::Etc::preferencesparts": "-",
        "Dir::State::lists": work / "lists",
        "Dir::Cache": work / "cache",
        "APT::Sandbox::User": "root",
        "APT::Default-Release": "",
        "Acquire::Languages": "none",
        "Acquire::http::Timeout": "30",
        "Acquire::Retries": "2",
    }
    settings = ["-qq", *(part for key, value in options.items() for part in ("-o", f"{key}={value}"))]
    listing = _run(["apt-get", "update", "--print-uris", "-o", f"Dir::State::lists={work / 'lists'}"])
    trust = f"[signed-by={_KEYRING}] " if _KEYRING.exists() else ""
    attempts = []
    for version in ("=".join(SOURCE), None):
        for mirror, suite in itertools.product(mirrors(listing), SUITES):
            (work / "sources.list").write_text(f"deb {trust}{mirror} {suite} main\n", "utf-8")
            try:
                _run(["apt-get", *settings, "update"])
                names = _run(["apt-cache", *settings, "pkgnames", "linux-source-"]).split()
                if (package := version or newest_source(names)) is None:
                    raise GuestKernelError("it has no package linux-source-*")
                _run(["apt-get", *settings, "download", package], folder=work / "debs")
            except GuestKernelError as error:
                attempts.append(f"{mirror} {suite}: {error}")
                continue
            (deb,) = (work / "debs").glob("*.deb")
            return deb
        if exactly:
            raise CapabilityError(
                f"cannot get {version} from the mirrors configured for apt; Debian archives it at "
                f"https://snapshot.debian.org/package/linux/{SOURCE[1]}/. Tried:\n" + "\n".join(attempts)
            )
    tried = "\n".join(attempts) or "apt has no package archive configured"
    raise GuestKernelError(f"cannot get linux-source-* of Debian {' or '.join(SUITES)}; {_INSTEAD}. Tried:\n{tried}")


def _run(command: Sequence[str], folder: Path | None = None) -> str:
    environment = os.environ | {"LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-4:] or ["no output"]
        raise GuestKernelError(f"{command[0]} ended with status {done.returncode}: {' '.join(said)}")
    return done.stdout
