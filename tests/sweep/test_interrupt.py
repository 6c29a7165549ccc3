"""What Ctrl-C means, where it is pressed once, twice, and where nobody is patient."""

from __future__ import annotations

import io
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from testbed import results
from testbed.sweep import controller
from testbed.sweep.interrupt import MESSAGE, Interrupt
from testbed.sweep.live_session import Tokens, network_of
from testbed.sweep.progress import SweepProgress
from testbed.sweep.recording import RunRecorder
from tests.known import known
from tests.synthetic import cell


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_once_is_noted_twice_is_raised() -> None:
    said: list[str] = []
    with Interrupt(said.append) as interrupt, interrupt.patient():
        assert not interrupt.asked
        press()
        assert interrupt.asked
        assert said == [MESSAGE]
        with pytest.raises(KeyboardInterrupt):
            press()


def test_where_nobody_is_patient_it_is_raised_as_ever() -> None:
    said: list[str] = []
    with Interrupt(said.append) as interrupt:
        with pytest.raises(KeyboardInterrupt):
            press()
        with interrupt.patient():
            pass
        with pytest.raises(KeyboardInterrupt):
            press()
    assert said == []


def test_afterwards_the_signal_is_as_it_was() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt(lambda _: None):
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_in_another_thread_no_signal_is_touched() -> None:
    before = signal.getsignal(signal.SIGINT)

    def look() -> object:
        with Interrupt(lambda _: None):
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor() as another:
        assert another.submit(look).result() == before


def test_jobs_have_ended_before_their_run_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is stopped at once may record one more step. The manifest came before it: "altered"."""
    what = cell("int8")

    class Ending:
        network = network_of(what)

        def close(self) -> None:
            (run,) = results.runs(tmp_path)
            (run.folder / "steps-0.jsonl").write_bytes(b"a step that was not over")

    def stopped(runner: RunRecorder, *_: object) -> None:
        (runner.run.folder / "steps-0.jsonl").write_bytes(b"")
        raise KeyboardInterrupt

    monkeypatch.setattr(controller, "Session", lambda *_: Ending())
    monkeypatch.setattr(controller, "prepare", lambda *_: Tokens(tmp_path, 2))
    monkeypatch.setattr(controller._Runner, "make", stopped)
    with pytest.raises(KeyboardInterrupt), SweepProgress(Console(file=io.StringIO()), [what]) as progress:
        controller.run_cells([what], tmp_path, "", progress)
    (run,) = results.runs(tmp_path)
    assert run.proof.state == "verified"
    assert known(run.summary).status == "interrupted"
