"""Read `[cell.compute]` of an experiment file.

  compute.mode = "calibrated"                    as long as this machine takes for each action, timed alone
  compute.mode = "measured"                      as fast as this machine is while the run lasts: live runs only
  compute.mode = "paced"                         held to a device's durations, with either
  compute.forward = "40ms"                       of one micro-batch; or a list, one per stage
  compute.backward = "80ms"                      likewise, recomputation included
or
  compute.device = "t4"                          a name from `testbed devices`, or the path of a file
and
  compute.update = "2ms"                         from the last gradient to the step's end; else the device's, or none
  compute.dilation = 4                           everything takes 4 times as long in the lab; else 1
or, for a job of a table `job`,
  compute.mode = "stated"
  compute.work = { token = "8ms" }               of each kind of work that its program names
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed import units
from testbed.devices.device import load_device
from testbed.devices.durations import durations
from testbed.errors import SpecError, UnknownNameError
from testbed.spec import Calibrated, Measured, Paced, PipelineSpec, Stated, Workload

_STATED = ("forward", "backward")
_KEYS = ("mode", "device", *_STATED, "update", "dilation")
_MOST_DILATED = 1000
_OWN_PACE = ("measured", "calibrated")


def compute_of(
    asked: Mapping[str, Any] | str,
    workload: Workload,
    pipeline: PipelineSpec,
    where: str,
    *,
    workers: int | None = None,
) -> Measured | Calibrated | Paced:
    """Return the compute that a table asks for; the text "measured" or "calibrated" stands for a table with that mode.

    `workers`: how many of them work, each with the whole model; None: as many stages as the pipeline has.

    SpecError, which starts with `where`, names the key and what is wrong with it.
    """
    try:
        return _compute_of({"mode": asked} if asked in _OWN_PACE else asked, workload, pipeline, workers)
    except (SpecError, UnknownNameError) as error:
        raise SpecError(f"{where}: compute: {error}") from None


def compute_of_job(asked: Mapping[str, Any] | str, where: str) -> Measured | Calibrated | Stated:
    """Return the compute of a job of another kind: "calibrated", "measured", or `mode = "stated"` with `work`, a
    duration for each kind of work of its program. SpecError as from `compute_of`.
    """
    table: object = {"mode": asked} if isinstance(asked, str) else asked
    try:
        match table:
            case {"mode": "calibrated" | "measured" as mode, **more} if not more:
                return Measured() if mode == "measured" else Calibrated()
            case {"mode": "stated", "work": dict(work), **more} if not more.keys() - {"dilation"}:
                work_ns = {str(what): _time(f"work.{what}", duration, least=0) for what, duration in work.items()}
                return Stated(work_ns=work_ns, source="stated", dilation=_dilation(more))
        raise SpecError(
            "for this kind of job it is 'calibrated', 'measured', or a table with mode = 'stated' and work, for "
            f"example {{ forward = '20ms' }}; found {asked!r}"
        )
    except SpecError as error:
        raise SpecError(f"{where}: compute: {error}") from None


def _dilation(asked: Mapping[Any, Any]) -> int:
    dilation = asked.get("dilation", 1)
    if not isinstance(dilation, int) or isinstance(dilation, bool) or not 1 <= dilation <= _MOST_DILATED:
        raise SpecError(f"dilation must be a whole number from 1 to {_MOST_DILATED}, found {dilation!r}")
    return dilation


def _compute_of(
    asked: object, workload: Workload, pipeline: PipelineSpec, workers: int | None
) -> Measured | Calibrated | Paced:
    if not isinstance(asked, Mapping):
        raise SpecError(f"it must be 'calibrated', 'measured' or a table with a mode, found {asked!r}")
    for key in asked:
        if key not in _KEYS:
            raise UnknownNameError("key of compute", key, _KEYS)
    mode = asked.get("mode")
    if mode in _OWN_PACE:
        if more := [key for key in asked if key != "mode"]:
            raise SpecError(f"mode is {mode!r}, which takes no {', '.join(more)}; leave them out, or use mode 'paced'")
        return Measured() if mode == "measured" else Calibrated()
    if mode != "paced":
        raise SpecError(f"mode must be 'calibrated', 'measured' or 'paced', found {mode!r}")
    stated = [key for key in _STATED if key in asked]
    if ("device" in asked) == bool(stated):
        both = "both" if stated else "neither"
        raise SpecError(f"mode 'paced' takes either forward and backward, or a device; found {both}")
    dilation = _dilation(asked)
    update_ns = _time("update", asked["update"], least=0) if "update" in asked else None
    if stated:
        if len(stated) < len(_STATED):
            raise SpecError(f"{stated[0]} is stated without {(set(_STATED) - set(stated)).pop()}; state both")
        forward_ns, backward_ns = (_times(key, asked[key], pipeline.stages, workers) for key in _STATED)
        source, own_update_ns = "stated", 0
    else:
        name = asked["device"]
        if not isinstance(name, str):
            raise SpecError(f"device must be a name or the path of a file, found {name!r}")
        forward_ns, backward_ns, updates_ns, source = durations(load_device(name), workload, pipeline)
        own_update_ns = max(updates_ns)  # a step ends at the slowest stage
        if update_ns is not None:
            source += "; update stated"
    return Paced(
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        update_ns=own_update_ns if update_ns is None else update_ns,
        source=source,
        dilation=dilation,
    )


def _times(key: str, asked: object, stages: int, workers: int | None) -> tuple[int, ...]:
    listed = asked if isinstance(asked, list | tuple) else [asked]
    count, who = (stages, "stage") if workers is None else (workers, "worker")
    if len(listed) not in (1, count):
        raise SpecError(
            f"{key} has {len(listed)} durations for {count} {who}s; state one for all of them, or one per {who}"
        )
    return tuple(_time(key, duration, least=1) for duration in listed)


def _time(key: str, asked: object, *, least: int) -> int:
    try:
        duration_ns = units.parse_time(asked)
    except SpecError as error:
        raise SpecError(f"{key}: {error}") from None
    if duration_ns < least:
        raise SpecError(f"{key} is {asked}; an action takes at least 1ns")
    return duration_ns
