"""Errors for a stage's maths and memory, with advice on what to try. No torch."""

from __future__ import annotations

import errno
from pathlib import Path

from testbed.errors import DivergedError, StageError

_ALLOCATOR = ("can't allocate memory", "std::bad_alloc", "Cannot allocate memory", "CUDA out of memory")
"""Texts of torch's RuntimeErrors."""
_MEMORY = (
    "try smaller micro-batches (more of them, or a smaller workload.batch_size), pipeline.recompute = true, "
    "a shorter sequence, or fewer stages on this machine"
)


def diverged(who: str, what: str, value: float, where: str) -> DivergedError:
    """Return the error for a loss or a gradient that is NaN or infinite; `who` is, for example, `stage 2`, and `where`
    `at train step 3`.
    """
    return DivergedError(
        f"{who}: the {what} is {value} {where}: training has diverged; try a lower optimiser.learning_rate, "
        f"a longer learning_rate_warmup or a smaller clip_norm, or, if only this codec diverges, a milder one"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory could not be allocated."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _ALLOCATOR)
    )


def out_of_memory(who: str, where: str, error: BaseException) -> StageError:
    """Return the error for memory that could not be allocated; arguments as for `diverged`."""
    lines = str(error).strip().splitlines()
    said = f" ({lines[0]})" if lines else ""
    return StageError(f"{who}: out of memory {where}{said}; {_MEMORY}")


def killed(who: str, how: str, where: str, *, by_kernel: bool) -> StageError:
    """Return the error for a process that was killed from outside; `who` as for `diverged`.

    `by_kernel`: whether the kernel was killing processes for lack of memory at the time.
    """
    if by_kernel:
        return StageError(f"{who}: out of memory {where}: the kernel killed its process; {_MEMORY}")
    return StageError(f"the process of {who} {how} {where}")


def oom_kills() -> int:
    """Return the number of processes that the kernel has killed for lack of memory since boot; 0 where it does not
    count them.
    """
    try:
        fields = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(fields.get("oom_kill", 0))
