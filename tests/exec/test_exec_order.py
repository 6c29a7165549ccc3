"""What is decided before a program runs in a lab, and what is made of the numbers after it."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed import forks
from testbed.errors import SpecError
from testbed.exec import nodes
from testbed.exec.order import fill_in, node_environment, parse_commands
from testbed.exec.regressions import RunNumber, differences, read_numbers, write_numbers
from testbed.exec.script import recognise
from testbed.report.exec_page import hints

ADDRESSES = ["10.77.1.2", "10.77.2.2", "10.77.3.2"]
ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
NUMBERS = st.lists(
    st.builds(
        RunNumber,
        name=st.text(min_size=1, max_size=20),
        unit=st.sampled_from(["ms", "B", "packets"]),
        value=st.floats(0, 1e15),
    ),
    unique_by=lambda each: each.name,
)


@given(st.lists(st.text(alphabet=st.characters(exclude_characters="{}")), max_size=5), st.integers(0, 2))
def test_words_without_placeholders_stay_as_they_are(words: list[str], node: int) -> None:
    assert fill_in(words, node, ADDRESSES) == words


def test_placeholders_are_replaced_and_other_braces_are_not() -> None:
    words = ["{node}/{nodes}", "{address}", "{addresses}", "--json={'a': {1}}", "tcp://{server}:80", "{nobody}"]
    assert fill_in(words, 1, ADDRESSES) == [
        *("1/3", "10.77.2.2", "10.77.1.2,10.77.2.2,10.77.3.2"),
        *("--json={'a': {1}}", "tcp://10.77.1.2:80", "{nobody}"),
    ]


def test_torchrun_and_gloo_find_each_other_by_the_environment_alone() -> None:
    first, last = (node_environment(node, ADDRESSES, "wan0") for node in (0, 2))
    assert first["PET_MASTER_ADDR"] == last["PET_MASTER_ADDR"] == ADDRESSES[0]
    assert (first["PET_NODE_RANK"], last["PET_NODE_RANK"], last["PET_NNODES"]) == ("0", "2", "3")
    assert last["GLOO_SOCKET_IFNAME"] == last["TESTBED_DEVICE"] == "wan0"


@given(
    st.dictionaries(st.integers(0, 50), st.text(alphabet="abc -./", min_size=1).filter(lambda text: bool(text.strip())))
)
def test_commands_are_read_as_they_were_written(commands: dict[int, str]) -> None:
    text = "# a comment\n\n" + "".join(f"{node}: {command}\n" for node, command in commands.items())
    assert parse_commands(text, "file") == {node: command.strip() for node, command in commands.items()}


def test_ranges_and_all_others() -> None:
    assert parse_commands("0: server\n1-3: client\n*: idle", "file") == {
        0: "server",
        1: "client",
        2: "client",
        3: "client",
        -1: "idle",
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("server", "line 1.*NODE: COMMAND"),
        ("0: a\nx: b", "line 2"),
        ("0:", "line 1"),
        ("0: a\n0: b", "line 2.*already"),
        ("0-999999: a", "more nodes than a lab has"),
        ("-1: a", "line 1"),
    ],
)
def test_lines_that_are_no_commands(text: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        parse_commands(text, "file")


@given(st.text(max_size=200))
def test_any_file_of_commands_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(SpecError):
        assert all(node >= -1 for node in parse_commands(text, "file"))


def test_only_scripts_of_this_interpreter_that_import_torch_are_forked(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import os\nfrom torch import nn\n")
    (tmp_path / "plain.py").write_text("import socket  # torch is not imported\n")

    def forked(*command: str) -> bool:
        return recognise(command, ENVIRONMENT, tmp_path) is not None

    assert forked("torchrun", "job.py")
    assert forked("python", "job.py", "--steps", "3")
    assert forked("python", "-u", "job.py")
    assert forked("python", "-m", "torch.distributed.run", "job.py")
    assert not forked("python", "plain.py")
    assert not forked("python", "-O", "job.py")
    assert not forked("python", "-c", "import torch")
    assert not forked("python", "missing.py")
    assert not forked("sh", "-c", "python job.py")
    assert not forked("no-such-program")


@pytest.mark.parametrize("name", ["python", "python3", f"python3.{sys.version_info.minor}"])
def test_torchrun_is_forked_whatever_name_of_the_interpreter_pip_wrote_into_it(tmp_path: Path, name: str) -> None:
    """`pip install` writes the name by which it was called itself, which need not be the one that runs testbed."""
    script = tmp_path / "torchrun"
    script.write_text(f"#!{Path(sys.executable).parent / name}\nimport torch\n")
    script.chmod(0o755)
    assert recognise(["torchrun", "job.py"], {"PATH": str(tmp_path)}, tmp_path) is not None
    script.write_text(f"#!/usr/bin/{name}\nimport torch\n")
    assert recognise(["torchrun", "job.py"], {"PATH": str(tmp_path)}, tmp_path) is None


@given(NUMBERS)
def test_a_baseline_is_read_as_it_was_written_and_nothing_differs_from_itself(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[RunNumber]
) -> None:
    path = tmp_path_factory.mktemp("baseline") / "b.json"
    write_numbers(numbers, path)
    assert read_numbers(path) == numbers
    assert not list(differences(numbers, numbers, 0.0))


@given(st.floats(1, 1e9), st.floats(0.001, 0.5), st.floats(0.01, 2))
def test_what_is_off_by_more_than_the_threshold_is_said_either_way(value: float, off_by: float, share: float) -> None:
    for changed in (value * (1 + off_by), value * (1 - off_by)):
        said = list(differences([RunNumber("n", "B", changed)], [RunNumber("n", "B", value)], off_by * share))
        if abs(share - 1) > 1e-6:
            assert bool(said) == (share < 1)


def test_numbers_that_come_and_go_are_said() -> None:
    said = list(differences([RunNumber("new", "B", 1)], [RunNumber("old", "B", 2)], 1.0))
    assert len(said) == 2
    assert "the baseline has none" in said[0]
    assert "old: gone, was 2" in said[1]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'[{"name": 1}]', b"\xff\xfe", b'[["a", "b", "c"]]'])
def test_files_that_are_no_baseline(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "b.json").write_bytes(content)
    with pytest.raises(SpecError, match=r"not a baseline.*--save"):
        read_numbers(tmp_path / "b.json")


def test_last_words_that_point_to_the_node_are_explained() -> None:
    assert list(hints(("EOFError: EOF when reading a line",)))
    assert not list(hints(("ValueError: too small",)))


def test_a_program_that_ends_after_the_last_look_leaves_its_descriptor_to_the_next(tmp_path: Path) -> None:
    order: Any = SimpleNamespace(step_pattern=None, environment={}, commands=[], separate=False, clock="real")
    lab: Any = SimpleNamespace(nodes=[])
    programs = nodes.Programs(order, lab, tmp_path, lambda: None)
    status, end = os.pipe()
    with os.fdopen(end, "wb", 0) as server, subprocess.Popen(["sleep", "60"]) as child:
        ended = forks.Forked(child.pid, status)
        programs._selector.register(ended, selectors.EVENT_READ)
        server.write(forks._NUMBER.pack(3))
        assert programs._poll(ended) == 3
        child.kill()
    again, end = os.pipe()
    os.close(end)
    assert again == status
    programs._selector.register(again, selectors.EVENT_READ)
    os.close(again)
