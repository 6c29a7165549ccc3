"""Fetching a kernel with stand-ins for apt-get and dpkg-deb leaves a whole kernel on the disk, or nothing."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from testbed import vm
from testbed.errors import GuestKernelError
from testbed.vm import debian

LISTING = """\
'http://mirror.example/debian/dists/bookworm/InRelease' mirror.example_debian_dists_bookworm_InRelease 0
'http://mirror.example/debian/dists/bookworm-updates/InRelease' x 0
'http://mirror.example/debian-security/dists/bookworm-security/InRelease' x 0
'https://other.example/tools/dists/stable/InRelease' x 0
'http://mirror.example/debian/dists/bookworm/main/binary-amd64/Packages.xz' x 0
"""

APT = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
  *--print-uris*) cat "$LISTING" ;;
  *download*) grep -q "$HAS" "$SOURCES"/*/sources.list || { echo "E: no such package" >&2; exit 100; }
    touch linux.deb libc6.deb ;;
esac
"""

DPKG = """#!/bin/sh
case "$1" in
  --show) case "$4" in *linux.deb) echo "user-mode-linux 9.9um1" ;; *) echo "libc6 9.41" ;; esac ;;
  --extract) mkdir -p "$3/usr/bin" "$3/usr/lib/x86_64-linux-gnu" "$3/usr/lib/uml/modules/9.9.9"
    printf 'x/lib64/ld-linux-x86-64.so.2\\0x' > "$3/usr/bin/$PROGRAM"
    echo c > "$3/usr/lib/x86_64-linux-gnu/libc.so.6"; echo l > "$3/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"
    echo m > "$3/usr/lib/uml/modules/9.9.9/modules.dep" ;;
esac
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("apt-get", APT), ("dpkg-deb", DPKG)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "listing").write_text(LISTING)
    settings = {"CALLS": tmp_path / "calls", "LISTING": tmp_path / "listing", "SOURCES": tmp_path / "cache"}
    for name, value in {
        **settings,
        "HAS": "forky",
        "PROGRAM": "linux.uml",
        "PATH": f"{tools}:{os.environ['PATH']}",
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return tmp_path / "cache"


def calls(cache: Path) -> str:
    return (cache.parent / "calls").read_text()


def test_mirrors_are_those_of_the_machine_without_security_updates() -> None:
    assert debian.mirrors(LISTING) == ["http://mirror.example/debian", "https://other.example/tools"]


def test_a_fetched_kernel_is_whole_and_is_not_fetched_again(cache: Path) -> None:
    found = vm.fetch_kernel(cache / "kernel")
    assert found == vm.find_kernel(cache / "kernel")
    assert found.version == "9.9.9"
    assert found.packages == {"user-mode-linux": "9.9um1", "libc6": "9.41"}
    assert os.access(found.linux, os.X_OK)
    before = calls(cache)
    assert vm.fetch_kernel(cache / "kernel") == found
    assert calls(cache) == before
    assert sorted(path.name for path in cache.iterdir()) == ["kernel", "kernel.lock"]


def test_the_second_suite_and_the_second_mirror_are_tried(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAS", "other.example/tools sid")
    vm.fetch_kernel(cache / "kernel")
    assert calls(cache).count("download") == 4


def test_a_damaged_kernel_and_what_a_killed_fetch_left_are_replaced(cache: Path) -> None:
    found = vm.fetch_kernel(cache / "kernel")
    found.linux.write_bytes(b"cut")
    (cache / "kernel.fetching-abc").mkdir()
    assert vm.fetch_kernel(cache / "kernel") == found
    assert sorted(path.name for path in cache.iterdir()) == ["kernel", "kernel.lock"]


def test_packages_that_no_mirror_has(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAS", "no such mirror")
    with pytest.raises(
        GuestKernelError, match=r"(?s)user-mode-linux.*Vagrant.*mirror\.example/debian sid: .*E: no such package"
    ):
        vm.fetch_kernel(cache / "kernel")
    assert [path.name for path in cache.iterdir()] == ["kernel.lock"]


def test_packages_that_are_laid_out_otherwise(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROGRAM", "elsewhere")
    with pytest.raises(GuestKernelError, match="not laid out as expected"):
        vm.fetch_kernel(cache / "kernel")
    assert [path.name for path in cache.iterdir()] == ["kernel.lock"]


def test_a_machine_of_another_kind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(GuestKernelError, match=r"x86-64 only.*aarch64.*Lima"):
        vm.fetch_kernel(cache / "kernel")
    assert not cache.exists()


def test_a_machine_without_apt(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(GuestKernelError, match="no apt-get and no dpkg-deb"):
        vm.fetch_kernel(cache / "kernel")
