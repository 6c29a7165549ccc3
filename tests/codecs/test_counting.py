"""What the rows say of a device's work: laws that every count keeps, and what a stranger's class may say."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.codecs.bench.measurements import BENCHED
from testbed.codecs.catalogue.codec_spec import parse_codec
from testbed.codecs.catalogue.counting import count_work
from testbed.codecs.catalogue.table import ROWS
from testbed.errors import SpecError, UserError
from testbed.message_key import Direction

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
COUNTED = sorted(
    {parse_codec(text).text for text in (*BENCHED, *(row.example_text for row in ROWS))}
    - {text for text in BENCHED if text.startswith(("zstd", "entropy"))}
    - {parse_codec(row.example_text).text for row in ROWS if isinstance(row.work, str)}
)
SHAPE = (4, 64, 256)
VALUES = 4 * 64 * 256


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_states_its_work_or_why_not(row) -> None:  # type: ignore[no-untyped-def]
    assert row.work
    assert row.backward_work is None or not isinstance(row.work, str)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", COUNTED)
def test_a_payload_is_written_and_read_and_the_tensor_too(text: str, direction: Direction) -> None:
    spec = parse_codec(text)
    encode, decode = count_work(spec, direction, SHAPE)
    # aqsgd's size is that of an example's first visit, its work that of later ones.
    first_visit = spec.name == "aqsgd" and direction == "forward"
    payload = 0.0 if first_visit else spec.bits(direction, SHAPE) / 8 * VALUES
    assert encode.read_bytes >= 4 * VALUES
    assert encode.written_bytes >= payload * (1 - 1e-9)
    assert decode.read_bytes >= payload * (1 - 1e-9)
    assert decode.written_bytes >= 4 * VALUES


@settings(max_examples=100, deadline=None)
@given(
    text=st.sampled_from(COUNTED),
    direction=st.sampled_from(DIRECTIONS),
    tokens=st.integers(1, 2048),
    width=st.sampled_from([64, 768, 8192]),
)
def test_more_tokens_are_not_less_work(text: str, direction: Direction, tokens: int, width: int) -> None:
    spec = parse_codec(text)
    for fewer, more in zip(
        count_work(spec, direction, (1, tokens, width)), count_work(spec, direction, (2, tokens, width)), strict=True
    ):
        for one, two in zip(fewer, more, strict=True):
            assert 0 <= one <= two * (1 + 1e-9)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("wrapper", ["hadamard({})", "delta({}, backward={})", "ef({})", "ef21({})", "lazy({})"])
def test_a_wrapper_costs_more_than_what_is_inside(wrapper: str, direction: Direction) -> None:
    inside = count_work(parse_codec("int4"), direction, SHAPE)
    outside = count_work(parse_codec(wrapper.replace("{}", "int4")), direction, SHAPE)
    for inner, outer in zip(inside, outside, strict=True):
        assert outer.moved_bytes >= inner.moved_bytes
        assert outer.operations >= inner.operations


def test_random_rounding_is_counted_where_it_happens() -> None:
    forward, backward = (count_work(parse_codec("int8"), direction, SHAPE)[0] for direction in DIRECTIONS)
    always, never = (
        count_work(parse_codec(f"int8({word})"), "backward", SHAPE)[0] for word in ("stochastic", "nearest")
    )
    assert backward == always
    assert forward == never
    assert backward.operations > forward.operations


@pytest.mark.parametrize("text", ["zstd(int8)", "entropy(int8)", "adaptive(50)", "ef(zstd(int8))"])
def test_what_nobody_can_count_is_refused_with_what_to_do(text: str) -> None:
    with pytest.raises(UserError, match=r"on a device.*codec_cost = 'host'.*'zero'"):
        count_work(parse_codec(text), "forward", SHAPE)


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(tmp_path)

    def write(body: str) -> str:
        name = f"stranger_{len(list(tmp_path.iterdir()))}"
        (tmp_path / f"{name}.py").write_text(f"raise AssertionError('nobody may run this')\nclass Mine:\n    {body}\n")
        return f"{name}:Mine"

    return write


def test_a_stranger_states_its_own(stranger) -> None:  # type: ignore[no-untyped-def]
    path = stranger("device_encode = ('8', 'share', '5'); device_decode: tuple = ('share', '4', '2*d')")
    encode, decode = count_work(parse_codec(f"{path}(share=0.5)"), "forward", SHAPE)
    assert encode == (8 * VALUES, 0.5 * VALUES, 5 * VALUES)
    assert decode == (0.5 * VALUES, 4 * VALUES, 512 * VALUES)


def test_a_stranger_around_ours(stranger) -> None:  # type: ignore[no-untyped-def]
    path = stranger("device_encode = ('4 + of.encode',) * 3")
    with pytest.raises(SpecError, match="three formulas"):
        count_work(parse_codec(f"{path}(of=int8())"), "forward", SHAPE)
    path = stranger("device_encode = device_decode = ('1', '1', '1')")
    with pytest.raises(SpecError, match="states no device_encode"):
        count_work(parse_codec(path), "forward", SHAPE)
    counts = "('of.encode', 'of.encode', 'of.encode')"
    path = stranger(f"device_encode = {counts}; device_decode = {counts.replace('encode', 'decode')}")
    assert count_work(parse_codec(f"{path}(of=int8())"), "forward", SHAPE) == count_work(
        parse_codec("int8"), "forward", SHAPE
    )


def test_a_silent_stranger_is_refused(stranger) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SpecError, match=r"states no device_encode and device_decode; set codec_cost"):
        count_work(parse_codec(stranger("pass")), "forward", SHAPE)


def test_a_name_that_means_nothing_is_named(stranger) -> None:  # type: ignore[no-untyped-def]
    path = stranger("device_encode = ('payload', '1', '1'); device_decode = ('1', '1', '1')")
    with pytest.raises(SpecError, match=r"Mine.*payload"):
        count_work(parse_codec(path), "forward", SHAPE)
