"""Read `[cell.compute]` of an experiment file.

  compute.mode = "calibrated"                    this machine's durations, each action timed alone
  compute.mode = "measured"                      this machine's speed during the run; live runs only
  compute.mode = "paced"                         paced to a device's durations, with either
  compute.forward = "40ms"                       per micro-batch; or a list, one per stage
  compute.backward = "80ms"                      likewise, including recomputation
or
  compute.device = "t4"                          a name from `testbed devices`, or the path of a file
and
  compute.update = "2ms"                         from the last gradient to the step's end; default: the device's, or 0
  compute.dilation = 4                           time in the lab runs 4 times slower; default 1
or, for a job from a `job` table,
  compute.mode = "stated"
  compute.work = { token = "8ms" }               per kind of work of its program
and, with any mode but measured, durations that vary (`spec.Varied`): `spread`, `stragglers`, `slow`, `seed`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from testbed import units
from testbed.devices.device import load_device
from testbed.devices.durations import durations
from testbed.errors import SpecError, UnknownNameError
from testbed.frozen import explain
from testbed.spec import Calibrated, Measured, Paced, PipelineSpec, Stated, Varied, Workload

_STATED = ("forward", "backward")
_KEYS = ("mode", "device", *_STATED, "update", "dilation", *Varied.model_fields)
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
    """Return the compute that a table describes; the text "measured" or "calibrated" is short for a table with that
    mode.

    `workers`: number of workers, each with the whole model; None: the pipeline's stages.

    SpecError that starts with `where` and names the key and the fault.
    """
    try:
        return _compute_of({"mode": asked} if asked in _OWN_PACE else asked, workload, pipeline, workers)
    except (SpecError, UnknownNameError) as error:
        raise SpecError(f"{where}: compute: {error}") from None


def compute_of_job(asked: Mapping[str, Any] | str, where: str) -> Measured | Calibrated | Stated:
    """Return the compute of a job of another kind: "calibrated", "measured", or `mode = "stated"` with `work`, a
    duration for each kind of work of its program. Raises SpecError like `compute_of`.
    """
    table: object = {"mode": asked} if isinstance(asked, str) else asked
    try:
        match table:
            case {"mode": "measured", **more} if not more:
                return Measured()
            case {"mode": "calibrated", **more} if not more.keys() - Varied.model_fields.keys():
                return Calibrated(**_varied(more))
            case {"mode": "stated", "work": dict(work), **more} if not more.keys() - {"dilation", *Varied.model_fields}:
                work_ns = {str(what): _time(f"work.{what}", duration, least=0) for what, duration in work.items()}
                return Stated(work_ns=work_ns, source="stated", dilation=_dilation(more), **_varied(more))
        raise SpecError(
            "for this kind of job it must be 'calibrated', 'measured', or a table with mode = 'stated' and work, such "
            f"as {{ forward = '20ms' }}; found {asked!r}"
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
        accepted = ("mode", *(Varied.model_fields if mode == "calibrated" else ()))
        if more := [key for key in asked if key not in accepted]:
            raise SpecError(f"mode {mode!r} does not accept {', '.join(more)}; remove them, or use mode 'paced'")
        return Measured() if mode == "measured" else Calibrated(**_varied(asked))
    if mode != "paced":
        raise SpecError(f"mode must be 'calibrated', 'measured' or 'paced', found {mode!r}")
    stated = [key for key in _STATED if key in asked]
    if ("device" in asked) == bool(stated):
        both = "both" if stated else "neither"
        raise SpecError(f"mode 'paced' needs either forward and backward, or a device; found {both}")
    dilation = _dilation(asked)
    update_ns = _time("update", asked["update"], least=0) if "update" in asked else None
    if stated:
        if len(stated) < len(_STATED):
            raise SpecError(f"{stated[0]} is set without {(set(_STATED) - set(stated)).pop()}; set both")
        forward_ns, backward_ns = (_times(key, asked[key], pipeline.stages, workers) for key in _STATED)
        source, own_update_ns = "stated", 0
    else:
        name = asked["device"]
        if not isinstance(name, str):
            raise SpecError(f"device must be a name or the path of a file, found {name!r}")
        forward_ns, backward_ns, updates_ns, source = durations(load_device(name), workload, pipeline)
        own_update_ns = max(updates_ns)  # a step ends with the slowest stage
        if update_ns is not None:
            source += "; update stated"
    return Paced(
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        update_ns=own_update_ns if update_ns is None else update_ns,
        source=source,
        dilation=dilation,
        **_varied(asked),
    )


def _varied(asked: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the fields that say how durations vary."""
    stated = {key: asked[key] for key in Varied.model_fields if key in asked}
    try:
        return dict(Varied.model_validate(stated, strict=True))
    except ValidationError as error:
        raise explain(error, Varied, "durations vary") from None


def _times(key: str, asked: object, stages: int, workers: int | None) -> tuple[int, ...]:
    listed = asked if isinstance(asked, list | tuple) else [asked]
    count, who = (stages, "stage") if workers is None else (workers, "worker")
    if len(listed) not in (1, count):
        raise SpecError(f"{key} has {len(listed)} durations for {count} {who}s; set one for all, or one per {who}")
    return tuple(_time(key, duration, least=1) for duration in listed)


def _time(key: str, asked: object, *, least: int) -> int:
    try:
        duration_ns = units.parse_time(asked)
    except SpecError as error:
        raise SpecError(f"{key}: {error}") from None
    if duration_ns < least:
        raise SpecError(f"{key} is {asked}; it must be at least 1ns")
    return duration_ns
