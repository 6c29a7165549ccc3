"""What separates a process from everything but its requests: `isolate` before a codec is imported, `seal` after.

`isolate`: own network, IPC and mount namespaces, in which nothing can be written but a temporary folder, and no
capabilities. `seal`: a list of allowed system calls, which the kernel enforces. The kit is told of every other call and
refuses it, so that it can name the call. Files can still be read, so a codec may import modules at any time. No torch
here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import struct
import tempfile
from pathlib import Path

from testbed.process import drop_capabilities

_libc = ctypes.CDLL(None, use_errno=True)
_NEW_USER, _NEW_OTHERS = 0x10000000, 0x40000000 | 0x08000000 | 0x04000000 | 0x00020000
"""CLONE_NEWUSER; CLONE_NEWNET, _NEWIPC, _NEWUTS and _NEWNS."""
_MS_PRIVATE, _RECURSIVE, _READ_ONLY = 1 << 18, 0x8000, 1
_PROCESSORS = ("/proc/cpuinfo", *(f"/sys/devices/system/cpu/{name}" for name in ("online", "possible", "present")))
"""By these torch chooses its instructions, on which rounding may depend."""
_MOUNT_SETATTR, _SECCOMP, _PIDFD_GETFD = 442, 317, 438
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
"""SECCOMP_IOCTL_NOTIF_RECV and _SEND."""
_LISTENER, _ALL_THREADS = 8, 1 | 16
_NATIVE = 0xC000003E
"""AUDIT_ARCH_X86_64: numbers of system calls are those of this architecture."""
_ALLOW, _ASK, _REFUSE, _KILL = 0x7FFF0000, 0x7FC00000, 0x00050000, 0x80000000
_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALL, _CLOCK_GETTIME, _MONOTONIC = 0xFFFFFFFF, 228, 1
_UNNAMED = 0x400000 | os.O_EXCL
"""Flags of a file without a name, which cannot get one: nobody else can open it."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


# fmt: off
_ALLOWED = (
    # files that are open: read, write, stat, lseek, pread, pwrite, readv, access, dup, getcwd, readlink, fallocate, ...
    0, 1, 3, 4, 5, 6, 8, 17, 18, 19, 20, 21, 32, 79, 89, 217, 262, 267, 269, 285, 295, 296, 327, 328, 332, 439,
    # memory: mmap, mprotect, munmap, brk, mremap, madvise
    9, 10, 11, 12, 25, 28,
    # signals and threads of this process, and its end
    13, 14, 15, 24, 60, 131, 186, 202, 204, 218, 219, 231, 273, 324, 334,
    # who it is, what it used, random numbers
    39, 63, 97, 98, 102, 104, 107, 108, 110, 318,
)
_ONLY = {
    2: (1, WRITES, (0,)),  # open, openat: to read, or a file of its own
    257: (2, WRITES | _UNNAMED, (0, os.O_RDWR | _UNNAMED)),
    38: (0, _ALL, (2,)), 302: (0, _ALL, (0,)),  # setitimer of the process's own time; prlimit of itself
    56: (0, 0x10000, (0x10000,)), 157: (0, _ALL, (15,)),  # clone: a thread; prctl: its name
    72: (1, _ALL, (0, 1, 2, 3, 4, 1030)), 228: (0, _ALL, (2, 3)),  # fcntl: no lock; clock_gettime: of its own time
}
"""For which values of an argument, after a mask, a call is allowed."""
_SILENTLY = {16: errno.ENOTTY, 96: errno.EPERM, 99: errno.EPERM, 203: errno.EPERM, 309: errno.ENOSYS, 435: errno.ENOSYS}
"""ioctl, gettimeofday, sysinfo, sched_setaffinity, getcpu, clone3: libraries try these and can do without."""
_NAMES = {
    "the clock": (100, 201, 228, 229), "sleep": (7, 23, 35, 230, 232, 270, 271, 281),
    "a timer": (37, 38, 222, 283), "a socket": (41, 42, 43, 44, 45, 46, 47, 49, 50, 53, 288),
    "a lock on a file": (72, 73), "a file, to write to it": (2, 85, 257, 437), "a file's length": (76, 77, 285),
    "a file's times": (132, 235, 261, 280), "a folder": (83, 84, 258), "the removal of a file": (87, 263),
    "another name for a file": (82, 86, 88, 264, 265, 266, 316), "a file's mode": (90, 91, 92, 93, 94, 260, 268),
    "a file's attributes": (188, 189, 190), "a pipe": (22, 293), "shared memory": (29, 30, 31, 319),
    "a message queue": (68, 69, 70, 71, 240, 242, 243), "a semaphore": (64, 65, 66, 220), "a key ring": (248, 249, 250),
    "another process": (56, 57, 58, 59, 61, 101, 310, 311, 322, 434, 438), "a signal": (62, 129, 200, 234, 297, 424),
    "news of files": (253, 254, 255, 294, 300, 301),
}
"""What a codec may not ask the kernel for, by the numbers of the system calls."""
# fmt: on


def isolate() -> list[str]:
    """Take this process, of one thread, out of everything that it shares with others; return what was refused."""
    refused: list[str] = []
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(_NEW_OTHERS) == 0:
        pass
    elif user and _libc.unshare(_NEW_OTHERS | _NEW_USER) == 0:  # what needs no privilege, on most machines
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text, encoding="ascii")
    else:
        return [f"namespaces of their own: {os.strerror(ctypes.get_errno())}"]
    read_only = struct.pack("QQQQ", _READ_ONLY, 0, _MS_PRIVATE, 0)
    if _libc.syscall(_MOUNT_SETATTR, -100, b"/", _RECURSIVE, read_only, len(read_only)) != 0:
        refused.append(f"a read-only file system: {os.strerror(ctypes.get_errno())}")
    told = {path: path.read_bytes() for path in map(Path, _PROCESSORS) if path.is_file()}
    # /proc and /sys tell what other processes do. Libraries need a temporary folder, and /proc exists everywhere.
    for folder in ("/proc", "/sys", "/run", "/dev/shm"):
        if Path(folder).is_dir() and _libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 6, b"size=64m") != 0:
            refused.append(f"a {folder} of their own: {os.strerror(ctypes.get_errno())}")
            return refused
    for path, content in told.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    os.environ["TMPDIR"] = tempfile.tempdir = "/proc"
    drop_capabilities()
    return refused


def seal() -> tuple[int | None, list[str]]:
    """Allow this process only what a codec needs, for good.

    Returns a descriptor at which the kernel tells of every other call, or None, and what this machine refused.
    """
    if platform.machine() != "x86_64":
        return None, [f"a filter of system calls on {platform.machine()}"]
    _read_clocks_by_system_calls()
    drop_capabilities()  # without privileges a filter is only accepted from a process that gets no new ones
    listener = _install(_ASK, _LISTENER | _ALL_THREADS)
    if listener >= 0:
        return listener, []
    told = f"a report of what they ask the kernel for: {os.strerror(ctypes.get_errno())}"
    if _install(_REFUSE | errno.EPERM, 1) == 0:
        return None, [told]
    return None, [f"a filter of system calls: {os.strerror(ctypes.get_errno())}"]


def _read_clocks_by_system_calls() -> None:
    """Overwrite the functions with which the kernel lets a process read clocks without a system call."""
    try:
        vdso = ctypes.CDLL("linux-vdso.so.1")
    except OSError:  # there are none
        return
    for name, call in (("clock_gettime", 228), ("gettimeofday", 96), ("time", 201), ("getcpu", 309)):
        address = ctypes.cast(vdso[f"__vdso_{name}"], ctypes.c_void_p).value or 0
        _libc.mprotect(ctypes.c_void_p(address & -4096), 8192, 7)
        ctypes.memmove(
            address, b"\xb8" + call.to_bytes(4, "little") + b"\x0f\x05\xc3", 8
        )  # mov eax, call; syscall; ret
        _libc.mprotect(ctypes.c_void_p(address & -4096), 8192, 5)


def _install(otherwise: int, flags: int) -> int:
    program = b"".join(struct.pack("HBBI", *step) for step in _program(otherwise))
    kept = ctypes.create_string_buffer(program)
    described = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(kept))
    return int(_libc.syscall(_SECCOMP, 1, flags, described))


def _program(otherwise: int) -> list[tuple[int, int, int, int]]:
    """Return the filter: instructions with their jumps if true and if false."""
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _NATIVE), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for call in _ALLOWED:
        steps += [(_EQUAL, 0, 1, call), (_RETURN, 0, 0, _ALLOW)]
    for call, number in _SILENTLY.items():
        steps += [(_EQUAL, 0, 1, call), (_RETURN, 0, 0, _REFUSE | number)]
    for call, (argument, mask, values) in _ONLY.items():
        # CPython reads the monotonic clock with every lock: that is refused without telling.
        silently = {_MONOTONIC: _REFUSE | errno.EPERM} if call == _CLOCK_GETTIME else {}
        results = {**dict.fromkeys(values, _ALLOW), **silently}
        steps += [(_EQUAL, 0, 3 + 2 * len(results), call), (_LOAD, 0, 0, 16 + 8 * argument), (_AND, 0, 0, mask)]
        steps += [step for value, end in results.items() for step in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, end))]
        steps.append((_RETURN, 0, 0, otherwise))
    return [*steps, (_RETURN, 0, 0, otherwise)]


class Listener:
    """Tells what a sealed process asks the kernel for and may not have."""

    def __init__(self, process: int, descriptor: int) -> None:
        """Take it over from the process, in which it is `descriptor`. OSError where that is refused."""
        self.refused: dict[str, None] = {}
        """What was asked for."""
        pidfd = os.pidfd_open(process)
        self.fd = int(_libc.syscall(_PIDFD_GETFD, pidfd, descriptor, 0))
        os.close(pidfd)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def refuse(self) -> None:
        """Answer the call that waits."""
        asked = bytearray(80)
        with contextlib.suppress(OSError):  # the thread that asked has ended
            fcntl.ioctl(self.fd, _RECEIVE, asked)
            number, _, _, call = struct.unpack_from("QIIi", asked)
            name = next((name for name, calls in _NAMES.items() if call in calls), f"system call {call}")
            self.refused[name] = None
            fcntl.ioctl(self.fd, _SEND, bytearray(struct.pack("QqiI", number, 0, -errno.EPERM, 0)))
