"""Every error that testbed raises on purpose, in one tree.

A message says what was attempted, what is wrong, what to do.

TestbedError                exit status 1: ours
+-- UserError               exit status 2: the user can mend it
|   +-- SpecError           a file, key, unit or value that cannot be accepted
|   +-- UnknownNameError    a name that is not in a table; the nearest is suggested
|   +-- CapabilityError     this machine cannot do what was asked
+-- LabError                the lab could not be built
|   +-- ShapingError        the kernel holds something other than what was asked
+-- CodecError              bytes that cannot be decoded, or a tensor that cannot be encoded
+-- TransportError          a peer was lost, or sent something that is not a frame of this run
+-- StageError              a stage host or its job ended before its time
+-- ResultsError            a result folder that cannot be read back
+-- GuestKernelError        the guest kernel could not be had or died
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable


class TestbedError(Exception):
    """Base of the tree; `exit_status` is what the command line ends with."""

    __test__ = False  # pytest would otherwise collect a class whose name starts with Test
    exit_status = 1


class UserError(TestbedError):
    """Something the user can mend."""

    exit_status = 2


class SpecError(UserError):
    """A file, key, unit or value that cannot be accepted."""


class UnknownNameError(UserError):
    """A name that is not in a table.

    `kind` says what the table holds ("profile", "codec"), `known` what it holds.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        near = difflib.get_close_matches(name, self.known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        super().__init__(f"there is no {kind} {name!r}{hint} Known: {', '.join(self.known) or 'none'}.")


class CapabilityError(UserError):
    """This machine cannot do what was asked; the message says how to get it or what to use instead."""


class LabError(TestbedError):
    """The lab (namespaces, links, shapers) could not be built."""


class ShapingError(LabError):
    """The kernel holds something other than what was asked."""


class CodecError(TestbedError):
    """Bytes that cannot be decoded, or a tensor that cannot be encoded. The codec's state is as before."""


class TransportError(TestbedError):
    """A peer was lost, or sent something that is not a frame of this run."""

    peer: int | None = None
    """The place at the other end, where a program is to know it."""


class StageError(TestbedError):
    """A stage host or its job ended before its time."""


class ResultsError(TestbedError):
    """A result folder that cannot be read back."""


class GuestKernelError(TestbedError):
    """The guest kernel could not be had, or died."""


def status_of(program: Callable[[], object]) -> int:
    """Run a program to its end and return its exit status; an error goes to stderr as one message."""
    try:
        program()
    except TestbedError as error:
        sys.stderr.write(f"testbed: error: {error}\n")
        return error.exit_status
    return 0
