"""Wrappers around any other codec. No torch here."""

from __future__ import annotations

import functools

from testbed.codecs.catalogue.row import NO_WORK, REQUIRED, CodecRow, Parameter, codec, word

_SPLIT = word("split", ("auto", "whole"), "auto: 16 and 32-bit values are split into byte planes; whole: they are not")
_ANY = codec("inner", "codec whose payload is packed")
_packing = functools.partial(
    CodecRow,
    bits="inner",
    at_most=True,
    size_note="at most this and 20 to 44 bytes per message: it depends on the values",
    work="an entropy coder's work depends on its input bytes, and no device kernel for it is specified",
    law="lossless",
)

ROWS: tuple[CodecRow, ...] = (
    _packing(
        name="zstd",
        forward="testbed.codecs.lossless:Zstd",
        parameters=(_ANY, Parameter("level", "int", 1, "zstd's level: 1 is fast", least=1, most=19), _SPLIT),
        summary="the inner payload packed by zstd, with byte planes of 16 and 32-bit values separated",
        source="zstd (RFC 8878); byte split: BloomBee, arXiv 2604.21072",
    ),
    _packing(
        name="entropy",
        forward="testbed.codecs.lossless:Entropy",
        parameters=(_ANY, _SPLIT),
        summary="the inner payload as Huffman codes of its bytes: saves only by their distribution",
        source="zstd's Huffman coder (RFC 8878), all but without its matches",
    ),
    CodecRow(
        name="warmup",
        for_gradients=True,
        forward="testbed.codecs.warmup:WarmUp",
        parameters=(
            codec("inner", "codec after the first steps"),
            Parameter("steps", "int", REQUIRED, "training steps with messages as fp32", least=0),
        ),
        summary="uncompressed values in the first training steps, then any other codec; for gradients",
        example="warmup(ef(onebit), 1)",
        bits="inner",
        size_note="messages of the first steps as fp32",
        source="1-bit Adam: Tang et al., arXiv 2102.02888; CocktailSGD: Wang et al., ICML 2023",
        work=NO_WORK.around(),
        law="none",
    ),
    CodecRow(
        name="adaptive",
        forward="testbed.codecs.adaptive:Adaptive",
        parameters=(
            Parameter("within_ms", "float", REQUIRED, "time limit of a message on the link, in ms", least=0),
            codec("mild", "codec for links within the time limit", default="bf16"),
            codec("middle", "codec for slower links", default="int8"),
            codec("strong", "codec for the slowest links", default="int4(group=64)"),
        ),
        summary="the mildest of three codecs that meets a time limit on the measured link",
        example="adaptive(50)",
        bits="mild",
        at_most=True,
        size_note="or those of the codec chosen, and 4 bytes per message",
        state="those of the three; sender: the measured rate",
        source="after FusionLLM's AdaTopK, arXiv 2410.12707: the slowest link compresses most",
        work="its choice of codec is made at run time",
        law="none",
        measures=True,
    ),
)
