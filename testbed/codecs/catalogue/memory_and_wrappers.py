"""Differences from what was sent before, and wrappers around other codecs. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed.codecs.catalogue.entry import REQUIRED, Entry, Parameter

_CLOSED = "both ends hold what the receiver last decoded"
_BACKWARD = Parameter("backward", "codec", "int8", "what gradients go over as, without differences")
_FIRST = Parameter(
    "first",
    "word",
    "inner",
    "a message key's first message: through inner too, or as it is",
    choices=("inner", "fp32", "bf16"),
)
_SPLIT = Parameter(
    "split", "word", "auto", "16 and 32-bit values into byte planes, or never", choices=("auto", "whole")
)
_ANY = Parameter("inner", "codec", REQUIRED, "the codec whose payload is packed")
_FULL_BITS = {"fp32": 32.0, "bf16": 16.0}
_TYPICAL_TOKENS, _TYPICAL_WIDTH = 1024, 768
"""What a nominal size that depends on the shape is given for."""


def _either(given: Mapping[str, Any]) -> float:
    return max(float(given["inner"]), float(given["backward"]))


def _inner(given: Mapping[str, Any]) -> float:
    return float(given["inner"])


ENTRIES = (
    Entry(
        name="delta-int8",
        forward="testbed.codecs.memory.delta:DeltaInt8",
        backward="testbed.codecs.dense.int8:Int8Stochastic",
        summary="difference from the previous step's tensor of the same micro-batch, as int8; gradients as int8",
        bits_per_element="8 + 32/d",
        nominal_bits=lambda _: 8,
        state="one fp32 tensor per micro-batch and phase, forward",
        source="activation delta (Bedoya and Zhang), closed loop",
        law="bounded",
    ),
    Entry(
        name="delta",
        forward="testbed.codecs.memory.delta:Delta",
        backward="testbed.codecs.memory.delta:gradients",
        parameters=(Parameter("inner", "codec", REQUIRED, "what the difference goes over as"), _FIRST, _BACKWARD),
        summary="difference from the previous step's tensor of the same micro-batch, through any codec, in a closed loop",
        bits_per_element="the inner codec's, and 4 bytes a message",
        nominal_bits=_either,
        state=f"{_CLOSED}: one fp32 tensor per micro-batch and phase, forward; and the inner codec's",
        source="activation delta (Bedoya and Zhang)",
        law="bounded",
    ),
    Entry(
        name="delta-open",
        forward="testbed.codecs.memory.delta:OpenDelta",
        backward="testbed.codecs.memory.delta:gradients",
        parameters=(Parameter("inner", "codec", REQUIRED, "what the difference goes over as"), _FIRST, _BACKWARD),
        summary="as delta, in an open loop: the difference from the true previous tensor, so that errors add up",
        bits_per_element="the inner codec's, and 4 bytes a message",
        nominal_bits=_either,
        state="one fp32 tensor per micro-batch and phase, forward: not the same at both ends",
        source="activation delta (Bedoya and Zhang), read naively",
        law="none",
        control=True,
    ),
    Entry(
        name="aqsgd",
        forward="testbed.codecs.memory.aqsgd:AqSgd",
        backward="testbed.codecs.memory.delta:gradients",
        parameters=(
            Parameter("inner", "codec", "acsgd(bits=4)", "what the difference goes over as"),
            Parameter("first", "word", "fp32", "an example's first visit", choices=("fp32", "bf16")),
            Parameter(
                "memory_mb", "float", 1024.0, "held in memory by each end, 10**6 bytes; the rest in a file", least=0
            ),
            Parameter("backward", "codec", "acsgd(bits=8)", "what gradients go over as, without differences"),
        ),
        summary="difference from the same example's last visit, an epoch ago; its first visit in full",
        bits_per_element="32 at an example's first visit, then the inner codec's and 1 byte an example",
        # What a run begins with, and all there is within one epoch.
        nominal_bits=lambda given: max(_FULL_BITS[given["first"]], float(given["backward"])),
        state=f"{_CLOSED}: one fp32 tensor per example and phase, forward, in memory up to a limit; and the inner codec's",
        source="AQ-SGD: Wang et al., NeurIPS 2022 (arXiv 2206.01299)",
        law="bounded",
    ),
    Entry(
        name="compactfusion",
        forward="testbed.codecs.memory.delta:Delta",
        backward="testbed.codecs.memory.delta:gradients",
        parameters=(
            Parameter("inner", "codec", "onebit", "what the residual goes over as: onebit, twobit, lowrank"),
            Parameter("first", "word", "bf16", _FIRST.doc, choices=_FIRST.choices),
            _BACKWARD,
        ),
        summary="residual from the previous step, strongly compressed, in a closed loop; the first message in full",
        bits_per_element="the inner codec's, and 4 bytes a message",
        nominal_bits=_either,
        state=f"{_CLOSED}: one fp32 tensor per micro-batch and phase, forward; and the inner codec's",
        source="after CompactFusion, which takes residuals between denoising steps; here between training steps",
        law="bounded",
    ),
    Entry(
        name="onebit",
        forward="testbed.codecs.dense.rank_one:OneBit",
        backward="testbed.codecs.dense.rank_one:OneBit",
        summary="signs, times a magnitude per token and one per channel",
        bits_per_element="1 + 16/d + 16/bn",
        nominal_bits=lambda _: 1,
        state="none",
        source="after CompactFusion's 1-bit compressor, from memory",
        law="bounded",
    ),
    Entry(
        name="twobit",
        forward="testbed.codecs.dense.rank_one:TwoBit",
        backward="testbed.codecs.dense.rank_one:TwoBit",
        summary="signs and two sizes, times a magnitude per token and one per channel",
        bits_per_element="2 + 16/d + 16/bn",
        nominal_bits=lambda _: 2,
        state="none",
        source="after CompactFusion's 2-bit compressor, from memory; levels: Max, IRE Trans. 1960",
        law="bounded",
    ),
    Entry(
        name="lowrank",
        forward="testbed.codecs.coded_low_rank:CodedLowRank",
        backward="testbed.codecs.coded_low_rank:CodedLowRank",
        parameters=(
            Parameter("rank", "int", 32, "columns of each factor", least=1, most=4096),
            Parameter("inner", "codec", "int4(group=32)", "what the two factors go over as"),
        ),
        summary="PowerSGD's two thin factors, each through another codec",
        bits_per_element="c rank (1/d + 1/bn), c those of the inner codec",
        nominal_bits=lambda given: (
            float(given["inner"]) * int(given["rank"]) * (1 / _TYPICAL_TOKENS + 1 / _TYPICAL_WIDTH)
        ),
        state="sender: one fp32 factor of d * rank values a phase",
        source="after CompactFusion's low-rank compressor with INT4 factors, from memory; factors: Vogels et al., NeurIPS 2019",
        law="none",
    ),
    Entry(
        name="zstd",
        forward="testbed.codecs.lossless:Zstd",
        backward="testbed.codecs.lossless:Zstd",
        parameters=(_ANY, Parameter("level", "int", 1, "zstd's: 1 is fast", least=1, most=19), _SPLIT),
        summary="the inner payload packed by zstd, byte planes of 16 and 32-bit values apart",
        bits_per_element="at most the inner codec's, and 20 to 44 bytes a message; depends on the values",
        nominal_bits=_inner,
        state="the inner codec's",
        source="zstd (RFC 8878); byte split: BloomBee, arXiv 2604.21072",
        law="lossless",
    ),
    Entry(
        name="entropy",
        forward="testbed.codecs.lossless:Entropy",
        backward="testbed.codecs.lossless:Entropy",
        parameters=(_ANY, _SPLIT),
        summary="the inner payload as Huffman codes of its bytes: what their distribution alone is worth",
        bits_per_element="at most the inner codec's, and 20 to 44 bytes a message; depends on the values",
        nominal_bits=_inner,
        state="the inner codec's",
        source="zstd's Huffman coder (RFC 8878), all but without its matches",
        law="lossless",
    ),
    Entry(
        name="adaptive",
        forward="testbed.codecs.adaptive:Adaptive",
        backward="testbed.codecs.adaptive:Adaptive",
        parameters=(
            Parameter("within_ms", "float", REQUIRED, "the time that a message may take on the link", least=0),
            Parameter("mild", "codec", "bf16", "for links that have time for it"),
            Parameter("middle", "codec", "int8", "for those that have not"),
            Parameter("strong", "codec", "int4(group=64)", "for the slowest"),
        ),
        summary="the mildest of three codecs for which the link, as measured while it sends, has time",
        example="adaptive(50)",
        bits_per_element="those of the codec chosen, and 4 bytes a message",
        nominal_bits=lambda given: float(given["mild"]),
        state="those of the three; sender: the measured rate",
        source="after FusionLLM's AdaTopK, arXiv 2410.12707: the slowest link compresses most",
        law="none",
        measures=True,
    ),
)
