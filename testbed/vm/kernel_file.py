"""The kernel as a single file: the bundled one, and export and import of one that was built elsewhere.

The file is compressed and holds the kernel and its manifest. The kernel is static, so it runs on any x86-64 Linux. A
truncated or altered file is refused. The bundled kernel is unpacked into the user's cache once.
"""

from __future__ import annotations

import dataclasses
import io
import lzma
import platform
import tarfile
from collections.abc import Callable
from pathlib import Path

from testbed import paths
from testbed.errors import CapabilityError, SpecError
from testbed.vm.debian import put_in_place
from testbed.vm.kernel import MANIFEST, SHIPPED, GuestKernel, find_kernel, own_folder, recipe

SHIPPED_FILE = SHIPPED / "kernel.tar.xz"
_MEMBERS = (MANIFEST, "linux")
_MOST_BYTES = 64 << 20
"""A kernel has about 7 MB. Without a limit, a small file could expand to fill the disk."""
# Machine code compresses better with absolute call targets.
_FILTERS = ({"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME})


def find_clock_kernel(folder: Path | None = None) -> GuestKernel | None:
    """Return the kernel with a virtual clock in `folder`, or None if there is none, or one built from another recipe.

    Default: the kernel that the user built or imported (`vm --build`, `vm --kernel`), else the bundled one; None if
    this machine is not x86-64. SpecError if the files were altered. The kernel itself is checked before every start.
    """
    if folder is None:
        if platform.machine() != "x86_64":
            return None
        if not own_folder().exists():
            return _shipped_kernel()
    kernel = find_kernel(folder or own_folder())
    if kernel is not None and kernel.recipe == recipe():
        return kernel
    if folder is not None:
        return None
    raise SpecError(
        f"{own_folder()} holds no complete guest kernel; remove it to use the bundled one: rm -r {own_folder()}"
    )


def _shipped_kernel() -> GuestKernel:
    if (shipped := find_kernel(SHIPPED)) is None:
        raise _altered(SHIPPED_FILE, f"{SHIPPED / MANIFEST} is missing or damaged")
    folder = paths.cache_folder() / f"guest-kernel-{shipped.sha256[:16]}"
    if find_kernel(folder) is None:
        unpacked = import_kernel(SHIPPED_FILE, folder, replace=False)
        if unpacked.sha256 != shipped.sha256:
            raise _altered(SHIPPED_FILE, f"its kernel has the SHA-256 {unpacked.sha256} instead of {shipped.sha256}")
    return dataclasses.replace(shipped, folder=folder.resolve())  # checked against the package's hash


def is_bundled(kernel: GuestKernel) -> bool:
    """Whether a kernel has the SHA-256 of the bundled one, which is a file of this package."""
    return (shipped := find_kernel(SHIPPED)) is not None and kernel.sha256 == shipped.sha256


def export_kernel(kernel: GuestKernel, file: Path) -> None:
    """Write a kernel with a virtual clock to a file, about 2 MB. SpecError where it cannot be written."""
    kernel.check()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in _MEMBERS:
            content = (kernel.folder / name).read_bytes()
            member = tarfile.TarInfo(name)  # no date and no owner: the same kernel makes the same file
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
    try:
        file.write_bytes(lzma.compress(packed.getvalue(), filters=_FILTERS))
    except OSError as error:
        raise SpecError(f"cannot write the guest kernel to {file}: {error.strerror}") from None


def import_kernel(
    file: Path,
    folder: Path | None = None,
    *,
    replace: bool = True,
    approve: Callable[[GuestKernel], None] = lambda kernel: None,
) -> GuestKernel:
    """Install the kernel of an exported file in `folder` (default: the user's own kernel), and return it.

    `replace`: also if the folder holds one. `approve` is called with the unpacked kernel before it is installed, and
    raises an error to refuse it: a manifest proves that a file is whole, not who made it. SpecError if the file cannot
    be read, is no exported kernel, was altered, or was built from another recipe. CapabilityError: the folder cannot be
    written.
    """
    folder = folder or own_folder()
    members = _unpacked(file)
    try:
        paths.make_folders(folder.parent)
        with paths.locked(folder.with_name(folder.name + ".lock")):
            if not replace and (kernel := find_kernel(folder)):  # unpacked by another process while this one waited
                return kernel
            with paths.scratch_folder(f"{folder.name}.fetching-", folder.parent) as work:
                fresh = work / "fresh"
                fresh.mkdir()
                for name, content in members.items():
                    (fresh / name).write_bytes(content)
                (fresh / "linux").chmod(0o755)
                approve(_accept(file, fresh))
                put_in_place(fresh, folder, work)
    except OSError as error:
        raise CapabilityError(
            f"cannot install the guest kernel in {folder}: {error.strerror}; set XDG_CACHE_HOME to a folder of yours"
        ) from None
    kernel = find_kernel(folder)
    assert kernel is not None
    return kernel


def _accept(file: Path, folder: Path) -> GuestKernel:
    """Return the kernel in `folder`, unpacked from `file`. SpecError unless it matches its manifest and this testbed's
    recipe.
    """
    if (kernel := find_kernel(folder)) is None:
        raise _altered(file, "its manifest is damaged")
    if (found := paths.digest(kernel.linux)) != kernel.sha256:
        raise _altered(file, f"its kernel has the SHA-256 {found} instead of {kernel.sha256}")
    if kernel.recipe != recipe():
        raise SpecError(
            f"the kernel in {file} was built by another version of testbed, from another configuration "
            f"({kernel.recipe}, here {recipe()}); without --kernel testbed uses the bundled one"
        )
    return kernel


def _unpacked(file: Path) -> dict[str, bytes]:
    try:
        with file.open("rb") as packed, lzma.open(packed) as stream:
            data = stream.read(_MOST_BYTES + 1)
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
                files = [member for member in archive.getmembers() if member.isfile()]
                members = {each.name: content for each in files if (content := archive.extractfile(each))}
                if len(data) > _MOST_BYTES or set(members) != set(_MEMBERS):
                    raise _altered(file, f"it should contain {' and '.join(_MEMBERS)}")
                return {name: content.read() for name, content in members.items()}
    except OSError as error:
        raise SpecError(f"cannot read the guest kernel in {file}: {error.strerror or error}") from None
    except (lzma.LZMAError, EOFError, tarfile.TarError) as error:
        raise _altered(file, str(error)) from None


def _altered(file: Path, what: str) -> SpecError:
    again = "`testbed vm --export` creates it"
    if file == SHIPPED_FILE:
        again = f"git checkout -- {SHIPPED}, or install testbed again"
    return SpecError(f"{file} is no complete guest kernel, or was altered: {what}; restore it ({again})")
