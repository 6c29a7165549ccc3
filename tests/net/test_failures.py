"""The kernel refuses half-way, or a process is killed: one message that names the attempt, and nothing is left."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed import spec
from testbed.errors import CapabilityError, LabError, TestbedError
from testbed.net import directory, topology
from testbed.net.kernel import messages, namespace, offloads, sysctl
from testbed.net.lab import Lab
from tests import forked
from tests.labs import CASES, lab_spec

_ROOT = Path(__file__).parents[2]
_BUILD = (
    "import json, os, signal, sys, time\n"
    "from testbed.net.lab import Lab, LabSpec\n"
    "lab = Lab(LabSpec.model_validate_json(sys.argv[1]))\n"
    "inodes = [os.fstat(space.fd).st_ino for space in lab.namespaces.values()]\n"
    "print(json.dumps([lab._relay and lab._relay.pid, inodes]), flush=True)\n"
)


def _open_descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def _refuses(monkeypatch: pytest.MonkeyPatch, at: int) -> Callable[[], bool]:
    """Refuse the `at`-th request to the kernel (namespace, sysctl, ethtool, netlink); says whether it came to that."""
    count = 0

    def refused() -> bool:
        nonlocal count
        count += 1
        return count == at

    def failing(module: object, name: str, error: BaseException) -> None:
        original = getattr(module, name)

        def attempt(*arguments: object, **options: object) -> object:
            if refused():
                raise error
            return original(*arguments, **options)

        monkeypatch.setattr(module, name, attempt)

    no_memory = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    acknowledged = messages.read_error

    def answer(body: bytes, flags: int) -> tuple[int, str]:
        found = acknowledged(body, flags)
        return (errno.ENOMEM, "on purpose") if refused() else found

    monkeypatch.setattr(messages, "read_error", answer)
    failing(namespace, "unshare", no_memory)
    failing(sysctl.os, "pwrite", no_memory)
    failing(offloads.fcntl, "ioctl", no_memory)
    return lambda: count >= at


@CASES
def test_whatever_step_is_refused_the_message_names_it_and_nothing_is_left(
    names: tuple[str, ...], engine: spec.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lab_spec(names, engine, nodes=3 if len(names) > 1 else 2)
    Lab(made).close()  # the first time, libraries open descriptors of their own
    gc.collect()  # what earlier tests left in cycles would be closed in between
    before, threads, step = _open_descriptors(), threading.active_count(), 1
    told: list[str] = []
    while True:
        with monkeypatch.context() as patch:
            reached = _refuses(patch, step)
            try:
                Lab(made).close()
            except TestbedError as error:
                told.append(str(error))
        assert _open_descriptors() == before
        assert not [lab for lab in directory.running_labs() if lab.pid == os.getpid()]
        assert threading.active_count() == threads
        if not reached():
            break
        step += 7  # a stride that meets every kind of step, of some hundred
    assert len(told) >= 5
    for message in told:
        assert os.strerror(errno.ENOMEM) in message
        assert "cannot " in message or "ethtool command" in message


@pytest.mark.root
def test_a_device_name_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "_NODE_DEVICE", "lo")
    with pytest.raises(LabError, match=r"hub: cannot create a veth cable link0 to lo in node-0: File exists"):
        Lab(lab_spec(("datacenter",), "relay"))


def _in_shell(command: str, made: str) -> subprocess.CompletedProcess[str]:
    program = (
        "import sys\nfrom testbed.net.lab import Lab, LabSpec\n"
        + command
        + "Lab(LabSpec.model_validate_json(sys.argv[1]))\n"
    )
    return subprocess.run(
        [
            "unshare",
            "-m",
            "sh",
            "-c",
            'mount -t tmpfs none /dev/net && exec "$@"',
            "sh",
            sys.executable,
            "-c",
            program,
            made,
        ],
        capture_output=True,
        text=True,
        cwd=_ROOT,
        timeout=240,
        check=False,
    )


@pytest.mark.root
def test_a_machine_without_dev_net_tun_is_told_what_to_do() -> None:
    done = _in_shell("", lab_spec(("cable",), "relay").model_dump_json())
    assert (
        "CapabilityError: cannot create the TUN device hub0: cannot open /dev/net/tun (No such file or directory)"
        in done.stderr
    )
    assert "modprobe tun" in done.stderr


@pytest.mark.root
def test_without_privilege_the_first_step_says_so() -> None:
    dropped = "from testbed.process import drop_capabilities\ndrop_capabilities()\n"
    done = _in_shell(dropped, lab_spec(("cable",), "relay").model_dump_json())
    assert "CapabilityError: cannot make a network namespace for hub: not permitted; run as root" in done.stderr


def _holders(inodes: set[int]) -> list[str]:
    """Processes that still hold one of these namespaces, as a descriptor or by living in it."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                links = [process / "ns/net", *(process / "fd").iterdir()]
            except OSError:
                continue
            for link in links:
                try:
                    target = str(link.readlink())
                except OSError:
                    continue
                if target.startswith("net:[") and int(target[5:-1]) in inodes:
                    found.append(f"{process.name}: {target}")
    return found


@CASES
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_controller_leaves_nothing(names: tuple[str, ...], engine: spec.Engine, how: signal.Signals) -> None:
    made = lab_spec(names, engine).model_dump_json()
    with subprocess.Popen(
        [sys.executable, "-c", _BUILD + "time.sleep(60)\n", made], stdout=subprocess.PIPE, cwd=_ROOT
    ) as controller:
        relay, inodes = json.loads(controller.stdout.readline())
        assert _holders(set(inodes))
        assert controller.pid in [lab.pid for lab in directory.running_labs()]
        controller.send_signal(how)
    deadline = time.monotonic() + 30
    while (left := _holders(set(inodes))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left
    assert relay is None or forked.is_gone(relay)
    assert controller.pid not in [lab.pid for lab in directory.running_labs()]


@pytest.mark.root
def test_a_foreign_file_of_that_name_is_no_lab() -> None:
    descriptor = os.memfd_create("testbed-lab")
    try:
        for content in (b"", b"nonsense", b"[1]", b'{"pid": 1, "started": "now", "namespaces": {}}'):
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, content, 0)
            assert not [lab for lab in directory.running_labs() if lab.pid == os.getpid()]
    finally:
        os.close(descriptor)


@pytest.mark.root
def test_a_refused_congestion_control_does_not_change_the_machine() -> None:
    before = sysctl.read_parameter("net.ipv4.tcp_allowed_congestion_control")
    with pytest.raises(CapabilityError, match=r"'nonesuch'; it has: .*reno.*modprobe tcp_nonesuch"):
        Lab(lab_spec(("datacenter",), "relay", congestion_control="nonesuch"))
    assert sysctl.read_parameter("net.ipv4.tcp_allowed_congestion_control") == before
