"""Differences from earlier messages, and error feedback. No torch here."""

from __future__ import annotations

import functools

from testbed.codecs.catalogue.row import NO_WORK, CodecRow, CodecWork, Counts, Parameter, codec, word

_MICROBATCH = "one fp32 tensor per micro-batch and phase"
_CLOSED = "both ends hold what the receiver last decoded"
_INNER = codec("inner", "codec for the difference")
_BACKWARD = codec("backward", "codec for gradients, without differences", default="int8")
_LATER_DOC = "content of later visits; direct: the tensor itself, a control without memory"
_FIRSTS = ("inner", "fp32", "bf16", "half", "byte")
_FIRST_DOC = "encoding of a message key's first message: through inner too, in full, as fp16 (half) or int8 (byte)"
# The encoder subtracts P, encodes, decodes, and adds to P; the decoder adds to P and returns a copy.
_DELTA = CodecWork(Counts("16", "8", "2"), Counts("8", "8", "1")).around("inner.encode + inner.decode")
# The encoder adds E, encodes, decodes, and keeps the remainder.
_FEEDBACK = NO_WORK._replace(encode=Counts("16", "8", "2")).around("inner.encode + inner.decode")

_difference = functools.partial(
    CodecRow,
    forward="testbed.codecs.memory.delta:Delta",
    backward="testbed.codecs.memory.delta:gradients",
    bits="inner + 32/n",
    backward_bits="backward",
    state=f"{_CLOSED}: {_MICROBATCH}, forward; and the inner codec's",
    work=_DELTA,
    backward_work=NO_WORK.around("backward.encode", "backward.decode"),
    law="bounded",
)
_feedback = functools.partial(
    CodecRow,
    for_gradients=True,
    parameters=(codec("inner", "codec for the sum"),),
    bits="inner",
    state=f"sender: {_MICROBATCH}, and the inner codec's",
    work=_FEEDBACK,
    law="none",
)

ROWS: tuple[CodecRow, ...] = (
    CodecRow(
        name="delta-int8",
        forward="testbed.codecs.memory.delta:DeltaInt8",
        backward="testbed.codecs.dense.integer:Int8",
        summary="difference from the previous step's tensor of the same micro-batch, as int8; gradients as int8",
        bits="8 + 32/d",
        state=f"{_MICROBATCH}, forward",
        source="activation delta (Bedoya and Zhang), closed loop",
        work=CodecWork(Counts("16", "payload + 4", "12"), Counts("payload + 4", "8", "4")),
        backward_work=CodecWork(Counts("8", "payload", "13.25"), Counts("payload", "4", "3")),
        law="bounded",
    ),
    _difference(
        name="delta",
        parameters=(_INNER, word("first", _FIRSTS, _FIRST_DOC), _BACKWARD),
        summary="difference from the same micro-batch's tensor of the step before, through any codec, in a closed loop",
        source="activation delta (Bedoya and Zhang)",
    ),
    _difference(
        name="delta-open",
        forward="testbed.codecs.memory.delta:OpenDelta",
        parameters=(_INNER, word("first", _FIRSTS, _FIRST_DOC), _BACKWARD),
        summary="as delta, in an open loop: the difference from the true previous tensor, so that errors add up",
        state=f"{_MICROBATCH}, forward: not the same at both ends",
        source="activation delta (Bedoya and Zhang), read naively",
        work=CodecWork(Counts("12", "8", "1"), Counts("8", "8", "1")).around(),
        law="none",
        control=True,
    ),
    _difference(
        name="aqsgd",
        forward="testbed.codecs.memory.aqsgd:AqSgd",
        parameters=(
            codec("inner", _INNER.doc, default="acsgd(bits=4)"),
            word("first", ("fp32", "bf16"), "encoding of an example's first visit"),
            word("later", ("difference", "direct"), _LATER_DOC),
            Parameter("memory_mb", "float", 1024.0, "memory of each end, in 10**6 bytes; the rest is in a file", (), 0),
            codec("backward", _BACKWARD.doc, default="acsgd(bits=8)"),
        ),
        summary="difference from the same example's last visit, an epoch ago; its first visit in full",
        bits="first",
        at_most=True,
        size_note="after an example's first visit the inner codec's, and 1 byte per example",
        state=f"{_CLOSED}: one fp32 tensor per example and phase, forward, in memory up to a limit; "
        "and the inner codec's",
        source="AQ-SGD: Wang et al., NeurIPS 2022 (arXiv 2206.01299)",
    ),
    _difference(
        name="compactfusion",
        parameters=(
            codec("inner", "codec for the residual: onebit, twobit, lowrank", default="onebit"),
            word("first", _FIRSTS, _FIRST_DOC, default="bf16"),
            _BACKWARD,
        ),
        summary="residual from the previous step, strongly compressed, in a closed loop; the first message in full",
        size_note="the first message in full",
        source="after CompactFusion, which takes residuals between denoising steps; here between training steps",
    ),
    _feedback(
        name="ef",
        for_gradients=False,
        forward="testbed.codecs.memory.feedback:ErrorFeedback",
        summary="error feedback: a message's error is added to the same micro-batch of the next step",
        example="ef(topk(0.1))",
        source="Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019",
        law="residual",
    ),
    _feedback(
        name="ef-decay",
        forward="testbed.codecs.memory.feedback:DecayedFeedback",
        parameters=(
            codec("inner", "codec for the sum"),
            Parameter("decay", "float", 0.95, "share of the error that is added", least=0, most=1),
        ),
        summary="decaying error feedback: a momentum from which sent values are subtracted; for gradients",
        example="ef-decay(topk-chunk(0.0156))",
        source="DeMo: Peng et al., arXiv 2411.19870; SparseLoCo: Sarfi et al., arXiv 2508.15706",
    ),
    _feedback(
        name="dgc",
        forward="testbed.codecs.memory.feedback:MomentumFeedback",
        parameters=(
            codec("inner", "the sparsifier that sends the sum"),
            Parameter("momentum", "float", 0.9, "of the gradients, before anything is left out", least=0, most=1),
        ),
        summary="error feedback of momentum, which is reset where values are sent; for gradients",
        example="dgc(topk(0.01))",
        state="sender: two fp32 tensors per micro-batch and phase, and the inner codec's",
        source="deep gradient compression: Lin et al., ICLR 2018",
        work=NO_WORK._replace(encode=Counts("32", "16", "6")).around("inner.encode + inner.decode"),
    ),
    _feedback(
        name="lazy",
        for_gradients=False,
        forward="testbed.codecs.memory.feedback:LazyErrorFeedback",
        summary="lazy error propagation: a message's error is added to the next one of the same step; for gradients",
        example="lazy(powersgd(4))",
        state="sender: one fp32 tensor per phase, and the inner codec's",
        source="Optimus-CC: Song et al., ASPLOS 2023, there with powersgd on gradients only",
    ),
    CodecRow(
        name="ef21",
        forward="testbed.codecs.memory.delta:Delta",
        parameters=(_INNER,),
        summary="both ends hold A; C(X - A) is sent and added to A, which the receiver uses",
        example="ef21(topk(0.1))",
        bits="inner + 32/n",
        state=f"{_MICROBATCH} at each end, both directions, and the inner codec's",
        source="EF21: Richtarik et al., NeurIPS 2021, which with A = 0 at first is `delta` with a sparsifier inside",
        work=_DELTA,
        law="none",
    ),
)
