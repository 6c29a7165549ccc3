"""The results of a codec benchmark, and the codecs measured by default. No torch here."""

from __future__ import annotations

from testbed.frozen import Frozen
from testbed.message_key import Direction

SLOW_BPS, FAST_BPS = 80_000_000, 1_000_000_000
"""The two links with which a codec's time is compared, in bits per second of payload."""
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
    """Package and version; empty for our codecs."""
    direction: Direction
    values: int
    encode_s: float
    """Medians of processor time."""
    decode_s: float
    payload_bytes: int
    bits_per_value: float
    """The mean over all messages, headers included."""
    relative_error: float | None
    """|decoded - x| / |x| over all messages. None where the codec changes the model: only training shows its error."""
    layers_s: float | None = None
    """The part of encode and decode spent in the codec's layers in the model; None without such layers."""

    @property
    def codec_s(self) -> float:
        """Processor time of encode and decode together."""
        return self.encode_s + self.decode_s

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the fp32 tensor per second of encode and decode."""
        return 4 * self.values / self.codec_s

    def wire_s(self, rate_bps: float) -> float:
        """Return the payload's time on a link of that rate."""
        return 8 * self.payload_bytes / rate_bps

    @property
    def share_of_wire(self) -> float:
        """Codec time relative to the tensor's bf16 wire time at 80 Mbit/s; the limit is 0.1."""
        return self.codec_s / (16 * self.values / SLOW_BPS)

    @property
    def break_even_bps(self) -> float:
        """The rate at which the codec's time equals its saving on the wire; above it bf16 is faster.

        0 without a saving.
        """
        return max(0.0, 16 * self.values - 8 * self.payload_bytes) / self.codec_s


class CodecBenchmark(Frozen):
    """One run of the benchmark."""

    machine: str
    tensors: str
    """Source of the tensors."""
    results: tuple[CodecCost, ...]
    failed: dict[str, str]
    """Codecs that could not be measured, with reasons."""
