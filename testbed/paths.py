"""Locations of shipped files, and of the user's cache and modules; owners, locks, digests and writing of files.

Guests' Pythons, which have no pydantic, import this too.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from testbed.errors import SpecError, UserError

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
    """Return (uid, gid) of the user who called sudo, or None. They own the results, and stage hosts run as them."""
    if os.geteuid() != 0 or not os.environ.get("SUDO_UID", "").isdigit() or os.environ.get("TESTBED_GUEST"):
        return None  # in a guest, all users are the user outside, even root
    uid, gid = int(os.environ["SUDO_UID"]), int(os.environ.get("SUDO_GID", "0"))
    return (uid, gid) if uid else None


def as_invoking_user() -> dict[str, Any]:
    """Return arguments for subprocess that start a program as the user who called sudo; none without sudo."""
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
    """Hand a file or folder that root created to the user who called sudo."""
    if user := invoking_user():
        os.chown(path, *user, follow_symlinks=False)


def make_folders(path: Path) -> None:
    """Create a folder and its missing parents, owned by the user who called sudo."""
    if not path.is_dir():
        make_folders(path.parent)
        path.mkdir(exist_ok=True)
        give_to_user(path)


def private(path: str, flags: int) -> int:
    """Open a file that only its owner may read, as an `opener` of `open`: anyone who may read a file may lock it."""
    return os.open(path, flags, 0o600)


@contextmanager
def locked(path: Path, busy: str = "", note: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold a lock. If it is taken and `busy` is given, pass that to `note` and wait; without `note`, raise it as
    UserError. The lock is released when its holder ends for any reason.
    """
    with open(path, "a", opener=private) as file:
        give_to_user(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError:
            if note is None:
                raise UserError(busy) from None
            note(busy)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def script() -> Path:
    """Return the path of the script `testbed` of this interpreter, which finds no modules in the current folder."""
    return Path(sys.executable).with_name("testbed")


@contextmanager
def scratch_folder(prefix: str, within: Path | None = None) -> Iterator[Path]:
    """Create a temporary folder that only the invoking user can enter, and remove it at the end.

    A shell waits for the end of its input, which is that of this process, too: kill -9 leaves no folder.
    """
    with tempfile.TemporaryDirectory(prefix=prefix, dir=within) as name:
        give_to_user(Path(name))
        # Again after a second, because programs that die with this one may still be writing.
        remove = 'read -r _; rm -rf "$0" || { sleep 1; rm -rf "$0"; }'
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        with subprocess.Popen(["/bin/sh", "-c", remove, name], stdin=subprocess.PIPE, cwd="/", **quiet):
            yield Path(name)


def import_named(module: str) -> ModuleType:
    """Import the module that a codec or job names. Modules of users may be in the current folder, which is
    searched last from then on.

    ImportError as from `import`. SpecError in a process that sudo made root, which must not run the user's code.
    """
    if not module.startswith(f"{__package__}."):
        if invoking_user() is not None:
            raise SpecError(f"{module} is your own code, which sudo would run as root: run without sudo")
        if (folder := str(Path.cwd())) not in sys.path:
            sys.path.append(folder)
    return importlib.import_module(module)


def create(path: Path) -> int:
    """Open a new file for writing, in place of what is there; return its descriptor. No link is followed: programs
    under `exec` may leave some in folders that root writes to.
    """
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def write_atomically(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a text file: a reader sees the old one or the new one, never a part. `durable`: return once it and its name
    are on the disk.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(create(draft), "w", encoding="utf8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    give_to_user(draft)
    draft.replace(path)
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return once the names in a folder are on the disk."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file. SpecError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None
