"""Faults on links as the kernel has them: its qdiscs before, during and after, and that a link is then as it was."""

from __future__ import annotations

import time
from typing import Any

import pytest

from testbed.net.kernel import shaping
from testbed.net.kernel.netlink import Netlink
from testbed.net.lab import Lab, LabSpec
from testbed.profiles import PipeFault, load_profile
from testbed.profiles.timeline import timeline
from tests.known import known

pytestmark = [pytest.mark.netem, pytest.mark.virtual_clock]

S = 10**9
LATE_NS = 10_000_000
"""Within which all changes are made, also of a rate, which comes a delay later."""


@pytest.mark.parametrize(
    ("effect", "kinds"),
    [
        ({"loss": 1.0}, []),
        ({"delay_ns": S // 2}, []),
        ({"reorder": 0.1, "duplicate": 0.2, "corrupt": 0.3}, []),
        ({"rate_bps": 800_000, "loss": 0.5}, ["htb", "bfifo"]),
    ],
    ids=["outage", "delay", "shares", "collapse"],
)
def test_the_kernel_has_a_fault_while_it_lasts(effect: dict[str, Any], kinds: list[str]) -> None:
    link = load_profile("link(10Mbit, 5ms)")
    faulty = {"faults": (PipeFault(at_ns=S, for_ns=S, **effect),)}
    link = link.model_copy(update={way: known(link.pipe(way)).model_copy(update=faulty) for way in ("up", "down")})  # type: ignore[arg-type]
    spec = LabSpec(topology="line", profiles=(link,), nodes=2, engine="netem", engine_reason="test")
    with Lab(spec) as lab:
        devices = lab._plan.shaped
        assert len(devices) == 2

        def held() -> list[list[str]]:
            chains = []
            for shaped in devices:
                with Netlink(lab.namespaces[shaped.namespace]) as netlink:
                    chains.append([qdisc.kind for qdisc in netlink.qdisc_chain(shaped.device)])
                    shaping.read_counters(netlink, shaped.device)
            return chains

        began_ns = lab.play(time.monotonic_ns())
        assert held() == [["netem"]] * 2
        for shaped, at_s, chain in ((d, at, c) for at, c in ((1, kinds), (2, kinds)) for d in devices):
            time.sleep(max(0, began_ns + at_s * S + LATE_NS - time.monotonic_ns()) / S)
            assert held() == [["netem", *chain]] * 2
            step = known(shaped.pipe.faults)[0]
            with Netlink(lab.namespaces[shaped.namespace]) as netlink:
                plan = shaped.plan(timeline(shaped.pipe).at(at_s * S))
                shaping.check_shaping(netlink, shaped.device, plan, link=shaped.label)
            assert (plan.netem.loss_u32 > 0) == (at_s == 1 and step.loss is not None)
        lab.hold()
        assert held() == [["netem"]] * 2
        for shaped in devices:
            with Netlink(lab.namespaces[shaped.namespace]) as netlink:
                shaping.check_shaping(netlink, shaped.device, shaped.plan(), link=shaped.label)
        told = known(lab.record.faults)
        assert [(each.link, each.direction) for each in told] == [("boundary-0", "up"), ("boundary-0", "down")]
        assert all(0 <= known(each.began_ns) - S < LATE_NS > known(each.ended_ns) - 2 * S >= 0 for each in told)
