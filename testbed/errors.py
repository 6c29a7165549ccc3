"""All errors that testbed raises deliberately, in one tree.

A message states what was attempted, what is wrong, and what to do.

TestbedError                exit status 1: ours
+-- UserError               exit status 2: the user can fix it
|   +-- SpecError           an invalid file, key, unit or value
|   +-- UnknownNameError    a name that is not in a table; suggests the nearest
|   +-- CapabilityError     this machine cannot do what was asked
+-- LabError                the lab could not be built
|   +-- ShapingError        the kernel's settings differ from the requested ones
+-- CodecError              bytes that cannot be decoded, or a tensor that cannot be encoded
+-- TransportError          a peer was lost, or sent something that is not a frame of this run
+-- StageError              a stage host or its job ended prematurely
+-- ResultsError            a result folder that cannot be read back
+-- GuestKernelError        the guest kernel could not be obtained, or died
"""

from __future__ import annotations

import difflib
import errno
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Final

# C0 except newline and tab, DEL and C1; overrides of the writing direction; halves of a surrogate pair.
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_COLOURS: Final = re.compile("\x1b\\[[0-9;:]*m")


def printable(text: str) -> str:
    """Return a text with control characters as escapes (`\\x1b`), because a terminal would obey them."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def without_colours(text: str) -> str:
    """Return a text without the escape sequences that set colours."""
    return _COLOURS.sub("", text)


def printable_line(text: str) -> str:
    """Return a line of somebody's program as a terminal may have it: with its colours, which end with the line.

    Of what a progress bar overwrites (`\\r`), the last remains. All else that controls a terminal becomes escapes.
    """
    colours = _COLOURS.findall(line := text.rpartition("\r")[2])
    printed = map(printable, _COLOURS.split(line))
    return "".join(itertools.chain(*zip(printed, [*colours, "\x1b[0m" if colours else ""], strict=True)))


class TestbedError(Exception):
    """Base of the tree; `exit_status` is the exit status of the command line. Messages may quote files, so they are
    `printable`.
    """

    __test__ = False  # pytest would otherwise collect a class whose name starts with Test
    exit_status = 1

    def __str__(self) -> str:
        return printable(super().__str__())


class UserError(TestbedError):
    """An error that the user can fix."""

    exit_status = 2


class SpecError(UserError):
    """An invalid file, key, unit or value."""


class UnknownNameError(UserError):
    """A name that is not in a table.

    `kind`: kind of the names in the table ("profile", "codec"); `known`: all of them.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        near = difflib.get_close_matches(name, self.known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        super().__init__(f"there is no {kind} {name!r}{hint} Known: {', '.join(self.known) or 'none'}.")


class CapabilityError(UserError):
    """This machine cannot do what was asked; the message names a remedy or an alternative."""


class LabError(TestbedError):
    """The lab (namespaces, links, shapers) could not be built."""


class ShapingError(LabError):
    """The kernel's settings differ from the requested ones."""


class CodecError(TestbedError):
    """Bytes that cannot be decoded, or a tensor that cannot be encoded. The codec's state is unchanged."""


class TransportError(TestbedError):
    """A peer was lost, or sent something that is not a frame of this run."""

    peer: int | None = None
    """The place at the other end, if the program needs to know it."""


class StageError(TestbedError):
    """A stage host or its job ended prematurely."""


class DivergedError(StageError):
    """A training whose loss or gradients are no longer finite."""


class ResultsError(TestbedError):
    """A result folder that cannot be read back."""


class GuestKernelError(TestbedError):
    """The guest kernel could not be obtained, or died."""


_FREE: Final = "free some space, then run the same command, which keeps finished work"
_REMEDIES: Final[Mapping[int | None, str]] = {
    errno.ENOSPC: _FREE,
    errno.EDQUOT: _FREE,
    errno.EFBIG: "the limit on the size of files is too low (ulimit -f)",
    errno.EACCES: "it belongs to another user; change its owner or mode, or choose another folder",
    errno.EROFS: "choose a folder that can be written",
    errno.ENAMETOOLONG: "shorten it",
    errno.EISDIR: "it is a folder; name a file",
    errno.ENOTDIR: "a part of its path is a file",
}
_SHOWN: Final = 100
"""Characters of a file's name in a message."""


def explained(error: BaseException) -> TestbedError | None:
    """Return a deliberate error unchanged, and a full disk or the like as a UserError; None for a bug."""
    if isinstance(error, TestbedError):
        return error
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        name = "a file" if error.filename is None else str(error.filename)
        shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
        return UserError(f"cannot write or open {shown}: {error.strerror}; {_REMEDIES[error.errno]}")
    return None


def status_of(program: Callable[[], object]) -> int:
    """Run a program to its end and return its exit status; an error is printed to stderr as one message."""
    try:
        program()
    except Exception as error:
        if (told := explained(error)) is None:
            raise
        sys.stderr.write(f"testbed: error: {told}\n")
        return told.exit_status
    return 0
