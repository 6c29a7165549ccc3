"""The first process inside the guest: set up its files and devices, run the command, report its status, power off.

The kernel runs it as `python -SBP -m testbed.vm.init`: no installed package can be imported. Serial line 0 carries the
command's standard output, 1 its standard error, 2 the report, one line of JSON. There is no input: a virtual clock
would advance while waiting for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import termios
import traceback
import tty
from pathlib import Path
from typing import Any

from testbed.vm.guest_plan import receive

_SYS_PIVOT_ROOT = 155  # x86-64
_MS_RDONLY, _MS_MOVE, _MS_BIND = 1, 8192, 4096
_MS_NOATIME = 1024
"""Otherwise the first reading of a file also reads the clock, which costs a program nanoseconds in its first boot."""
_MNT_DETACH = 2
_RB_POWER_OFF = 0x4321FEDC
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_RNDRESEEDCRNG = 0x5207
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Run the guest, then power it off; never returns."""
    for kind, folder in (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")):
        if not os.path.ismount(folder):  # some kernels mount devtmpfs themselves
            _mount(kind, folder, kind)
    stdout, stderr, reporting = (_serial_line(number) for number in range(3))
    try:
        plan = receive()
        _make_files(plan)
        begin_random_numbers()
        report: dict[str, Any] = {"status": _carry_out(plan, stdout, stderr)}
    except Exception:
        report = {"failure": traceback.format_exc()}
    os.sync()
    for line in (stdout, stderr):
        termios.tcdrain(line)
    _write(reporting, json.dumps(report).encode() + b"\n")
    termios.tcdrain(reporting)
    _libc.reboot(_RB_POWER_OFF)


def begin_random_numbers() -> None:
    """Begin the guest's random numbers anew; bbr, cake and fq_codel draw some. On a virtual clock they are then
    the same on every machine, whatever the guest did before.
    """
    with Path("/dev/urandom").open("rb") as device:
        fcntl.ioctl(device, _RNDRESEEDCRNG)


def _serial_line(number: int) -> int:
    fd = os.open(f"/dev/ttyS{number}", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    tty.setraw(fd)  # unchanged bytes: no echo, no conversion of line ends
    return fd


def _make_files(plan: dict[str, Any]) -> None:
    """Mount the host's files under a layer in memory, shared folders on top, and new /dev, /proc, /sys and /run."""
    _mount("tmpfs", "/tmp", "tmpfs", data="size=90%,mode=755")
    root = Path("/tmp/root")
    for name in ("root", "upper", "work"):
        Path("/tmp", name).mkdir()
    _mount("overlay", root, "overlay", data="lowerdir=/,upperdir=/tmp/upper,workdir=/tmp/work")
    for folder in ("/proc", "/sys", "/dev"):
        _mount(folder, f"{root}{folder}", "", _MS_MOVE)
    _mount("tmpfs", root / "run", "tmpfs", data="mode=755")
    (root / "run" / "testbed-written").mkdir()  # writes outside shared folders, which are discarded; `exec` lists them
    _mount("/tmp/upper", root / "run" / "testbed-written", "", _MS_BIND)
    for folder, kind in (("pts", "devpts"), ("shm", "tmpfs")):
        (root / "dev" / folder).mkdir(exist_ok=True)
        _mount(kind, root / "dev" / folder, kind)
    for shared in plan["shares"]:
        Path(f"{root}{shared}").mkdir(parents=True, exist_ok=True)
        flags = _MS_NOATIME | _MS_RDONLY * (shared in plan["read_only"])
        _mount("hostfs", f"{root}{shared}", "hostfs", flags, data=shared)
    os.chdir(root)
    _check(_libc.syscall(_SYS_PIVOT_ROOT, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        Path("/dev", name).symlink_to(f"/proc/self/fd{target}")
    _set_loopback_up()
    _put_packets_first()
    socket.sethostname(plan["hostname"])
    # Written files reach the host within about two seconds, so that little is lost if the guest is killed.
    for name in ("dirty_writeback_centisecs", "dirty_expire_centisecs"):
        Path("/proc/sys/vm", name).write_text("100")


def _put_packets_first() -> None:
    """Let the thread that processes packets under load run before programs on the guest's only CPU.

    By default it takes turns with them: with two busy programs a 256 KiB message over 80 Mbit/s arrived 2 ms late.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended in the meantime
            if (folder / "comm").read_text("utf-8").startswith("ksoftirqd"):
                os.sched_setscheduler(int(folder.name), os.SCHED_FIFO, os.sched_param(60))


def _set_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        flags = struct.unpack("16sH14x", request)[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def _carry_out(plan: dict[str, Any], stdout: int, stderr: int) -> int:
    """Run the command, forward its output, adopt and reap its orphans; return its exit status as a shell does."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    try:
        child = subprocess.Popen(
            plan["command"],
            cwd=plan["directory"],
            env=plan["environment"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if plan["one_output"] else subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        _write(stderr, f"testbed vm: cannot run {error.filename or plan['command'][0]}: {error.strerror}\n".encode())
        return 127 if isinstance(error, FileNotFoundError) else 126
    lines = {pipe.fileno(): line for pipe, line in ((child.stdout, stdout), (child.stderr, stderr)) if pipe is not None}
    with selectors.DefaultSelector() as selector:
        for fd in (woken, *lines):
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        while child.returncode is None:
            for key, _ in selector.select():
                if key.fd == woken:
                    os.read(woken, 1 << 12)
                elif not _pass_on(key.fd, lines[key.fd]):
                    selector.unregister(key.fd)
            _reap(child)
    for fd, line in lines.items():  # its last output; do not wait for a daemon that still holds the pipe open
        while _pass_on(fd, line):
            pass
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _pass_on(fd: int, line: int) -> bool:
    """Forward one read from a pipe. False if it is empty, or all writers have closed it."""
    try:
        data = os.read(fd, 1 << 16)
    except BlockingIOError:
        return False
    _write(line, data)
    return bool(data)


def _reap(child: subprocess.Popen[bytes]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _mount(source: str, target: Path | str, kind: str, flags: int = 0, data: str = "") -> None:
    done = _libc.mount(source.encode(), str(target).encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(done, f"mount of {kind or source} on {target}")


def _check(done: int, what: str) -> None:
    if done != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
