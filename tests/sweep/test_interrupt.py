"""What Ctrl-C means, where it is pressed once, twice, and where nobody is patient."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from testbed.sweep.interrupt import MESSAGE, Interrupt


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
