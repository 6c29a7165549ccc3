"""Load kernel modules inside the guest: at boot, and whenever the kernel asks for one. Machines need no kmod for it.

Run by the guest's kernel as `PROGRAM -q -- NAME`; NAME is a module or an alias such as `net-sch-netem`.
"""

from __future__ import annotations

import ctypes
import errno
import fnmatch
import os
import sys
from pathlib import Path

_SYS_FINIT_MODULE = 313  # x86-64
_libc = ctypes.CDLL(None, use_errno=True)


def module_files(name: str, dependencies: str, aliases: str, built_in: str) -> list[str]:
    """Return the files to load for a module or alias, in order; none for what is built into the kernel.

    LookupError for an unknown name.

    `dependencies`, `aliases`, `built_in`: the text of modules.dep, modules.alias, modules.builtin (see modules.dep(5)).
    """
    needs = {}
    for line in dependencies.splitlines():
        file, _, others = line.partition(":")
        needs[_module(file)] = [*reversed(others.split()), file]  # modules.dep lists what comes first last
    wanted = []
    for candidate in (name, *_behind_alias(name, aliases)):
        if files := needs.get(candidate.replace("-", "_")):
            wanted += [file for file in files if file not in wanted]
    if not wanted and name.replace("-", "_") not in map(_module, built_in.split()):
        raise LookupError(f"no module or alias {name!r}")
    return wanted


def load_module(name: str, folder: Path) -> None:
    """Load a module and what it needs from a folder like /lib/modules/7.2.7.

    LookupError; OSError when the kernel refuses.
    """
    texts = [(folder / f"modules.{kind}").read_text("utf-8") for kind in ("dep", "alias", "builtin")]
    for file in module_files(name, *texts):
        fd = os.open(folder / file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _libc.syscall(_SYS_FINIT_MODULE, fd, b"", 0) != 0 and (number := ctypes.get_errno()) != errno.EEXIST:
                raise OSError(number, f"{os.strerror(number)} while loading", file)
        finally:
            os.close(fd)


def _module(file: str) -> str:
    return Path(file).name.removesuffix(".ko").replace("-", "_")


def _behind_alias(name: str, aliases: str) -> list[str]:
    modules = []
    for line in aliases.splitlines():
        word, _, rest = line.partition(" ")
        pattern, _, module = rest.rpartition(" ")
        if word == "alias" and fnmatch.fnmatchcase(name, pattern):
            modules.append(module)
    return modules


def main() -> None:
    """Load modules, as /proc/sys/kernel/modprobe inside the guest.

    The exit status is 1 when there is no such module.
    """
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    folder = Path("/lib/modules") / os.uname().release
    for name in names:
        try:
            load_module(name, folder)
        except (LookupError, OSError) as error:
            sys.exit(f"modprobe {name}: {error}")


if __name__ == "__main__":
    main()
