"""Boot the kernel with a virtual clock: time jumps, all else is as in any guest, and every boot is the same."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from testbed import vm
from testbed.net.kernel.namespace import Namespace
from testbed.vm import guest as guests
from tests.vm.members import guest_of

pytestmark = [pytest.mark.slow, pytest.mark.clock_kernel]

ROOT = Path(vm.__file__).parents[2]
Run = Callable[..., tuple[int, bytes]]
Start = Callable[..., vm.Guest]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a guest with its output in the file `out`."""
    monkeypatch.chdir(tmp_path)
    kernel = vm.find_clock_kernel()
    assert kernel is not None
    with (tmp_path / "out").open("ab") as file:
        options = {"memory": "256M", "time_limit_s": 100, "virtual_clock": True}
        yield lambda *command, **settings: vm.start_guest(
            kernel, command, stdout=file.fileno(), stderr=file.fileno(), **{**options, **settings}
        )


@pytest.fixture
def run(start: Start, tmp_path: Path) -> Run:
    def to_its_end(*command: str, **settings: object) -> tuple[int, bytes]:
        (tmp_path / "out").write_bytes(b"")
        with start(*command, **settings) as guest:
            return guest.wait(), (tmp_path / "out").read_bytes()

    return to_its_end


def test_a_long_sleep_ends_at_once(run: Run) -> None:
    started = time.monotonic()
    script = "import time; a = time.monotonic(); time.sleep(1e6); print(round(time.monotonic() - a))"
    assert run(sys.executable, "-c", script) == (0, b"1000000\n")
    assert time.monotonic() - started < 60


def test_computing_takes_no_time(run: Run) -> None:
    script = "import time; a = time.monotonic_ns(); sum(range(1000000)); print(time.monotonic_ns() - a)"
    status, said = run(sys.executable, "-c", script)
    assert (status, int(said) < 1000) == (0, True)  # a system call that fails would take 1000


POLLING = """
import os, select, sys, threading, time
woken, wake = os.pipe()
poll, epoll = select.poll(), select.epoll()
for each in (poll, epoll):
    each.register(woken, 1)
rung = []
ring = lambda: (time.sleep(0.25), rung.append(time.monotonic_ns()), os.write(wake, b"!"))
looks = {
    "clock": lambda: time.monotonic_ns() - began > 250_000_000,
    "epoll": lambda: epoll.poll(0),
    "epoll and clock": lambda: [time.monotonic_ns(), epoll.poll(0), time.monotonic_ns()][1],
    "poll": lambda: poll.poll(0),
    "select": lambda: select.select([woken], [], [], 0)[0],
    "yield": lambda: os.sched_yield() or rung,
}
look, count, began = looks[sys.argv[1]], 1, time.monotonic_ns()
threading.Thread(target=ring).start()
while not look():
    count += 1
print(count, time.monotonic_ns() - began)
"""
"""Looks again and again, and never sleeps, until the bell rings after 0.25 s."""


@pytest.mark.parametrize("look", ["clock", "epoll", "epoll and clock", "poll", "select", "yield"])
def test_time_moves_for_a_program_that_polls(run: Run, look: str) -> None:
    status, first = run(sys.executable, "-c", POLLING, look)
    assert status == 0, first
    count, took_ns = map(int, first.split())
    calls = 3 * count if look == "epoll and clock" else count
    assert 4_096 < calls < 4_096 + 30_000
    assert 250e6 < took_ns < 250e6 + 20e6  # the other thread gets the processor at a tick, every 10 ms
    assert run(sys.executable, "-c", POLLING, look) == (0, first)  # in every boot


def test_the_clock_costs_next_to_nothing_for_a_program_that_sleeps_when_it_waits(run: Run) -> None:
    script = """
import time
for _ in range(3):
    time.sleep(1)
    began = time.monotonic_ns()
    for _ in range(4000):
        now = time.monotonic_ns()
    print(now - began)
"""
    assert run(sys.executable, "-c", script) == (0, b"4000\n4000\n4000\n")


WITNESS = """
import os, socket, time, tempfile
print(os.urandom(16).hex(), hash("seed"), id(object()), time.time_ns(), time.monotonic_ns(), tempfile.mktemp())
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname())
    for _ in range(3):
        with socket.create_connection(server.getsockname()) as client:
            print(client.getsockname())
            time.sleep(0.0123)
print(time.monotonic_ns(), open("/proc/sys/kernel/random/boot_id").read())
"""
"""Prints what a guest has of chance and of time: random bytes, addresses, ports, clocks."""


def test_every_boot_has_the_same_time_and_the_same_chance(run: Run) -> None:
    status, first = run(sys.executable, "-c", WITNESS)
    assert status == 0, first
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        assert run(sys.executable, "-c", WITNESS) == (0, first)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_chance_begins_anew_whatever_a_machine_has_and_a_guest_did(run: Run) -> None:
    """Two machines have other files, and each failed lookup costs a microsecond: bbr drew other numbers on each."""
    script = """
import os, sys, time
from testbed.vm.init import begin_random_numbers
for each in range(int(sys.argv[1])):
    os.path.exists(f"/nothing/{each}"), os.urandom(each)
time.sleep(0.07 * int(sys.argv[1]))
begin_random_numbers()
time.sleep(200)  # longer than any interval at which a kernel draws anew by itself
print(os.urandom(4096).hex())
"""
    once, other = (run(sys.executable, "-c", script, times) for times in ("0", "1000"))
    assert once == other
    assert once[0] == 0, once


def test_a_boot_leaves_nothing_that_the_next_one_would_find(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled module that is there saves a system call that fails, and that takes time."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    (tmp_path / "mine.py").write_text("")
    script = "import time; a = time.monotonic_ns(); import mine; print(time.monotonic_ns() - a)"
    status, first = run(sys.executable, "-c", script)
    assert status == 0, first
    assert run(sys.executable, "-c", script) == (0, first)
    assert not (tmp_path / "__pycache__").exists()


def test_the_package_is_compiled_before_a_boot(run: Run) -> None:
    """A guest forgets what it compiles, so that boots would differ before and after somebody compiles here."""
    compiled = Path(cache_from_source(str(Path(vm.__file__).with_name("init.py"))))
    compiled.unlink(missing_ok=True)
    guests._compile_modules.cache_clear()  # once per process is enough
    assert run("true") == (0, b"")
    assert compiled.exists()


def test_a_program_that_spins_is_ended_by_this_machines_clock(run: Run) -> None:
    started = time.monotonic()
    script = "while True: pass"
    status, said = run(sys.executable, "-c", script, time_limit_s=5)
    assert status == 124
    assert b"time limit of 5 s" in said
    assert time.monotonic() - started < 30


@pytest.mark.root
def test_two_guests_take_two_processors(start: Start) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has one processor")
    # What holds a processor is a name in a network namespace: in one of their own these two meet no other test's guest.
    with (
        Namespace("two guests") as apart,
        apart.entered(),
        start(sys.executable, "-c", "while True: pass") as first,
        start(sys.executable, "-c", "while True: pass") as other,
    ):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            taken = [os.sched_getaffinity(guest.pid) for guest in (first, other)]
            if all(len(processors) == 1 for processors in taken):
                break
            time.sleep(0.05)
        assert [len(processors) for processors in taken] == [1, 1]
        assert taken[0] != taken[1]
        first.kill()
        other.kill()
        assert guest_of(os.getpid()) == set()


FORBID = """
import ctypes, errno, os, struct, sys
load_number, allow, refuse = (0x20, 0, 0, 0), (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | errno.EPERM)
steps = [load_number]
for number in sys.argv[1].split(","):
    steps += [(0x15, 0, 1, int(number)), refuse]
code = b"".join(struct.pack("HBBI", *step) for step in [*steps, allow])
held = ctypes.create_string_buffer(code)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps) + 1, ctypes.addressof(held)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
assert libc.prctl(22, 2, program, 0, 0) == 0  # a seccomp filter
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs a program in a sandbox that refuses some system calls, by their numbers."""
PTRACE, SECCOMP = 101, 317


def _in_a_sandbox(folder: Path, *forbidden: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "testbed", "vm", "--virtual-clock", "--memory", "256M", "--", "echo", "through"]
    return subprocess.run(
        [sys.executable, "-c", FORBID, ",".join(map(str, forbidden)), *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("forbidden", [PTRACE, SECCOMP])
def test_one_way_of_catching_system_calls_is_enough(tmp_path: Path, forbidden: int) -> None:
    done = _in_a_sandbox(tmp_path, forbidden)
    assert (done.returncode, done.stdout) == (0, "through\n"), done.stderr


def test_where_seccomp_and_ptrace_are_forbidden_the_message_says_so(tmp_path: Path) -> None:
    done = _in_a_sandbox(tmp_path, PTRACE, SECCOMP)
    assert done.returncode == 2
    assert "neither seccomp filters nor ptrace" in " ".join(done.stderr.split())
