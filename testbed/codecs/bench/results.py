"""The results of a benchmark of codecs, and the codecs that it measures unless told otherwise. No torch here."""

from __future__ import annotations

from testbed.frozen import Frozen
from testbed.message_key import Direction

SLOW_BPS, FAST_BPS = 80_000_000, 1_000_000_000
"""The two links that a codec's time is set beside, in bits per second of payload."""
BENCHED = (
    "fp32", "bf16", "fp16", "fp8",
    "int8", "int6(group=64)", "int4", "int4(group=64)", "int4(group=32, asymmetric)",
    "int3(group=64)", "int2(group=64)", "int1",
    "blockwise-8", "hadamard(int4(group=64))", "tah", "acsgd",
    "topk(0.1)", "topk(0.1, tensor)", "topk(0.02)", "columns(0.1)", "mask(0.1)", "powersgd(8)", "powersgd(32)",
    "ef(topk(0.1))", "ef21(topk(0.1))",
    "delta-int8", "delta(int4(group=64))", "onebit", "twobit", "lowrank", "compactfusion",
    "zstd(bf16)", "zstd(int8)", "entropy(int4(group=64))",
    "subspace", "subspace(reparametrised)", "mapl", "bottleneck", "bottleneck(maxout)", "autoencoder", "resbm",
)  # fmt: skip


class CodecCost(Frozen):
    """One codec on one direction's saved tensors, with one thread; sizes and times are of one message."""

    codec: str
    package: str = ""
    """The package that it is of, with its version; empty for ours."""
    direction: Direction
    values: int
    encode_s: float
    """Medians of processor time."""
    decode_s: float
    payload_bytes: int
    bits_per_value: float
    """The mean over all messages, headers included."""
    relative_error: float | None
    """|decoded - x| / |x| over all messages. None where the codec changes the model: it is for the training to find."""
    layers_s: float | None = None
    """What of encode and decode the codec's own layers in the model take; None where it has none."""

    @property
    def codec_s(self) -> float:
        """Processor time of encode and decode together."""
        return self.encode_s + self.decode_s

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the fp32 tensor per second of encode and decode."""
        return 4 * self.values / self.codec_s

    def wire_s(self, rate_bps: float) -> float:
        """Return the time that the payload takes on a link of that rate."""
        return 8 * self.payload_bytes / rate_bps

    @property
    def share_of_wire(self) -> float:
        """Codec time over the time that the tensor takes as bf16 at 80 Mbit/s; the rule is 0.1 at most."""
        return self.codec_s / (16 * self.values / SLOW_BPS)

    @property
    def break_even_bps(self) -> float:
        """The rate at which the codec takes the time that it saves on the wire; above it bf16 is faster.

        0 where it saves nothing.
        """
        return max(0.0, 16 * self.values - 8 * self.payload_bytes) / self.codec_s


class CodecBenchmark(Frozen):
    """One run of the benchmark."""

    machine: str
    tensors: str
    """Where the tensors come from."""
    results: tuple[CodecCost, ...]
    failed: dict[str, str]
    """Codecs that could not be measured, and why."""
