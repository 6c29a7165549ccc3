"""The Vagrantfile and what it provisions with: checked as far as a machine without a hypervisor can."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECK = ROOT / "vagrant" / "check_netem.sh"


def _run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_provider_gets_its_processors_and_memory() -> None:
    text = (ROOT / "Vagrantfile").read_text(encoding="utf8")
    blocks = dict(
        re.findall(r'config\.vm\.provider\("(\w+)"\)(.*?)(?=config\.vm\.provider|synced_folder)', text, re.DOTALL)
    )
    assert set(blocks) == {"virtualbox", "libvirt", "vmware_desktop", "parallels", "qemu"}
    for name, block in blocks.items():
        assert "cpus" in block, name
        assert "memory" in block, name


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("vagrant"), reason="needs vagrant")
def test_vagrant_accepts_the_file_and_refuses_a_slip_in_it(tmp_path: Path) -> None:
    environment = {
        "VAGRANT_HOME": str(tmp_path / "home"),
        "VAGRANT_DOTFILE_PATH": str(tmp_path / "project"),
        "VAGRANT_CHECKPOINT_DISABLE": "1",
    }
    done = _run("vagrant", "validate", "--ignore-provider", **environment)
    assert done.returncode == 0, done
    slip = (ROOT / "Vagrantfile").read_text(encoding="utf8").replace("config.vm.hostname", "config.vm.hostnaem")
    (tmp_path / "Vagrantfile").write_text(slip, encoding="utf8")
    shutil.copytree(ROOT / "vagrant", tmp_path / "vagrant")
    done = _run("vagrant", "validate", "--ignore-provider", VAGRANT_CWD=str(tmp_path), **environment)
    assert done.returncode != 0
    assert "hostnaem" in done.stdout + done.stderr


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
def test_scripts_are_clean() -> None:
    scripts = sorted((ROOT / "vagrant").glob("*.sh"))
    assert CHECK in scripts
    done = _run("shellcheck", *scripts)
    assert done.returncode == 0, done.stdout
    assert all(os.access(script, os.X_OK) for script in scripts)


@pytest.mark.netem
def test_the_check_passes_where_netem_works() -> None:
    done = _run(CHECK)
    assert done.returncode == 0, done.stderr
    assert "netem takes every effect" in done.stdout


@pytest.mark.slow
@pytest.mark.clock_kernel
def test_the_check_passes_in_the_guest_kernel() -> None:
    done = _run(sys.executable, "-m", "testbed", "vm", "--time-limit", "60", "--", CHECK)
    assert done.returncode == 0, done.stderr
    assert "netem takes every effect" in done.stdout


@pytest.mark.root
def test_the_check_says_what_is_missing_where_netem_is_not() -> None:
    from tests.conftest import missing

    if missing("netem") is None:
        pytest.skip("netem works here")
    done = _run(CHECK)
    assert done.returncode == 1
    assert "no sch_netem" in done.stderr


def test_the_check_names_a_program_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "bash").symlink_to("/bin/bash")
    done = _run("/bin/bash", CHECK, PATH=str(tmp_path))
    assert done.returncode == 1
    assert "no command ip; install iproute2" in done.stderr


def test_provisioning_refuses_a_machine_without_apt(tmp_path: Path) -> None:
    done = _run("/bin/bash", ROOT / "vagrant" / "provision.sh", ROOT, "nobody", PATH=str(tmp_path))
    assert done.returncode == 1
    assert "no apt-get" in done.stderr
