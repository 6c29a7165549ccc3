"""The encode and decode that codecs share: what it refuses for all of them, and the one statement of their size."""

from __future__ import annotations

import pytest
import torch

from testbed.codecs.catalogue import table
from testbed.codecs.catalogue.row import CodecRow
from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.make import make
from testbed.codecs.wire.header import VISIT_AT, header_bytes
from testbed.codecs.wire.message import BodyCodec
from testbed.errors import CodecError

KEY = MessageKey("train", 3, 1, ())
SHAPES = ((), (7,), (0, 5), (3, 0), (2, 3, 17))


def _body_codecs() -> dict[str, BodyCodec]:
    made = {row.name: make(row.example_text, Context(0, 0, "forward")) for row in table.CODECS.values()}
    return {name: codec for name, codec in made.items() if isinstance(codec, BodyCodec)}


@pytest.mark.parametrize("name", sorted(_body_codecs()))
def test_a_codec_that_counts_no_visits_refuses_their_numbers_whatever_the_shape(name: str) -> None:
    codec = _body_codecs()[name]
    for shape in SHAPES:
        payload = bytearray(codec.encode(torch.ones(shape), KEY))
        assert payload[VISIT_AT] == 0
        assert codec.decode(payload, KEY).shape == shape
        payload[VISIT_AT] = 1
        with pytest.raises(CodecError, match="train step 3, micro-batch 1: no encoder writes visit number 1"):
            codec.decode(payload, KEY)


@pytest.mark.parametrize("row", table.ROWS, ids=lambda row: row.name)
def test_a_payload_in_pieces_is_refused(row: CodecRow) -> None:
    codec = make(row.example_text, Context(0, 0, "forward"))
    for pieces in (memoryview(bytearray(range(200)))[::2], memoryview(bytearray(200)).cast("B", (10, 20))[::2]):
        with pytest.raises(CodecError):
            codec.decode(pieces, KEY)


@pytest.mark.parametrize("name", sorted(_body_codecs()))
def test_a_payload_is_its_header_and_its_fields(name: str) -> None:
    codec = _body_codecs()[name]
    for shape in SHAPES:
        fields = codec.fields(shape) if 0 not in shape else ()
        size = header_bytes(len(shape)) + sum(field.length * field.dtype.itemsize for field in fields)
        assert memoryview(codec.encode(torch.ones(shape), KEY)).nbytes == codec.payload_bytes(shape) == size
    with pytest.raises(CodecError, match="8 axes"):
        codec.encode(torch.ones((1,) * 9), KEY)
