from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.metrics import align
from testbed.metrics.ideal import ideal_step_s, unshaped_step_s
from testbed.metrics.wires import Wires
from tests.synthetic import Pipeline, profile

UNSHAPED = profile("unshaped")


MICROSECONDS = st.integers(1, 9_000).map(lambda count: 1000 * count)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    shape=st.fixed_dictionaries(
        {
            "schedule": st.sampled_from(["gpipe", "1f1b"]),
            "stages": st.integers(1, 6),
            "microbatches": st.integers(1, 8),
            "accumulation": st.sampled_from([1, 2, 4]),
            "forward_ns": MICROSECONDS,
            "backward_ns": MICROSECONDS,
            "update_ns": MICROSECONDS | st.just(0),
            "dilation": st.integers(1, 5),
            "paced": st.booleans(),
        }
    ),
    more_in_flight=st.integers(0, 3),
)
def test_the_event_simulation_gives_exactly_that(shape: dict[str, Any], more_in_flight: int) -> None:
    """Where stages are not paced, they also take a while to tell each other their norms, and to begin the next step."""
    pipeline = Pipeline(UNSHAPED, **shape, in_flight=shape["stages"] + more_in_flight, codec_ns=0)
    norm_s, between_s = (0.0, 0.0) if pipeline.paced else (200e-6 * pipeline.dilation, 50e-6)
    asked = {f"{what}_s": shape[f"{what}_ns"] / 1e9 for what in ("forward", "backward", "update")}
    expected = unshaped_step_s(pipeline.cell.pipeline, **asked) * pipeline.dilation
    for step in align(pipeline.run(0).run(1).records):
        ideal_s = ideal_step_s(Wires(pipeline.cell), step.records, step.free_ns, pipeline.cell.compute)
        assert ideal_s == pytest.approx(expected + norm_s)
        assert step.seconds == pytest.approx(ideal_s + between_s * step.number)
