"""Packages come from the first suite of the first mirror that has them, with a stand-in for apt."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testbed.errors import CapabilityError, GuestKernelError
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
  *download*) grep -q "$HAS" "$SOURCES" || { echo "E: no such package" >&2; exit 100; }
    touch linux-source.deb ;;
esac
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("apt-get", APT), ("apt-cache", "#!/bin/sh\necho linux-source-7.2")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "listing").write_text(LISTING)
    work = tmp_path / "work"
    settings = {"CALLS": tmp_path / "calls", "LISTING": tmp_path / "listing", "SOURCES": work / "sources.list"}
    for name, value in {**settings, "HAS": "forky", "PATH": f"{tools}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, str(value))
    return work


def test_mirrors_are_those_of_the_machine_without_security_updates() -> None:
    assert debian.mirrors(LISTING) == ["http://mirror.example/debian", "https://other.example/tools"]


def test_the_second_suite_and_the_second_mirror_are_tried(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAS", "other.example/tools sid")
    assert debian.download(work, exactly=False) == work / "debs" / "linux-source.deb"
    assert (work.parent / "calls").read_text().count("download") == 4


def test_packages_that_no_mirror_has(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAS", "no such mirror")
    with pytest.raises(
        GuestKernelError,
        match=r"(?s)linux-source.*virtual-machines.md.*mirror\.example/debian sid: .*E: no such package",
    ):
        debian.download(work, exactly=False)
    with pytest.raises(CapabilityError, match=r"(?s)cannot get linux-source.*mirror\.example/debian sid: .*no such"):
        debian.download(work.parent / "again", exactly=True)


@pytest.mark.parametrize(
    ("names", "newest"),
    [
        (["linux-source-6.9", "linux-source-6.19", "linux-source"], "linux-source-6.19"),
        (["linux-source-6.19", "linux-source-7", "linux-source-7.0.1-rt"], "linux-source-7"),
        ([], None),
    ],
)
def test_the_newest_source_is_chosen(names: list[str], newest: str | None) -> None:
    assert debian.newest_source(names) == newest
