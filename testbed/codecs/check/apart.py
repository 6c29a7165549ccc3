"""Work in a child process with little memory and time, so that a codec can neither hide things nor do harm."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import resource
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from testbed.codecs.check.verdicts import Broken
from testbed.process import die_with_parent

_GRACE_S = 5.0


def elsewhere(work: Callable[..., Any], *arguments: object, seconds: float) -> Any:
    """Return what `work(*arguments)` returns, computed in a process that descends from another interpreter.

    It has another seed for hashes of strings, another folder for temporary files, and no memory in common.

    Broken as in `in_child`. `work` is a function of a module, the arguments plain values.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    with tempfile.TemporaryDirectory(prefix="testbed-check-") as folder:
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_serve_elsewhere, args=(theirs, folder, work, arguments), daemon=True)
        with _unlike_this_one():
            child.start()
        theirs.close()
        return _answer(ours, child, seconds)


@contextlib.contextmanager
def _unlike_this_one() -> Iterator[None]:
    """The server of forks is started with the first of them and keeps the seed for hashes; a child would import this
    program's main module again, of which it needs nothing.
    """
    kept, main = os.environ.get("PYTHONHASHSEED"), sys.modules["__main__"]
    os.environ["PYTHONHASHSEED"] = "2" if kept == "1" else "1"
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if kept is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = kept


def _serve_elsewhere(answer: Connection, folder: str, work: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    _serve(os.getppid(), functools.partial(work, *arguments), answer, None)


def in_child(work: Callable[[], Any], *, seconds: float = 60.0, memory_bytes: int | None = None) -> Any:
    """Return what `work` returns (plain values, bytes, arrays), computed in a fork of this process.

    Nothing that it leaves in modules or classes comes back. Broken where it takes longer than `seconds`; with
    `memory_bytes`, an allocation beyond that much more than the process has now fails in it.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    arguments = (os.getpid(), work, theirs, memory_bytes)
    child = multiprocessing.get_context("fork").Process(target=_serve, args=arguments, daemon=True)
    child.start()
    theirs.close()
    return _answer(ours, child, seconds)


def _answer(ours: Connection, child: BaseProcess, seconds: float) -> Any:
    try:
        if not ours.poll(seconds):
            raise Broken(f"not done after {seconds:.0f} s")
        kind, answer = ours.recv()
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
        raise Broken(answer)
    return answer


def _serve(parent: int, work: Callable[[], Any], answer: Connection, memory_bytes: int | None) -> None:
    die_with_parent(parent)  # which keeps the time limit
    torch.set_num_threads(1)  # a fork has no pool of threads, and would wait for the parent's for ever
    if memory_bytes is not None:
        now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (now + memory_bytes, hard))
    try:
        answer.send(("done", work()))
    except Broken as broken:
        answer.send(("broken", str(broken)))
    except BaseException as error:  # a stranger's codec may raise anything
        answer.send(("broken", f"{type(error).__name__}: {error}"))
