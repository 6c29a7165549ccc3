"""Play the job of an 800M model at 132,000 tokens over links as formulas, without computing anything: what links allow.

python experiments/context_parallel/scale.py [--output FOLDER]

The sizes are those of Llama 3.2 1B with 8 layers, which is one with about 800M parameters; the paper's own are not in
what was read of it. Nothing takes time but bytes, so no implementation of these exchanges can be faster.
"""

import argparse
import itertools
from collections import defaultdict
from collections.abc import Callable

from testbed import csv_rows
from testbed.jobs.actions import Key, Sizes
from testbed.jobs.context import ContextParallel
from testbed.jobs.loop import Clock, Loop

TOKENS, NODES, LAYERS, WIDTH, PARAMETERS = 132_000, 8, 8, 512, 749_000_000
BF16 = 2
STEPS = 2


class Star:
    """Each node has a link of its own, as fast both ways; a message begins to arrive while it is being sent."""

    def __init__(self, rate_bps: float, delay_ns: int) -> None:
        self._ns_per_byte, self._delay_ns = 8e9 / rate_bps, delay_ns
        self._free: dict[tuple[str, int], int] = defaultdict(int)

    def carry(self, clock: Clock, source: int, target: int, size: int, deliver: Callable[[], None]) -> None:
        """Deliver when both links have carried the message."""
        took = round(size * self._ns_per_byte)
        left = self._free["up", source] = max(clock.now_ns, self._free["up", source]) + took

        def cross() -> None:
            down = self._free["down", target] = max(left, self._free["down", target] + took)
            clock.at(down + 2 * self._delay_ns, deliver)

        clock.at(left, cross)  # who has left first comes first at a shared downlink

    def take(self, clock: Clock, source: int, target: int, size: int, deliver: Callable[[], None]) -> None:
        """Deliver at once."""
        deliver()


def seconds(exchange: str, rate_bps: float, kept: float, *, backward: bool = True, weights: bool = False) -> float:
    """Return how long a step takes where keys and values are `kept` of their bytes as bf16, with or without gradients
    of keys and values, and with or without those of the weights.
    """
    job = ContextParallel.model_validate(
        {"kind": "context", "nodes": NODES, "layers": LAYERS, "exchange": exchange}, strict=True
    )

    def size(key: Key) -> int:
        if key.what in ("weights", "sum"):
            return PARAMETERS * BF16 // NODES if weights else 0
        return int(kept * 2 * TOKENS // NODES * WIDTH * BF16) if backward or key.what == "keys" else 0

    loop = Loop(
        [job.program(place) for place in range(NODES)],
        [Sizes(size)] * NODES,
        links=Star(rate_bps, 10_000_000),
        goes_on=lambda place, step: step + 1 < STEPS,
    )
    loop.run()
    return loop.now_ns / 1e9 / STEPS


def main(asked: argparse.Namespace) -> None:
    """Write scale.csv."""
    fields, rows = ["exchange", "rate_bps", "kept", "backward", "weights", "step_s", "tokens_per_s"], []
    crossing = [(False, False), (True, False), (True, True)]
    settings = itertools.product(("direct", "chain"), (100e9, 300e6), (1.0, 0.05), crossing)
    for exchange, rate, kept, (backward, weights) in settings:
        took = seconds(exchange, rate, kept, backward=backward, weights=weights)
        rows.append((exchange, int(rate), kept, backward, weights, f"{took:.5g}", f"{TOKENS / took:.5g}"))
    csv_rows.write_rows(asked.output / "scale.csv", fields, rows)


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, __file__)
