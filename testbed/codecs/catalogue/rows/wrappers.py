"""Wrappers around any other codec. No torch here."""

from __future__ import annotations

from testbed.codecs.catalogue.row import REQUIRED, CodecRow, Counts, Parameter, Work

_SPLIT = Parameter(
    "split",
    "word",
    "auto",
    "auto: 16 and 32-bit values are split into byte planes; whole: they are not",
    choices=("auto", "whole"),
)
_ANY = Parameter("inner", "codec", REQUIRED, "the codec whose payload is packed")
_UNCOUNTED = "an entropy coder's work depends on the bytes that it packs, and no device's kernel for it is given"

ROWS: tuple[CodecRow, ...] = (
    CodecRow(
        name="zstd",
        forward="testbed.codecs.lossless:Zstd",
        parameters=(_ANY, Parameter("level", "int", 1, "zstd's level: 1 is fast", least=1, most=19), _SPLIT),
        summary="the inner payload packed by zstd, byte planes of 16 and 32-bit values apart",
        bits="inner",
        at_most=True,
        size_note="at most this and 20 to 44 bytes per message: it depends on the values",
        state="the inner codec's",
        source="zstd (RFC 8878); byte split: BloomBee, arXiv 2604.21072",
        work=_UNCOUNTED,
        law="lossless",
    ),
    CodecRow(
        name="entropy",
        forward="testbed.codecs.lossless:Entropy",
        parameters=(_ANY, _SPLIT),
        summary="the inner payload as Huffman codes of its bytes: what their distribution alone can save",
        bits="inner",
        at_most=True,
        size_note="at most this and 20 to 44 bytes per message: it depends on the values",
        state="the inner codec's",
        source="zstd's Huffman coder (RFC 8878), all but without its matches",
        work=_UNCOUNTED,
        law="lossless",
    ),
    CodecRow(
        name="warmup",
        for_gradients=True,
        forward="testbed.codecs.warmup:WarmUp",
        parameters=(
            Parameter("inner", "codec", REQUIRED, "the codec from then on"),
            Parameter("steps", "int", REQUIRED, "training steps whose messages go as fp32", least=0),
        ),
        summary="values as they are for the first training steps, then any other codec; for gradients",
        example="warmup(ef(onebit), 1)",
        bits="inner",
        size_note="messages of the first steps as fp32",
        state="the inner codec's",
        source="1-bit Adam: Tang et al., arXiv 2102.02888; CocktailSGD: Wang et al., ICML 2023",
        work=Work(
            Counts("inner.encode", "inner.encode", "inner.encode"),
            Counts("inner.decode", "inner.decode", "inner.decode"),
        ),
        law="none",
    ),
    CodecRow(
        name="adaptive",
        forward="testbed.codecs.adaptive:Adaptive",
        parameters=(
            Parameter("within_ms", "float", REQUIRED, "the time that a message may take on the link, in ms", least=0),
            Parameter("mild", "codec", "bf16", "the codec for links that have the time for it"),
            Parameter("middle", "codec", "int8", "the codec for links that have not"),
            Parameter("strong", "codec", "int4(group=64)", "the codec for the slowest links"),
        ),
        summary="the mildest of three codecs for which the link, as measured while it sends, has time",
        example="adaptive(50)",
        bits="mild",
        at_most=True,
        size_note="or those of the codec chosen, and 4 bytes per message",
        state="those of the three; sender: the measured rate",
        source="after FusionLLM's AdaTopK, arXiv 2410.12707: the slowest link compresses most",
        work="which of its codecs works is decided while it runs",
        law="none",
        measures=True,
    ),
)
