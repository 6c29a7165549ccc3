"""Over real links: no link changes a bit of what programs sample, and what crosses is what was said to."""

from __future__ import annotations

import pytest
import torch
from test_diffusion import lively

from testbed import vm
from testbed.diffusion.dit import ROWS, TOKENS, Dit, DitSize, sample, start
from testbed.diffusion.experts import BLOCK, ExpertProgram, ExpertSchedule, sample_experts
from testbed.diffusion.over_links import sample_live
from testbed.diffusion.programs import Costs, Program, trace_of
from testbed.diffusion.sample_in_guest import LiveSampling
from testbed.diffusion.workers import Codecs, Workers
from testbed.jobs.sampling import sent_parts
from testbed.metrics.links import Pipes
from testbed.net.lab import LabSpec
from testbed.profiles import load_profile
from testbed.trace.simulate import ideal_step_ns

LINKS = {"slow": "link(2Mbit, 20ms)", "fast": "link(1Gbit, 100us)", "lossy": "link(20Mbit, 5ms, loss=3%)"}
STEPS, IMAGES, WORK_NS = 2, 4, 1_000_000
EXPERT_IMAGES = 4 * BLOCK
NAMES = ("ring", "gather", "displaced", "pipefusion", "asyncdiff")
ONE_FLOW = ("ring", "pipefusion", "asyncdiff")
"""In which a worker sends to one other at a time. Where flows share a link, pipes are no floor: in them a message waits
for a whole other one, while packets of both cross in turn."""


def model() -> Dit:
    """A model with experts; the programs without take the shared one for the whole feed-forward part."""
    return lively(DitSize(layers=4, width=16, heads=2, experts=4))


def sampling(link: str, program: Program | ExpertProgram, codec: str = "fp32", boundary: str = "fp32") -> LiveSampling:
    nodes = max(2, program.workers)
    lab = LabSpec(
        topology="star",
        profiles=(load_profile(LINKS[link]),) * nodes,
        nodes=nodes,
        engine="netem",
        engine_reason="all that the guest has",
    )
    images = EXPERT_IMAGES if isinstance(program, ExpertProgram) else IMAGES
    return LiveSampling(lab=lab, program=program, images=images, codec=codec, boundary=boundary, work_ns=WORK_NS)


def synchronous(link: str, workers: int) -> list[LiveSampling]:
    layers = model().size.layers
    dense = [Program(name, workers, layers, STEPS, TOKENS, ROWS, warmup=STEPS) for name in NAMES]  # type: ignore[arg-type]
    return [sampling(link, program) for program in (*dense, ExpertProgram(ExpertSchedule(0), workers, layers, STEPS))]


def coded(link: str) -> list[LiveSampling]:
    """Return samplings that are late, and whose codecs remember."""
    layers, steps = model().size.layers, 2 * STEPS
    residual = "compactfusion(onebit, first=half)"
    made = [
        sampling(link, Program(name, 3, layers, steps, TOKENS, ROWS, patches=2), residual, "int8")  # type: ignore[arg-type]
        for name in NAMES
    ]
    return [*made, sampling(link, ExpertProgram(ExpertSchedule(1, "deep", "low"), 3, layers, steps), "fp16")]


def in_one_process(of: LiveSampling, dit: Dit) -> tuple[torch.Tensor, dict]:  # type: ignore[type-arg]
    request, program = start(of.images, 0), of.program
    if isinstance(program, ExpertProgram):
        found = sample_experts(dit, *request, program.steps, program.schedule, workers=program.workers, codec=of.codec)
        return found.images, found.frame_bytes
    sampled = Workers(dit, program, Codecs(of.codec, of.boundary)).sample(*request)
    return sampled.images, dict(sampled.frame_bytes)


@pytest.mark.slow
@pytest.mark.clock_kernel
@pytest.mark.timeout(3000)
def test_no_link_changes_a_bit_and_what_crosses_is_what_was_said_to() -> None:
    dit, kernel = model(), vm.find_clock_kernel()
    assert kernel is not None
    asked = [each for link in LINKS for workers in (1, 2, 3, 4) for each in synchronous(link, workers)]
    late = [each for link in ("fast", "lossy") for each in coded(link)]
    found = sample_live(dit, [*asked, *late], kernel)
    unsplit = sample(dit, *start(IMAGES, 0), STEPS)
    experts = sample_experts(dit, *start(EXPERT_IMAGES, 0), STEPS, ExpertSchedule(0)).images
    for of, live in zip(asked, found, strict=False):
        assert torch.equal(live.images, experts if isinstance(of.program, ExpertProgram) else unsplit), of
    for of, live in zip([*asked, *late], found, strict=True):
        images, frame_bytes = in_one_process(of, dit)
        assert torch.equal(live.images, images), of
        assert live.frame_bytes == frame_bytes, of
        if of.program.workers == 1:
            assert not live.sends
            continue
        actions = of.program.actions()
        crossed = [frame_bytes[part] for _, part in sent_parts(actions)]
        assert live.sends == len(crossed)
        wire = sum(node.sent_bytes for node in live.counters)
        assert sum(crossed) < wire  # headers of packets, acknowledgements, what was lost and sent again
        trace = trace_of(actions, Costs(lambda action: WORK_NS, frame_bytes.__getitem__), requests=1)
        ideal = ideal_step_ns(trace, Pipes("star", list(of.lab.profiles), of.program.workers), 1) / 1e9
        if of.program.workers == 2 or getattr(of.program, "name", "experts") in ONE_FLOW:
            assert live.took_ns / 1e9 > 0.999 * ideal
