"""A lab without root, where this machine allows one: an ordinary user's process in a user namespace of its own."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from testbed import spec
from testbed.errors import CapabilityError
from testbed.net.machine import rootless
from testbed.records import LabRecord
from tests.labs import CASES, SHAPES, lab_spec

_ROOT = Path(__file__).parents[2]
_BUILD = """
import os, socket, sys
from testbed.net import directory
from testbed.net.machine import rootless
from testbed.net.lab import Lab, LabSpec
rootless.enter()
assert os.geteuid() == 0 and rootless.inside()
with Lab(LabSpec.model_validate_json(sys.argv[1])) as lab:
    link = lab.links[0]
    with lab.namespaces[link.far.namespace].entered():
        server = socket.create_server((link.far.address, 9))
    with lab.namespaces[link.near.namespace].entered():
        client = socket.create_connection((link.far.address, 9))
    used = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\\0")[0].decode()
    assert used == link.profile.congestion_control, used
    assert lab.counters()[link.name]["up"].packets > 0
    assert os.getpid() in [found.pid for found in directory.running_labs()]
    print(lab.record.model_dump_json())
"""


def _unprivileged(made: str) -> subprocess.CompletedProcess[str]:
    """Build in a process that has no capability outside its own user namespace but the one for mapping user 0."""
    drop = (
        ["setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all", "--ambient-caps=-all"]
        if os.geteuid() == 0
        else []
    )
    return subprocess.run(
        [*drop, sys.executable, "-c", _BUILD, made], capture_output=True, text=True, cwd=_ROOT, timeout=240, check=False
    )


@CASES
@SHAPES
def test_a_lab_stands_without_root(shape: str, names: tuple[str, ...], engine: spec.Engine) -> None:
    done = _unprivileged(lab_spec(names, engine, shape).model_dump_json())
    if "CapabilityError: cannot create a user namespace" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    record = LabRecord.model_validate_json(done.stdout)
    assert record.rootless
    assert {link.settings.get("relay", {}).get("scheduling") for link in record.links} <= {
        None,
        "SCHED_OTHER",
        "SCHED_FIFO",
    }


@pytest.mark.parametrize(
    ("setting", "value", "advice"),
    [
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "docs/virtual-machines.md for a profile"),
        ("kernel/unprivileged_userns_clone", "0", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces=15000"),
    ],
)
def test_a_machine_that_forbids_it_is_told_how_to_allow_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str, value: str, advice: str
) -> None:
    (tmp_path / setting).parent.mkdir(parents=True)
    (tmp_path / setting).write_text(f"{value}\n")
    monkeypatch.setattr(rootless, "_SETTINGS", tmp_path)

    def refuse(kinds: int) -> None:  # before anything has changed
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(rootless, "unshare", refuse)
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # tests before this one may have left a library's threads
    with pytest.raises(CapabilityError, match=r"cannot create a user namespace.*Operation not permitted") as caught:
        rootless.enter()
    assert advice in str(caught.value)
    assert "guest kernel" in str(caught.value)
