"""A folder of files that examples overwrite, and the kernel of the virtual clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.vm import find_clock_kernel
from testbed.vm.kernel import GuestKernel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def kernel() -> GuestKernel:
    kernel = find_clock_kernel()
    assert kernel is not None
    return kernel
