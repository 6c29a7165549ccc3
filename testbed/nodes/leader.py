"""The leader: a node that measures the transfers of other nodes' messages and chooses parameters during training.

The leader is the server, or worker 0 where there is none. Its decisions travel in the notes of its messages, so they
cross the links like all data (`jobs.decision`). A decision takes effect in a step that no worker can have started when
it learns of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from testbed.codecs.catalogue.codec_spec import CodecSpec, parse_codec
from testbed.errors import SpecError
from testbed.jobs.actions import Message
from testbed.jobs.decision import Decision
from testbed.nodes.pace import as_stated, worker_times
from testbed.policies.cycle import MessageSize
from testbed.policies.deco import NOISE_FACTORS, DecoChoice, approach, choose
from testbed.policies.link_estimate import LinkEstimate, PassiveEstimator
from testbed.runtime.place_job import PlaceJob
from testbed.spec import DecoSpec, Paced

_RATIO = "share"
"""Names of the parameter with the kept share of values, in sparsifiers."""


def ratio_of(codec: str) -> float:
    """Return the share of the values that a codec keeps. SpecError for a codec without such a parameter."""
    for part in parse_codec(codec).parts():
        for name, value in part.arguments:
            if name == _RATIO and isinstance(value, float):
                return value
    raise SpecError(f"codec {codec} has no parameter for the kept share; use ef(topk(0.01))")


def with_ratio(codec: str, ratio: float) -> str:
    """Return the codec with another kept share."""

    def changed(spec: CodecSpec) -> CodecSpec:
        arguments = [
            (name, changed(value) if isinstance(value, CodecSpec) else ratio if name == _RATIO else value)
            for name, value in spec.arguments
        ]
        return CodecSpec(spec.name, tuple(arguments))

    return changed(parse_codec(codec)).text


class Leader:
    """DeCo-SGD (arXiv 2507.17346) from measured links: periodically chooses one ratio and staleness for all workers, to
    suit the slowest link.
    """

    def __init__(
        self, spec: DecoSpec, first: Decision, *, hears: Iterable[int], compute_ns: int, copies: int, raw_bytes: int
    ) -> None:
        """`hears`: the workers that it observes. Each computes for at most `compute_ns` and sends its message, of
        `raw_bytes` as fp32, `copies` times over its link.
        """
        self._spec, self._first = spec, first
        # Connections persist, and a profile may keep windows open; without that, links seem slower.
        self._links = {worker: PassiveEstimator(least_products=0) for worker in hears}
        self._last = DecoChoice(max(first.staleness), ratio_of(first.codecs[0]))
        self._told = first
        self._compute_ns, self._copies = compute_ns, copies
        self._raw_bytes, self._expansion = raw_bytes, 1.0

    @classmethod
    def of(cls, job: PlaceJob, raw_bytes: int) -> Leader:
        """Make the leader of a job; `raw_bytes` is the size of all tensors as fp32."""
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
            # A worker sends to every other worker over its own link; a server receives one message from each.
            copies=1 if data.exchange == "star" else data.workers - 1,
            raw_bytes=raw_bytes,
        )

    def heard(self, worker: int, message: Message, decision: Decision) -> None:
        """Observe a worker's message of a step in which `decision` was in force; a decision without codecs means the
        initial ones.
        """
        assert message.round_trip_ns is not None
        size = len(message.payload)
        self._links[worker].heard(size, message.first_byte_ns, message.last_byte_ns, message.round_trip_ns)
        self._expansion = size / (ratio_of((decision.codecs or self._first.codecs)[worker]) * self._raw_bytes)

    def slowest(self) -> LinkEstimate | None:
        """Return the lowest rate and the longest delay of the links; None until all are known."""
        known = [estimate for link in self._links.values() if (estimate := link.estimate) is not None]
        if len(known) < len(self._links):
            return None
        return LinkEstimate(min(each.rate_bps for each in known), max(each.delay_ns for each in known))

    def decide(self, step: int) -> Decision | None:
        """Choose, after a step; None if no choice is due, links are still unknown, or nothing changes."""
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
            # The worker furthest ahead learns of it while waiting for this step's aggregate, before it starts that
            # step.
            effective_from=step + before.staleness + 2,
            staleness=(chosen.staleness,) * workers,
            local_steps=self._first.local_steps,
            codecs=tuple(with_ratio(codec, chosen.ratio) for codec in self._first.codecs),
        )
        return self._told
