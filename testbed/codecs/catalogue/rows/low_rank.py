"""Two thin factors in place of a matrix. No torch here."""

from __future__ import annotations

from testbed.codecs.catalogue.row import REQUIRED, CodecRow, CodecWork, Counts, Parameter, codec, word

# Without what codes the factors.
_FACTORS = CodecWork(
    Counts("8 + 12*rank/d + 8*rank/bn", "8*rank/d + 8*rank/bn", "4*rank + 2*rank*rank/d"),
    Counts("4*rank*(1/d + 1/bn)", "4", "2*rank"),
)

ROWS: tuple[CodecRow, ...] = (
    CodecRow(
        name="powersgd",
        forward="testbed.codecs.low_rank:PowerSGD",
        parameters=(
            Parameter("rank", "int", REQUIRED, "columns of each factor", least=1, most=4096),
            word("start", ("warm", "cold"), "Q of the previous message, or a random one"),
            word("values", ("bf16", "fp32"), "the format of the factors"),
        ),
        summary="the matrix of tokens and channels as two thin factors, one step of power iteration",
        bits="values*min(rank, d, bn)*(1/d + 1/bn)",
        state="sender: one fp32 factor of d * rank values per phase",
        source="PowerSGD: Vogels et al., NeurIPS 2019; on activations: Bian et al., MLSys 2024",
        work=CodecWork(
            Counts("8 + 12*rank/d + 8*rank/bn", "payload + 8*rank/d + 4*rank/bn", "4*rank + 2*rank*rank/d"),
            Counts("payload", "4", "2*rank"),
        ),
        law="projection",
    ),
    CodecRow(
        name="lowrank",
        forward="testbed.codecs.low_rank:CodedLowRank",
        parameters=(
            Parameter("rank", "int", 32, "columns of each factor", least=1, most=4096),
            codec("inner", "the codec that sends the two factors", default="int4(group=32)"),
        ),
        summary="PowerSGD's two thin factors, each through another codec",
        bits="r*(inner(bn, r)/d + inner(d, r)/bn) where r = min(rank, d, bn)",
        state="sender: one fp32 factor of d * rank values per phase",
        source="after CompactFusion's low-rank compressor with INT4 factors, from memory; "
        "factors: Vogels et al., NeurIPS 2019",
        work=_FACTORS.around("inner.encode*rank*(1/d + 1/bn)", "inner.decode*rank*(1/d + 1/bn)"),
        law="none",
    ),
    CodecRow(
        name="rvq",
        forward="testbed.codecs.residual_vq:ResidualVQ",
        parameters=(
            Parameter("rank", "int", 16, "directions of the projection", least=1, most=4096),
            Parameter("levels", "int", 2, "codebooks, each for what the ones before leave", least=1, most=8),
            Parameter("bits", "int", 4, "bits of an index into a codebook", least=1, most=8),
            Parameter("group", "int", 4, "values that share an index", least=1, most=64),
        ),
        summary="a projection that follows the messages, residually vector-quantised with codebooks of each message",
        bits="levels*bits*(groups(bn*r, group)*r/d + groups(d*r, group)*r/bn) "
        "+ 32*(levels*2**bits*group + 6)/n where r = min(rank, d, bn)",
        state="sender: one fp32 factor of d * rank values per phase",
        source="MDCP-PP (openreview 9ztCmwxYxN), from its abstract; factors: Vogels et al., NeurIPS 2019",
        work=_FACTORS.around("2*levels*2**bits*rank*(1/d + 1/bn)", "levels*rank*(1/d + 1/bn)"),
        law="none",
    ),
)
