"""What the files of runs prove, remembered between processes: to prove a run, all of its files must be read.

A proof holds for a version of the files (`manifest.version_of`). proofs.json in a result folder keeps those of verified
runs; it may be old, damaged or missing, because it is only believed for files that have not changed since.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Final, Literal, NamedTuple

import testbed
from testbed import manifest, paths
from testbed.frozen import Frozen

NAME: Final = "proofs.json"
_WORTH: Final = 1000
"""Number of runs verified by a process from which it writes the file."""


class Proof(NamedTuple):
    """Whether the files of a run are complete and unaltered."""

    state: Literal["verified", "unverified", "unfinished", "altered"]
    """verified: according to its manifest. unverified: an old run without a manifest, with consistent files.
    unfinished: it is still running, or was killed."""
    why: str = ""
    """The faulty file; empty if verified or unverified."""

    @property
    def sound(self) -> bool:
        """Whether the numbers of the run may be used."""
        return self.state in ("verified", "unverified")


class _VerifiedRuns(Frozen):
    """proofs.json."""

    testbed: str
    """Version of testbed that verified the runs."""
    verified: dict[str, str]
    """By CELL/run-K: the version of its files."""
    seal: str = ""
    """SHA-256 of the fields above."""

    def sealed(self) -> _VerifiedRuns:
        return self.model_copy(update={"seal": manifest.subject_of(self.model_copy(update={"seal": ""}))})


class Proofs:
    """What is known of the runs of a result folder."""

    def __init__(self, experiment: Path) -> None:
        """Starts with what the folder's file says, if that is whole and by this version."""
        self._file, self._kept = experiment / NAME, dict[str, str]()
        with contextlib.suppress(OSError, ValueError):
            kept = _VerifiedRuns.model_validate_json(self._file.read_bytes())
            if kept == kept.sealed() and kept.testbed == testbed.__version__:
                self._kept = kept.verified
        self.known = {run: (version, Proof("verified")) for run, version in self._kept.items()}
        """By CELL/run-K: the version of its files, and what they prove."""

    def keep(self) -> None:
        """Write the file, if many runs are not in it. No error if that is impossible."""
        verified = {run: version for run, (version, proof) in self.known.items() if proof.state == "verified"}
        if sum(self._kept.get(run) != version for run, version in verified.items()) >= _WORTH:
            there = {run: version for run, version in verified.items() if (self._file.parent / run).is_dir()}
            with contextlib.suppress(OSError):
                text = _VerifiedRuns(testbed=testbed.__version__, verified=there).sealed().model_dump_json(indent=1)
                paths.write_atomically(self._file, text + "\n")
                self._kept = there


@functools.cache
def proofs_in(experiment: Path) -> Proofs:
    """Return what this process knows of a result folder."""
    return Proofs(experiment)
