"""Differences from what was sent before, and error feedback. No torch here."""

from __future__ import annotations

from testbed.codecs.catalogue.row import REQUIRED, CodecRow, Counts, Parameter, Work

_CLOSED = "both ends hold what the receiver last decoded"
_BACKWARD = Parameter("backward", "codec", "int8", "the codec that sends gradients, without differences")
_FIRST = Parameter(
    "first",
    "word",
    "inner",
    "how a message key's first message is sent: through inner too, in full, as fp16 (half) or int8 (byte)",
    choices=("inner", "fp32", "bf16", "half", "byte"),
)
# The encoder subtracts P, encodes, decodes, and adds to P; the decoder adds to P and hands a copy over.
_DELTA = Work(
    Counts("16 + inner.encode + inner.decode", "8 + inner.encode + inner.decode", "2 + inner.encode + inner.decode"),
    Counts("8 + inner.decode", "8 + inner.decode", "1 + inner.decode"),
)
# The encoder adds E, encodes, decodes, and keeps what is left.
_FEEDBACK = Work(_DELTA.encode, Counts("inner.decode", "inner.decode", "inner.decode"))
_GRADIENTS = Work(
    Counts("backward.encode", "backward.encode", "backward.encode"),
    Counts("backward.decode", "backward.decode", "backward.decode"),
)

ROWS: tuple[CodecRow, ...] = (
    CodecRow(
        name="delta-int8",
        forward="testbed.codecs.memory.delta:DeltaInt8",
        backward="testbed.codecs.dense.integer:Int8",
        summary="difference from the previous step's tensor of the same micro-batch, as int8; gradients as int8",
        bits="8 + 32/d",
        state="one fp32 tensor per micro-batch and phase, forward",
        source="activation delta (Bedoya and Zhang), closed loop",
        work=Work(Counts("16", "payload + 4", "12"), Counts("payload + 4", "8", "4")),
        backward_work=Work(Counts("8", "payload", "13.25"), Counts("payload", "4", "3")),
        law="bounded",
    ),
    CodecRow(
        name="delta",
        forward="testbed.codecs.memory.delta:Delta",
        backward="testbed.codecs.memory.delta:gradients",
        parameters=(Parameter("inner", "codec", REQUIRED, "the codec that sends the difference"), _FIRST, _BACKWARD),
        summary="difference from the same micro-batch's tensor of the step before, through any codec, in a closed loop",
        bits="inner + 32/n",
        backward_bits="backward",
        state=f"{_CLOSED}: one fp32 tensor per micro-batch and phase, forward; and the inner codec's",
        source="activation delta (Bedoya and Zhang)",
        work=_DELTA,
        backward_work=_GRADIENTS,
        law="bounded",
    ),
    CodecRow(
        name="delta-open",
        forward="testbed.codecs.memory.delta:OpenDelta",
        backward="testbed.codecs.memory.delta:gradients",
        parameters=(Parameter("inner", "codec", REQUIRED, "the codec that sends the difference"), _FIRST, _BACKWARD),
        summary="as delta, in an open loop: the difference from the true previous tensor, so that errors add up",
        bits="inner + 32/n",
        backward_bits="backward",
        state="one fp32 tensor per micro-batch and phase, forward: not the same at both ends",
        source="activation delta (Bedoya and Zhang), read naively",
        work=Work(
            Counts("12 + inner.encode", "8 + inner.encode", "1 + inner.encode"),
            Counts("8 + inner.decode", "8 + inner.decode", "1 + inner.decode"),
        ),
        backward_work=_GRADIENTS,
        law="none",
        control=True,
    ),
    CodecRow(
        name="aqsgd",
        forward="testbed.codecs.memory.aqsgd:AqSgd",
        backward="testbed.codecs.memory.delta:gradients",
        parameters=(
            Parameter("inner", "codec", "acsgd(bits=4)", "the codec that sends the difference"),
            Parameter("first", "word", "fp32", "how an example's first visit is sent", choices=("fp32", "bf16")),
            Parameter(
                "later",
                "word",
                "difference",
                "what later visits send through inner; direct: the tensor itself, the control without memory",
                choices=("difference", "direct"),
            ),
            Parameter(
                "memory_mb", "float", 1024.0, "memory of each end, in 10**6 bytes; the rest is in a file", least=0
            ),
            Parameter("backward", "codec", "acsgd(bits=8)", "the codec that sends gradients, without differences"),
        ),
        summary="difference from the same example's last visit, an epoch ago; its first visit in full",
        bits="first",
        backward_bits="backward",
        at_most=True,
        size_note="after an example's first visit the inner codec's, and 1 byte per example",
        state=f"{_CLOSED}: one fp32 tensor per example and phase, forward, in memory up to a limit; "
        "and the inner codec's",
        source="AQ-SGD: Wang et al., NeurIPS 2022 (arXiv 2206.01299)",
        work=_DELTA,
        backward_work=_GRADIENTS,
        law="bounded",
    ),
    CodecRow(
        name="compactfusion",
        forward="testbed.codecs.memory.delta:Delta",
        backward="testbed.codecs.memory.delta:gradients",
        parameters=(
            Parameter("inner", "codec", "onebit", "the codec that sends the residual: onebit, twobit, lowrank"),
            Parameter("first", "word", "bf16", _FIRST.doc, choices=_FIRST.choices),
            _BACKWARD,
        ),
        summary="residual from the previous step, strongly compressed, in a closed loop; the first message in full",
        bits="inner + 32/n",
        backward_bits="backward",
        size_note="the first message in full",
        state=f"{_CLOSED}: one fp32 tensor per micro-batch and phase, forward; and the inner codec's",
        source="after CompactFusion, which takes residuals between denoising steps; here between training steps",
        work=_DELTA,
        backward_work=_GRADIENTS,
        law="bounded",
    ),
    CodecRow(
        name="ef",
        forward="testbed.codecs.memory.feedback:ErrorFeedback",
        parameters=(Parameter("inner", "codec", REQUIRED, "the codec that sends the sum"),),
        summary="error feedback: what a message left out is added to the same micro-batch of the next step",
        example="ef(topk(0.1))",
        bits="inner",
        state="sender: one fp32 tensor per micro-batch and phase, and the inner codec's",
        source="Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019",
        work=_FEEDBACK,
        law="residual",
    ),
    CodecRow(
        name="ef-decay",
        for_gradients=True,
        forward="testbed.codecs.memory.feedback:DecayedFeedback",
        parameters=(
            Parameter("inner", "codec", REQUIRED, "the codec that sends the sum"),
            Parameter("decay", "float", 0.95, "the share of what was left out that is added", least=0, most=1),
        ),
        summary="error feedback that forgets: a momentum from which what is sent is taken; for gradients",
        example="ef-decay(topk-chunk(0.0156))",
        bits="inner",
        state="sender: one fp32 tensor per micro-batch and phase, and the inner codec's",
        source="DeMo: Peng et al., arXiv 2411.19870; SparseLoCo: Sarfi et al., arXiv 2508.15706",
        work=_FEEDBACK,
        law="none",
    ),
    CodecRow(
        name="dgc",
        for_gradients=True,
        forward="testbed.codecs.memory.feedback:MomentumFeedback",
        parameters=(
            Parameter("inner", "codec", REQUIRED, "the sparsifier that sends the sum"),
            Parameter("momentum", "float", 0.9, "of the gradients, before anything is left out", least=0, most=1),
        ),
        summary="error feedback of momentum, which is forgotten where something is sent; for gradients",
        example="dgc(topk(0.01))",
        bits="inner",
        state="sender: two fp32 tensors per micro-batch and phase, and the inner codec's",
        source="deep gradient compression: Lin et al., ICLR 2018",
        work=Work(
            Counts(
                "32 + inner.encode + inner.decode",
                "16 + inner.encode + inner.decode",
                "6 + inner.encode + inner.decode",
            ),
            _FEEDBACK.decode,
        ),
        law="none",
    ),
    CodecRow(
        name="lazy",
        forward="testbed.codecs.memory.feedback:LazyErrorFeedback",
        parameters=(Parameter("inner", "codec", REQUIRED, "the codec that sends the sum"),),
        summary="lazy error propagation: what a message left out is added to the next of the same step; for gradients",
        example="lazy(powersgd(4))",
        bits="inner",
        state="sender: one fp32 tensor per phase, and the inner codec's",
        source="Optimus-CC: Song et al., ASPLOS 2023, there with powersgd on gradients only",
        work=_FEEDBACK,
        law="none",
    ),
    CodecRow(
        name="ef21",
        forward="testbed.codecs.memory.delta:Delta",
        parameters=(Parameter("inner", "codec", REQUIRED, "the codec that sends the difference"),),
        summary="both ends hold A; C(X - A) is sent and added to A, which is what the receiver uses",
        example="ef21(topk(0.1))",
        bits="inner + 32/n",
        state="one fp32 tensor per micro-batch and phase at each end, both directions, and the inner codec's",
        source="EF21: Richtarik et al., NeurIPS 2021, which with A = 0 at first is `delta` with a sparsifier inside",
        work=_DELTA,
        law="none",
    ),
)
