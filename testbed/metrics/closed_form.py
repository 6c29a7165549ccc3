"""What a schedule takes by arithmetic, where frames take no time and all stages take equally long: what a paced pipeline on
unshaped links is held against, and the event simulation too.
"""

from __future__ import annotations

from testbed.spec import PipelineSpec


def unshaped_step_s(pipeline: PipelineSpec, *, forward_s: float, backward_s: float, update_s: float = 0.0) -> float:
    """A step in seconds: `accumulation * (microbatches + stages - 1) * (forward_s + backward_s) + update_s`.

    The same for gpipe (Huang et al. 2019, section 2.3) and 1f1b (Narayanan et al. 2021, section 2.2), which differ in what they
    hold in memory. Passes do not overlap: the first stage, with which a pass begins, is the last to end it. With fewer
    micro-batches in flight than stages 1f1b may also wait within a pass, and this is only a lower bound.
    """
    rounds = pipeline.accumulation * (pipeline.microbatches + pipeline.stages - 1)
    return rounds * (forward_s + backward_s) + update_s
