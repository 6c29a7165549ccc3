"""Two processes that share nothing but the kit's requests: one has all encoders, the other all decoders.

Many checks use the same two. A process that has ended or hangs fails the check that asked it, and the next request
starts another.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from testbed.closing import Closing
from testbed.codecs.check.packing import pack, unpack
from testbed.codecs.check.seal import Listener
from testbed.codecs.check.verdicts import Broken, NothingToAsk
from testbed.errors import CodecError, SpecError
from testbed.process import start_program

Place = Literal["encoder", "decoder"]
PLACES: tuple[Place, Place] = ("encoder", "decoder")
_ERRORS = {"CodecError": CodecError, "SpecError": SpecError, "NothingToAsk": NothingToAsk}
_STARTS = 4
"""How often a process is started anew before the remaining checks fail unasked."""
_START_S, _GRACE_S = 120.0, 5.0
_LONGEST_BYTES = 1 << 30


class Ends(Closing):
    """Both processes, which import the codecs of `texts` before they are sealed. A context manager that ends them."""

    def __init__(self, texts: Sequence[str], *, warm: bool = True, limit_s: float = 60.0) -> None:
        """`limit_s`: how long a process may take for a request. `warm`: try the codecs once before sealing.

        SpecError if a process ends while it imports them.
        """
        self.limit_s, self.numbers = limit_s, itertools.count()
        self.limits: dict[str, None] = {}
        """What this machine does not isolate, and why."""
        self.refused, self.noticed, self.printed = dict[str, None](), dict[str, None](), b""
        """What the processes asked the kernel for in vain, what else they did, and what they printed; a check's caller
        empties these."""
        self._texts, self._warm, self._starts = list(texts), warm, 0
        self._processes: dict[Place, _EndProcess] = {}
        try:
            for place in PLACES:
                self._processes[place] = _EndProcess(place)
            for place in PLACES:
                self._set_up(place)
        except BaseException:
            self.close()
            raise
        self._starts = 0

    @property
    def pids(self) -> dict[Place, int]:
        """The processes that run."""
        return {place: process.pid for place, process in self._processes.items()}

    def ask(self, place: Place, *request: Any, limit_s: float | None = None) -> Any:
        """Return a process's answer to a request. Raises what the request raised there.

        Broken if the process ends, or takes longer than `limit_s`.
        """
        if place not in self._processes:
            self._restart(place)
        try:
            kind, noticed, answer = self._processes[place].ask(request, limit_s or self.limit_s)
        except _Gone:
            self._collect(self._processes[place])
            self._processes.pop(place).close()
            raise
        self._collect(self._processes[place])
        for name in noticed:
            (self.refused if name.startswith("the clock") else self.noticed)[name] = None
        if kind == "done":
            return answer
        raise _ERRORS.get(kind, Broken)(answer)

    def limit_memory(self, place: Place, more_bytes: int | None) -> None:
        """Make a process's allocations beyond that much additional memory fail; None: no longer."""
        with contextlib.suppress(KeyError, OSError):  # it has ended
            pid, most = self.pids[place], resource.RLIM_INFINITY
            if more_bytes is not None:
                pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[0]
                most = int(pages) * resource.getpagesize() + more_bytes
            resource.prlimit(pid, resource.RLIMIT_AS, (most, resource.prlimit(pid, resource.RLIMIT_AS)[1]))

    def close(self) -> None:
        """End both."""
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def _set_up(self, place: Place) -> None:
        try:
            self.limits |= dict.fromkeys(self._processes[place].set_up([sys.path, self._texts, self._warm]))
        except _Gone as gone:
            self._processes.pop(place).close()
            if not self._warm:
                raise SpecError(f"cannot import {', '.join(self._texts)}: {gone}") from None
            self._warm = False  # perhaps the codec ended it when it was tried; a check will say so
            self._restart(place)

    def _restart(self, place: Place) -> None:
        self._starts += 1
        if self._starts > _STARTS:
            raise Broken(f"not asked, because the codec has ended or halted its processes {_STARTS} times")
        self._processes[place] = _EndProcess(place)
        self._set_up(place)

    def _collect(self, process: _EndProcess) -> None:
        if process.listener is not None:
            self.refused |= process.listener.refused
            process.listener.refused.clear()
        if written := os.pread(process.output, 1 << 16, 0):
            self.printed += written
            os.ftruncate(process.output, 0)
            os.lseek(process.output, 0, os.SEEK_SET)


class _Gone(Broken):
    """The process has ended, or is of no more use."""


class _EndProcess(Closing):
    def __init__(self, place: Place) -> None:
        self._place = place
        self.listener: Listener | None = None
        theirs, ours = zip(os.pipe(), reversed(os.pipe()), strict=True)
        self._requests, self._answers = Connection(ours[0], readable=False), Connection(ours[1], writable=False)
        self.output = os.memfd_create("output")
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._program = start_program(
            "testbed.codecs.check.end_process",
            *map(str, theirs),
            attempt="start a process for codecs",
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            pass_fds=theirs,
            env={**os.environ, **threads, "PYTHONHASHSEED": "1" if place == "encoder" else "2"},
        )
        self.pid = self._program.pid
        for descriptor in theirs:
            os.close(descriptor)

    def set_up(self, request: Any) -> list[str]:
        """Have it import, then seal itself; return what was not possible."""
        _, _, (descriptor, limits) = self.ask(request, _START_S)
        if descriptor is not None:
            try:
                self.listener = Listener(self.pid, descriptor)
            except OSError as error:
                limits.append(f"a report of what they ask the kernel for: {error.strerror}")
        return list(limits)

    def ask(self, request: Any, limit_s: float) -> Any:
        """Raises _Gone if it ends or takes longer, otherwise what it answers with."""
        attempt = request[3] if len(request) > 3 else "its start"
        deadline = time.monotonic() + limit_s
        sources: list[Connection | int] = [self._answers, *([] if self.listener is None else [self.listener.fd])]
        try:
            self._requests.send_bytes(pack(request))
            while self._answers not in (ready := wait(sources, max(0.0, deadline - time.monotonic()))):
                if self.listener is None or not ready or time.monotonic() > deadline:
                    late = f"did not answer within {limit_s:.0f} s, during {attempt}"
                    raise _Gone(f"the {self._place}'s process {late}")
                self.listener.refuse()
            kind, noticed, answer = unpack(self._answers.recv_bytes(_LONGEST_BYTES))
            return kind, noticed, unpack(answer)
        except (EOFError, OSError):
            try:
                status = self._program.wait(_GRACE_S)
            except subprocess.TimeoutExpired:  # it has only closed its pipes
                self._program.kill()
                status = self._program.wait()
            how = f"exit status {status}" if status >= 0 else f"signal {-status}"
            raise _Gone(f"the {self._place}'s process ended with {how} during {attempt}") from None

    def close(self) -> None:
        """End it."""
        self._program.kill()
        self._program.wait()
        self._requests.close()
        self._answers.close()
        os.close(self.output)
        if self.listener is not None:
            os.close(self.listener.fd)
