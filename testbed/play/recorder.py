"""Record what a real PyTorch job does, as a trace: what each rank sends, receives and works on between.

    with Recorder(Path("job")) as recorder:      # job.0.rank, job.1.rank ...
        for batch in batches:
            train(batch)
            recorder.step()

Then `python -m testbed trace join job.*.rank -o job.trace`, and play it over any links.

The functions of torch.distributed are wrapped while the recorder is open. send, recv, isend, irecv are noted as they
are; all_reduce, all_gather, reduce_scatter, broadcast (and their _into_tensor and _tensor forms) as the messages of a
ring over their group (rings.py), in a lane of their own, one after the other; a barrier as an all_reduce of one byte.
All other time of the thread is work; an accelerator is waited for first, which slows the job down and makes its work
known. What a call itself takes is not noted: that is for the network to say. What was begun with isend, irecv or
async_op=True is waited for where the job calls wait(), at the latest at the end of its step.

Call them as torch.distributed.NAME: a name that was imported before is not wrapped. Not seen either: what C++ starts by
itself, such as DistributedDataParallel's own all-reduce (give it a communication hook that calls
torch.distributed.all_reduce); time that a job waits for anything but these calls, which counts as work. Other
communication of torch.distributed is refused when it is called.
"""

from __future__ import annotations

import functools
import inspect
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from testbed.errors import SpecError
from testbed.play.join import LABELS, VERSION, Row
from testbed.play.rings import ring_rounds
from testbed.play.trace import RECEIVE, SEND, SIGNAL, WAIT, WORK

_COLLECTIVES: Final = {
    "all_reduce": ("all_reduce", "tensor"),
    "all_gather": ("all_gather", "tensor"),
    "all_gather_into_tensor": ("all_gather", "input_tensor"),
    "reduce_scatter": ("reduce_scatter", "input_list"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "broadcast": ("broadcast", "tensor"),
    "barrier": ("all_reduce", None),
}
"""Function of torch.distributed -> whose ring it is, and which argument's size counts; None: one byte."""
_REFUSED: Final = ("all_to_all", "all_to_all_single", "gather", "scatter", "reduce", "monitored_barrier")


class Recorder:
    """Writes NAME.RANK.rank for this rank; a context manager, to be opened after init_process_group."""

    def __init__(self, name: Path) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.path = name.parent / f"{name.name}.{self.rank}.rank"
        self._steps: list[list[Row]] = []
        self._rows: list[Row] = []
        self._inside = False
        self._events = 0
        self._begun: dict[int, Callable[[], object]] = {}
        """What is noted when the job waits for it, by number."""
        self._own: list[tuple[Any, str, Any]] = []
        self._since_ns = 0

    def __enter__(self) -> Recorder:
        handlers: dict[str, Callable[..., Any]] = {
            "send": self._send, "isend": self._send, "recv": self._receive, "irecv": self._receive,
            **dict.fromkeys(_COLLECTIVES, self._collective), **dict.fromkeys(_REFUSED, self._refuse),
        }  # fmt: skip
        for name, handler in handlers.items():
            wrapped = self._wrap(name, getattr(self._dist, name), handler)
            for module in (self._dist, self._dist.distributed_c10d):
                self._own.append((module, name, getattr(module, name)))
                setattr(module, name, wrapped)
        self.resume()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: TracebackType | BaseException | None) -> None:
        for module, name, own in self._own:
            setattr(module, name, own)
        if kind is None:
            if not self._steps or self._begun or any(row[1] != WORK for row in self._rows):
                self.step()  # what follows the last step, unless it is nothing but work
            about = {"version": VERSION, "rank": self.rank, "ranks": self.ranks}
            lines = [about, *self._steps]
            self.path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines), "utf-8")

    def step(self) -> None:
        """End a step."""
        self.work()
        for number in list(self._begun):
            self.waited(number)
        self._steps.append(self._rows)
        self._rows = []

    def _wrap(self, name: str, own: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            if self._inside:  # one of these calls another
                return own(*arguments, **keywords)
            self.work()
            self._inside = True
            try:
                given = inspect.signature(own).bind(*arguments, **keywords).arguments
                return handler(name, given, functools.partial(own, *arguments, **keywords))
            finally:
                self._inside = False
                self.resume()

        return wrapped

    def work(self) -> None:
        """Note the time since the last communication."""
        import torch

        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        now_ns = time.perf_counter_ns()
        if now_ns > self._since_ns:
            self._rows.append([0, WORK, 0, 0, 0, now_ns - self._since_ns])
        self._since_ns = now_ns

    def resume(self) -> None:
        """Note that the job goes on from here."""
        self._since_ns = time.perf_counter_ns()

    def waited(self, number: int) -> None:
        """Note that the job waits for what it had begun; once."""
        self._begun.pop(number, lambda: None)()

    def _begin(self, done: Any, note: Callable[[], object]) -> Any:
        """Note that something began whose end the job waits for: now, where `done` is no handle, or later."""
        number = self._events = self._events + 1
        self._begun[number] = note
        if isinstance(done, self._dist.Work):
            return _Handle(self, number, done)
        self.waited(number)
        return done

    def _send(self, name: str, given: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        size = max(1, _size(given["tensor"]))
        self._rows.append([0, SEND, 1, self._peer(given, "dst"), f"tag {given.get('tag', 0)}", size])
        return self._begin(call(), lambda: None)

    def _receive(self, name: str, given: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        row = [0, RECEIVE, 1, self._peer(given, "src"), f"tag {given.get('tag', 0)}", 0]
        return self._begin(call(), lambda: self._rows.append(row))

    def _collective(self, name: str, given: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        collective, argument = _COLLECTIVES[name]
        ranks: list[int] = self._dist.get_process_group_ranks(given.get("group") or self._dist.group.WORLD)
        root = ranks.index(self._peer(given, "src")) if collective == "broadcast" else 0
        size = _size(given[argument]) if argument else 1
        number = self._events = self._events + 1
        channel, label = f"ranks {ranks}", LABELS.index(collective)
        self._rows += [[0, SIGNAL, label, 0, 2 * number, 0], [1, WAIT, label, 0, 2 * number, 1]]
        for ring in ring_rounds(collective, ranks.index(self.rank), len(ranks), size, root):
            if ring.sends_to is not None:
                self._rows.append([1, SEND, label, ranks[ring.sends_to], channel, ring.message_bytes])
            if ring.receives_from is not None:
                self._rows.append([1, RECEIVE, label, ranks[ring.receives_from], channel, 0])
        self._rows.append([1, SIGNAL, label, 0, 2 * number + 1, 0])
        return self._begin(call(), lambda: self._rows.append([0, WAIT, label, 0, 2 * number + 1, 1]))

    def _refuse(self, name: str, given: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        known = ", ".join(("send", "recv", "isend", "irecv", *_COLLECTIVES))
        raise SpecError(f"torch.distributed.{name} cannot be recorded; known are {known}")

    def _peer(self, given: Mapping[str, Any], end: str) -> int:
        """Return the rank at the other end of a call, which may be stated by its number in the group."""
        if given.get(end) is not None:
            return int(given[end])
        if given.get(f"group_{end}") is None:
            raise SpecError(f"a message that comes from anyone cannot be recorded; state its {end}")
        return int(self._dist.get_global_rank(given.get("group") or self._dist.group.WORLD, given[f"group_{end}"]))


class _Handle:
    """What isend and others return: torch's own, and it tells the recorder when the job waits for it."""

    def __init__(self, recorder: Recorder, number: int, own: Any) -> None:
        self._recorder, self._number, self._own = recorder, number, own

    def wait(self, *arguments: Any, **keywords: Any) -> Any:
        self._recorder.work()
        try:
            return self._own.wait(*arguments, **keywords)
        finally:
            self._recorder.waited(self._number)
            self._recorder.resume()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def _size(tensors: Any) -> int:
    """Return the bytes of a tensor, or of a list of them."""
    if isinstance(tensors, (list, tuple)):
        return sum(map(_size, tensors))
    return int(tensors.numel() * tensors.element_size())
