"""With which messages a certificate measures: those that a run will send, and did."""

from __future__ import annotations

import pytest

from testbed.records import FRAME_HEADER_BYTES
from testbed.sweep.bounded_steps import expected_messages, sent_messages
from tests.synthetic import Pipeline, cell

VALUES = 4 * 64 * 256  # sequences of a micro-batch, tokens, width of gpt2-mini


@pytest.mark.parametrize(
    ("codec", "parts"),
    [
        ("fp32", {4}),
        ("bf16", {2, 4}),
        ("int8", {1, 4}),
        ("json:JSONDecoder", {1, 4}),
        ("0: fwd=int8, bwd=bf16; rest: int8", {2, 4}),  # the widest counts
    ],
)
def test_before_a_run_they_are_the_tensor_and_what_the_codec_nominally_makes_of_it(codec: str, parts: set[int]) -> None:
    what = cell(codec)
    what = what.model_copy(update={"workload": what.workload.model_copy(update={"model": "gpt2-mini"})})
    assert set(expected_messages(what)) == {VALUES * part for part in parts}


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        ((), ()),
        ((5000,), (5000,)),
        ((5000, 5400), (5000,)),
        ((1000, 5000, 90_000), (1000, 5000, 90_000)),
        ((1000, 1000, 1000, 90_000), (1000, 90_000)),
        ((1000, 89_000, 89_000, 90_000), (1000, 89_000)),
    ],
)
def test_after_a_run_they_are_what_it_sent_alike_sizes_once(sizes: tuple[int, ...], chosen: tuple[int, ...]) -> None:
    nodes = []
    for size in sizes:
        pipeline = Pipeline(cell().profiles, payload_bytes=size - FRAME_HEADER_BYTES)
        pipeline.run(0)
        nodes += pipeline.records
    assert sent_messages(nodes) == chosen
