"""Play the setups of others, told as numbers, through our program of decoding: `python experiments/decode/setups.py`.

No model is run: messages are as long as a token's hidden state in the codec that a source names, work takes what the
source's own run without a network implies, and links are what it states. This writes setups.csv: a line for each setup
with the published tokens/s, and those of ours, played in the guest. Where guesses are accepted is stated, too.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from testbed import csv_rows, profiles
from testbed.jobs.actions import Action, Encoded, Key, Message, Work
from testbed.jobs.decode import Decoding
from testbed.player.split import step_split
from testbed.player.virtual import OverLinks, guest_lab, play_virtual
from testbed.runtime.frame import HEADER_BYTES
from testbed.trace.tracing import TracedJob

STEPS, TOKENS = 6, 16
"""Steps that are played, of which the last ones count, and tokens that each decodes of a request."""


class Setup(NamedTuple):
    """One run, of others or ours."""

    group: str
    name: str
    link: str
    stages: int
    token_bytes: int
    """A token's hidden state at a boundary, coded."""
    forward_s: tuple[float, ...]
    """What a token takes at each stage, once for all of them or one by one."""
    published: float | None
    """Tokens per second."""
    requests: int = 1
    speculate: int = 0
    accepted: float = 0.0
    """Of the guesses of a turn, on average."""
    draft_s: float = 0.0
    """For all guesses of a turn."""


def petals() -> Iterator[Setup]:
    """BLOOM-176B: 14,336 values of 8 bits a token; stages are the client and its servers. What they compute is what the
    first row leaves when its own hops, of less than 5 ms round trip (here 4), are taken away.
    """
    rows = {3: (1.71, 1.66, 1.23), 12: (1.24, 1.24, 0.57)}
    links = ("link(1Gbit, 1ms, buffer=1s)", "link(100Mbit, 1ms, buffer=1s)", "link(100Mbit, 25ms, buffer=1s)")
    for servers, speeds in rows.items():
        compute = (1 / speeds[0] - (servers + 1) * (0.002 + 2 * 14_336 * 8 / 1e9)) / servers
        for link, speed in zip(links, speeds, strict=True):
            yield Setup("Petals", f"{servers} servers", link, servers + 1, 14_336, (0.0, *[compute] * servers), speed)


def llama_cpp() -> Iterator[Setup]:
    """TinyLlama 1.1B in fp16 on a GTX 1660 across gigabit Ethernet; 74.83 tokens/s on the same card without a network.
    The server sends 32,000 logits of 4 bytes, not a token, so here they are the message.
    """
    for name, size in (("tokens come back", 2 * 2048), ("logits come back", 4 * 32_000)):
        yield Setup("llama.cpp", name, "link(1Gbit, 0.05ms, buffer=1s)", 2, size, (0.0, 1 / 74.83), 42.0)


def exo() -> Iterator[Setup]:
    """Llama 4 over 4 Mac Studios with Thunderbolt 5, and Llama 3.2 3B over a MacBook Pro and a Mac mini: two bytes a
    value, and stages take their share of what the whole model takes on one of the machines.
    """
    cable = "link(10Gbit, 0.01ms, buffer=1s)"
    for name, alone, speed in (
        ("Scout 4-bit", 46.7, 36.8),
        ("Scout 8-bit", 30.3, 26.0),
        ("Maverick 4-bit", 53.1, 41.6),
    ):
        yield Setup("exo, 4 Mac Studios", name, cable, 4, 2 * 5120, (1 / alone / 4,) * 4, speed)
    halves = (1 / 40 / 2, 1 / 20 / 2)
    yield Setup("exo, two Macs", "Llama 3.2 3B", "link(300Mbit, 1ms, buffer=1s)", 2, 2 * 3072, halves, 24.0)


def speculating() -> Iterator[Setup]:
    """DSD: N nodes save (N - 1) t1 (k - 1) / k of communication a token, where k tokens come of a turn."""
    for stages, delay_ms in itertools.product((2, 4, 8), (5, 20, 50)):
        link = f"link(100Mbit, {delay_ms / 2:g}ms, buffer=1s)"
        plain = Setup("speculating", "no guesses", link, stages, 2 * 4096, (0.004,) * stages, None)
        yield plain
        for more in (1, 2, 4):
            yield plain._replace(name=f"k = {1 + more}", speculate=more, accepted=float(more), draft_s=0.001 * more)


class Stated:
    """A node without maths: what it makes is as long as stated."""

    def __init__(self, setup: Setup, job: Decoding) -> None:
        self._setup, self._job = setup, job

    def work(self, what: str, key: Key, value: Any) -> int | None:
        """Accept as many guesses as are stated."""
        if what != "verify":
            return None
        return min(round(self._setup.accepted), self._job.guesses(key.part % self._job.tokens))

    def encode(self, key: Key, value: Any) -> Encoded:
        """Return something as long as a token, or what is guessed and a token: a prompt has one token."""
        size = self._setup.token_bytes * (1 + self._setup.speculate) if key.what == "activation" else 8
        return Encoded(range(HEADER_BYTES + size))

    def decode(self, messages: Sequence[Message]) -> Sequence[None]:
        """Return no values."""
        return [None] * len(messages)


def job_of(setup: Setup) -> TracedJob:
    """Return the job that is played."""
    draft = "gpt2-nano" if setup.speculate else None
    job = Decoding(
        kind="decode",
        stages=setup.stages,
        requests=setup.requests,
        prompt=1,
        tokens=TOKENS,
        draft=draft,
        speculate=setup.speculate,
    )
    took = setup.forward_s if len(setup.forward_s) > 1 else setup.forward_s * setup.stages

    def cost(place: int, action: Action) -> int | None:
        if not isinstance(action, Work) or action.what == "verify":
            return None
        return round(1e9 * (setup.draft_s if action.what == "draft" else took[place]))

    nodes = [Stated(setup, job) for _ in range(setup.stages)]
    return TracedJob(job, nodes, cost, goes_on=lambda place, step: step + 1 < STEPS)


def play(setups: Sequence[Setup]) -> list[float]:
    """Return the tokens per second of each setup, played on the virtual clock."""
    traces = [job_of(setup).trace() for setup in setups]
    labs = [guest_lab("star", [profiles.load_profile(setup.link)], setup.stages) for setup in setups]
    found = play_virtual(list(map(OverLinks, traces, labs)), guests=2)
    steps = [step_split(trace, played).step_ns for trace, played in zip(traces, found, strict=True)]
    return [1e9 * setup.requests * TOKENS / ns for setup, ns in zip(setups, steps, strict=True)]


def main(asked: argparse.Namespace) -> None:
    """Write setups.csv."""
    setups = [*petals(), *llama_cpp(), *exo(), *speculating()]
    if asked.quick:
        setups = [*llama_cpp(), *itertools.islice(speculating(), 4)]
    rows = [
        {**each._asdict(), "forward_s": round(sum(each.forward_s), 6), "ours": round(speed, 4)}
        for each, speed in zip(setups, play(setups), strict=True)
    ]
    csv_rows.write_rows(asked.output / "setups.csv", tuple(rows[0]), [tuple(row.values()) for row in rows])


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, __file__)
