"""Kernel parameters follow the calling thread's namespace, and are what was asked or an error."""

from __future__ import annotations

import pytest

from testbed.errors import CapabilityError, ShapingError
from testbed.net.kernel import sysctl
from testbed.net.kernel.namespace import Namespace

IDLE = "net.ipv4.tcp_slow_start_after_idle"


@pytest.mark.root
def test_a_parameter_is_set_in_the_entered_namespace_alone() -> None:
    outside = sysctl.read_parameter(IDLE)
    with Namespace("a") as a, Namespace("b") as b:
        with a.entered():
            assert sysctl.set_parameter(IDLE, "0") == "0"
        with b.entered():
            assert sysctl.set_parameter(IDLE, "1") == "1"
        with a.entered():
            assert sysctl.read_parameter(IDLE) == "0"
    assert sysctl.read_parameter(IDLE) == outside


@pytest.mark.root
def test_what_the_kernel_refuses_or_lacks_is_an_error() -> None:
    with Namespace("a") as a, a.entered():
        with pytest.raises(ShapingError, match=r"ip_forward = nonsense"):
            sysctl.set_parameter("net.ipv4.ip_forward", "nonsense")
        with pytest.raises(CapabilityError, match="no such parameter"):
            sysctl.set_parameter("net.ipv4.nonesuch", "1")
        assert sysctl.read_parameter("net.ipv4.nonesuch") is None
