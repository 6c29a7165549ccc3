"""Sparsifiers: which values are kept, what goes over, and masks that serve both directions."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import numpy as np
import pytest
import torch
from ends import BACKWARD, FORWARD, KEY, key_at
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from testbed.codecs.catalogue import placement
from testbed.codecs.check.tensors import normal
from testbed.codecs.contract import Codec, Context, MessageKey, Paired
from testbed.codecs.make import make
from testbed.codecs.sparse.positions import Form, LargestInRows, PositionCoding, kept_of
from testbed.codecs.wire.header import header_bytes
from testbed.codecs.wrap import capability
from testbed.errors import CodecError, SpecError
from testbed.nodes.boundary import Boundary

FORMS: tuple[Form, ...] = ("smaller", "bitmap", "index", "packed")
_LARGEST = LargestInRows()
"""One for all shapes, whose buffers may leave no trace."""


def through(text: str, x: Tensor, key: MessageKey = KEY, context: Context = FORWARD) -> Tensor:
    return make(text, context).decode(bytes(make(text, context).encode(x, key)), key)


# ------------------------------------------------------------------ positions
@given(
    data=st.data(),
    rows=st.integers(1, 9),
    width=st.integers(1, 9) | st.integers(250, 300),
    form=st.sampled_from(FORMS),
)
@settings(max_examples=300, deadline=None)
def test_positions_come_back_from_their_code_and_other_codes_are_refused(
    data: st.DataObject, rows: int, width: int, form: Form
) -> None:
    kept = data.draw(st.integers(1, width))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    columns = np.stack([np.sort(random.permutation(width)[:kept]) for _ in range(rows)])
    positions = (columns + np.arange(rows)[:, None] * width).reshape(-1)
    coding = PositionCoding(rows, width, kept, form)
    coded = np.zeros(coding.coded_bytes, np.uint8)
    coding.write(positions, coded)
    assert np.array_equal(coding.read(coded), positions)
    if coded.size:
        for bit in data.draw(st.sets(st.integers(0, 8 * coded.size - 1), max_size=2)):
            coded[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(CodecError):
        found, again = coding.read(coded), np.zeros_like(coded)
        assert (np.diff(found) > 0).all()
        assert np.array_equal(found // width, np.repeat(np.arange(rows), kept))
        coding.write(found, again)
        assert np.array_equal(again, coded)


@given(rows=st.integers(1, 50), width=st.integers(1, 70_000), share=st.floats(1e-4, 1))
@settings(max_examples=200, deadline=None)
def test_the_smaller_form_is_the_smaller(rows: int, width: int, share: float) -> None:
    kept = kept_of(share, width)
    sizes = {form: PositionCoding(rows, width, kept, form).coded_bytes for form in FORMS}
    assert sizes["smaller"] == min(sizes["bitmap"], sizes["index"])
    assert sizes["packed"] <= sizes["index"]
    assert 1 <= kept <= width
    if kept == width:
        assert set(sizes.values()) == {0}
    else:
        assert sizes["index"] == rows * kept * (1 if width <= 256 else 2 if width <= 65536 else 4)
        assert sizes["bitmap"] == (rows * width + 7) // 8


@given(data=st.data(), rows=st.integers(1, 6), width=st.integers(1, 40), values=st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_the_largest_are_chosen_and_of_equals_the_first(
    data: st.DataObject, rows: int, width: int, values: int
) -> None:
    kept = data.draw(st.integers(1, width))
    drawn = data.draw(st.lists(st.integers(0, values), min_size=rows * width, max_size=rows * width))
    keys = np.array(drawn, np.float32).reshape(rows, width)
    order = np.sort(np.argsort(-keys, axis=1, kind="stable")[:, :kept], axis=1)
    wanted = (order + np.arange(rows)[:, None] * width).reshape(-1)
    for one in (keys, keys.astype(np.uint32), keys):
        assert np.array_equal(_LARGEST.positions(one, kept), wanted)


# ------------------------------------------------------------------ bytes
# ------------------------------------------------------------------ top-k
@given(
    shape=st.lists(st.integers(1, 20), min_size=0, max_size=3),
    share=st.floats(0.01, 1),
    per=st.sampled_from(["token", "tensor"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_no_other_choice_of_as_many_has_a_smaller_error(shape: list[int], share: float, per: str, seed: int) -> None:
    x = normal(*shape, seed=seed)
    decoded = through(f"topk({share}, {per}, fp32)", x)
    rows = x.reshape(1, -1) if per == "tensor" or not shape else x.reshape(-1, shape[-1])
    k = kept_of(share, rows.shape[1])
    found = decoded.reshape(rows.shape)
    assert bool(((found == rows) | (found == 0)).all())
    assert bool(((found != 0).sum(1) == k).all())
    best = rows.square().double().sum() - rows.square().double().topk(k, dim=1).values.sum()
    assert (found - rows).square().double().sum() == pytest.approx(best.item(), rel=1e-9, abs=1e-12)


def test_the_largest_of_a_sample_are_sought_over_its_tokens() -> None:
    x = torch.tensor([[[10.0, 9, 8, 7], [0.1, 0.2, 0.3, 0.4]], [[1, 1, 1, 1], [2, 2, 2, 2]]])
    kept = through("topk(0.5, sample)", x)
    assert torch.equal(kept[0], torch.tensor([[10.0, 9, 8, 7], [0, 0, 0, 0]]))
    assert torch.equal(kept[1], torch.tensor([[0.0, 0, 0, 0], [2, 2, 2, 2]]))
    assert torch.equal(through("topk(0.5, sample)", x[0]), kept[0])


@pytest.mark.parametrize("name", ["topk", "topk-blocks", "columns", "mask", "topk-shared"])
def test_the_largest_numbers_stay_finite(name: str) -> None:
    x = torch.full((4, 8), torch.finfo(torch.float32).max)
    decoded = through(f"{name}(0.25)", x)
    assert bool(torch.isfinite(decoded).all())
    kept = decoded[decoded != 0]
    assert kept.numel() == 8
    assert bool(((kept.double() - x[0, 0].double()).abs() <= 2**-7 * x[0, 0].double()).all())


def test_a_scaled_value_beyond_fp32_is_refused() -> None:
    with pytest.raises(CodecError, match="scale=none"):
        make("randk(0.25)", FORWARD).encode(torch.full((4, 8), 3e38), key_at(0))


@pytest.mark.parametrize("text", ["topk(0.5)", "topk(0.5, fp32)", "mask(0.5)"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_not_decoded(text: str, bad: float) -> None:
    codec = make(text, FORWARD)
    payload = bytearray(codec.encode(torch.ones(2, 4), key_at(0)))
    dtype = torch.float32 if "fp32" in text else torch.bfloat16
    value = torch.tensor([bad]).to(dtype).view(torch.uint8).numpy().tobytes()
    payload[header_bytes(2) : header_bytes(2) + len(value)] = value
    with pytest.raises(CodecError, match="NaN"):
        codec.decode(payload, key_at(0))


# ------------------------------------------------------------------ drawn places
@given(
    width=st.integers(1, 60),
    share=st.floats(0.01, 1),
    per=st.sampled_from(["token", "channels"]),
    step=st.integers(0, 50),
    name=st.sampled_from(["randk", "mask"]),
)
@settings(max_examples=100, deadline=None)
def test_each_token_keeps_the_same_number(width: int, share: float, per: str, step: int, name: str) -> None:
    x = normal(7, width).abs() + 1
    kept = through(f"{name}({share}, {per})", x, key_at(step)) != 0
    assert bool((kept.sum(1) == kept_of(share, width)).all())
    assert per == "token" or bool((kept == kept[0]).all())


def test_places_depend_on_the_key_and_the_place() -> None:
    x = torch.ones(8, 64)
    masks = [through("randk(0.5)", x, key_at(*at)) != 0 for at in ((0, 0), (1, 0), (0, 1))]
    masks.append(through("randk(0.5)", x, key_at(0), BACKWARD) != 0)
    masks.append(through("randk(0.5)", x, key_at(0), Context(8, 0, "forward")) != 0)
    assert len({mask.numpy().tobytes() for mask in masks}) == len(masks)
    assert all(0.4 < float((one != masks[0]).float().mean()) < 0.6 for one in masks[1:])
    assert bool((masks[0][0] != masks[0][1]).any())


def test_bf16_rounding_adds_no_bias_to_rand_k() -> None:
    x = normal(32, 64)
    count = 600
    errors = torch.stack([through("randk(1.0)", x, key_at(step)).double() - x for step in range(count)])
    assert bool((errors.abs() <= 2**-7 * x.abs()).all())
    steps = torch.exp2(x.abs().log2().floor() - 7).double()
    # A rounding's standard deviation is at most half a step; the nearest would be off by up to half a step in the mean.
    assert bool((errors.mean(0).abs() <= 5 * steps / 2 / count**0.5).all())


@pytest.mark.parametrize(("scale", "factor"), [("none", 1.0), ("inverse", 4.0), ("rms", 2.0)])
def test_scales(scale: str, factor: float) -> None:
    decoded = through(f"mask(0.25, scale={scale})", torch.ones(3, 16))
    assert sorted(set(decoded.flatten().tolist())) == [0.0, factor]


def test_the_keyed_mask_is_the_same_in_both_directions() -> None:
    x, gradient = normal(2, 8, 64).abs() + 1, normal(2, 8, 64, seed=1).abs() + 1
    forward = through("mask(0.1)", x, key_at(3))
    backward = through("mask(0.1)", gradient, key_at(3), BACKWARD)
    assert torch.equal(forward != 0, backward != 0)
    again = through("mask(0.1)", gradient, key_at(4), BACKWARD)
    assert not torch.equal(backward != 0, again != 0)


# ------------------------------------------------------------------ columns
def test_the_columns_of_the_largest_norm_are_kept_whole() -> None:
    x = normal(2, 16, 40)
    found = through("columns(0.2, fp32)", x)
    norms = x.double().square().sum((0, 1))
    kept = norms.topk(8).indices
    wanted = torch.zeros_like(x)
    wanted[..., kept] = x[..., kept]
    assert torch.equal(found, wanted)


@given(
    rows=st.integers(1, 9), width=st.integers(1, 40), tokens=st.integers(1, 4), channels=st.integers(1, 9),
    share=st.sampled_from([0.1, 0.4]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_blocks_are_kept_whole_and_those_of_the_largest_energy(
    rows: int, width: int, tokens: int, channels: int, share: float
) -> None:
    x = normal(rows, width, seed=width)
    decoded = through(f"topk-blocks({share}, channels={channels}, tokens={tokens}, fp32)", x)
    kept = decoded != 0
    assert torch.equal(decoded[kept], x[kept])
    blocks = [
        (slice(top, top + tokens), slice(left, left + channels))
        for top in range(0, rows, tokens)
        for left in range(0, width, channels)
    ]
    ranked = sorted(blocks, key=lambda at: -float(x[at].double().square().sum()))
    count = kept_of(share, len(blocks))
    assert all(kept[at].all() for at in ranked[:count])
    # Blocks at the ends may reach back into others, which are then kept in part.
    assert int(kept.sum()) <= count * min(tokens, rows) * min(channels, width)


def test_norms_of_huge_columns_do_not_overflow() -> None:
    x = torch.ones(4, 4) * torch.tensor([1e30, 3e30, 2e30, 1.0])
    assert (through("columns(0.5)", x)[0] != 0).tolist() == [False, True, True, False]


# ------------------------------------------------------------------ one mask for both directions
def paired(text: str, x: Tensor, key: MessageKey = KEY) -> tuple[Codec, Codec]:
    """(the gradient's encoder, its decoder) after the activations of the message key have passed."""
    upper, lower = make(text, FORWARD), make(text, FORWARD)
    lower.decode(bytes(upper.encode(x, key)), key)
    encoder, decoder = make(text, BACKWARD), make(text, BACKWARD)
    for codec, forward in ((encoder, lower), (decoder, upper)):
        able = capability(codec, Paired)
        able.pair(forward)
    return encoder, decoder


@pytest.mark.parametrize("name", ["topk-shared(0.1, fp32)", "topk-shared(0.1, tensor, fp32)", "columns(0.1, fp32)"])
def test_what_comes_back_is_the_gradient_of_masking(name: str) -> None:
    x = normal(2, 8, 64).requires_grad_()
    gradient = normal(2, 8, 64, seed=9)
    mask = through(name, x) != 0
    (x * mask).backward(gradient)
    encoder, decoder = paired(name, x)
    decoded = decoder.decode(bytes(encoder.encode(gradient, key_at(0))), key_at(0))
    assert x.grad is not None
    assert torch.equal(decoded, x.grad)


def test_gradients_of_several_micro_batches_go_by_their_own_masks() -> None:
    upper, lower = make("topk-shared(0.2, fp32)", FORWARD), make("topk-shared(0.2, fp32)", FORWARD)
    encoder, decoder = make("topk-shared(0.2, fp32)", BACKWARD), make("topk-shared(0.2, fp32)", BACKWARD)
    cast(Any, encoder).pair(lower)
    cast(Any, decoder).pair(upper)
    for step in range(3):
        masks = []
        for part in range(4):
            x = normal(6, 20, seed=10 * step + part)
            masks.append(lower.decode(bytes(upper.encode(x, key_at(step, part))), key_at(step, part)) != 0)
        for part in (3, 0, 2, 1):
            key = key_at(step, part)
            decoded = decoder.decode(bytes(encoder.encode(torch.ones(6, 20), key)), key)
            assert torch.equal(decoded != 0, masks[part])
    assert set(cast(Any, upper).shared()) == {f"train {part} mask" for part in range(4)}


def test_a_gradient_without_its_activations_is_refused() -> None:
    encoder, decoder = paired("topk-shared(0.1)", normal(4, 20))
    payload = bytes(encoder.encode(normal(4, 20), key_at(0)))
    for key in (key_at(1), key_at(0, 1), MessageKey("evaluation", 0, 0, ())):
        with pytest.raises(CodecError, match="did not pass"):
            encoder.encode(normal(4, 20), key)
        with pytest.raises(CodecError, match="did not pass"):
            decoder.decode(payload, key)
    with pytest.raises(CodecError, match="shape"):
        encoder.encode(normal(20, 4), key_at(0))
    with pytest.raises(CodecError, match="not paired"):
        make("topk-shared(0.1)", BACKWARD).encode(normal(4, 20), key_at(0))


def test_only_a_codec_that_keeps_its_mask_can_be_paired_with() -> None:
    backward = make("topk-shared(0.1)", BACKWARD)
    with pytest.raises(SpecError, match="must be the same"):
        cast(Any, backward).pair(make("topk(0.1)", FORWARD))


@pytest.mark.parametrize("wrong", ["fwd=int8, bwd=topk-shared(0.1)", "fwd=topk(0.1), bwd=ef(columns(0.1))"])
def test_a_mask_that_there_is_not_is_found_out_before_anything_is_made(wrong: str) -> None:
    with pytest.raises(SpecError, match=r"use .* for both"):
        placement.parse_placement(wrong)
    placement.parse_placement("fwd=ef(topk-shared(0.1)), bwd=topk-shared(0.1)")
    placement.parse_placement("fwd=topk-shared(0.1), bwd=int8")


def test_masks_go_on_from_a_saved_state() -> None:
    text, x = "topk-shared(0.1)", normal(4, 40)
    upper, later = make(text, FORWARD), make(text, FORWARD)
    upper.encode(x, key_at(0))
    cast(Any, later).load(cast(Any, upper).state())
    decoder = make(text, BACKWARD)
    cast(Any, decoder).pair(later)
    encoder, _ = paired(text, x)
    assert int((decoder.decode(bytes(encoder.encode(torch.ones(4, 40), key_at(0))), key_at(0)) != 0).sum()) == 16
    cast(Any, later).reset()
    with pytest.raises(CodecError):
        decoder.decode(bytes(encoder.encode(torch.ones(4, 40), key_at(0))), key_at(0))


@pytest.mark.parametrize("side", ["upstream", "downstream"])
def test_a_boundary_pairs_its_two_codecs(side: Any) -> None:
    end = Boundary(
        side, index=0, seed=7, make=lambda context: make("topk-shared(0.1)", context), measure=cast(Any, None)
    )
    forward, backward = (end._encoder, end._decoder) if side == "downstream" else (end._decoder, end._encoder)
    forward.encode(normal(4, 40), key_at(0))
    assert len(memoryview(backward.encode(normal(4, 40, seed=1), key_at(0)))) == header_bytes(2) + 4 * 4 * 2


# ------------------------------------------------------------------ a threshold
@given(
    size=st.integers(1, 3000), threshold=st.sampled_from([0.01, 0.5, 1.5, 9.0]), most=st.sampled_from([0.01, 0.3, 1])
)
@settings(max_examples=40, deadline=None)
def test_a_threshold_sends_what_reaches_it_but_no_more_than_allowed(size: int, threshold: float, most: float) -> None:
    x = normal(size, seed=size)
    text = f"ht({threshold}, {most}, fp32)"
    payload = memoryview(make(text, FORWARD).encode(x, KEY))
    decoded = make(text, FORWARD).decode(payload, KEY)
    reach, allowed = x.abs() >= threshold, kept_of(most, size)
    kept = int(min(reach.sum(), allowed))
    assert torch.equal(decoded[decoded != 0], x[decoded != 0])
    assert int((decoded != 0).sum()) == kept
    if kept < allowed:
        assert torch.equal(decoded != 0, reach)
    content = 4 + 4 * kept + PositionCoding(1, size, kept).coded_bytes
    assert payload.nbytes == header_bytes(1) + max(content, -(-size // 256))
    # another threshold at the receiver is nothing to it
    assert torch.equal(make("ht(7.0, 1.0, fp32)", FORWARD).decode(payload, KEY), decoded)


def test_with_error_feedback_a_threshold_owes_no_more_than_itself_and_a_spike_drains() -> None:
    sender = cast(Any, make("ef(ht(0.5, 0.1, fp32))", FORWARD))
    sender.encode(100 * normal(400), key_at(0))
    assert float(sender.residual(key_at(0)).abs().max()) > 0.5
    for step in range(1, 12):
        sender.encode(torch.zeros(400), key_at(step))
    assert float(sender.residual(key_at(11)).abs().max()) < 0.5


# ------------------------------------------------------------------ few bits per kept value
@given(size=st.integers(1, 9000), chunk=st.sampled_from([16, 256, 4096]), share=st.sampled_from([0.02, 0.3]))
@settings(max_examples=30, deadline=None)
def test_each_chunk_keeps_its_largest_with_sign_and_the_sum(size: int, chunk: int, share: float) -> None:
    x = normal(size, seed=size)
    decoded = through(f"topk-chunk({share}, {chunk})", x)
    kept = decoded != 0
    assert torch.equal(decoded[kept].sign(), x[kept].sign())
    assert float(decoded.double().sum()) == pytest.approx(float(x[kept].double().sum()), rel=1e-4, abs=1e-4)
    for part, sent in zip(x.split(chunk), kept.split(chunk), strict=True):
        assert int(sent.sum()) == kept_of(share, len(part))
        assert sent.all() or part[~sent].abs().max() <= part[sent].abs().min()


def test_a_cocktail_is_the_largest_of_one_of_each_so_many_neighbours() -> None:
    x = normal(1003)
    one, other = through("cocktail(0.2, 10)", x), through("cocktail(0.2, 10)", x, key_at(1))
    assert int((one != 0).sum()) == int((other != 0).sum()) == kept_of(0.2, 101)
    assert not torch.equal(one != 0, other != 0)
    assert max((part != 0).sum() for part in one.split(10)) == 1
    assert float((one - x)[one != 0].abs().max()) <= 0.55 * float(x.abs().max()) / 7
