"""Carry a built kernel to another machine: one compressed file with the kernel and its manifest.

The kernel is static, so it runs on any x86-64 Linux. A file that was cut or altered is refused.
"""

from __future__ import annotations

import io
import lzma
import tarfile
import tempfile
from pathlib import Path

from testbed.errors import SpecError
from testbed.vm.build import BUILD_COMMAND, clock_folder, find_clock_kernel, recipe
from testbed.vm.debian import locked, make_folder, put_in_place
from testbed.vm.kernel import MANIFEST, GuestKernel, find_kernel

_MEMBERS = (MANIFEST, "linux")
_MOST_BYTES = 64 << 20
"""A kernel has about 7 MB. Without a limit a small file could unpack to a whole disk."""


def export_kernel(kernel: GuestKernel, file: Path) -> None:
    """Write a kernel with a virtual clock to a file, about 2 MB. SpecError where it cannot be written."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in _MEMBERS:
            content = (kernel.folder / name).read_bytes()
            member = tarfile.TarInfo(name)  # no date and no owner: the same kernel makes the same file
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
    try:
        file.write_bytes(lzma.compress(packed.getvalue(), preset=9))
    except OSError as error:
        raise SpecError(f"cannot write the guest kernel to {file}: {error.strerror}") from None


def import_kernel(file: Path, folder: Path | None = None) -> GuestKernel:
    """Put the kernel of an exported file into `folder` (default: the user's cache), and return it.

    What was in the folder is replaced. SpecError where the file cannot be read, is no exported kernel, was altered, or
    was built by a testbed that builds kernels otherwise than this one.
    """
    folder = folder or clock_folder()
    members = _unpacked(file)
    make_folder(folder.parent)
    with locked(folder.with_name(folder.name + ".lock")):
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.fetching-", dir=folder.parent) as work:
            fresh = Path(work) / "fresh"
            fresh.mkdir()
            for name, content in members.items():
                (fresh / name).write_bytes(content)
            (fresh / "linux").chmod(0o755)
            kernel = find_kernel(fresh)
            if kernel is None:
                raise _altered(file, "its contents do not have the checksums of its manifest")
            if kernel.recipe != recipe():
                raise SpecError(
                    f"the kernel in {file} was built by another version of testbed, from another configuration "
                    f"({kernel.recipe or 'none'}, here {recipe()}); build it with this one: {BUILD_COMMAND}"
                )
            put_in_place(fresh, folder, Path(work))
    found = find_clock_kernel(folder)
    assert found is not None
    return found


def _unpacked(file: Path) -> dict[str, bytes]:
    try:
        with file.open("rb") as packed, lzma.open(packed) as stream:
            data = stream.read(_MOST_BYTES + 1)
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
                members = {member.name: member for member in archive.getmembers() if member.isfile()}
                if len(data) > _MOST_BYTES or set(members) != set(_MEMBERS):
                    raise _altered(file, f"it should hold {' and '.join(_MEMBERS)}")
                return {name: _content(archive, members[name]) for name in _MEMBERS}
    except OSError as error:
        raise SpecError(f"cannot read the guest kernel in {file}: {error.strerror or error}") from None
    except (lzma.LZMAError, EOFError, tarfile.TarError) as error:
        raise _altered(file, str(error)) from None


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = archive.extractfile(member)
    assert stream is not None  # it is a file
    return stream.read()


def _altered(file: Path, what: str) -> SpecError:
    return SpecError(
        f"{file} is no whole guest kernel, or was altered: {what}; get it again (`testbed vm --export` makes it), or "
        f"build one here: {BUILD_COMMAND}"
    )
