"""Where things lie: shipped profiles, experiments and texts, the user's cache; whose files they are, and
what they hold.
"""

from __future__ import annotations

import hashlib
import os
import pwd
from pathlib import Path
from typing import Any

from testbed.errors import SpecError

_PACKAGE = Path(__file__).resolve().parent


def _shipped(name: str) -> Path:
    """Return the top-level folder in a checkout, or the copy inside an installed package."""
    checkout = _PACKAGE.parent / name
    return checkout if (_PACKAGE.parent / "pyproject.toml").is_file() else _PACKAGE / "_shipped" / name


def _folders(name: str) -> list[Path]:
    folders: list[Path] = []
    for folder in (Path.cwd() / name, _shipped(name)):
        if folder.is_dir() and folder.resolve() not in (f.resolve() for f in folders):
            folders.append(folder)
    return folders


def profile_folders() -> list[Path]:
    """Return the folders searched for profiles; the first one wins."""
    return _folders("netem_profiles")


def experiment_folders() -> list[Path]:
    """Return the folders searched for experiments; the first one wins."""
    return _folders("experiments")


def invoking_user() -> tuple[int, int] | None:
    """Return (uid, gid) of the person behind sudo, or None. Results belong to them, and stage hosts run as them."""
    if os.geteuid() != 0 or not os.environ.get("SUDO_UID", "").isdigit():
        return None
    uid, gid = int(os.environ["SUDO_UID"]), int(os.environ.get("SUDO_GID", "0"))
    return (uid, gid) if uid else None


def as_invoking_user() -> dict[str, Any]:
    """Return arguments for subprocess that start a program as the person behind sudo; none where there is nobody."""
    user = invoking_user()
    return {} if user is None else {"user": user[0], "group": user[1], "extra_groups": []}


def user_cache() -> Path:
    """Return `$XDG_CACHE_HOME`, or `~/.cache` of the invoking user, whose processes may still have root's HOME.

    The folder is not created here.
    """
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base)
    uid = os.environ.get("SUDO_UID", "")
    behind = uid.isdigit() and int(uid) and os.geteuid() in (0, int(uid))
    return (Path(pwd.getpwuid(int(uid)).pw_dir) if behind else Path.home()) / ".cache"


def cache_folder() -> Path:
    """Return testbed's folder in `user_cache`. It is not created here."""
    return user_cache() / "testbed"


def give_to_user(path: Path) -> None:
    """Hand a file or folder that root made to the person behind sudo."""
    if user := invoking_user():
        os.chown(path, *user)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file. SpecError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None
