"""A layer that logs everything a rank does with its process groups: FOLDER/rank-R.jsonl, one JSON object per line.

about   version, rank, ranks, device: the first line of every process that wrote the file
group   name, ranks (global, by group rank), level
op      number, what ("all_reduce"), call (the method of the group), group, bytes, sizes (bytes of each tensor, if there
        are several), item (bytes of an element), root, peer, tag (of a message), splits (bytes for and from each rank
        of an uneven all-to-all), begin, called (when the call returned), end (null: its end was not observed)
wait    number (of the op), begin, end: the job was blocked in wait()
module  name, phase, at, ns: see pace.py
step    number, by ("job" or an optimiser's number), at: a step ended
backward_end  at: a backward pass has finished computing, and waits for its reducer

Times are CLOCK_MONOTONIC in nanoseconds. `bytes` is the size of the tensor that is reduced, broadcast or sent, this
rank's input of all_gather, gather and all_to_all, the whole input of reduce_scatter, or the output of scatter. An
operation ends when its future completes; a message, which has none, when the job has waited for it. `level` 0 is a call
of the job, 1 a call of a codec on its behalf. If `record` is on, the accelerator is synchronised before a time is read.

Lines are kept in memory and written every `LINES` lines, at the end of each step, when a group shuts down, and on exit.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from testbed.torch import steps
from testbed.torch.process_group import WrappedGroup

VERSION: Final = 1
LINES: Final = 4096
_NOW = time.monotonic_ns

_CALLS: Final[dict[str, tuple[str, int | None]]] = {
    "broadcast": ("broadcast", 0), "allreduce": ("all_reduce", 0), "allreduce_coalesced": ("all_reduce", 0),
    "reduce": ("reduce", 0), "allgather": ("all_gather", 1), "all_gather_single": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1), "allgather_coalesced": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1), "allgather_into_tensor_coalesced": ("all_gather", 1),
    "gather": ("gather", 1), "scatter": ("scatter", 0), "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1), "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1), "all_to_all_single": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1), "alltoall": ("all_to_all", 1), "send": ("send", 0), "recv": ("receive", 0),
    "recv_anysource": ("receive", 0), "barrier": ("barrier", None), "monitored_barrier": ("monitored_barrier", None),
}  # fmt: skip
"""Method -> name of the operation, and the argument whose bytes count."""


class Log:
    """Lines that are not written yet."""

    def __init__(self, folder: Path, record: bool = False) -> None:
        self.folder, self.record = folder, record
        folder.mkdir(parents=True, exist_ok=True)
        self.waited_ns = 0
        """Total time that this process was blocked in wait()."""
        self._lock = threading.Lock()
        self._lines: list[dict[str, Any]] = []
        self._open: dict[int, dict[str, Any]] = {}
        self._numbers = self._steps = 0
        self._path: Path | None = None
        self._groups: dict[tuple[str, int], list[int]] = {}
        self._optimizers: dict[int, int] = {}
        self._process = os.getpid()

    def started(self, group: dist.ProcessGroup, level: int) -> None:
        """Log a new group; the first one determines the rank."""
        # A fork has its own file only if it is a rank of its own.
        if self._path is None or os.getpid() != self._process:
            self._process, self._path = os.getpid(), self.folder / f"rank-{_global_rank(group)}.jsonl"
            self._lines, self._open, self._groups = [], {}, {}
            about = {"version": VERSION, "rank": _global_rank(group), "ranks": _world_size(group)}
            accelerator = torch.accelerator.current_accelerator()
            self.note("about", **about, device=str(accelerator or "cpu"), clock="monotonic")
            self.flush()  # that there is a rank is known although it may be killed
            atexit.register(self.flush)

    def note(self, kind: str, **fields: Any) -> None:
        """Add a line."""
        self._lines.append({"kind": kind, **fields})
        if len(self._lines) >= LINES:
            self.flush()

    def begin(self, group: ObservedGroup, call: str, arguments: Sequence[Any]) -> dict[str, Any]:
        """Open the line of an operation."""
        name = str(group.group_name)
        if (name, group.level) not in self._groups:
            # torch knows the outermost layer alone, whose call came first.
            ranks = self._groups[name, 0] if group.level else dist.get_process_group_ranks(group)
            self._groups[name, group.level] = ranks
            self.note("group", name=name, ranks=ranks, level=group.level)
        self.synchronize()
        what, position = _CALLS[call]
        with self._lock:
            self._numbers += 1
            line = {"number": self._numbers, "what": what, "call": call, "group": name, "level": group.level}
            self._open[self._numbers] = line
        line.update(_sizes(what, arguments[position] if position is not None else []), **_ends(call, arguments))
        line.update(begin=_NOW(), called=None, end=None)
        return line

    def ended(self, line: dict[str, Any]) -> None:
        """Log the end of an operation, once."""
        at = _NOW()
        with self._lock:
            if self._open.pop(line["number"], None) is None:
                return
        line["end"] = at
        self.note("op", **line)

    def waited(self, line: dict[str, Any], begin: int, before_ns: int) -> None:
        """Log that the job has been blocked by an operation since `begin`, when it had been for `before_ns`."""
        end = _NOW()
        if threading.current_thread() is threading.main_thread():  # a wait below a codec is part of the one above
            self.waited_ns = max(self.waited_ns, before_ns + end - begin)
        self.note("wait", number=line["number"], begin=begin, end=end)

    def step(self, by: str | int = "job") -> None:
        """Log that a step has ended, and write all lines."""
        self.synchronize()
        self.note("step", number=self._steps, by=by, at=_NOW())
        self._steps += 1
        self.flush()

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Log a step of an optimiser."""
        self.step(self._optimizers.setdefault(id(optimizer), len(self._optimizers)))

    def flush(self) -> None:
        """Write the lines. Operations whose end was not observed stay open until the process ends."""
        if self._path is None or os.getpid() != self._process:
            return
        with self._lock:
            lines, self._lines = self._lines, []
        with self._path.open("a", encoding="utf8") as file:
            file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)

    def close(self) -> None:
        """Write everything, including operations whose end was not observed."""
        with self._lock:
            still, self._open = list(self._open.values()), {}
        for line in still:
            self.note("op", **line)
        self.flush()

    def synchronize(self) -> None:
        """Synchronise with an accelerator, if durations are recorded."""
        if self.record and torch.accelerator.is_available():
            torch.accelerator.synchronize()


class ObservedWork(dist.Work):
    """Handle of an operation that logs when the job waits for it."""

    def __init__(self, log: Log, line: dict[str, Any], inner: Any) -> None:
        super().__init__()
        self._log, self._line, self._inner = log, line, inner

    def wait(self, timeout: timedelta | None = None) -> bool:
        begin, before_ns = _NOW(), self._log.waited_ns
        try:
            done = bool(self._inner.wait() if timeout is None else self._inner.wait(timeout))
            if self._line.get("peer", 0) is None:  # the actual sender
                self._line["peer"] = self._inner._source_rank()
            return done
        finally:
            self._log.waited(self._line, begin, before_ns)
            self._log.ended(self._line)

    def is_completed(self) -> bool:
        if done := bool(self._inner.is_completed()):
            self._log.ended(self._line)
        return done

    def get_future(self) -> Any:
        return self._inner.get_future()

    def result(self) -> Any:
        return self._inner.result()

    def is_success(self) -> bool:
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        return self._inner.exception()

    def synchronize(self) -> None:
        self._inner.synchronize()

    def _source_rank(self) -> int:
        return int(self._inner._source_rank())

    source_rank = _source_rank


class ObservedGroup(WrappedGroup):
    """A process group whose operations are logged."""

    def __init__(self, inner: dist.ProcessGroup, log: Log, level: int = 0) -> None:
        super().__init__(inner)
        self.log, self.level = log, level
        log.started(inner, level)

    def call(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        log = self.log
        line = log.begin(self, operation, [*arguments, *keywords.values()])
        work = super().call(operation, *arguments, **keywords)
        line["called"] = _NOW()
        if not isinstance(work, dist.Work):  # monitored_barrier, which returns nothing
            log.ended(line)
            return work
        with contextlib.suppress(RuntimeError):  # a message has no future
            # gloo's thread may hold the last reference to this: with the group in it, the thread would join itself.
            work.get_future().add_done_callback(lambda _: log.ended(line))
        return ObservedWork(log, line, work)

    def shutdown(self) -> None:
        """Write the lines: some programs end without running Python's exit handlers."""
        self.log.close()
        self.inner.shutdown()


def layers(wanted: dict[str, Any]) -> list[Any]:
    """Return the observer's layer if TESTBED_TORCH requests it, and log steps of every optimiser."""
    log = _active(Log(Path(wanted["folder"]), bool(wanted.get("record"))))
    if log.record:
        importlib.import_module("testbed.torch.pace").stopwatch(log)
    steps.listen(log.step)
    register_optimizer_step_post_hook(log.optimizer_stepped)  # after the stopwatch has timed the update
    return [lambda group: ObservedGroup(group, log)]


_log: Log | None = None


def _active(log: Log) -> Log:
    global _log
    _log = log
    return log


def active_log() -> Log | None:
    """Return this process's log, if it is observed."""
    return _log


def _global_rank(group: dist.ProcessGroup) -> int:
    return dist.get_rank() if dist.is_initialized() else group.rank()


def _world_size(group: dist.ProcessGroup) -> int:
    return dist.get_world_size() if dist.is_initialized() else group.size()


def _sizes(what: str, tensors: Any) -> dict[str, Any]:
    flat = list(_tensors(tensors))
    sizes = [_bytes(tensor) for tensor in flat]
    about: dict[str, Any] = {"bytes": sum(sizes), "item": flat[0].element_size() if flat else 1}
    if any(tensor.is_sparse for tensor in flat):
        about["sparse"] = True
    return about | ({"sizes": sizes} if len(sizes) > 1 else {})


def _tensors(tensors: Any) -> Any:
    if isinstance(tensors, torch.Tensor):
        yield tensors
    else:
        for each in tensors:
            yield from _tensors(each)


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return _bytes(tensor.indices()) + _bytes(tensor.values())
    return tensor.numel() * tensor.element_size()


def _ends(call: str, arguments: Sequence[Any]) -> dict[str, Any]:
    """Return an operation's root, or a message's peer and tag; ranks are those in the group."""
    if call in ("send", "recv"):
        return {"peer": arguments[1], "tag": arguments[2]}
    if call == "recv_anysource":
        return {"peer": None, "tag": arguments[1]}
    if call in ("all_to_all_single", "alltoall_base") and (arguments[2] or arguments[3]):
        output, given = arguments[0], arguments[1]
        rows = [tensor.element_size() * tensor[0:1].numel() if tensor.dim() else 0 for tensor in (output, given)]
        return {"splits": [[rows[1] * count for count in arguments[3]], [rows[0] * count for count in arguments[2]]]}
    if call in ("broadcast", "reduce", "gather", "scatter"):
        roots = [argument.rootRank for argument in arguments if hasattr(argument, "rootRank")]
        return {"root": (roots or [argument for argument in arguments if isinstance(argument, int)] or [0])[0]}
    return {}
