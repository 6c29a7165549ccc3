"""Boot guests on the real clock: output, status and files are as promised, and nothing is left however it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testbed import vm
from testbed.vm.guest import GUEST_VARIABLE
from tests.vm.members import guest_of

pytestmark = [pytest.mark.slow, pytest.mark.clock_kernel]

ROOT = Path(vm.__file__).parents[2]
RUN = """
import json, sys
from pathlib import Path
import testbed.vm.guest
from testbed import vm
settings = json.loads(sys.argv[2])
settings["share"] = [Path(folder) for folder in settings.get("share", [])]
vm.guest._SILENCE_S = settings.pop("silence_s", vm.guest._SILENCE_S)
kernel = vm.find_clock_kernel(Path(sys.argv[1]))
with vm.start_guest(kernel, sys.argv[3:], **{"memory": "512M", "time_limit_s": 120, **settings}) as guest:
    sys.exit(guest.wait())
"""
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture(scope="session")
def kernel() -> vm.GuestKernel:
    kernel = vm.find_clock_kernel()
    assert kernel is not None
    return kernel


@pytest.fixture
def start(kernel: vm.GuestKernel, tmp_path: Path) -> Iterator[Start]:
    """Start a runner in tmp_path; a runner that a failed test leaves is killed."""
    runners = []

    def popen(*command: str, settings: dict[str, object] | None = None, **options: object) -> subprocess.Popen[bytes]:
        runner = [sys.executable, "-c", RUN, str(kernel.folder), json.dumps(settings or {}), *command]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "MARK": "a 'b' \"c\"\n$d"}
        runners.append(subprocess.Popen(runner, cwd=tmp_path, env=environment, stdout=-1, stderr=-1, **options))  # type: ignore[call-overload]
        return runners[-1]

    yield popen
    for runner in runners:
        runner.kill()
        runner.communicate()


@pytest.fixture
def guest(start: Start) -> Callable[..., tuple[int, bytes, bytes]]:
    def run(*command: str, **settings: object) -> tuple[int, bytes, bytes]:
        runner = start(*command, settings=settings)
        stdout, stderr = runner.communicate(timeout=150)
        return runner.returncode, stdout, stderr

    return run


Guest = Callable[..., tuple[int, bytes, bytes]]


def test_output_and_status_are_carried_over_unchanged(guest: Guest) -> None:
    script = "import os, sys; os.write(1, bytes(range(256)) * 2000); os.write(2, b'\\r\\n\\x04\\xff'); os._exit(7)"
    status, stdout, stderr = guest(sys.executable, "-c", script)
    assert status == 7
    assert stdout == bytes(range(256)) * 2000
    assert stderr == b"\r\n\x04\xff"


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (("sh", "-c", "kill -SEGV $$"), 128 + signal.SIGSEGV, b""),
        (("no-such-program",), 127, b"cannot run no-such-program: No such file"),
        (("/etc/passwd",), 126, b"cannot run /etc/passwd: Permission denied"),
    ],
)
def test_a_command_that_does_not_end_well(guest: Guest, command: tuple[str, ...], status: int, said: bytes) -> None:
    found, stdout, stderr = guest(*command)
    assert (found, stdout) == (status, b"")
    assert said in stderr


def test_environment_directory_and_files(guest: Guest, tmp_path: Path) -> None:
    inner, outer = tmp_path / "in,side=1 x", tmp_path.parent / f"{tmp_path.name}-outer"
    inner.mkdir()
    outer.mkdir()
    try:
        script = f"""
import os, sys
print(os.getcwd(), repr(os.environ["MARK"]), os.environ["{GUEST_VARIABLE}"], sys.stdin.read() == "", os.getuid())
for folder in (".", {str(inner)!r}, {str(outer)!r}, "/usr"):
    open(os.path.join(folder, "from-guest"), "w").write("written")
"""
        status, stdout, stderr = guest(sys.executable, "-c", script)
        assert (status, stderr) == (0, b"")
        marked = "a 'b' \"c\"\n$d"
        assert stdout.decode() == f"{tmp_path} {marked!r} 1 True 0\n"
        assert (tmp_path / "from-guest").read_text() == (inner / "from-guest").read_text() == "written"
        assert not (outer / "from-guest").exists()
        assert not Path("/usr/from-guest").exists()
        assert guest("sh", "-c", "echo shared > file", share=[str(outer)])[0] == 0
        assert (
            guest(
                "sh",
                "-c",
                f"echo shared > '{outer}/file' && echo shared > '{inner}/file'",
                share=[str(outer), str(inner)],
            )[0]
            == 0
        )
        assert (outer / "file").read_text() == (inner / "file").read_text() == "shared\n"
    finally:
        shutil.rmtree(outer)


def test_it_has_netem_tun_namespaces_and_bbr(guest: Guest) -> None:
    script = """
import os, socket
from testbed.net.kernel.namespace import Namespace
from testbed.net.relay.tun import open_tun
with Namespace("inside") as namespace, namespace.entered():
    os.close(open_tun("tun7"))
with socket.socket() as one:
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr")
from testbed.net.machine.capabilities import resolve_engine
print(resolve_engine("netem")[0])
"""
    status, stdout, stderr = guest(sys.executable, "-c", script)
    assert (status, stdout) == (0, b"netem\n"), stderr.decode()


def test_a_daemon_that_holds_the_output_open_is_not_waited_for(guest: Guest) -> None:
    assert guest("sh", "-c", "sleep 1000 & echo done") == (0, b"done\n", b"")


# It touches every second page, so that no two stand in one mapping of the host; with one too many the guest's kernel
# tries for ever.
TOUCH_PAGES = """
import mmap, sys
count = int(sys.argv[1])
memory = mmap.mmap(-1, 2 * count * mmap.PAGESIZE)
for page in range(count):
    memory[2 * page * mmap.PAGESIZE] = 1
print("through")
"""


def test_a_process_with_more_mappings_than_the_host_allows_is_named(guest: Guest) -> None:
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 1 << 17:
        pytest.skip(f"a process here may hold {limit} mappings, more than a test should fill")
    status, stdout, stderr = guest(sys.executable, "-c", TOUCH_PAGES, str(limit), memory="1G", silence_s=2)
    assert (status, stdout) == (1, b"")
    assert f"this machine's limit of memory mappings per process (vm.max_map_count = {limit})".encode() in stderr
    assert f"sudo sysctl vm.max_map_count={16 * limit}".encode() in stderr


def test_a_silent_guest_that_works_is_left_alone(guest: Guest) -> None:
    assert guest("sh", "-c", "sleep 3; echo done", silence_s=1) == (0, b"done\n", b"")


def test_a_guest_that_dies_shows_its_last_lines(guest: Guest) -> None:
    status, _, stderr = guest("sh", "-c", "echo 2 > /proc/sys/vm/panic_on_oom; tail /dev/zero", memory="128M")
    assert status == 1
    assert b"GuestKernelError: the guest kernel died" in stderr
    assert b"panic" in stderr


@pytest.mark.root
def test_the_guests_kernel_comes_before_the_guests_programs(start: Start) -> None:
    """They share a processor; a timer of the kernel, and so a packet, must not wait for the end of a program's turn."""
    runner = start("sh", "-c", "echo up; sleep 1000")
    assert runner.stdout.readline() == b"up\n"
    members = guest_of(runner.pid)
    (kernel,) = (pid for pid in members if os.getpgid(pid) == pid)
    assert os.sched_getscheduler(kernel) == os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
    assert {os.sched_getscheduler(pid) for pid in members - {kernel}} == {os.SCHED_OTHER}


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_runner_that_is_killed_leaves_nothing(start: Start, ending: signal.Signals) -> None:
    # A shell without job control has its background programs ignore SIGINT, and with them their children.
    runner = start(
        "sh", "-c", "echo up; sleep 1000", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    )
    assert runner.stdout.readline() == b"up\n"
    members = guest_of(runner.pid)
    assert len(members) > 1
    runner.send_signal(ending)
    runner.communicate(timeout=20)
    assert runner.returncode in (-ending, 128 + ending)
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in members) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in members if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def own(kernel: vm.GuestKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., vm.Guest]]:
    """Start a guest from this process, with its output in the file `out`."""
    monkeypatch.chdir(tmp_path)

    with (tmp_path / "out").open("ab") as file:
        fd = file.fileno()
        yield lambda *command, **settings: vm.start_guest(
            kernel, command, memory="256M", stdout=fd, stderr=fd, **settings
        )


def test_two_guests_of_one_process_run_at_once(own: Callable[..., vm.Guest], tmp_path: Path) -> None:
    with own("sh", "-c", "echo first; sleep 2; exit 3") as first, own("sh", "-c", "echo second; exit 4") as second:
        assert first.poll() is None
        assert first.pid != second.pid
        assert (second.wait(), first.wait(), first.poll()) == (4, 3, 3)
    assert sorted((tmp_path / "out").read_text().split()) == ["first", "second"]


def test_a_guest_that_is_killed_is_gone(own: Callable[..., vm.Guest]) -> None:
    with own("sleep", "1000") as guest:
        with pytest.raises(TimeoutError, match="still runs"):
            guest.wait(0.1)
        guest.kill()
        assert guest.poll() == 128 + signal.SIGKILL
        assert guest_of(os.getpid()) == set()


def test_the_time_limit_holds_though_nobody_waits(own: Callable[..., vm.Guest], tmp_path: Path) -> None:
    with own("sleep", "1000", time_limit_s=1) as guest:
        deadline = time.monotonic() + 20
        while guest.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert guest.poll() == 124
    assert "time limit of 1 s" in (tmp_path / "out").read_text()
