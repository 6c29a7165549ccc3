"""Durations of modules: recorded on one machine, slept on another, whose clock stands still while programs compute.

    {"mode": "recorded", "file": "notes"}      those of a job observed with `record` (observed.py)
    {"mode": "flops", "device": "t4"}          2 m k n for each matrix product, at a device's speed (testbed/devices)

Points of a program divide its time: a module's forward pass begins ("enter") and ends ("leave"), the gradient of its
output is available ("before backward"), the backward pass ends, an optimiser begins and ends its step. An interval lies
between two points; it is named by the point at its end, or, after a module's gradient, by that module ("backward").
A module's gradients therefore follow the sleep for its backward pass, and DistributedDataParallel sends them then. The
duration of an interval is the time between its points minus the time blocked in it. Recorded durations are medians over
all steps except the first, for each interval of a step; a step with more intervals starts from the first one again.

From FLOPs, a module's forward pass takes the time of its own products, backward twice that, and an update that of 28
bytes per parameter at the memory's bandwidth (AdamW's traffic in fp32); everything else takes no time.
"""

from __future__ import annotations

import os
import statistics
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from testbed.errors import SpecError, UnknownNameError
from testbed.process import set_timer_slack
from testbed.torch import observed, steps

ENTER, LEAVE, BEFORE_BACKWARD, BACKWARD, BACKWARD_END = "enter", "leave", "before backward", "backward", "backward end"
BEFORE_UPDATE, UPDATE = "before update", "update"
_UPDATE_BYTES: Final = 28
"""Memory traffic per parameter: fp32 weight, gradient and two moments are read; weight and moments are written."""


class Points:
    """Hooks into every module and optimiser of the process, each of which calls `at`."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._in_backward = False
        modules.register_module_forward_pre_hook(self._enter)
        modules.register_module_forward_hook(self._leave)
        register_optimizer_step_pre_hook(self._update_begins)
        register_optimizer_step_post_hook(self._updated)

    def at(self, phase: str, name: str, owned: Any = None) -> Any:
        """Called at each point. The result for LEAVE is passed as `owned` at that module's BEFORE_BACKWARD."""
        raise NotImplementedError

    def step(self) -> None:
        """Called at the end of a step."""

    def _name(self, module: torch.nn.Module) -> str:
        if module not in self._names:
            self._names[module] = f"{len(self._names)} {type(module).__name__}"
        return self._names[module]

    def _enter(self, module: torch.nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.at(ENTER, self._name(module))

    def _leave(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        name = self._name(module)
        owned, seen = self.at(LEAVE, name), False

        def gradient(_: Any) -> None:
            nonlocal seen
            if seen:  # the first of several outputs
                return
            seen = True
            if not self._in_backward:
                self._in_backward = True
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
            self.at(BEFORE_BACKWARD, name, owned)

        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(gradient)  # type: ignore[no-untyped-call]

    def _backward_ends(self) -> None:
        self._in_backward = False
        self.at(BACKWARD_END, "")

    def _update_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.at(BEFORE_UPDATE, type(optimizer).__name__)

    def _updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.at(UPDATE, type(optimizer).__name__, optimizer)
        self.step()


class Stopwatch(Points):
    """Logs how long each interval takes."""

    def __init__(self, log: observed.Log) -> None:
        super().__init__()
        self._log, self._last, self._at, self._waited = log, ("", ""), time.monotonic_ns(), 0

    def at(self, phase: str, name: str, owned: Any = None) -> None:
        log, began = self._log, self._at
        log.synchronize()
        now = time.monotonic_ns()
        took = max(0, now - began - (log.waited_ns - self._waited))
        owner = (BACKWARD, self._last[1]) if self._last[0] == BEFORE_BACKWARD else (phase, name)
        log.note("module", phase=owner[0], name=owner[1], at=self._at, ns=took)
        if phase == BACKWARD_END:
            log.note("backward_end", at=now)
        self._last, self._at, self._waited = (phase, name), time.monotonic_ns(), log.waited_ns


class Sleeper(Points):
    """Sleeps for the recorded durations."""

    def __init__(self, folder: Path) -> None:
        from testbed.trace.observations import read_observations

        self._durations = [_durations(rank) for rank in read_observations(folder)]
        if not any(self._durations):
            raise SpecError(f"{folder} has no durations of modules; observe the job with record")
        self._counts: Counter[tuple[str, str]] = Counter()
        self._last = ""
        super().__init__()

    def at(self, phase: str, name: str, owned: Any = None) -> None:
        after, self._last = self._last == BEFORE_BACKWARD, phase
        if not after:
            self._sleep(phase, name)
        if phase == BEFORE_BACKWARD:
            self._sleep(BACKWARD, name)

    def step(self) -> None:
        self._counts.clear()

    def _sleep(self, *key: str) -> None:
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        if known := self._durations[rank % len(self._durations)].get(key):  # type: ignore[arg-type]
            sleep_ns(known[self._counts[key] % len(known)])  # type: ignore[index]
            self._counts[key] += 1  # type: ignore[index]


def _durations(rank: Any) -> dict[tuple[str, str], list[int]]:
    """Return the durations of each interval, in order within a step.

    After the backward pass, a reducer in C++ waits for its buckets, unobserved; that is not computing. Their arrival
    may be logged only after the interval, when the thread that logs it gets its turn.
    """
    ends = rank.steps
    waited = {line["number"] for line in rank.of("wait")}
    called = (line for line in rank.of("op") if not line["level"])  # not what codecs do on its behalf
    unseen = [line for line in called if line["number"] not in waited and line["end"] is not None]
    by_step: dict[tuple[str, str], list[list[int]]] = defaultdict(list)
    step, seen = 0, Counter[tuple[str, str]]()
    came = 0
    for line in rank.of("module", "backward_end"):
        if line["kind"] == "backward_end":
            came = max((each["end"] for each in unseen if each["begin"] < line["at"]), default=0)
            continue
        took, came = max(0, min(line["ns"], line["at"] + line["ns"] - came)), 0
        while step < len(ends) and line["at"] >= ends[step]:
            step, seen = step + 1, Counter()
        key = (line["phase"], line["name"])
        if step and len(ends) > 2 and step == len(ends):
            break  # the rest after the last step is not a step
        if step or len(ends) < 3:
            lists = by_step[key]
            if len(lists) == seen[key]:
                lists.append([])
            lists[seen[key]].append(took)
        seen[key] += 1
    return {key: [round(statistics.median(each)) for each in lists] for key, lists in by_step.items() if all(lists)}


class _Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts floating point operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (counted := flop_registry.get(func._overloadpacket)) is not None:
            self.count += counted(*args, **(kwargs or {}), out_val=result)
        return result


class FromFlops(Points):
    """Sleeps for the time that a device needs for a module's products."""

    def __init__(self, device: str) -> None:
        from testbed.devices.device import load_device

        emulated = load_device(device)
        if (speed := emulated.speed("fp32")) is None:
            raise SpecError(f"device {device} has no speed in fp32; use another, or recorded durations")
        self._ns_per_flop, self._ns_per_byte = 1e9 / speed.effective_flops, 1e9 / emulated.bandwidth_bytes_per_s
        self._flops: Any = _Flops()  # type: ignore[no-untyped-call]
        self._before: list[int] = []
        """For each module in its forward pass: the count at its start, plus the count of its parts so far."""
        super().__init__()

    def at(self, phase: str, name: str, owned: Any = None) -> Any:
        if phase == ENTER:
            if not self._before:
                self._flops.count = 0
                self._flops.__enter__()
            self._before.append(self._flops.count)
        elif phase == LEAVE:
            own = self._flops.count - self._before.pop()
            self._before = [before + own for before in self._before]
            if not self._before:
                self._flops.__exit__(None, None, None)
            sleep_ns(own * self._ns_per_flop)
            return own
        elif phase == BEFORE_BACKWARD:
            sleep_ns(2 * owned * self._ns_per_flop)
        elif phase == UPDATE:
            parameters = sum(each.numel() for group in owned.param_groups for each in group["params"])
            sleep_ns(parameters * _UPDATE_BYTES * self._ns_per_byte)
        return None


def sleep_ns(duration_ns: float) -> None:
    """Sleep for this many nanoseconds."""
    if duration_ns >= 1:
        time.sleep(duration_ns / 1e9)


_MODES: Final[dict[str, tuple[str, Callable[[Any], Points]]]] = {
    "recorded": ("file", lambda file: Sleeper(Path(file))),
    "flops": ("device", lambda device: FromFlops(device)),
}


def layers(wanted: dict[str, Any]) -> list[Any]:
    """Install the hooks that TESTBED_TORCH requests; they are not a layer. SpecError for an invalid pace."""
    pace = dict(wanted["pace"])
    mode = pace.pop("mode", "zero")
    if mode == "zero":
        return []
    if mode not in _MODES:
        raise UnknownNameError("mode of pace", mode, [*_MODES, "zero"])
    key, make = _MODES[mode]
    if set(pace) != {key}:
        raise SpecError(f"pace with mode {mode!r} needs {key!r} and nothing else; found {sorted(pace)}")
    # A sleep ends up to 50 us late otherwise, on the virtual clock too.
    set_timer_slack()
    steps.listen(make(pace[key]).step)
    return []


def stopwatch(log: observed.Log) -> None:
    """Log how long modules take."""
    Stopwatch(log)
