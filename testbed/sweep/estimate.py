"""Estimates how long a run will take: from earlier runs in the result folder, or from a model of the schedule."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from testbed import devices, results
from testbed.codecs.catalogue import placement as codecs
from testbed.devices.device import Precision
from testbed.devices.durations import durations
from testbed.errors import TestbedError
from testbed.metrics.ideal import unshaped_step_s
from testbed.results import Run
from testbed.spec import Cell, Paced, PipelineSpec, Recipe, TextSpec, link_count, text_of
from testbed.sweep.bounded_steps import expected_step
from testbed.sweep.live_session import network_of
from testbed.workloads import models as workloads

_AROUND_S = 7.0
"""Time of a run outside its steps: two certificates, and its share of building the lab and loading torch. Measured on
2 cores with 3 stages."""
_PLAYING_S = 2.0
"""Time of a run on the virtual clock after its training. Measured on a busy machine, 3 stages, 10 steps: 0.3 to 6 s."""
_HEADERS = 1.06
"""Ratio of wire bytes to payload bytes, measured with frames of some kilobytes."""


class RunEstimate(NamedTuple):
    """Estimated duration of one run, in seconds of this machine."""

    seconds: float
    source: str
    """Basis of the estimate."""


class _Past(NamedTuple):
    cell: Cell
    seconds: float
    """The whole run, certificates included."""
    step_s: float
    """Time of a step in the lab."""

    def extended(self, steps: int) -> float:
        """Return the duration of a run of `steps` steps."""
        return self.seconds + (steps - self.cell.training.steps) * self.step_s


class Estimator:
    """Reads a result folder at most once, and estimates any cell."""

    def __init__(self, folder: Path, host: Callable[[Precision], devices.ComputeDevice] | None) -> None:
        """`host` returns the speed of this machine; called only if the model needs it. None: the speed is unknown."""
        self._folder, self._host = folder, host

    @cached_property
    def _past(self) -> list[_Past]:
        past = []
        for run in results.runs(self._folder):
            with suppress(TestbedError):  # of an older version; the folder may hold anything
                past.append(_past_of(run))
        return list(filter(None, past))

    def estimate(self, cell: Cell) -> RunEstimate | None:
        """Estimate how long a run of the cell will take, without training if it is played; None if unknown."""
        if cell.timing == "played" and cell.clock == "virtual":
            return RunEstimate(_PLAYING_S, "playing alone")
        if same := [past.seconds for past in self._past if past.cell.id == cell.id]:
            return RunEstimate(median(same), "its own runs")
        alike = [past for past in self._past if _shape(past.cell) == _shape(cell)]
        if nearest := [past for past in alike if past.cell.codec == cell.codec] or alike:
            return RunEstimate(mean(past.extended(cell.training.steps) for past in nearest), "runs over its network")
        if self._host is None and not isinstance(cell.compute, Paced):
            return None
        steps = cell.training.steps if cell.timing == "played" else _steps(cell)
        return RunEstimate(_AROUND_S + self._step_s(cell) * steps, "a model")

    def training_s(self, recipe: Recipe) -> float:
        """Estimate the time to train a recipe in one process, on one core; needs `host`."""
        return self._maths_s(recipe) * _steps(recipe)

    def _maths_s(self, of: Cell | Recipe) -> float:
        """Estimate the compute time of a step, all stages together, on one core."""
        assert self._host is not None
        real = durations(self._host(of.workload.precision), of.workload, of.pipeline)
        parts = of.pipeline.microbatches * of.pipeline.accumulation
        parts *= of.parallelism.batches_per_step
        return parts * (sum(real.forward_ns) + sum(real.backward_ns)) / 1e9

    def _step_s(self, cell: Cell) -> float:
        """Estimate a step in the lab: the maximum of the schedule, this machine's cores and the slowest link, plus the
        latency of one frame.
        """
        if not isinstance(cell.parallelism, PipelineSpec):
            return expected_step(cell).seconds
        compute, pipeline = cell.compute, cell.pipeline
        if isinstance(compute, Paced):
            forward_ns, backward_ns, update_ns = compute.forward_ns, compute.backward_ns, compute.update_ns
            working_s = 0.0
        else:
            assert self._host is not None
            real = durations(self._host(cell.workload.precision), cell.workload, pipeline)
            forward_ns, backward_ns, update_ns = real.forward_ns, real.backward_ns, max(real.update_ns)
            # Played stages do not share a processor.
            working_s = self._maths_s(cell) / len(os.sched_getaffinity(0)) if cell.timing == "live" else 0.0
        schedule_s = compute.dilation * unshaped_step_s(
            pipeline, forward_s=max(forward_ns) / 1e9, backward_s=max(backward_ns) / 1e9, update_s=update_ns / 1e9
        )
        wire_s, way_s = _wire_s(cell)
        return max(schedule_s, working_s, wire_s) + way_s


def _steps(of: Cell | Recipe) -> float:
    """Return the length of a run in training steps, with its evaluations converted to steps."""
    training = of.training
    evaluations = 1 + (training.steps // training.evaluate_every if training.evaluate_every else 0)
    batches = workloads.validation_tokens(of.workload) / of.workload.batch_tokens
    return training.steps + evaluations * batches * (1 + training.evaluate_uncompressed) / 3


def _wire_s(cell: Cell) -> tuple[float, float]:
    """Return two times: that of one step's frames on the busiest link direction, and that of one frame over all links
    and back.
    """
    pipeline = cell.pipeline
    parts, stages = pipeline.microbatches * pipeline.accumulation, pipeline.stages
    text = text_of(cell)
    values = text.batch_size // parts * text.sequence_length * workloads.hidden_width(text)
    bits = values * codecs.parse_placement(cell.codec).nominal_bits * _HEADERS
    busiest = way = 0.0
    for index in range(link_count(cell.topology, stages)):
        # in a star, a middle stage's uplink carries activations to one neighbour and gradients to the other
        frames = 2 if cell.topology == "star" and 0 < index < stages - 1 else 1
        for pipe in (cell.links[index].up, cell.links[index].down) if stages > 1 else ():
            if pipe is not None:
                busiest = max(busiest, parts * frames * bits / pipe.rate_bps)
                way += bits / pipe.rate_bps + pipe.delay_ns / 1e9
    return busiest, way


def _shape(cell: Cell) -> tuple[Any, ...]:
    """Return the fields that determine the time of a step, except the codec."""
    workload = cell.workload
    if isinstance(workload, TextSpec):
        workload = workload.model_copy(update={"text": "", "order": "fixed", "training_sequences": None})
    return (network_of(cell), cell.compute, workload, cell.pipeline)


def _past_of(run: Run) -> _Past | None:
    """Read an earlier run; None if it failed, or has no duration."""
    summary = run.summary
    if summary is None or summary.status != "ok" or summary.ended not in (None, "steps") or summary.step_s is None:
        return None
    after, began = run.certificates.after, run.environment.get("taken_at")
    if after is None or began is None:
        return None
    seconds = (datetime.fromisoformat(after.taken_at) - datetime.fromisoformat(began)).total_seconds() + after.seconds
    return _Past(run.cell, seconds, summary.step_s * summary.dilation)


def on_this_machine(cell: Cell, host: devices.ComputeDevice) -> str:
    """Describe in one sentence how this machine keeps the pace of a cell."""
    assert isinstance(cell.compute, Paced)
    duty, needed = devices.cores_needed(cell, host) / cell.compute.dilation, devices.needed_dilation(cell, host)
    at = f" at dilation {cell.compute.dilation}" if cell.compute.dilation > 1 else ""
    text = f"durations: {cell.compute.source}; the real compute of all stages keeps {duty:.2f} cores busy{at}"
    if needed > cell.compute.dilation:
        text += f", more than half of this machine's: set compute.dilation={needed}, or expect overruns"
    return text
