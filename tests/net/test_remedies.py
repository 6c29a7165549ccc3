"""Which platform it is, from facts alone, and that every problem has its remedy on every one of them."""

from __future__ import annotations

import itertools
import shlex
import typing

import pytest

from testbed.net.machine import remedies
from testbed.net.machine.remedies import Facts, Platform

PROBLEMS = typing.get_args(remedies.Problem)

_STOCK = "Linux version 6.8.0 (builder@host) (gcc) #1 SMP"
_WSL = "Linux version 5.15.167.4-microsoft-standard-WSL2 (root@host) (gcc) #1 SMP"
_LINUXKIT = "Linux version 6.10.14-linuxkit (root@buildkitsandbox) (gcc) #1 SMP"


def facts(
    *,
    id: str = "debian",
    like: str = "",
    kernel: str = _STOCK,
    marks: tuple[str, ...] = ("/proc/modules",),
    release: str = "6.8.0",
    own_kernel: bool | None = None,
    **environment: str,
) -> Facts:
    contained = bool({"/.dockerenv", "/run/.containerenv"} & set(marks)) or "container" in environment
    return Facts(
        os_release={"ID": id, "ID_LIKE": like},
        kernel=kernel,
        release=release,
        architecture="amd64",
        environment=environment,
        own_kernel=not contained if own_kernel is None else own_kernel,
        marks=frozenset(marks),
    )


_DOCKER, _PODMAN = ("/.dockerenv", "/proc/modules"), ("/run/.containerenv", "/proc/modules")
MACHINES: list[tuple[Platform, Facts]] = [
    ("debian", facts()),
    ("ubuntu", facts(id="ubuntu", like="debian")),
    ("ubuntu", facts(id="linuxmint", like="ubuntu debian")),
    ("debian", facts(id="raspbian", like="debian")),
    ("fedora", facts(id="fedora")),
    ("fedora", facts(id="almalinux", like="rhel centos fedora")),
    ("fedora", facts(id="rhel")),
    ("linux", facts(id="arch")),
    ("linux", facts(id="")),
    ("wsl2", facts(id="ubuntu", like="debian", kernel=_WSL)),
    ("docker", facts(marks=_DOCKER)),
    ("docker", facts(marks=("/proc/modules",), container="docker")),
    ("docker", facts(id="ubuntu", marks=_DOCKER, GITHUB_ACTIONS="true")),
    ("docker desktop", facts(marks=_DOCKER, kernel=_LINUXKIT)),
    ("docker desktop", facts(marks=_DOCKER, kernel=_WSL)),
    ("debian", facts(marks=_DOCKER, own_kernel=True)),  # an image that was booted as a machine of its own
    ("podman", facts(marks=_PODMAN)),
    ("podman", facts(container="podman")),
    ("github runner", facts(id="ubuntu", like="debian", GITHUB_ACTIONS="true", RUNNER_ENVIRONMENT="github-hosted")),
    ("ubuntu", facts(id="ubuntu", like="debian", GITHUB_ACTIONS="true", RUNNER_ENVIRONMENT="self-hosted")),
]


@pytest.mark.parametrize(("platform", "found"), MACHINES)
def test_platform(platform: Platform, found: Facts) -> None:
    assert remedies.platform(found) == platform


def test_every_platform_is_told_apart_by_some_machine() -> None:
    assert {platform for platform, _ in MACHINES} == set(typing.get_args(Platform))
    assert set(remedies.table()) == set(PROBLEMS)


@pytest.mark.parametrize(("problem", "machine"), list(itertools.product(PROBLEMS, MACHINES)))
def test_every_problem_has_a_remedy_in_one_line_without_gaps(
    problem: remedies.Problem, machine: tuple[Platform, Facts]
) -> None:
    found = remedies.remedy(problem, machine[1])
    assert found
    assert "\n" not in found
    assert "{" not in found
    shlex.split(found.partition(" (")[0].replace("`", ""))  # words for a shell


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (facts(), "modprobe sch_netem"),
        (facts(release="6.1-cloud-x"), "apt install linux-image-amd64 && sudo apt remove linux-image-6.1-cloud-x"),
        (facts(id="ubuntu", release="6.8-x"), "apt install linux-modules-extra-6.8-x && sudo modprobe"),
        (facts(id="fedora", release="6.11.fc41"), "dnf install kernel-modules-extra-6.11.fc41 &&"),
        (facts(id="ubuntu", kernel=_WSL), "--engine relay"),
        (facts(marks=_DOCKER), "on the host: sudo modprobe"),
        (facts(marks=_DOCKER, kernel=_LINUXKIT), "testbed vm -- COMMAND"),
        (facts(id="ubuntu", GITHUB_ACTIONS="true", release="6.11-azure"), "linux-modules-extra-6.11-azure"),
        (facts(marks=()), "loads no modules"),
        (facts(id="ubuntu", marks=("/.dockerenv",)), "loads no modules"),
    ],
)
def test_netem_is_mended_by_what_the_platform_has(found: Facts, words: str) -> None:
    assert words in remedies.remedy("netem", found)


def test_apparmor_is_not_switched_off_for_everyone() -> None:
    restricted = facts(id="ubuntu", marks=("/proc/modules", "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"))
    found = remedies.remedy("user namespaces", restricted)
    assert "AppArmor profile" in found
    assert "sysctl" not in found


def test_the_facts_of_this_machine_name_a_platform() -> None:
    found = remedies.facts()
    assert remedies.platform(found) in typing.get_args(Platform)
    assert found.release
    assert found.kernel
