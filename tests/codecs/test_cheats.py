"""Every cheat is caught by the kit, with a sentence that names what was seen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from testbed.codecs.check.apart import Ends
from testbed.codecs.check.packing import pack, unpack
from testbed.codecs.check.subject import subject_of
from testbed.codecs.check.suite import CHECKS, ask
from testbed.codecs.check.verdicts import Broken, CheckResult
from tests.codecs import cheats
from tests.commands import PATIENCE_S, for_all_users

TWO_ENDS = "nothing hidden, both ends alike"
HIDDEN = "the decoder used data that was not in the payload"
CHEATS = {
    "HidesInAFile": (
        TWO_ENDS,
        f"for a file, to write to it, and was refused; open('{cheats.HIDDEN}', 'w'",
    ),
    "HidesInFileNames": (TWO_ENDS, f"asked the kernel for a folder, and was refused; os.mkdir('{cheats.HIDDEN}-"),
    "HidesInFileTimes": (TWO_ENDS, f"asked the kernel for a file's times, and was refused; os.utime('{cheats.HERE}'"),
    "HidesInSharedMemory": (TWO_ENDS, "asked the kernel for a file, to write to it"),
    "HidesInASocket": (TWO_ENDS, "asked the kernel for a socket"),
    "HidesInALock": (TWO_ENDS, "asked the kernel for a lock on a file"),
    "HidesInALockOfAFile": (TWO_ENDS, "asked the kernel for a lock on a file"),
    "HidesInAChild": (TWO_ENDS, "asked the kernel for another process"),
    "HidesInTheEnvironment": (TWO_ENDS, "os.putenv(b'TESTBED_HIDDEN'"),
    "HidesInAGlobal": (TWO_ENDS, HIDDEN),
    "ReadsTheClock": (TWO_ENDS, "asked the kernel for the clock"),
    "ReadsTheMonotonicClock": (TWO_ENDS, "asked the kernel for the clock"),
    "GoesByIdentity": (TWO_ENDS, "builtins.id("),
    "ChangesALargeInput": ("bytes as the formula says", "encode changed its input tensor"),
    "DiffersBetweenRuns": ("two runs alike", "two runs of one program make different bytes"),
    "LeaksMemory": ("bounded memory", "both ends keep 4.00 MB of memory for each message"),
    "KeepsEveryTensor": ("bounded memory", "both ends keep 0.52 MB of memory for each message"),
    "Sleeps": (TWO_ENDS, "asked the kernel for the clock"),
    "ExitsPolitely": (TWO_ENDS, "SystemExit: 0"),
    "PrintsEscapes": (
        TWO_ENDS,
        r"printed characters that control terminals: \x1b[2J\x1b[31mall is well",
    ),
    "RaisesEscapes": (
        TWO_ENDS,
        r"its error has characters that control terminals; ValueError: \x1b]0;owned",
    ),
    "StopsAtEmpty": ("odd tensors", "empty, three axes: IndexError"),
    "RefusesLarge": ("large tensors", "OverflowError: too many values"),
    "LosesLarge": ("large tensors", "4194304 values: a relative error of"),
    "LosesInfinity": ("NaN and infinity", "inf became 3"),
    "LosesNan": ("NaN and infinity", "nan became 0.0"),
    "StopsAtNan": ("NaN and infinity", "AssertionError"),
}
"""The check that catches each, and what it says."""
DEADLY = {
    "Hangs": "the encoder's process did not answer within 5 s, during encode",
    "Exits": "process ended with exit status 0 during decode",
    "TrustsAnAddress": "the decoder's process ended with signal 11 during decode",
}
"""Those that end a process or halt it: another is started for each check."""


def asked(name: str, which: str, ends: Ends) -> CheckResult:
    check = next(check for check in CHECKS if check.name == which)
    return ask(check, subject_of(f"cheats:{name}", "forward", ends))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_caught_and_what_was_seen_is_named(name: str, ends: Ends) -> None:
    which, words = CHEATS[name]
    found = asked(name, which, ends)
    assert found.verdict == "FAIL", found
    assert words in found.detail


@pytest.mark.slow
@pytest.mark.parametrize("name", DEADLY)
def test_one_that_ends_its_process_fails_and_the_kit_goes_on(name: str) -> None:
    with Ends([f"cheats:{name}", "fp32"], warm=False, limit_s=5.0) as ends:
        found = asked(name, TWO_ENDS, ends)
        assert found.verdict == "FAIL"
        assert DEADLY[name] in found.detail
        check = next(check for check in CHECKS if check.name == TWO_ENDS)
        ends.limit_s = 100.0  # of what another codec needs on a busy machine
        assert ask(check, subject_of("fp32", "forward", ends)).verdict == "PASS"


@pytest.mark.slow
def test_one_that_exits_is_a_failure_of_the_program_and_ends_soon() -> None:
    path = f"{Path(__file__).parents[2]}:{Path(__file__).parent}"
    found = subprocess.run(
        [sys.executable, "-m", "testbed.codecs.check", "cheats:Exits"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert found.returncode == 1, found.stdout + found.stderr
    assert "ended with exit status 0 during decode" in found.stdout
    assert "not asked, because the codec has ended or halted its processes" in found.stdout
    assert "Traceback" not in found.stderr


LESS = """
from testbed.codecs.check.apart import Ends
from testbed.codecs.check.subject import subject_of
from testbed.codecs.check.suite import CHECKS, ask
with Ends(["cheats:HidesInAFile", "fp32"], warm=False) as ends:
    print(*ends.limits, sep="\\n")
    for name in ("cheats:HidesInAFile", "fp32"):
        print(ask(CHECKS[1], subject_of(name, "forward", ends)).verdict, *ends.refused)
"""


def run_as(*words: str) -> list[str]:
    """Return what the kit says of two codecs where `words` take privileges away."""
    paths = f"PYTHONPATH={Path(__file__).parents[2]}:{Path(__file__).parent}"
    command = [*words, "env", paths, "OMP_NUM_THREADS=1", sys.executable, "-B", "-c", LESS]
    found = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout.splitlines()


@pytest.mark.root
def test_a_plain_user_gets_the_same_isolation() -> None:
    user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all")
    lines = run_as(*for_all_users(), *user)
    assert lines == ["", "FAIL", "PASS"]


@pytest.mark.root
def test_without_namespaces_the_kit_says_so_and_still_refuses() -> None:
    lines = run_as("setpriv", "--inh-caps=-all", "--bounding-set=-all")
    assert lines == ["namespaces of their own: Operation not permitted", "FAIL", "PASS"]


@pytest.mark.slow
def test_what_every_process_tries_is_counted_once_and_forgotten(ends: Ends) -> None:
    assert asked("HidesInASocket", TWO_ENDS, ends).verdict == "FAIL"
    assert (ends.refused, ends.noticed, ends.printed) == ({}, {}, b"")


def test_answers_of_a_process_are_not_believed() -> None:
    good = pack({"a": [1.5, (2, None)], (1, "b"): b"xyz"})
    assert unpack(good) == {"a": [1.5, (2, None)], (1, "b"): b"xyz"}
    for cut in range(len(good)):
        with pytest.raises(Broken, match="cannot be read"):
            unpack(good[:cut])
    claimed = pack(torch.zeros(2**20)[:1].expand(2**20)).replace(b"[1048576]", b"[4294967296]")
    grown = int.from_bytes(claimed[:8], "little") + 3
    with pytest.raises(Broken, match="a tensor of shape"):
        unpack(grown.to_bytes(8, "little") + claimed[8:])
