"""Download Debian's kernel source from the mirror that apt uses, and put what was made of them in its place.

apt runs with package lists of its own in a temporary folder: the system's sources, lists and libraries stay as they
are, and no root is needed. The folder is filled aside and renamed when it is whole.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from testbed import paths
from testbed.errors import GuestKernelError

SUITES = ("forky", "sid")
"""Debian suites, tried in this order. Older ones have kernels that fail on processors with AMX."""

_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_INDEX = re.compile(r"'(?P<mirror>[^']+?)/+dists/[^']+/InRelease'")
_SOURCE = re.compile(r"linux-source-(\d+(?:\.\d+)*)")
_INSTEAD = "use a machine whose kernel has sch_netem (README: Vagrant, or a Lima virtual machine), or --engine relay"


def mirrors(listing: str) -> list[str]:
    """Return the package archives that `apt-get update --print-uris` lists, in order, without security updates."""
    archives = dict.fromkeys(match["mirror"] for match in _INDEX.finditer(listing))
    return [mirror for mirror in archives if "security" not in mirror]


def check_machine(instead: str) -> None:
    """GuestKernelError where no guest kernel runs, or no package can be had. `instead`: what helps without packages."""
    if platform.machine() != "x86_64":
        raise GuestKernelError(
            f"the guest kernel exists for x86-64 only, and this machine is {platform.machine()}; {_INSTEAD}"
        )
    if missing := [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]:
        raise GuestKernelError(
            f"the guest kernel is built from Debian's source, and this machine has no {' and no '.join(missing)}; "
            f"{instead}"
        )


def put_in_place(fresh: Path, folder: Path, work: Path) -> None:
    """Rename a sealed folder to where it belongs; what was there goes to the folder `work`."""
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
    """Unpack a package's files into a folder, which is made if it is not there."""
    _run(["dpkg-deb", "--extract", str(deb), str(folder)])


def newest_source(names: Sequence[str]) -> str | None:
    """Choose the package with the newest kernel source from the names of packages."""
    versions = [
        (tuple(map(int, match[1].split("."))), name) for name in names if (match := _SOURCE.fullmatch(name)) is not None
    ]
    return max(versions)[1] if versions else None


def download(work: Path) -> Path:
    """Download the newest kernel source into a folder of ours; return its package.

    The first suite of the first mirror that has one is taken. GuestKernelError when none has.
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
    for mirror in mirrors(listing):
        for suite in SUITES:
            (work / "sources.list").write_text(f"deb {trust}{mirror} {suite} main\n", "utf-8")
            try:
                _run(["apt-get", *settings, "update"])
                names = _run(["apt-cache", *settings, "pkgnames", "linux-source-"]).split()
                if (package := newest_source(names)) is None:
                    raise GuestKernelError("it has no package linux-source-*")
                _run(["apt-get", *settings, "download", package], folder=work / "debs")
            except GuestKernelError as error:
                attempts.append(f"{mirror} {suite}: {error}")
                continue
            (deb,) = (work / "debs").glob("*.deb")
            return deb
    tried = "\n".join(attempts) or "apt is set up with no package archive"
    raise GuestKernelError(f"cannot get linux-source-* of Debian {' or '.join(SUITES)}; {_INSTEAD}. Tried:\n{tried}")


def _run(command: Sequence[str], folder: Path | None = None) -> str:
    environment = os.environ | {"LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-4:] or ["it said nothing"]
        raise GuestKernelError(f"{command[0]} ended with status {done.returncode}: {' '.join(said)}")
    return done.stdout


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; they belong to the person behind sudo."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        paths.give_to_user(folder)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock, and wait for whoever holds it. It is free again when its holder ends, however that ends.

    Not that of `results`: this folder is imported by guests' Pythons, which have no pydantic.
    """
    with path.open("a") as file:
        paths.give_to_user(path)
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
