"""Sparsifiers. No torch here."""

from __future__ import annotations

from testbed.codecs.catalogue.row import REQUIRED, CodecRow, CodecWork, Counts, Parameter, word

_SHARE_DOC = "share of values that is kept, 0.1 for a tenth; at least one per row"
_SHARE = Parameter("share", "float", REQUIRED, _SHARE_DOC, least=1e-4, most=1.0)
_VALUES = word("values", ("bf16", "fp32"), "the format of kept values")
_POSITIONS = word(
    "positions",
    ("smaller", "bitmap", "index"),
    "encoding of positions: a bit per value, an index per kept value (8 bits among 256 values, 16 among 65,536, or "
    "32), or the shorter of the two",
)
_PER = word("per", ("token", "sample", "tensor"), "scope in which the largest values are chosen")
_DRAWN = word("per", ("token", "channels"), "positions drawn for each token, or channels for all tokens")
_SCALES = ("none", "inverse", "rms")
_SCALE_DOC = "factor of kept values: 1, d/k (unbiased) or (d/k)**0.5 (preserves the mean square)"
_TOLD = "((1 if bitmap else i if index else min(1, i)) if 1 - k else 0)"
_AMONG = "d if token else n/b if sample else n"
_TOPK = (
    f"k*values + {_TOLD} where k = kept(share, w) and i = k*index_bits(min(d, 65536) if token else w) and w = {_AMONG}"
)

_DRAWING = Counts("4 if channels else 24", "payload if channels else payload + 4", "2 if channels else 43")
_DRAWN_AGAIN = Counts("payload if channels else payload + 20", "4 if channels else 8", "2 if channels else 43")
_BY_MASK = CodecWork(Counts("4 + 1/8", "payload", "3"), Counts("payload + 1/8", "4", "3"))
_MASK_KEPT = "a bit for each element of a micro-batch, until its gradient has passed"

ROWS: tuple[CodecRow, ...] = (
    CodecRow(
        name="topk",
        forward="testbed.codecs.sparse.sparsifier:TopK",
        parameters=(_SHARE, _PER, _VALUES, _POSITIONS),
        summary="the largest magnitudes of each token, and their positions; gradients choose their own",
        bits=_TOPK,
        source="top-k of activations: Rudakov et al., arXiv 2401.07788",
        work=CodecWork(Counts("20", "payload", "16"), Counts("payload", "4", "3")),
        law="support",
    ),
    CodecRow(
        name="topk-blocks",
        forward="testbed.codecs.sparse.sparsifier:BlockTopK",
        parameters=(
            Parameter("share", "float", REQUIRED, "share of blocks that is kept", least=1e-4, most=1.0),
            Parameter("channels", "int", 8, "neighbouring values of a token in a block", least=1),
            Parameter("tokens", "int", 1, "successive tokens in a block", least=1),
            _VALUES,
        ),
        summary="the blocks of 8 neighbouring channels with the largest energy, and their positions",
        example="topk-blocks(0.125)",
        bits="g*(k*values*c*t + (min(1, k*ceil(log2(w))) if 1 - k else 0)) where k = kept(share, w) and w = round(g*n) "
        "and g = groups(d, c)*groups(bn, t) and c = min(channels, d) and t = min(tokens, bn)",
        source="after Block Top-k of OmniReduce (Fei et al., SIGCOMM 2021, not re-read), there of gradients",
        work=CodecWork(Counts("8", "payload", "3"), Counts("payload", "4", "2")),
        law="support",
    ),
    CodecRow(
        name="ht",
        for_gradients=True,
        forward="testbed.codecs.sparse.threshold:HardThreshold",
        parameters=(
            Parameter("threshold", "float", REQUIRED, "the smallest magnitude that is sent", least=1e-12),
            Parameter("most", "float", 0.25, "maximum share of a tensor that is sent", least=1e-4, most=1.0),
            _VALUES,
        ),
        summary="values of at least a fixed magnitude, up to a maximum share, and their positions",
        example="ht(0.01)",
        bits="most*values + min(1, 32*most)",
        at_most=True,
        size_note="at most: it depends on the values",
        source="hard threshold: Sahu et al., NeurIPS 2021; with a threshold that follows the stepsize: gamma-FedHT, "
        "arXiv 2505.12479",
        work=CodecWork(Counts("8", "payload", "5"), Counts("payload", "4", "3")),
        law="bounded",
    ),
    CodecRow(
        name="topk-chunk",
        for_gradients=True,
        forward="testbed.codecs.sparse.quantised:ChunkTopK",
        parameters=(
            _SHARE,
            Parameter("chunk", "int", 4096, "values, in memory order, among which the largest are kept", least=2),
        ),
        summary="the largest magnitudes of each chunk of 4096 values with 2 bits each, and packed positions",
        example="topk-chunk(0.0156)",
        bits="k*2 + (min(1, k*ceil(log2(c))) if 1 - k else 0) + 128/n where k = kept(share, c) and c = min(chunk, n)",
        source="SparseLoCo: Sarfi et al., arXiv 2508.15706, and its deployed code",
        work=CodecWork(Counts("20", "payload", "16 + 10*share"), Counts("payload", "4", "3 + 5*share")),
        law="support",
    ),
    CodecRow(
        name="cocktail",
        for_gradients=True,
        forward="testbed.codecs.sparse.quantised:Cocktail",
        parameters=(
            Parameter("share", "float", 0.2, "the share of the sample that is kept, the largest", least=1e-3, most=1.0),
            Parameter("every", "int", 10, "one of this many neighbours is drawn into the sample", least=1, most=1000),
            Parameter("bits", "int", 4, "bits per kept value", least=2, most=8),
        ),
        summary="a random sample, of which the largest magnitudes, with 4 bits each",
        bits="s*(k*(bits + 16/128) + (min(1, k*ceil(log2(w))) if 1 - k else 0)) where k = kept(share, w) "
        "and w = round(s*n) and s = groups(n, every)",
        source="CocktailSGD: Wang et al., ICML 2023",
        work=CodecWork(
            Counts("4 + 20/every", "payload + 4/every", "(25 + 18 + 10*share)/every"),
            Counts("payload", "4", "3 + (25 + 2 + 4*share)/every"),
        ),
        law="support",
    ),
    CodecRow(
        name="topk-shared",
        forward="testbed.codecs.sparse.shared_mask:SharedTopK",
        backward="testbed.codecs.sparse.shared_mask:ForwardMask",
        parameters=(_SHARE, _PER, _VALUES, _POSITIONS),
        summary="as topk; gradients use the activations' positions, which need not be sent again",
        bits=_TOPK,
        backward_bits=f"kept(share, {_AMONG})*values",
        state=_MASK_KEPT,
        source="re-used forward mask: Rudakov et al., arXiv 2401.07788",
        work=CodecWork(Counts("20", "payload + 1/8", "16"), Counts("payload", "4 + 1/8", "3")),
        backward_work=_BY_MASK,
        law="support",
        pairs=True,
    ),
    CodecRow(
        name="columns",
        forward="testbed.codecs.sparse.shared_mask:Columns",
        backward="testbed.codecs.sparse.shared_mask:ForwardMask",
        parameters=(_SHARE, _VALUES, _POSITIONS),
        summary="the channels of the largest norm over the message's tokens, whole; gradients keep the same channels",
        bits=f"k*values + {_TOLD}/bn where k = kept(share, d) and i = k*index_bits(d)",
        backward_bits="kept(share, d)*values",
        state=_MASK_KEPT,
        source='"Beyond Top-K: structured sparsification" (MCDC at ICLR 2025), from a re-implementation',
        work=CodecWork(Counts("8", "payload + 1/8", "3"), Counts("payload", "4 + 1/8", "2")),
        backward_work=_BY_MASK,
        law="support",
        pairs=True,
    ),
    CodecRow(
        name="randk",
        forward="testbed.codecs.sparse.random_places:RandK",
        parameters=(_SHARE, _DRAWN, word("scale", _SCALES, _SCALE_DOC, default="inverse"), _VALUES),
        summary="random values of each token, scaled up; both ends draw the positions from the message key",
        bits="kept(share, d)*values",
        source="Stich et al., NeurIPS 2018, unscaled in ef: ef(randk(0.1, none)); scaled: Wangni et al., NeurIPS 2018",
        work=CodecWork(
            _DRAWING._replace(operations="(0 if channels else 41) + 2 + (14.5*share if bf16 else 0)"), _DRAWN_AGAIN
        ),
        law="unbiased",
    ),
    CodecRow(
        name="mask",
        forward="testbed.codecs.sparse.random_places:KeyedMask",
        parameters=(_SHARE, _DRAWN, word("scale", _SCALES, _SCALE_DOC), _VALUES),
        summary="one random mask for activations and their gradient, drawn from the message key at both ends",
        bits="kept(share, d)*values",
        source="random masks of 90 and 95 %: arXiv 2609.14339, from a summary",
        work=CodecWork(_DRAWING, _DRAWN_AGAIN),
        law="support",
    ),
)
