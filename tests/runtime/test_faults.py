"""What a stage says when it has no memory, or no number."""

from __future__ import annotations

import errno
import re

import pytest
import torch

from testbed.runtime import failures


def refused() -> BaseException:
    """What torch raises for more than any machine has."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize("error", [refused(), MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_every_kind_of_refused_memory_is_known_and_explained_in_one_line(error: BaseException) -> None:
    assert failures.is_out_of_memory(error)
    message = str(failures.out_of_memory("stage 3", "at train step 7", error))
    assert message.startswith("stage 3: out of memory at train step 7")
    assert "smaller micro-batches" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), OSError(errno.EPIPE, "Broken pipe")]
)
def test_other_errors_are_not_taken_for_it(error: BaseException) -> None:
    assert not failures.is_out_of_memory(error)


def test_a_kill_is_a_want_of_memory_only_where_the_kernel_says_so() -> None:
    at = "after 3 recorded steps"
    plain, ours = (
        str(failures.killed("stage 1", "was killed by SIGKILL", at, by_kernel=found)) for found in (False, True)
    )
    assert plain == f"the process of stage 1 was killed by SIGKILL {at}"
    assert re.match(f"stage 1: out of memory {at}: the kernel .* fewer stages", ours)
    assert failures.oom_kills() >= 0
