"""A real Ray cluster on this machine: lost nodes, drivers and heads, other versions, and the numbers of one machine."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.process import ROOT
from tests.commands import OVERLAPPED
from tests.many_runs import EXPERIMENT

PATIENCE_S = 600
REAL = {"taken_at", "seconds", "load_average", "peak_memory_bytes", "host_seconds", "git_changed_files"}
"""Fields that are of the real clock, or of the moment."""
SYSTEM = {"worker_niceness": 0, "health_check_initial_delay_ms": 5000, "health_check_period_ms": 1000}
SYSTEM |= {"health_check_timeout_ms": 5000, "health_check_failure_threshold": 3}

pytestmark = [pytest.mark.ray, pytest.mark.clock_kernel, pytest.mark.slow, pytest.mark.timeout(4 * PATIENCE_S)]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with a short name: Ray's sockets lie in it."""
    made = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Any]:
    """A head, a node, and a node with another version of testbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("RAY_TMPDIR", str(folder))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        from ray.cluster_utils import Cluster

        small = {"num_cpus": 1, "object_store_memory": 80_000_000}
        started = Cluster(
            initialize_head=True, head_node_args={**small, "include_dashboard": False, "_system_config": SYSTEM}
        )
        try:
            started.second = started.add_node(**small, resources={"guest": 1})
            started.add_node(**small, env_vars={"PYTHONPATH": str(other_version(folder))})
            yield started
        finally:
            started.shutdown()


def other_version(folder: Path) -> Path:
    """A folder with a package whose version is another one; the rest is that of the checkout."""
    package = folder / "other" / "testbed"
    package.mkdir(parents=True)
    for path in (ROOT / "testbed").iterdir():
        if path.name not in ("__init__.py", "__pycache__"):
            (package / path.name).symlink_to(path)
    text = (ROOT / "testbed" / "__init__.py").read_text("utf8")
    (package / "__init__.py").write_text(text + '\n__version__ = "0.0.7"\n')
    return package.parent


class Sweep:
    """The command line, as somebody types it."""

    def __init__(self, folder: Path, results: str, *more: str) -> None:
        home = folder / "small"
        home.mkdir(exist_ok=True)
        axes = 'codec = ["fp32", "int8"]\nprofile = ["consumer-80mbps", "cable"]\n"training.seed" = [0]\n'
        (home / "sweep.toml").write_text(EXPERIMENT + axes)
        words = ["sweep", str(home / "sweep.toml"), "--results", str(folder / results), "--no-report", *more]
        self.said = folder / f"{results}-{time.monotonic_ns()}.txt"
        with self.said.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "testbed", *words], stdout=out, stderr=out, cwd=folder
            )
        self.runs = folder / results / "small"

    def wait_for(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert self.process.poll() is None, self.said.read_text()
            assert time.monotonic() < deadline, self.said.read_text()
            time.sleep(0.05)

    def ended(self) -> str:
        """Wait for its end; return what it said."""
        self.process.wait(PATIENCE_S)
        return self.said.read_text()

    def trained(self) -> set[str]:
        return {path.parent.name for path in self.runs.glob("trained/*/manifest.json") if path.parent.name[0] != "."}


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items() if key not in REAL}
    return [plain(part) for part in value] if isinstance(value, list) else value


def numbers(runs: Path) -> dict[str, Any]:
    """All files of all runs, without the real clock's times and the manifests that seal them."""
    files = {str(path.relative_to(runs)): path for path in runs.glob("*/run-*/*") if path.name != "manifest.json"}
    return {
        name: plain(json.loads(path.read_text())) if path.suffix == ".json" else path.read_bytes()
        for name, path in files.items()
    }


def test_a_sweep_outlives_its_driver_and_a_node_and_gives_the_numbers_of_one_machine(
    cluster: Any, folder: Path
) -> None:
    on_ray = ("--executor", "ray", "--address", cluster.address)
    first = Sweep(folder, "ray", *on_ray)
    first.wait_for(first.trained)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    before = first.trained()
    made = {name: (first.runs / "trained" / name / "manifest.json").stat().st_mtime_ns for name in before}

    again = Sweep(folder, "ray", *on_ray)
    again.wait_for(lambda: "cluster " in again.said.read_text())
    again.wait_for(lambda: "trained" in again.said.read_text() or "playing" in again.said.read_text())
    cluster.remove_node(cluster.second, allow_graceful=False)
    said = again.ended()
    assert again.process.returncode == 0, said
    assert "not used: node" in said
    assert "it has testbed 0.0.7" in said
    assert "2 nodes with 2 cores" in said
    for name, when in made.items():
        assert (again.runs / "trained" / name / "manifest.json").stat().st_mtime_ns == when, "it was trained before"
    assert not list(again.runs.glob(".p*")), "nothing is left of the killed one"

    local = Sweep(folder, "local")
    assert "4/4" in (said := local.ended()), said
    assert numbers(again.runs) == numbers(local.runs)
    assert len(numbers(local.runs)) == 4 * 8


def test_reproduce_predicts_on_a_cluster_that_is_sent_the_checkout(cluster: Any, folder: Path) -> None:
    home = folder / "experiments" / "tiny"
    home.mkdir(parents=True)
    (home / "cells.toml").write_text(OVERLAPPED)
    sent = {"working_dir": str(ROOT), "excludes": ["/.git", "/.venv", "/results", "/experiments", "/docs", "/tests"]}
    on_ray = ("--executor", "ray", "--address", cluster.address, "--runtime-env", json.dumps(sent))

    def ran(*words: str) -> str:
        command = [sys.executable, "-P", "-m", "testbed", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    said = ran("reproduce", "tiny", "--results", "there", *on_ray)
    alive = len(cluster.list_all_nodes())
    assert alive > 1
    assert f"{alive} nodes with {alive} cores" in said, "what is sent is used, and not another version there"
    assert "not used" not in said
    assert "2 cells to play" in said
    ran("predict", "tiny", "--results", "here")
    there, here = ((folder / name / "tiny" / "cells.csv").read_bytes() for name in ("there", "here"))
    assert there == here


def test_without_its_head_a_sweep_ends_and_says_so(cluster: Any, folder: Path) -> None:
    sweep = Sweep(folder, "headless", "--executor", "ray", "--address", cluster.address)
    sweep.wait_for(lambda: "cores" in sweep.said.read_text())
    cluster.head_node.kill_gcs_server()
    said = sweep.ended()
    assert sweep.process.returncode == 1, said
    assert "is lost" in said
    assert "repeat the command: it resumes" in said


def test_no_cluster_is_an_error_of_the_user(folder: Path) -> None:
    sweep = Sweep(folder, "nowhere", "--executor", "ray", "--address", "127.0.0.1:1")
    assert "cannot connect to the Ray cluster '127.0.0.1:1'" in sweep.ended()
    assert sweep.process.returncode == 2
    assert not list(sweep.runs.glob("*/run-*"))
