"""The cells on which the kernel, the formula and ns-3 are compared: jobs, and links with and without loss."""

from __future__ import annotations

from typing import NamedTuple

from testbed.profiles import Bernoulli, LinkProfile, load_profile
from testbed.spec import Topology
from testbed.trace.format import RECEIVE, SEND, WORK, Lane, Trace
from testbed.trace.synthetic import pipeline_trace

JOBS = ("pipeline", "exchange")
LOSSLESS = ("us-fixed", "consumer-80mbps", "cable", "dsl", "fibre", "virginia-frankfurt")
LOSSY = (("consumer-80mbps", 0.001), ("consumer-80mbps", 0.01), ("consumer-10mbps", 0.0))
"""Shares of packets lost by chance; at 10 Mbit/s both jobs overflow the queue."""


class Cell(NamedTuple):
    """A job over equal links."""

    job: str
    topology: Topology
    profile: LinkProfile

    @property
    def lossy(self) -> bool:
        """Whether its links lose packets, by chance or because a queue overflows."""
        return self.profile.congestion_control == "reno"


def job_trace(job: str, steps: int) -> Trace:
    """Return a job: a pipeline of 3 stages, or 4 nodes that each send a message to every other."""
    if job == "pipeline":
        return pipeline_trace(
            stages=3,
            microbatches=4,
            steps=steps,
            message_bytes=131_072,
            forward_ns=20_000_000,
            backward_ns=40_000_000,
            update_ns=5_000_000,
        )
    return exchange_trace(4, steps, 65_536, 50_000_000)


def exchange_trace(nodes: int, steps: int, size: int, work_ns: int) -> Trace:
    """Return a job in which every node works, sends `size` bytes to each other node, and waits for theirs."""
    lanes = tuple(Lane(node, "worker") for node in range(nodes))
    for step in range(steps):
        for lane in lanes:
            others = [(lane.node + far) % nodes for far in range(1, nodes)]
            lane.add(WORK, value=work_ns)
            for peer in others:
                lane.add(SEND, label=1, peer=peer, tag=step, value=size)
            for peer in others:
                lane.add(RECEIVE, label=1, peer=peer, tag=step)
            lane.end_step()
    return Trace(tuple(f"node {n}" for n in range(nodes)), ("work", "message"), lanes, {"maker": "exchange"})


def cells() -> list[Cell]:
    """Return 12 cells whose links lose nothing, and 6 whose links do."""
    links = [load_profile(name) for name in LOSSLESS] + [lossy(load_profile(name), share) for name, share in LOSSY]
    return [Cell(job, "star", link) for link in links for job in JOBS]


def lossy(profile: LinkProfile, share: float) -> LinkProfile:
    """Return the profile with independent losses in both directions, if any, and reno."""
    loss = Bernoulli(probability=share) if share else None
    up, down = (pipe and pipe.model_copy(update={"loss": loss}) for pipe in (profile.up, profile.down))
    name = f"{profile.name}, {share:.1%} lost" if share else f"{profile.name}, overflows"
    return profile.model_copy(update={"up": up, "down": down, "name": name, "congestion_control": "reno"})
