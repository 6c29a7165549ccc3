"""Who ends a run: any node that fails, but not a worker whose server goes on without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from testbed.errors import StageError
from testbed.runtime.control_plane import JobDone, JobFailed
from testbed.sweep.interrupt import Interrupt
from testbed.sweep.live_session import Session

CRASHED = JobFailed(error="StageError", message="worker 1 was killed by SIGKILL", traceback="")
LOST = JobFailed(error="TransportError", message="server: all workers are lost", traceback="")


class Told:
    """A node that has said this much."""

    def __init__(self, message: JobDone | JobFailed) -> None:
        self._message = message
        self._reading, writing = os.pipe()
        os.close(writing)  # always readable

    def fileno(self) -> int:
        return self._reading

    def messages(self) -> Iterator[JobDone | JobFailed]:
        yield self._message

    def close(self) -> None:
        os.close(self._reading)


def followed(survives: bool, *said: JobDone | JobFailed) -> tuple[Session, Any]:
    session = object.__new__(Session)
    names = [*(f"worker {node}" for node in range(len(said) - 1)), "server"]
    session.lost, session.hosts = {}, [Told(message) for message in said]  # type: ignore[misc]
    sampler: Any = SimpleNamespace(check=lambda: None, latest=None)
    work: Any = tuple(SimpleNamespace(name=name) for name in names)
    try:
        ended = session._follow(work, sampler, None, Interrupt(print), 60.0, survives=survives)  # type: ignore[arg-type]
    finally:
        for host in session.hosts:
            host.close()
    return session, ended


def test_asynchronous_training_goes_on_without_a_worker() -> None:
    session, ended = followed(True, JobDone(), CRASHED, JobDone())
    assert ended == "steps"
    assert session.lost == {"worker 1": CRASHED}


def test_where_all_are_needed_it_ends_the_run_and_is_named() -> None:
    with pytest.raises(StageError, match=r"^worker 1 was killed"):
        followed(False, JobDone(), CRASHED, JobDone())


def test_a_server_that_has_lost_all_ends_the_run_and_the_first_cause_is_named() -> None:
    with pytest.raises(StageError, match=r"^worker 1 was killed"):
        followed(True, CRASHED.model_copy(update={"error": "TransportError"}), CRASHED, LOST)
