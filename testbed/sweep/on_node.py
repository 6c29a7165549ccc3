"""Runs a task on another machine, which shares no folder with the one that sent it: files in, program, files out.

Prepared data, below the cache folder of the sender, is placed at the same name below the cache folder here, and stays
there. All else lies in a folder that is removed at the end of the task.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import testbed
from testbed import paths, results, vm
from testbed.errors import ResultsError, TestbedError
from testbed.sweep.calibrations import hash_of_sources
from testbed.sweep.environment import describe_machine
from testbed.sweep.executor import Task, execute
from testbed.sweep.trainings import host_options

_NAMING = ("tokens", "folder", "trace", "output")
"""Fields of jobs that are paths."""
_STATED = ("recipe", "lab")
"""Fields of jobs in which nothing is replaced."""


class SentFile(NamedTuple):
    """A file that a task reads."""

    path: str
    """Where the sender has it."""
    sha256: str
    content: Any
    """Its bytes, or what `fetch` makes them of."""


class Shipment(NamedTuple):
    """A task, as it is sent."""

    task: Task
    files: list[SentFile]
    cache: str
    """The sender's cache folder."""
    versions: Mapping[str, str]
    """Versions that are needed: those of the sender."""


class Done(NamedTuple):
    """What comes back."""

    host: str
    unlike: str
    """Why it did not run: the versions here are others; else empty."""
    error: TestbedError | None
    said: str
    files: dict[str, bytes]
    """The files of the folder that the task makes, by their names in it."""


class NodeFacts(NamedTuple):
    """Description of a machine."""

    host: str
    versions: dict[str, str]
    machine: dict[str, Any]
    """What `environment.describe_machine` returns there."""


@functools.cache
def facts() -> NodeFacts:
    """Describe this machine and the versions here on which results depend."""
    machine, kernel = describe_machine(), vm.find_clock_kernel()
    versions = {
        "testbed": f"{testbed.__version__} ({hash_of_sources(['.'])[:12]})",
        "torch": str(machine["versions"]["torch"]),
        "guest kernel": "none" if kernel is None else f"{kernel.version} ({kernel.sha256[:12]})",
    }
    return NodeFacts(platform.node(), versions, machine)


def differences(here: Mapping[str, str], needed: Mapping[str, str]) -> str:
    """List the versions that differ from the needed ones; empty if none does."""
    return "; ".join(
        f"it has {name} {here.get(name, 'none')}, and {needed[name]} is needed"
        for name in needed
        if here.get(name) != needed[name]
    )


def work(shipment: Shipment, fetch: Callable[[Any], bytes] = lambda content: content) -> Done:
    """Run a task, unless versions here differ from those needed. Main thread only."""
    here, task = facts(), shipment.task
    if unlike := differences(here.versions, shipment.versions):
        return Done(here.host, unlike, None, "", {})
    with paths.scratch_folder("testbed-task-") as scratch:
        names = {shipment.cache: str(paths.cache_folder())}
        for number, sent in enumerate(shipment.files):
            names[sent.path] = str(_placed(sent, shipment.cache, scratch / str(number), fetch))
        made = scratch / "made"
        if task.writes is not None:
            made /= task.writes.name
            names[str(task.writes)] = str(made)
        results.make_folder(made.parent)
        for argument in set(task.arguments) & {sent.path for sent in shipment.files}:
            job = Path(names[argument])
            job.write_text(json.dumps(_renamed(json.loads(job.read_text("utf8")), names)), "utf8")
        arguments = tuple(names.get(argument, argument) for argument in task.arguments)
        here_task = task._replace(arguments=arguments, reads=(), writes=None)
        with closing(execute([here_task], options={} if task.guest else host_options())) as ended:
            (result,) = ended
        files = {} if result.error or task.writes is None else _read(made)
    return Done(here.host, "", result.error, result.said, files)


def _placed(sent: SentFile, cache: str, folder: Path, fetch: Callable[[Any], bytes]) -> Path:
    """Return the place of a file here, which now holds it."""
    path = Path(sent.path)
    kept = path.is_relative_to(cache)
    place = paths.cache_folder() / path.relative_to(cache) if kept else folder / path.name
    if not (kept and place.is_file() and paths.digest(place) == sent.sha256):
        results.make_folder(place.parent)
        draft = place.with_name(f".{place.name}.{os.getpid()}")
        draft.write_bytes(fetch(sent.content))
        draft.replace(place)
    return place


def _renamed(value: Any, names: Mapping[str, str], field: str = "") -> Any:
    """Replace paths of the sender in a job by those here."""
    if isinstance(value, dict):
        return {key: part if key in _STATED else _renamed(part, names, key) for key, part in value.items()}
    if isinstance(value, list):
        return [_renamed(part, names, field) for part in value]
    if field not in _NAMING or not isinstance(value, str):
        return value
    above = [name for name in names if value == name or value.startswith(f"{name}/")]
    name = max(above, key=len, default="")
    return names[name] + value.removeprefix(name) if above else value


def _read(folder: Path) -> dict[str, bytes]:
    """Read all files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def place_results(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder of the files that came back, atomically. ResultsError for a name that leads out of it."""
    check_names(files)
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    for name, content in files.items():
        place = draft / name
        results.make_folder(place.parent)
        place.write_bytes(content)
        paths.give_to_user(place)
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    paths.sync_folder(folder.parent)


def check_names(names: Iterable[str]) -> None:
    """Raise ResultsError for names of files that lead out of their folder."""
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or not PurePosixPath(name).parts:
            raise ResultsError(
                f"a node sent a file named {name!r}, which lies outside the task's folder; it is refused"
            )
