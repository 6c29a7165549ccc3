"""The methods that are compared: how each trains, and how its messages cross the links."""

from typing import NamedTuple

from testbed.spec import Exchange, OuterSpec, StreamingSpec
from testbed.studies.stacked_text import TextMethod

NESTEROV = OuterSpec(learning_rate=0.7, momentum=0.9, nesterov=True)
"""DiLoCo's outer optimiser as published, for 500 local steps."""
OUTER_RATES = (1.4, 0.7, 0.35, 0.175, 0.0875)
"""That are tried with it."""
MOMENTA = (0.9, 0.0)
"""That are tried where aggregates come late or in parts: staleness and error feedback act as momentum themselves."""
MEAN = OuterSpec(learning_rate=1.0, momentum=0.0, nesterov=False)
"""SparseLoCo's: go on from the mean."""
ALL_REDUCE, BF16 = "all-reduce fp32", "all-reduce bf16"


class MethodRow(NamedTuple):
    """One method."""

    name: str
    family: str
    """What it is called, whatever its numbers."""
    method: TextMethod
    exchange: Exchange
    """all-reduce where messages can be added up as they are; else every worker sends its message to all."""
    first_rate: float
    """The middle of the learning rates that are tried first, from a pilot of one seed."""
    outer_rates: tuple[float, ...] = ()
    """Of the outer optimiser, each tried with learning rates of its own; none: as `method` says."""
    momenta: tuple[float, ...] = ()
    """AdamW's first beta, likewise."""
    quick: bool = False
    """It is in the short form."""

    @property
    def variants(self) -> list[TextMethod]:
        """The method with each of its outer rates and momenta."""
        method, outer = self.method, self.method.outer
        if outer is not None and self.outer_rates:
            outers = [outer.model_copy(update={"learning_rate": rate}) for rate in self.outer_rates]
            return [method._replace(outer=each) for each in outers]
        return [method._replace(betas=(beta, method.betas[1])) for beta in self.momenta] or [method]


def _late(ratio: float, staleness: int, first_rate: float, *, quick: bool = False) -> MethodRow:
    name, family = f"top-k {100 * ratio:g} %", "top-k"
    if staleness:
        name, family = f"DD-EF ({ratio:g}, {staleness})", "DD-EF"
    method = TextMethod(f"ef(topk({ratio:g}, tensor))", "values", staleness=staleness)
    return MethodRow(name, family, method, "all-to-all", first_rate, momenta=MOMENTA, quick=quick)


def _low_rank(rank: int) -> MethodRow:
    method = TextMethod(f"ef(powersgd({rank}))", "matrices")
    return MethodRow(f"PowerSGD {rank}", "PowerSGD", method, "all-to-all", 0.004)


def _one_bit(warmup: int) -> MethodRow:
    """1-bit Adam; published are 15 to 25 % of all batches until the second moment is frozen."""
    method = TextMethod(f"warmup(ef(onebit), {warmup})", "matrices", frozen_after=warmup)
    return MethodRow("1-bit Adam", "1-bit Adam", method, "all-to-all", 0.008)


def _demo(kept: int) -> MethodRow:
    codec = f"ef-decay(dct(topk-chunk({kept / 1024:g}, 1024)), 0.999)"
    method = TextMethod(codec, "rows", betas=(0.0, 0.0), clip_norm=1e9)  # the sign is the same for any length
    return MethodRow(f"DeMo {kept}", "DeMo", method, "all-to-all", 0.004)


def _diloco(local_steps: int, *, quick: bool = False) -> MethodRow:
    method = TextMethod("fp32", "values", local_steps=local_steps, outer=NESTEROV)
    return MethodRow(
        f"DiLoCo {local_steps}", "DiLoCo", method, "all-reduce", 0.004, outer_rates=OUTER_RATES, quick=quick
    )


def _streaming(local_steps: int) -> MethodRow:
    """Four fragments; one is exchanged every quarter of the local steps, and applied a quarter later."""
    method = TextMethod(
        "int4(group=32)",
        "matrices",
        staleness=1,
        local_steps=local_steps // 4,
        outer=NESTEROV,
        streaming=StreamingSpec(fragments=4, mixing=0.5),
    )
    return MethodRow(
        f"Streaming DiLoCo {local_steps}", "Streaming DiLoCo", method, "all-to-all", 0.008, outer_rates=OUTER_RATES
    )


def _sparse_loco(local_steps: int, *, quick: bool = False) -> MethodRow:
    codec = "ef-decay(topk-chunk(0.0156), 0.95)"
    method = TextMethod(codec, "values", local_steps=local_steps, outer=MEAN)
    return MethodRow(f"SparseLoCo {local_steps}", "SparseLoCo", method, "all-to-all", 0.016, quick=quick)


METHODS: tuple[MethodRow, ...] = (
    MethodRow(ALL_REDUCE, "all-reduce", TextMethod("fp32", "values"), "all-reduce", 0.008, quick=True),
    MethodRow(BF16, "all-reduce", TextMethod("bf16", "values"), "all-reduce", 0.008),
    _diloco(8, quick=True),
    _diloco(32),
    _streaming(8),
    _streaming(32),
    _sparse_loco(8, quick=True),
    _sparse_loco(32),
    _late(0.01, 0, 0.008),
    _late(0.01, 1, 0.004, quick=True),
    _demo(32),
    _low_rank(4),
    _one_bit(64),
)
