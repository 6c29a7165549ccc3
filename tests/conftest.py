"""What this machine can do is found by trying; a test whose need is missing is skipped, or fails where it is required.

TESTBED_REQUIRE=netem,root  names the needs that must be there: a skip for one of them becomes a failure.
TESTBED_PART=2              of what is marked `slow`, tests the second of four parts; `1,3` two of them, `all` all.
                            Where nothing is said a run of the whole suite takes the part that is next.

No test is decided by a time on the real clock, which says how busy the machine is. What is decided by time is marked
`virtual_clock`; net/test_in_guest.py runs it, and all that is marked `netem`, in one guest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib.util
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from testbed import forks, paths
from testbed.errors import TestbedError
from testbed.vm import find_clock_kernel
from testbed.vm.guest import GUEST_VARIABLE
from testbed.vm.kernel import GuestKernel
from tests import forked
from tests.commands import Command


def _try_root() -> None:
    from testbed.net.kernel.namespace import Namespace
    from testbed.net.relay.tun import open_tun

    with Namespace("probe") as namespace, namespace.entered():
        os.close(open_tun("probe0"))


def _try_netem() -> None:
    from testbed.net.machine.capabilities import resolve_engine

    resolve_engine("netem")


def _try_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise OSError("torch finds no CUDA device")


def _try_package(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise OSError(f"no package {name}; make examples")


def _try_clock_kernel() -> None:
    from testbed import vm

    if os.environ.get(GUEST_VARIABLE):
        raise OSError("a guest cannot run another")
    if vm.find_clock_kernel() is None:
        raise OSError("the guest kernel runs on x86-64 only")


def _try_virtual_clock() -> None:
    from tests.labs import on_a_virtual_clock

    if not on_a_virtual_clock():
        raise OSError("it is decided by time; tests/net/test_in_guest.py runs it in a guest")


# Tests are plain root where sudo runs them, too: behind sudo `python -m testbed` is refused (test_privilege.py).
for name in ("SUDO_UID", "SUDO_GID"):
    os.environ.pop(name, None)

# Where people work a few examples are drawn at random, others every time; where a red build would only be noise, more,
# and always the same. No deadline: an example's time says how busy the machine is.
hypothesis.settings.register_profile("here", deadline=None, max_examples=40)
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=100)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")

TOGETHER = {
    "tests/hostile/test_calibrations_passed_in.py",
    "tests/runtime/test_host.py",
    "tests/report/test_browser.py",
    "tests/report/test_experiment_tables.py",
    "tests/report/test_maps.py",
    "tests/report/test_page.py",
    "tests/sweep/test_laws.py",
    "tests/sweep/test_played.py",
    "tests/sweep/test_smollm2.py",
    "tests/sweep/test_trainings.py",
    "tests/test_shell.py",
}
"""Files whose tests share a set-up that costs more than a second. (xdist_group does not work with pytest 9.2.)"""

FIRST = (
    "tests/sweep/test_laws.py",
    "tests/test_chaos.py",
    "tests/sweep/test_live_virtual.py",
    "tests/experiments/test_codec_quality.py",
    "tests/experiments/test_seed_activation_delta.py",
    "tests/net/test_in_guest.py",
    "tests/sweep/test_smollm2.py",
    "tests/sweep/test_played.py",
    "tests/sweep/test_sweep.py",
    "tests/runtime/test_host.py",
    "tests/experiments/test_subspace_80mbps.py",
    "tests/report/test_page.py",
)
"""Where tests run side by side these files begin, the longest first, so that no worker is left with a long one."""

PARTS = 4
_PART = "TESTBED_PART"

_NEEDS: dict[str, Callable[[], None]] = {
    "root": _try_root,
    "netem": _try_netem,
    "gpu": _try_gpu,
    "hivemind": functools.partial(_try_package, "hivemind"),
    "flower": functools.partial(_try_package, "flwr"),
    "torchft": functools.partial(_try_package, "torchft"),
    "ns3": functools.partial(_try_package, "ns"),
    "ray": functools.partial(_try_package, "ray"),
    "clock_kernel": _try_clock_kernel,
    "virtual_clock": _try_virtual_clock,
}


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch computes as in a stage host, and is as it was afterwards."""
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = sys.getswitchinterval(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    sys.setswitchinterval(before[0])
    torch.set_num_threads(before[1])
    torch.use_deterministic_algorithms(before[2])


@functools.cache
def missing(need: str) -> str | None:
    """Why a need cannot be met here, or None."""
    try:
        _NEEDS[need]()
    except (TestbedError, OSError) as error:
        return str(error)
    return None


def required() -> set[str]:
    return {name.strip() for name in os.environ.get("TESTBED_REQUIRE", "").split(",") if name.strip()}


def pytest_configure(config: pytest.Config) -> None:
    """Take Ctrl-C as a person's terminal gives it: a shell's background job, and its children, ignore it.

    And choose a part of what is slow: here, because the processes that run tests side by side must have the same.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _PART not in os.environ:
        asked = config.option
        chosen = asked.keyword or asked.markexpr or config.args_source is pytest.Config.ArgsSource.ARGS
        whole = chosen or asked.collectonly
        os.environ[_PART] = "all" if whole else str(_next_part())
    if os.environ[_PART] != "all" and not {*os.environ[_PART].split(",")} <= {*map(str, range(1, PARTS + 1))}:
        raise pytest.UsageError(f"{_PART} is {os.environ[_PART]!r}; it is all, or numbers from 1 to {PARTS}, as in 1,3")


def _next_part() -> int:
    """Return the part after that of the last run, and remember it."""
    file = paths.cache_folder() / "tests-part"
    last = file.read_text(encoding="ascii") if file.is_file() else ""
    part = int(last) % PARTS + 1 if last.isdigit() else 1
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(part), encoding="ascii")
    return part


def pytest_report_header() -> str:
    part = os.environ[_PART]
    if part == "all":
        return "slow tests: all"
    return f"slow tests: part {part} of {PARTS}; {_PART}=all has all of them"


def pytest_runtest_setup(item: pytest.Item) -> None:
    for need in _NEEDS:
        if item.get_closest_marker(need) and (reason := missing(need)):
            if need in required():
                pytest.fail(f"TESTBED_REQUIRE names {need}, but: {reason}", pytrace=False)
            pytest.skip(f"needs {need}: {reason}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take a part of what is slow, and begin with what takes longest where tests run side by side."""
    place = {file: number for number, file in enumerate(FIRST)}

    def turn(item: pytest.Item) -> tuple[bool, int]:
        return not item.get_closest_marker("slow"), place.get(item.nodeid.partition("::")[0], len(FIRST))

    in_turn = sorted(items, key=turn)
    if (part := os.environ[_PART]) != "all":
        slow = [item for item in in_turn if item.get_closest_marker("slow")]
        scopes = dict.fromkeys(_together(item.nodeid) for item in slow)
        ours = {scope for each in part.split(",") for scope in itertools.islice(scopes, int(each) - 1, None, PARTS)}
        left = {item for item in slow if _together(item.nodeid) not in ours}
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
        in_turn = [item for item in in_turn if item not in left]
    if hasattr(config, "workerinput"):
        items[:] = in_turn


def pytest_collection_finish() -> None:
    """Leave all that stands when tests begin out of the collector's rounds: torch, models and tests are a million
    objects, and a round over them takes 0.2 s.
    """
    gc.collect()
    gc.freeze()


def _together(nodeid: str) -> str:
    """Return what a test shares its process with: its file, or nothing."""
    file = nodeid.partition("::")[0]
    return file if file in TOGETHER else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Send the tests of some files to one worker, and each other test to whoever is free, in their order."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    config.option.loadscopereorder = False  # which would begin with the files of most tests

    class Together(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return _together(nodeid)

    return Together(config, log)


def _children() -> set[int]:
    """Return our children but for the one that programs are forked from, whose children count instead."""
    servers = forked.servers() | {server for server in [forks.server()] if server is not None}
    children: set[int] = set()
    for pid in (os.getpid(), *servers):
        for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children |= {int(child) for child in tasks.read_text().split()}
    return children - servers


@pytest.fixture(autouse=True, scope="session")
def _machine_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give this process a cache folder with a lock of its own, and all else that the user's has.

    `testbed` refuses to measure while another one does. Here it may: what is measured while others run decides nothing.
    """
    user, own = paths.cache_folder(), tmp_path_factory.mktemp("cache")
    for kept in ("certificates", "models", "tokens"):
        (user / kept).mkdir(parents=True, exist_ok=True)
    for folder, copy in ((user.parent, own), (user, own / user.name)):
        copy.mkdir(exist_ok=True)
        for entry in folder.iterdir():
            if entry != user and entry.name != "machine.lock":
                (copy / entry.name).symlink_to(entry)
    os.environ["XDG_CACHE_HOME"] = str(own)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Check that a test leaves no process running. Namespaces and TUN devices live by processes' descriptors."""
    before = _children()
    yield
    deadline = time.monotonic() + 20
    while (left := _children() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    running = {pid: forked.command_line(pid) for pid in left if forked.is_running(pid)}
    assert not left, f"processes left behind: {left}, of which run: {running}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files that examples overwrite."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """An empty folder that all users reach; pytest keeps its own from others, and takes it back at any time."""
    with tempfile.TemporaryDirectory(prefix="open-to-all-") as name:
        (folder := Path(name)).chmod(0o755)
        yield folder


@pytest.fixture(scope="module")
def kernel() -> GuestKernel:
    """The kernel of the virtual clock."""
    kernel = find_clock_kernel()
    assert kernel is not None
    return kernel


@pytest.fixture
def tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of four layers of width 32, named gpt2-tiny and llama-tiny."""
    from testbed.workloads import models
    from tests.nodes.test_stage import TOKENS

    for family in ("gpt2", "llama"):
        nano = models.SIZES[f"{family}-nano"]
        tiny = dataclasses.replace(nano, layers=4, width=32, inner=128, vocabulary=TOKENS)
        monkeypatch.setitem(models.SIZES, f"{family}-tiny", tiny)


@pytest.fixture
def command(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Command]:
    """The command line in a folder of its own. Nothing may be left of what it did outside."""
    with Command.standing(tmp_path, "netem" if request.node.get_closest_marker("netem") else "relay") as command:
        yield command
