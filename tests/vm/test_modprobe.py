"""Which files a module needs, in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.vm.modprobe import module_files

DEP = """\
kernel/net/sched/sch_netem.ko:
kernel/drivers/net/vxlan/vxlan.ko: kernel/net/ipv6/ip6_udp_tunnel.ko kernel/net/ipv4/udp_tunnel.ko
kernel/net/ipv6/ip6_udp_tunnel.ko: kernel/net/ipv4/udp_tunnel.ko
kernel/net/ipv4/udp_tunnel.ko:
kernel/net/openvswitch/vport-vxlan.ko: kernel/drivers/net/vxlan/vxlan.ko
"""
ALIAS = """\
# Aliases extracted from modules themselves.
alias net-sch-netem sch_netem
alias char-major-10-2* sch_netem
alias rtnl-link-vxlan vxlan
"""
BUILTIN = "kernel/net/ipv4/tcp_cubic.ko\nkernel/fs/hostfs/hostfs.ko\n"


@pytest.mark.parametrize("name", ["sch_netem", "sch-netem", "net-sch-netem", "char-major-10-200"])
def test_a_name_or_an_alias_with_either_dash(name: str) -> None:
    assert module_files(name, DEP, ALIAS, BUILTIN) == ["kernel/net/sched/sch_netem.ko"]


@pytest.mark.parametrize("name", ["vxlan", "rtnl-link-vxlan"])
def test_what_is_needed_comes_first(name: str) -> None:
    assert [file.rsplit("/")[-1] for file in module_files(name, DEP, ALIAS, BUILTIN)] == [
        "udp_tunnel.ko",
        "ip6_udp_tunnel.ko",
        "vxlan.ko",
    ]


def test_a_file_name_with_a_dash() -> None:
    assert module_files("vport_vxlan", DEP, ALIAS, BUILTIN)[-1] == "kernel/net/openvswitch/vport-vxlan.ko"


def test_what_the_kernel_has_inside_needs_no_file() -> None:
    assert module_files("tcp_cubic", DEP, ALIAS, BUILTIN) == []


@pytest.mark.parametrize("name", ["sch_nothing", "netem", "", "net-sch"])
def test_unknown(name: str) -> None:
    with pytest.raises(LookupError, match="no module or alias"):
        module_files(name, DEP, ALIAS, BUILTIN)


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(*(st.sets(st.integers(0, max(i - 1, 0))) for i in range(n)))))
def test_every_file_comes_after_all_that_it_needs(needs: tuple[set[int], ...]) -> None:
    """`needs[i]`: the modules below i that module i uses itself; depmod writes all that it needs, nearest first."""
    order: list[list[int]] = []
    for i, direct in enumerate(needs):
        behind = {j for k in direct if k < i for j in [k, *order[k]]}
        order.append(sorted(behind, reverse=True))
    dep = "".join(f"k/m{i}.ko: {' '.join(f'k/m{j}.ko' for j in behind)}\n" for i, behind in enumerate(order))
    files = module_files(f"m{len(needs) - 1}", dep, "", "")
    assert sorted(files) == sorted({f"k/m{i}.ko" for i in [*order[-1], len(needs) - 1]})
    for i, behind in enumerate(order):
        if f"k/m{i}.ko" in files:
            assert all(files.index(f"k/m{j}.ko") < files.index(f"k/m{i}.ko") for j in behind)
