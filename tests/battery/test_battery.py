"""What the battery recorded is still so: all traces here, and a sample of what takes longer."""

from __future__ import annotations

from tests.battery import entries, traces


def test_every_trace_is_what_it_was() -> None:
    made = {name: make() for name, make in traces.traces().items()}
    assert len(made) > 1500
    assert made == entries.recorded("A")
