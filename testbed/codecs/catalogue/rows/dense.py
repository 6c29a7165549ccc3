"""Casts and quantisers. No torch here."""

from __future__ import annotations

from testbed.codecs.catalogue.row import CodecRow, CodecWork, Counts, Parameter, codec, word

_GRID = word(
    "grid",
    ("suited", "symmetric", "midrise", "asymmetric"),
    "position of the levels: around zero including it, around zero without it, or between a group's minimum and "
    "maximum; suited: symmetric, but midrise for fewer than 8 bits rounded stochastically",
)
_ROUNDING = word(
    "rounding", ("auto", "nearest", "stochastic"), "auto: to nearest forward, stochastic (unbiased) backward"
)
_GROUP = Parameter("group", "int", 0, "number of channels of a token that share a step; 0: all", least=0)


_TAH_SHARE = "share of tiles, those of highest entropy, with 4 bits; the others have 3"
_TAH_TAU = "a tile is rotated if its largest value is more than tau times its second largest"


def _cast(bits: int, name: str, summary: str, source: str) -> CodecRow:
    operations = "0" if bits == 32 else "1"
    return CodecRow(
        name=name,
        forward=f"testbed.codecs.dense.cast:{name.title()}",
        summary=summary,
        bits=str(bits),
        source=source,
        work=CodecWork(Counts("4", "payload", operations), Counts("payload", "4", operations)),
        linear=True,
        law="identity" if bits == 32 else "bounded",
    )


def _integer(bits: int, title: str, *, size: str = "") -> CodecRow:
    packing = {8: 0, 6: 4, 3: 4}.get(bits, 2)
    # The maximum or the ends, then the codes; a random byte each for stochastic rounding.
    encoding = f"{5 + packing} + (8.25 if stochastic or (gradients if auto else 0) else 0)"
    return CodecRow(
        name=f"int{bits}",
        forward=f"testbed.codecs.dense.integer:Int{bits}",
        parameters=(_GROUP, _ROUNDING, _GRID),
        summary=f"{title} and a step per token or group of channels; gradients rounded stochastically",
        bits=size or f"{bits} + (32 if asymmetric else 16)*groups(d, min(group or d, d))",
        source="absmax quantisation; stochastic rounding: Gupta et al., ICML 2015"
        + ("; one bit: Seide et al., Interspeech 2014" if bits == 1 else ""),
        work=CodecWork(Counts("8", "payload", encoding), Counts("payload", "4", f"{3 + packing}")),
        law="bounded",
    )


ROWS: tuple[CodecRow, ...] = (
    _cast(32, "fp32", "the uncompressed tensor: the reference for every ratio", "IEEE 754 binary32"),
    _cast(16, "bf16", "rounded to bfloat16, both directions", "torch.bfloat16, round to nearest even"),
    _cast(
        16,
        "fp16",
        "rounded to half precision; values beyond 65504 are refused, small gradients lose bits",
        "IEEE 754 binary16, round to nearest even",
    ),
    CodecRow(
        name="fp8",
        forward="testbed.codecs.dense.fp8:Fp8",
        parameters=(
            word("format", ("auto", "e4m3", "e5m2"), "auto: e4m3 (finer) forward, e5m2 (larger range) backward"),
        ),
        summary="8-bit floating point with a scale per token: e4m3 forward, e5m2 backward",
        bits="8 + 16/d",
        source="Micikevicius et al., FP8 formats for deep learning, 2022",
        work=CodecWork(Counts("8", "payload", "4"), Counts("payload", "4", "2")),
        law="bounded",
    ),
    _integer(8, "8 bits", size="8 + ((32 if asymmetric else 16)*groups(d, min(group, d)) if group else 32/d)"),
    _integer(6, "6 bits"),
    _integer(4, "4 bits"),
    _integer(3, "3 bits"),
    _integer(2, "2 bits"),
    _integer(1, "a sign"),
    CodecRow(
        name="blockwise-8",
        forward="testbed.codecs.dense.blockwise:Blockwise8",
        parameters=(
            Parameter("block", "int", 4096, "number of values, in memory order, that share an absmax", least=1),
        ),
        summary="8-bit codes of a dynamic map, fine near zero, with an absmax per block of 4096 values",
        bits="8 + 32*groups(n, min(block, n))",
        source="Dettmers et al., ICLR 2022 (bitsandbytes); Ryabinin et al., SWARM, ICML 2023",
        work=CodecWork(Counts("8", "payload", "11"), Counts("payload", "4", "2")),
        law="bounded",
    ),
    CodecRow(
        name="uniform",
        forward="testbed.codecs.dense.uniform:Uniform",
        parameters=(
            Parameter("step", "float", 0.25, "step, in units of `unit`", least=1e-6),
            word(
                "unit",
                ("rms", "absolute"),
                "rms: the step is relative to the message's root mean square; absolute: it is a value",
            ),
        ),
        summary="multiples of one step per message, sized by an entropy coder after it",
        example="uniform(0.25)",
        bits="8*min(2, max(1, ceil(log2(32/step)/8)))",
        at_most=True,
        size_note="for values up to 16 root mean squares: 8 if none exceeds 127 steps, else 16",
        source="uniform scalar quantiser: Gish and Pierce, IEEE TIT 1968",
        work=CodecWork(Counts("12", "payload", "8"), Counts("payload", "4", "3")),
        law="bounded",
    ),
    CodecRow(
        name="acsgd",
        forward="testbed.codecs.dense.fixed_point:FixedPoint",
        parameters=(Parameter("bits", "int", 0, "2 to 8 bits; 0: 4 forward, 8 backward, as published", (), 0, 8),),
        summary="fixed point with one scale per channel over all tokens of the micro-batch",
        bits="(bits or 4) + 16/bn",
        backward_bits="(bits or 8) + 16/bn",
        source="AQ-SGD's direct quantiser (Wang et al., NeurIPS 2022)",
        work=CodecWork(Counts("8", "payload", "9"), Counts("payload", "4", "5")),
        law="bounded",
    ),
    CodecRow(
        name="hadamard",
        forward="testbed.codecs.dense.hadamard:Hadamard",
        parameters=(
            codec("inner", "codec for the rotated tensor"),
            Parameter("size", "int", 64, "channels of a tile, a power of two", least=1),
        ),
        summary="each token rotated in tiles, which spreads outliers, then any other codec",
        bits="inner",
        source="QuaRot (Ashkboos et al., NeurIPS 2024); tiles: TAH-Quant",
        work=CodecWork(*[Counts("4", "4", "1 + log2(size)")] * 2).around(),
        law="bounded",
    ),
    CodecRow(
        name="dct",
        for_gradients=True,
        forward="testbed.codecs.dense.cosine:Cosine",
        parameters=(
            codec("inner", "codec for the coefficients"),
            Parameter("size", "int", 32, "rows and columns of a block", least=1, most=256),
        ),
        summary="the cosine transform of each block of 32 x 32, then any other codec; for gradients",
        example="dct(topk-chunk(0.0078, 1024))",
        bits="inner",
        source="DeMo: Peng et al., arXiv 2411.19870",
        work=CodecWork(*[Counts("8", "8", "4*size")] * 2).around(),
        law="none",
    ),
    CodecRow(
        name="haar",
        forward="testbed.codecs.dense.haar:Haar",
        parameters=(codec("inner", "codec for the details"),),
        summary="each channel's mean over tokens, and differences of neighbouring tokens through any other codec",
        example="haar(int8(group=64, asymmetric))",
        bits="32/bn + inner(d, bn - 1)*(1 - 1/bn)",
        source="RAHT: de Queiroz and Chou, IEEE TIP 2016; with zstd around it MesonGS's chain (arXiv 2409.09756)",
        work=CodecWork(*[Counts("16", "12", "6")] * 2).around(),
        law="bounded",
    ),
    CodecRow(
        name="tah",
        forward="testbed.codecs.dense.tah:Tah",
        backward="testbed.codecs.dense.tah:TahGradients",
        parameters=(
            Parameter("tile", "int", 64, "channels of a tile, a power of two", least=1, most=256),
            Parameter("share", "float", 0.8, _TAH_SHARE, least=0, most=1),
            Parameter("tau", "float", 2.0, _TAH_TAU, least=0),
            Parameter("bits", "int", 6, "bits of gradients: 1, 2, 3, 4, 6 or 8", least=1, most=8),
            word(
                "per",
                ("token", "sample"),
                "tiles ranked together; narrow tokens have so few that a sample's tiles are better",
            ),
        ),
        summary="tiles at 4 or 3 bits by their entropy, tiles with an outlier rotated; gradients at 6 bits",
        bits="g*(t*(3 + raised(share, w)) + 34 + log2(t)) where g = groups(d, t) and t = min(tile, 2**ceil(log2(d))) "
        "and w = round(g*d)*(bn/b if sample else 1)",
        backward_bits="bits + 16*groups(d, min(tile, d))",
        source="TAH-Quant (He et al., arXiv 2506.01352)",
        work=CodecWork(Counts("12", "payload", "21 + 2*log2(tile)"), Counts("payload", "4", "8 + log2(tile)")),
        backward_work=CodecWork(Counts("8", "payload", "9"), Counts("payload", "4", "7")),
        law="bounded",
    ),
    CodecRow(
        name="onebit",
        forward="testbed.codecs.dense.rank_one:OneBit",
        summary="signs, times a magnitude per token and one per channel",
        bits="1 + 16/d + 16/bn",
        source="after CompactFusion's 1-bit compressor, from memory",
        work=CodecWork(Counts("8", "payload", "7"), Counts("payload", "4", "4")),
        law="bounded",
    ),
    CodecRow(
        name="twobit",
        forward="testbed.codecs.dense.rank_one:TwoBit",
        summary="signs and two sizes, times a magnitude per token and one per channel",
        bits="2 + 16/d + 16/bn",
        source="after CompactFusion's 2-bit compressor, from memory; levels: Max, IRE Trans. 1960",
        work=CodecWork(Counts("8", "payload", "9"), Counts("payload", "4", "5")),
        law="bounded",
    ),
)
