"""Casts and quantisers. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed.codecs.catalogue.entry import REQUIRED, Entry, Parameter

_NONE = "none"

_GRID = Parameter(
    "grid",
    "word",
    "suited",
    "where the levels lie: about zero with zero one of them, about zero without it, or between a group's least and largest "
    "value; suited: symmetric, and midrise for fewer than 8 bits rounded stochastically",
    choices=("suited", "symmetric", "midrise", "asymmetric"),
)
_ROUNDING = Parameter(
    "rounding",
    "word",
    "auto",
    "auto: to the nearest forward, stochastic (unbiased) backward",
    choices=("auto", "nearest", "stochastic"),
)
_GROUP = Parameter("group", "int", 0, "channels of a token that share a step; 0: the whole token", least=0)


def _per_group(bits: int, parameters: Mapping[str, Any]) -> float:
    """A token's own step counts for nothing: the width is not known here."""
    numbers = 2 if parameters["grid"] == "asymmetric" else 1
    return bits + 16 * numbers / parameters["group"] if parameters["group"] else bits


def _integer(bits: int, title: str) -> Entry:
    return Entry(
        name=f"int{bits}",
        forward=f"testbed.codecs.dense.integer:Int{bits}",
        backward=f"testbed.codecs.dense.integer:Int{bits}",
        parameters=(_GROUP, _ROUNDING, _GRID),
        summary=f"{title} and a step per token or group of channels; gradients rounded stochastically",
        bits_per_element=f"{bits} + 16/group; asymmetric {bits} + 32/group"
        + ("; per token 8 + 32/d" if bits == 8 else ""),
        nominal_bits=lambda parameters: _per_group(bits, parameters),
        state=_NONE,
        source="absmax quantisation; stochastic rounding: Gupta et al., ICML 2015"
        + ("; one bit: Seide et al., Interspeech 2014" if bits == 1 else ""),
        law="bounded",
    )


ENTRIES = (
    Entry(
        name="fp32",
        forward="testbed.codecs.dense.cast:Fp32",
        backward="testbed.codecs.dense.cast:Fp32",
        summary="the tensor as it is: the reference of every ratio",
        bits_per_element="32",
        nominal_bits=lambda _: 32,
        state=_NONE,
        source="IEEE 754 binary32",
        law="identity",
    ),
    Entry(
        name="bf16",
        forward="testbed.codecs.dense.cast:Bf16",
        backward="testbed.codecs.dense.cast:Bf16",
        summary="rounded to bfloat16, both directions",
        bits_per_element="16",
        nominal_bits=lambda _: 16,
        state=_NONE,
        source="torch.bfloat16, round to nearest even",
        law="bounded",
    ),
    Entry(
        name="fp16",
        forward="testbed.codecs.dense.cast:Fp16",
        backward="testbed.codecs.dense.cast:Fp16",
        summary="rounded to half precision; values beyond 65504 are refused, small gradients lose bits",
        bits_per_element="16",
        nominal_bits=lambda _: 16,
        state=_NONE,
        source="IEEE 754 binary16, round to nearest even",
        law="bounded",
    ),
    Entry(
        name="fp8",
        forward="testbed.codecs.dense.fp8:Fp8",
        backward="testbed.codecs.dense.fp8:Fp8",
        parameters=(
            Parameter(
                "format",
                "word",
                "auto",
                "auto: e4m3 (finer) forward, e5m2 (of larger range) backward",
                choices=("auto", "e4m3", "e5m2"),
            ),
        ),
        summary="8-bit floating point with a scale per token: e4m3 forward, e5m2 backward",
        bits_per_element="8 + 16/d",
        nominal_bits=lambda _: 8,
        state=_NONE,
        source="Micikevicius et al., FP8 formats for deep learning, 2022",
        law="bounded",
    ),
    _integer(8, "8 bits"),
    _integer(6, "6 bits"),
    _integer(4, "4 bits"),
    _integer(3, "3 bits"),
    _integer(2, "2 bits"),
    _integer(1, "a sign"),
    Entry(
        name="blockwise-8",
        forward="testbed.codecs.dense.blockwise:Blockwise8",
        backward="testbed.codecs.dense.blockwise:Blockwise8",
        parameters=(Parameter("block", "int", 4096, "values in memory order that share an absmax", least=1),),
        summary="8-bit codes of a dynamic map, fine near zero, with an absmax per block of 4096 values",
        bits_per_element="8 + 32/block",
        nominal_bits=lambda parameters: 8 + 32 / parameters["block"],
        state=_NONE,
        source="Dettmers et al., ICLR 2022 (bitsandbytes); Ryabinin et al., SWARM, ICML 2023",
        law="bounded",
    ),
    Entry(
        name="acsgd",
        forward="testbed.codecs.dense.fixed_point:FixedPoint",
        backward="testbed.codecs.dense.fixed_point:FixedPoint",
        parameters=(Parameter("bits", "int", 0, "2 to 8; 0: 4 forward, 8 backward, as published", least=0, most=8),),
        summary="fixed point with one scale per channel over all tokens of the micro-batch",
        bits_per_element="bits + 16/(b n) for b sequences of n tokens",
        nominal_bits=lambda parameters: parameters["bits"] or 8,
        state=_NONE,
        source="AQ-SGD's direct quantiser (Wang et al., NeurIPS 2022)",
        law="bounded",
    ),
    Entry(
        name="hadamard",
        forward="testbed.codecs.dense.hadamard:Hadamard",
        backward="testbed.codecs.dense.hadamard:Hadamard",
        parameters=(
            Parameter("inner", "codec", REQUIRED, "what the rotated tensor is sent with"),
            Parameter("size", "int", 64, "channels of a tile, a power of two", least=1),
        ),
        summary="each token rotated in tiles, which spreads outliers, around any other codec",
        bits_per_element="inner",
        nominal_bits=lambda parameters: float(parameters["inner"]),
        state="the inner codec's",
        source="QuaRot (Ashkboos et al., NeurIPS 2024); tiles: TAH-Quant",
        law="bounded",
    ),
    Entry(
        name="tah",
        forward="testbed.codecs.dense.tah:Tah",
        backward="testbed.codecs.dense.tah:TahGradients",
        parameters=(
            Parameter("tile", "int", 64, "channels of a tile, a power of two", least=1, most=256),
            Parameter("share", "float", 0.8, "of the tiles, those of most entropy: 4 bits; others 3", least=0, most=1),
            Parameter(
                "tau", "float", 2.0, "a tile is rotated if its largest value is so many times its second", least=0
            ),
            Parameter("bits", "int", 6, "of gradients: 1, 2, 3, 4, 6 or 8", least=1, most=8),
            Parameter(
                "per",
                "word",
                "token",
                "what tiles are ranked in; a narrow token's few are best ranked with its sample's",
                choices=("token", "sample"),
            ),
        ),
        summary="tiles at 4 or 3 bits by their entropy, tiles with an outlier rotated; gradients at 6 bits",
        bits_per_element="3 + ceil(share T)/T + (34 + log2 tile)/tile for T tiles ranked together; backward bits + 16/tile",
        nominal_bits=lambda parameters: max(
            3 + parameters["share"] + (34 + parameters["tile"].bit_length() - 1) / parameters["tile"],
            parameters["bits"] + 16 / parameters["tile"],
        ),
        state=_NONE,
        source="TAH-Quant (He et al., arXiv 2506.01352)",
        law="bounded",
    ),
)
