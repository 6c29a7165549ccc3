"""Reads torch.profiler's export for a rank of a job over NCCL (Kineto's Chrome trace), as an observed job's lines.

A collective is an NCCL kernel. Its size and group are attributes of the kernel ("Collective name", "In msg nelems",
"Process Group Ranks") or, in older profiles, of the call (`nccl:all_reduce`, with the shape of its input), which is
matched by order.

All other activity of the device is compute. A profile does not state which operation waits for a collective. If the
device idles longer before a collective's end than after it, it is assumed to wait for that collective and for its
group's earlier ones; otherwise it waits at the end of the step. Steps are the profiler's.

Profiles of gloo name neither groups nor roots nor peers; testbed.torch records those jobs.
"""

from __future__ import annotations

import gzip
import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

from testbed.trace import gloo

_KINDS: Final = dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset"), "device") | {"cuda_driver": "cuda_runtime"}
"""Kineto's categories that are merged here."""
_ITEM_BYTES: Final = dict.fromkeys(("bool", "byte", "char", "signed char", "unsigned char", "float8"), 1) | (
    {"double": 8, "long": 8, "long int": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "short": 2}
)
Line = dict[str, Any]
_INSTEAD: Final = "record the job with TESTBED_TORCH instead (docs/traces.md)"


class _Span(NamedTuple):
    """An event with a duration; times in ns."""

    begin: int
    end: int
    name: str
    args: Mapping[str, Any]


def kineto_lines(path: Path) -> list[Line]:
    """Return the lines that an observer would have written for a rank. ValueError, KeyError and the like if the file is
    not a profile, or lacks data.
    """
    raw = path.read_bytes()
    profile = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    info = profile.get("distributedInfo", {})
    if not 0 < info.get("world_size", 0) <= 1 << 16:
        raise ValueError("it has no distributedInfo with its rank; start torch.profiler after init_process_group")
    groups = {str(group["pg_name"]): group["ranks"] for group in info.get("pg_config", ())} or {"0": []}
    groups = {name: members or list(range(info["world_size"])) for name, members in groups.items()}
    kinds: dict[str, list[_Span]] = defaultdict(list)
    for event in profile["traceEvents"]:
        if event.get("ph") == "X":
            begin, end = (round(1000 * at) for at in (event["ts"], event["ts"] + event["dur"]))
            if not -(1 << 62) < begin <= end < 1 << 62:
                raise ValueError(f"an event begins at {event['ts']} us and takes {event['dur']} us")
            span = _Span(begin, end, event["name"], event.get("args", {}))
            kinds[_KINDS.get(event.get("cat"), event.get("cat"))].append(span)
    for spans in kinds.values():
        spans.sort(key=lambda span: span[:2])
    device, said = kinds["device"], kinds["user_annotation"]
    kernels = calls = [span for span in device if span.name.startswith("nccl")]
    if not kernels or not all("Collective name" in kernel.args for kernel in kernels):
        calls = [span for span in said if span.name.startswith("nccl:")]
        if not kernels or len(calls) != len(kernels) or len(groups) > 1:
            counted = f"{len(kernels)} kernels of NCCL, {len(calls)} calls of it and {len(groups)} process groups"
            raise ValueError(f"cannot match its collectives: it has {counted}; {_INSTEAD}")
    operations = [_operation(number, *pair, groups) for number, pair in enumerate(zip(kernels, calls, strict=True))]
    computing = [span for span in device if not span.name.startswith("nccl")]
    launched = {span.args.get("correlation"): span.begin for span in kinds["cuda_runtime"]}
    begins = [(launched.get(span.args.get("correlation"), span.begin), span.begin) for span in computing]
    steps = [span.end for span in said if span.name.startswith("ProfilerStep")]
    last = max(span.end for span in device)
    # The device's step ends when it begins work launched after the step.
    marks = [*(min((at for launch, at in begins if launch >= end), default=last) for end in steps[:-1]), last]
    return [
        {"kind": "about", "version": 1, "rank": info["rank"], "ranks": info["world_size"]},
        *({"kind": "group", "name": name, "ranks": members} for name, members in groups.items()),
        {"kind": "step", "by": "start", "at": device[0].begin},
        *operations,
        *_waits(operations, computing, marks),
        *({"kind": "step", "by": "job", "at": mark} for mark in marks),
    ]


def _operation(number: int, kernel: _Span, call: _Span, groups: dict[str, list[int]]) -> Line:
    """Return the line of a collective, as testbed.torch.observed writes it. Adds a new group to `groups`."""
    args = call.args
    name = args.get("Collective name") or call.name.partition(":")[2]
    short = name.lower().replace("_", "")
    what = next((what for what in gloo.OPERATIONS if short.startswith(what.replace("_", ""))), None)
    if what is None:
        raise ValueError(f"the profile lacks data to play {name!r}; {_INSTEAD}")
    group = str(args.get("Process Group Name", next(iter(groups))))
    if group not in groups:
        groups[group] = json.loads(args["Process Group Ranks"])
    shapes, types = args.get("Input Dims", ()), args.get("Input type", ())
    if "dtype" in args:
        shapes, types = [[args["Out msg nelems" if what == "scatter" else "In msg nelems"]]], [args["dtype"]]
    items = [_ITEM_BYTES.get(kind.rpartition("::")[2].partition("_")[0].lower(), 0) for kind in types]
    if not any(items) or any(kind and not item for kind, item in zip(types, items, strict=True)):
        unknown = f"cannot compute the size of {name!r} from shapes {shapes} and types {types}"
        raise ValueError(f"{unknown}; profile with record_shapes=True, or {_INSTEAD}")
    size = sum(math.prod(shape) * item for shape, item in zip(shapes, items, strict=False))
    about = {"kind": "op", "number": number, "what": what, "call": "profiled", "backend": "nccl", "level": 0}
    about |= {"begin": kernel.begin, "called": kernel.begin, "end": kernel.end, "group": group, "bytes": size}
    root = int(args.get("Rank", 0))  # PyTorch puts a broadcast's root there
    about |= {"item": next(filter(None, items)), "root": root}
    given, taken = (json.loads(args.get(f"{side} split size") or "[]") for side in ("In", "Out"))
    if what == "all_to_all" and given:
        if {len(given), len(taken)} != {len(groups[group])}:
            raise ValueError(f"{name!r} of {len(groups[group])} ranks splits into {given} and {taken}")
        about["splits"] = [[size * rows // max(1, sum(given)) for rows in side] for side in (given, taken)]
    return about


def _waits(operations: Sequence[Line], computing: Sequence[_Span], marks: Sequence[int]) -> list[Line]:
    """Return the waits of the device: when, and for which collective."""
    begins, ends = [span.begin for span in computing], list(accumulate((span.end for span in computing), max))
    held: dict[int, tuple[int, int]] = {}
    for line in sorted(operations, key=lambda line: line["end"]):
        begin, end = line["begin"], line["end"]
        at = bisect_right(begins, end)
        idle, following = max(begin, *ends[at - 1 : at]), begins[at] if at < len(begins) else end
        if idle <= end and end - idle >= following - end:
            for other in operations:
                if other["group"] == line["group"] and other["begin"] <= begin and other["end"] <= end:
                    held.setdefault(other["number"], (idle, end))
    for line in operations:
        held.setdefault(line["number"], (next(mark for mark in marks if mark >= line["begin"]),) * 2)
    return [{"kind": "wait", "number": number, "begin": begin, "end": end} for number, (begin, end) in held.items()]
