"""Who chooses while training lasts: one node hears how the others' messages cross their links, and tells all.

The leader is the server, or worker 0 where there is none. What it chooses travels in the notes of its messages, so it
crosses the links as everything does (`jobs.decision`). A decision holds from a step on that nobody can have begun when
it is told.
"""

from __future__ import annotations

from collections.abc import Iterable

from testbed.codecs.catalogue.codec_spec import CodecSpec, parse_codec
from testbed.errors import SpecError
from testbed.jobs.actions import Message
from testbed.jobs.decision import Decision
from testbed.pipeline.job import PlaceJob
from testbed.policies.cycle import MessageSize
from testbed.policies.deco import NOISE_FACTORS, DecoChoice, approach, choose
from testbed.policies.links import LinkEstimate, PassiveEstimator
from testbed.replicas.pace import as_stated, worker_times
from testbed.spec import DecoSpec, Paced

_RATIO = "share"
"""What sparsifiers call the share of the values that they keep."""


def ratio_of(codec: str) -> float:
    """Return which share of the values a codec keeps. SpecError for one that has no such number."""
    for part in parse_codec(codec).parts():
        for name, value in part.arguments:
            if name == _RATIO and isinstance(value, float):
                return value
    raise SpecError(f"codec {codec} keeps no stated share of the values, so none can be chosen; take ef(topk(0.01))")


def with_ratio(codec: str, ratio: float) -> str:
    """Return the codec that keeps another share of the values."""

    def changed(spec: CodecSpec) -> CodecSpec:
        arguments = [
            (name, changed(value) if isinstance(value, CodecSpec) else ratio if name == _RATIO else value)
            for name, value in spec.arguments
        ]
        return CodecSpec(spec.name, tuple(arguments))

    return changed(parse_codec(codec)).text


class Leader:
    """DeCo-SGD (arXiv 2507.17346) by what was measured: it chooses one ratio and staleness for all workers, for the
    slowest of their links, every so many steps.
    """

    def __init__(
        self, spec: DecoSpec, first: Decision, *, hears: Iterable[int], compute_ns: int, copies: int, raw_bytes: int
    ) -> None:
        """It hears some of the workers, each of which computes for `compute_ns` at most and sends its message, of
        `raw_bytes` as fp32, `copies` times over its link.
        """
        self._spec, self._first = spec, first
        # Connections last, and a profile may ask for windows that stay open; one that does not makes links seem slower.
        self._links = {worker: PassiveEstimator(least_products=0) for worker in hears}
        self._last = DecoChoice(max(first.staleness), ratio_of(first.codecs[0]))
        self._told = first
        self._compute_ns, self._copies = compute_ns, copies
        self._raw_bytes, self._expansion = raw_bytes, 1.0

    @classmethod
    def of(cls, job: PlaceJob, raw_bytes: int) -> Leader:
        """Make a job's; `raw_bytes` are of all tensors as fp32."""
        recipe, data = job.recipe, job.recipe.data
        assert data is not None
        assert data.deco is not None
        assert isinstance(job.compute, Paced)
        first, workers = as_stated(recipe), range(data.workers)
        times = [worker_times(job.compute, data, recipe.pipeline, worker) for worker in workers]
        return cls(
            data.deco,
            first,
            hears=[worker for worker in workers if worker != job.place],
            compute_ns=max(
                each.local_ns * batches + each.update_ns for each, batches in zip(times, first.local_steps, strict=True)
            ),
            # To every other worker over one link of its own; a server gets one message of each.
            copies=1 if data.exchange == "star" else data.workers - 1,
            raw_bytes=raw_bytes,
        )

    def heard(self, worker: int, message: Message, decision: Decision) -> None:
        """Learn of a worker's message of a step in which that decision held; without codecs, those of the beginning."""
        assert message.round_trip_ns is not None
        size = len(message.payload)
        self._links[worker].heard(size, message.first_byte_ns, message.last_byte_ns, message.round_trip_ns)
        self._expansion = size / (ratio_of((decision.codecs or self._first.codecs)[worker]) * self._raw_bytes)

    def slowest(self) -> LinkEstimate | None:
        """Return the least rate and the longest delay of the links; None where one of them is not known yet."""
        known = [estimate for link in self._links.values() if (estimate := link.estimate) is not None]
        if len(known) < len(self._links):
            return None
        return LinkEstimate(min(each.rate_bps for each in known), max(each.delay_ns for each in known))

    def decide(self, step: int) -> Decision | None:
        """Choose, after a step; None where it is not the time, nothing is known yet, or nothing changes."""
        if (step + 1) % self._spec.every or step + 1 < self._told.effective_from:
            return None
        if (slowest := self.slowest()) is None:
            return None
        wanted = choose(
            slowest,
            MessageSize(self._raw_bytes * self._copies, self._expansion),
            self._compute_ns,
            noise=NOISE_FACTORS[self._spec.noise],
            noise_weight=self._spec.noise_weight,
        )
        chosen = approach(self._last, wanted)
        if chosen == self._last:
            return None
        before, self._last = self._last, chosen
        workers = len(self._first.codecs)
        self._told = Decision(
            # Who is furthest ahead hears of it when it waits for this step's aggregate, before it begins that step.
            effective_from=step + before.staleness + 2,
            staleness=(chosen.staleness,) * workers,
            local_steps=self._first.local_steps,
            codecs=tuple(with_ratio(codec, chosen.ratio) for codec in self._first.codecs),
        )
        return self._told
