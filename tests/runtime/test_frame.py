"""Any bytes are a header of this run or a TransportError."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import TransportError
from testbed.jobs.actions import Key
from testbed.message_key import Phase
from testbed.runtime.frame import (
    HEADER_BYTES,
    LARGEST_NOTE_BYTES,
    FrameHeader,
    pack_frame_header,
    parse_frame_header,
)

TOKEN = bytes(range(16))
words = st.integers(0, 2**32 - 1)
NAMES = ("activation", "gradient", "aggregate")
keys = st.builds(Key, st.sampled_from(NAMES), words, words, st.integers(0, 255), st.sampled_from(get_args(Phase)))
headers = st.builds(
    FrameHeader, keys, st.integers(0, LARGEST_NOTE_BYTES), st.integers(0, 10**6), st.integers(0, 2**63), words
)


@given(headers)
def test_what_is_packed_is_parsed(header: FrameHeader) -> None:
    data = pack_frame_header(header, TOKEN, NAMES)
    assert len(data) == HEADER_BYTES
    assert parse_frame_header(data, token=TOKEN, names=NAMES, max_payload_bytes=10**6) == header


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(TransportError):
        parse_frame_header(data, token=TOKEN, names=NAMES, max_payload_bytes=10**6)


@given(headers, st.integers(0, HEADER_BYTES * 8 - 1))
def test_one_wrong_bit_is_found(header: FrameHeader, bit: int) -> None:
    data = bytearray(pack_frame_header(header, TOKEN, NAMES))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TransportError):
        parse_frame_header(data, token=TOKEN, names=NAMES, max_payload_bytes=10**6)
