"""Work done in a child process with little memory and little time, so that a codec can neither hide things nor do harm."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from testbed.codecs.check.findings import Broken

_GRACE_S = 5.0


def in_child(work: Callable[[], Any], *, seconds: float = 60.0, memory_bytes: int | None = None) -> Any:
    """What `work` returns (plain values, bytes, arrays), computed in a fork of this process.

    Nothing that it leaves in modules or classes comes back. Broken where it takes longer than `seconds`; with `memory_bytes`, an
    allocation beyond that much more than the process has now fails in it.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_serve, args=(work, theirs, memory_bytes), daemon=True)
    child.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            raise Broken(f"not done after {seconds:.0f} s")
        kind, found = ours.recv()
    except EOFError:
        child.join(_GRACE_S)
        raise Broken(f"the process died of it, exit code {child.exitcode}") from None
    finally:
        if child.is_alive():
            child.join(0.2)
        if child.is_alive():
            child.kill()
        child.join()
        ours.close()
    if kind == "broken":
        raise Broken(found)
    return found


def _serve(work: Callable[[], Any], answer: Connection, memory_bytes: int | None) -> None:
    torch.set_num_threads(1)  # a fork has no pool of threads, and would wait for the parent's for ever
    if memory_bytes is not None:
        now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (now + memory_bytes, hard))
    try:
        answer.send(("found", work()))
    except Broken as broken:
        answer.send(("broken", str(broken)))
    except BaseException as error:  # a stranger's codec may raise anything
        answer.send(("broken", f"{type(error).__name__}: {error}"))
