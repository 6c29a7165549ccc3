"""No string from a file controls a terminal, a table's markup, or a page."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live
from rich.table import Table
from rich.text import Text

import testbed
from testbed.codecs.check import __main__ as kit
from testbed.codecs.check.verdicts import CheckResult
from testbed.errors import CodecError, SpecError, UnknownNameError, printable, printable_line, without_colours
from testbed.terminal import Terminal
from testbed.trace.format import WORK, Lane, Trace
from tests.commands import run_testbed

ATTACKS = (
    "\x1b]0;owned\x07",
    "\x1b[2J\x1b[1;1H",
    "\x9b31m",
    "\r\x1b[Kall good",
    "\x08\x08\x08",
    "\u202egnp.exe",
    "[/x]",
    "[bold]",
    ":skull:",
    "\udcff",
)
CONTROL = set(map(chr, [*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]))


def _printed(*renderables: object) -> str:
    file = io.StringIO()
    console = Terminal(file=file, width=200, force_terminal=True, highlight=False)
    for each in renderables:
        console.print(each)
    return file.getvalue()


@given(st.text(st.characters(codec=None), max_size=60) | st.sampled_from(ATTACKS))
def test_what_is_printed_holds_no_control_character(text: str) -> None:
    table = Table(text, box=None)
    table.add_row(text)
    table.add_row(Text(text))
    for each in (text, Text(text), table):
        said = _printed(each)
        assert not CONTROL & set(said.replace("\x1b[1m", "").replace("\x1b[0m", ""))  # the heading is bold
        said.encode("utf8")


@given(st.text())
def test_a_printable_text_is_unchanged_and_an_escaped_one_stays_escaped(text: str) -> None:
    once = printable(text)
    assert printable(once) == once
    if text.isprintable():
        assert once == text


@given(st.text(st.characters(codec=None), max_size=60) | st.sampled_from(ATTACKS), st.sampled_from(["", "\x1b[1;31m"]))
def test_a_line_of_a_program_has_its_colours_and_controls_nothing_else(text: str, colour: str) -> None:
    said = printable_line(f"{colour}{text}")
    assert not CONTROL & set(without_colours(said))
    if colour and "\r" not in text:
        assert said.startswith(colour)
    if "\x1b" in said:
        assert said.endswith("\x1b[0m")
    if text.isprintable():
        assert without_colours(said) == text


def test_of_a_progress_bar_the_last_is_shown() -> None:
    assert printable_line("\r 10 %\r 100 %") == " 100 %"


def test_markup_and_emoji_are_text() -> None:
    assert _printed("[bold]x[/bold] [/x] :skull:").strip() == "[bold]x[/bold] [/x] :skull:"


def test_a_live_view_shows_escapes() -> None:
    file = io.StringIO()
    console = Terminal(file=file, width=80, force_terminal=True, highlight=False)
    with Live(Text("a \x1b]0;owned\x07 b"), console=console, refresh_per_second=1):
        pass
    assert "\x1b]0;" not in file.getvalue()
    assert "\\x1b]0;owned" in file.getvalue()


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_error_quotes_a_file_safely(attack: str) -> None:
    for error in (SpecError(f"file {attack}"), CodecError(attack), UnknownNameError("codec", attack, [attack])):
        assert not CONTROL & set(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_trace_show_prints_what_a_trace_says(attack: str, tmp_path: Path) -> None:
    lane = Lane(0, f"lane {attack}")
    lane.add(WORK, value=1_000_000)
    lane.end_step()
    about = {f"key {attack}": f"value {attack}"}
    Trace((f"node {attack}",), (f"label {attack}",), (lane,), about).write(tmp_path / "a.trace")
    for flags in ([], ["--step", "0"]):
        done = run_testbed("trace", "show", "a.trace", *flags, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert not CONTROL & set(done.stdout)
        assert printable(f"label {attack}").rstrip() in done.stdout


def test_the_kit_prints_what_a_codec_raises() -> None:
    file = io.StringIO()
    console = Terminal(file=file, width=150, force_terminal=True, highlight=False)
    detail = "CodecError: \x1b]0;owned\x07[/x]"
    kit._print(console, [CheckResult("its law", way, "FAIL", detail) for way in ("forward", "backward")])
    assert "\x1b]0;" not in file.getvalue()
    assert "\\x1b]0;owned" in file.getvalue()


PRINTERS = {
    "csv_rows.py": "rows that an experiment's program measured",
    "codecs/bench/measure.py": "JSON for the parent process, in ASCII",
    "studies/tuned_text.py": "rows that a study measured",
    "codecs/check/__main__.py": "an error, which is printable",
}


@pytest.mark.slow
def test_only_the_terminal_prints() -> None:
    """Each other module that prints is listed with the reason why it can."""
    root = Path(testbed.__file__).parent
    found: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in ("Console", "echo", "secho") or (called == "print" and isinstance(node.func, ast.Name)):
                    found.setdefault(str(path.relative_to(root)), set()).add(called)
    assert found == {name: {"print"} for name in PRINTERS}
