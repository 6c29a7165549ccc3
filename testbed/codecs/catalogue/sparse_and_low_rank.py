"""Sparsifiers, error feedback and low rank. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed.codecs.catalogue.entry import REQUIRED, Entry, Parameter

_SHARE = Parameter(
    "share", "float", REQUIRED, "of the values is kept, 0.1 for a tenth; at least one of each row", least=1e-4, most=1.0
)
_VALUES = Parameter("values", "word", "bf16", "what kept values go over as", choices=("bf16", "fp32"))
_POSITIONS = Parameter(
    "positions",
    "word",
    "smaller",
    "how places go over: a bit for each value, an index for each kept one, or the shorter of the two",
    choices=("smaller", "bitmap", "index"),
)
_PER = Parameter("per", "word", "token", "what the largest are sought in", choices=("token", "sample", "tensor"))
_DRAWN = Parameter(
    "per", "word", "token", "places drawn for each token, or channels for all tokens", choices=("token", "channels")
)
_SCALES = ("none", "inverse", "rms")
_SCALE_DOC = "kept values times 1, d/k (right in the mean) or (d/k)**0.5 (the mean square is kept)"
_BITS: Mapping[str, int] = {"bf16": 16, "fp32": 32}
_TYPICAL_TOKENS, _TYPICAL_WIDTH = 1024, 768
"""What a nominal size that depends on the shape is given for."""


def _keyed_bits(given: Mapping[str, Any]) -> float:
    return float(given["share"]) * _BITS[given["values"]]


def _told_bits(given: Mapping[str, Any]) -> float:
    share, index = float(given["share"]), 32 if given["per"] == "tensor" else 16
    places = {"bitmap": 1.0, "index": share * index, "smaller": min(1.0, share * index)}[given["positions"]]
    return _keyed_bits(given) + places


def _low_rank_bits(given: Mapping[str, Any]) -> float:
    return _BITS[given["values"]] * int(given["rank"]) * (1 / _TYPICAL_TOKENS + 1 / _TYPICAL_WIDTH)


ENTRIES = (
    Entry(
        name="topk",
        forward="testbed.codecs.sparse.sparsifiers:TopK",
        backward="testbed.codecs.sparse.sparsifiers:TopK",
        parameters=(_SHARE, _PER, _VALUES, _POSITIONS),
        summary="the largest magnitudes of each token and where they stand; gradients choose for themselves",
        bits_per_element="16 share + min(1, w share), w = 8 for places among 256 values, 16 among 65,536, or 32",
        nominal_bits=_told_bits,
        state="none",
        source="top-k of activations: Rudakov et al., arXiv 2401.07788",
        law="support",
    ),
    Entry(
        name="topk-shared",
        forward="testbed.codecs.sparse.shared_mask:SharedTopK",
        backward="testbed.codecs.sparse.shared_mask:ForwardMask",
        parameters=(_SHARE, _PER, _VALUES, _POSITIONS),
        summary="as topk; gradients go over where the activations did, without places",
        bits_per_element="as topk forward, 16 share backward",
        nominal_bits=_told_bits,
        state="a bit for each element of a micro-batch, until its gradient has passed",
        source="re-used forward mask: Rudakov et al., arXiv 2401.07788",
        law="support",
        pairs=True,
    ),
    Entry(
        name="columns",
        forward="testbed.codecs.sparse.shared_mask:Columns",
        backward="testbed.codecs.sparse.shared_mask:ForwardMask",
        parameters=(_SHARE, _VALUES, _POSITIONS),
        summary="the channels of the largest norm over the message's tokens, whole; gradients keep the same ones",
        bits_per_element="16 share + 1/bn forward, 16 share backward",
        nominal_bits=_keyed_bits,
        state="a bit for each element of a micro-batch, until its gradient has passed",
        source='"Beyond Top-K: structured sparsification" (MCDC at ICLR 2025), from a re-implementation',
        law="support",
        pairs=True,
    ),
    Entry(
        name="randk",
        forward="testbed.codecs.sparse.sparsifiers:RandK",
        backward="testbed.codecs.sparse.sparsifiers:RandK",
        parameters=(_SHARE, _DRAWN, Parameter("scale", "word", "inverse", _SCALE_DOC, choices=_SCALES), _VALUES),
        summary="random values of each token, scaled up; both ends draw the places from the message key's key",
        bits_per_element="16 share",
        nominal_bits=_keyed_bits,
        state="none",
        source="Stich et al., NeurIPS 2018, unscaled in ef: ef(randk(0.1, none)); scaled: Wangni et al., NeurIPS 2018",
        law="unbiased",
    ),
    Entry(
        name="mask",
        forward="testbed.codecs.sparse.sparsifiers:KeyedMask",
        backward="testbed.codecs.sparse.sparsifiers:KeyedMask",
        parameters=(_SHARE, _DRAWN, Parameter("scale", "word", "none", _SCALE_DOC, choices=_SCALES), _VALUES),
        summary="one random mask for activations and their gradient, drawn from the message key's key at both ends",
        bits_per_element="16 share",
        nominal_bits=_keyed_bits,
        state="none",
        source="random masks of 90 and 95 %: arXiv 2609.14339, from a summary",
        law="support",
    ),
    Entry(
        name="powersgd",
        forward="testbed.codecs.low_rank:PowerSGD",
        backward="testbed.codecs.low_rank:PowerSGD",
        parameters=(
            Parameter("rank", "int", REQUIRED, "columns of each factor", least=1, most=4096),
            Parameter("start", "word", "warm", "Q of the message before, or a random one", choices=("warm", "cold")),
            _VALUES,
        ),
        summary="the matrix of tokens and channels as two thin factors, one step of power iteration",
        bits_per_element="16*rank*(1/d + 1/bn)",
        nominal_bits=_low_rank_bits,
        state="sender: one fp32 factor of d * rank values a phase",
        source="PowerSGD: Vogels et al., NeurIPS 2019; on activations: Bian et al., MLSys 2024",
        law="projection",
    ),
    Entry(
        name="ef",
        forward="testbed.codecs.memory.feedback:ErrorFeedback",
        backward="testbed.codecs.memory.feedback:ErrorFeedback",
        parameters=(Parameter("inner", "codec", REQUIRED, "what goes over"),),
        summary="error feedback: what a message left out is added to the same micro-batch of the next step",
        example="ef(topk(0.1))",
        bits_per_element="inner",
        nominal_bits=lambda given: float(given["inner"]),
        state="sender: one fp32 tensor per micro-batch and phase, and the inner codec's",
        source="Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019",
        law="residual",
    ),
    Entry(
        name="lazy",
        forward="testbed.codecs.memory.feedback:LazyErrorFeedback",
        backward="testbed.codecs.memory.feedback:LazyErrorFeedback",
        parameters=(Parameter("inner", "codec", REQUIRED, "what goes over"),),
        summary="lazy error propagation: what a message left out is added to the next one of the same step; for gradients",
        example="lazy(powersgd(4))",
        bits_per_element="inner",
        nominal_bits=lambda given: float(given["inner"]),
        state="sender: one fp32 tensor a phase, and the inner codec's",
        source="Optimus-CC: Song et al., ASPLOS 2023, there with powersgd on gradients only",
        law="none",
    ),
    Entry(
        name="ef21",
        forward="testbed.codecs.memory.delta:Delta",
        backward="testbed.codecs.memory.delta:Delta",
        parameters=(Parameter("inner", "codec", REQUIRED, "what the difference goes over as"),),
        summary="both ends hold A; C(X - A) goes over and is added to A, which is what the receiver uses",
        example="ef21(topk(0.1))",
        bits_per_element="inner + 32/n",
        nominal_bits=lambda given: float(given["inner"]),
        state="one fp32 tensor per micro-batch and phase at each end, both directions, and the inner codec's",
        source="EF21: Richtarik et al., NeurIPS 2021, which with A = 0 at first is `delta` with a sparsifier inside",
        law="none",
    ),
)
