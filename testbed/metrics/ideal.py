"""The ideal duration of recorded steps: their duration over links that match their profile exactly.

The job's own program runs on the event loop over links as formulas (`metrics.links` states what they bound). The
records provide the duration of all work, the size of every message, and the start of the run, which matters where links
vary. The formulas replace all waiting for messages. All times are lab times, including dilation.

A pipeline's step is simulated alone, each stage starting when it could in the run. In paced stages, maths and updates
take the emulated device's time instead of their time here. In other kinds of jobs nodes may run ahead of each other, so
all steps are simulated in a row, from the first.

`unshaped_step_s` is the closed form for links that take no time and equally fast stages; both a paced pipeline on
unshaped links and the simulation must match it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from testbed.errors import ResultsError
from testbed.jobs.actions import Begin, Decode, Encode, EndStep, Job, Key, Meet, Node, Program, Sizes, Work
from testbed.jobs.data_parallel import DataParallelJob, partner
from testbed.jobs.kind import RecordedNode, kind_of
from testbed.jobs.loop import Links, Loop, NodeLane, StuckError
from testbed.jobs.pipeline import MATHS, PipelineJob
from testbed.jobs.schedule import Action
from testbed.metrics.links import Queues
from testbed.metrics.wires import Wires
from testbed.records import StepRecord
from testbed.spec import Cell, Compute, DataParallelSpec, Measured, Paced, PipelineSpec

MEASURED = Measured()
_Owner = tuple[str, int] | None
"""An action of the records, by kind and number; None: the step itself."""
_Took = dict[tuple[_Owner, type], int]
"""Durations of decode, compute and encode per action of a step; for the step itself, of the computation after the
meeting."""


class RecordedSteps:
    """Steps of a job, as all places recorded them. An action's total decode, compute and encode times are each charged
    once, at its first such operation.
    """

    def __init__(self, job: Job, nodes: Sequence[Node], took: Sequence[Sequence[_Took]], first: int = 0) -> None:
        """`nodes` know the sizes of messages. `took`: durations by place, of the steps from `first` on, which run as if
        all places started with the first of them and all earlier steps were complete.
        """
        self._job, self._nodes, self._took, self._first = job, nodes, took, first
        self._steps, self._places = len(took[0]), range(len(nodes))

    def seconds(self, links: Links) -> list[float]:
        """Return the duration of each step over links, up to its end at the last node, in seconds of the lab."""
        return [(after - before) / 1e9 for before, after in pairwise([0, *accumulate(self.ends_ns(links), max)])]

    def ends_ns(self, links: Links, begins_ns: Sequence[int] | None = None) -> list[int]:
        """Return the end of each step at the last place. `begins_ns`: start of each place; None: all at 0.

        ResultsError on deadlock.
        """
        ends = [0] * self._steps
        self._step, self._owner = [0 for _ in self._places], list[_Owner](None for _ in self._places)
        self._done = [{Work} for _ in self._places]
        """Operations done so far in each place's current action."""

        def goes_on(place: int, step: int) -> bool:
            at = step - self._first
            ends[at] = max(ends[at], loop.now_ns)
            return at + 1 < self._steps

        def program(place: int) -> Program:
            if begins_ns is not None:
                yield Work("", Key("begin", 0), begins_ns[place])
            yield from self._job.program(place, self._first)

        programs = [program(place) for place in self._places]
        loop = Loop(programs, self._nodes, cost=self._cost, links=links, observers=[self], goes_on=goes_on)
        try:
            loop.run()
        except StuckError as error:
            stuck = self._job.places[error.lanes[0].node]
            raise ResultsError(
                f"cannot replay the recorded actions of {stuck}: an input never arrives; remove the run and repeat it"
            ) from None
        return ends

    def did(self, lane: NodeLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        """Note the current action of a place."""
        place = lane.node
        if type(action) is Begin:
            self._owner[place] = None if action.kind is None else (action.kind, action.number)
            self._done[place] = {Work} if action.kind is None else set()
        elif type(action) is Meet and self._owner[place] is None:
            self._done[place] = set()
        elif type(action) is EndStep and action.phase == "train":
            self._step[place] = action.number + 1 - self._first

    def _cost(self, place: int, action: Any) -> int:
        what, step = type(action), self._step[place]
        if what is Work and action.key.what == "begin":
            return action.value  # type: ignore[no-any-return]
        if what not in (Work, Encode, Decode) or what in self._done[place] or step >= self._steps:
            return 0
        self._done[place].add(what)
        return self._took[place][step][self._owner[place], what]


def _took_ns(record: StepRecord) -> _Took:
    took: _Took = defaultdict(int)
    for action in record.actions:
        owner = action.kind, action.microbatch
        took[owner, Decode] += action.decoded_ns - action.input_ns
        took[owner, Work] += action.computed_ns - action.decoded_ns
        took[owner, Encode] += action.encoded_ns - action.computed_ns
    if record.synchronised_ns is not None:
        took[None, Work] = record.end_ns - record.synchronised_ns
    return took


# ------------------------------------------------------------------ pipelines
def _updates_ns(step: Sequence[StepRecord], compute: Compute) -> list[int]:
    """Return the duration of each stage's update, counted from the end of the last stage's actions."""
    actions_end = [record.optimiser_start_ns for record in step if record.optimiser_start_ns is not None]
    norm_known = [record.synchronised_ns for record in step if record.synchronised_ns is not None]
    if len(actions_end) < len(step) or len(norm_known) < len(step):
        return [0] * len(step)
    if isinstance(compute, Paced):
        return [compute.takes_ns(0)["update"]] * len(step)
    met_ns = max(0, min(norm_known) - max(actions_end))
    return [met_ns + record.end_ns - known for record, known in zip(step, norm_known, strict=True)]


def ideal_step_s(
    wires: Wires,
    step: Sequence[StepRecord],
    free_ns: Sequence[int] | None = None,
    compute: Compute = MEASURED,
) -> float:
    """Return the ideal duration of a pipeline's recorded step, in seconds of the lab.

    `step` holds one record per stage, first stage first. `free_ns` is the earliest start of each stage; the duration
    counts from the latest of these (an earlier stage has a head start, as in the run). None: all start together, as
    paced stages always do. `compute` is the cell's.

    After the actions all stages learn the gradient norm, with the same delay as in the run, and then each stage
    updates; in paced stages both together take the stated update time. ResultsError for inconsistent records.
    """
    if compute.varied:  # what was drawn is in the records
        compute = MEASURED
    if free_ns is None or isinstance(compute, Paced):
        free_ns = [min(record.start_ns for record in step) if free_ns is None else max(free_ns)] * len(step)
    orders = [[Action(action.kind, action.microbatch) for action in record.actions] for record in step]
    took = [_took_ns(record) for record in step]
    for stage, update_ns in enumerate(_updates_ns(step, compute)):
        took[stage][None, Work] = update_ns
        if isinstance(compute, Paced):
            takes_ns = compute.takes_ns(stage)
            took[stage] |= {((kind, part), Work): takes_ns[MATHS[kind]] for kind, part in orders[stage]}
    job = PipelineJob(orders, 1)
    nodes = [RecordedNode(place, [record], job.named) for place, record in zip(job.places, step, strict=True)]
    first_ns = min(free_ns)
    begins_ns = [stage_ns - first_ns for stage_ns in free_ns]
    links = Queues(wires, begins_ns=0 if wires.played_at_ns is None else first_ns - wires.played_at_ns)
    (end_ns,) = RecordedSteps(job, nodes, [[each] for each in took]).ends_ns(links, begins_ns)
    return (end_ns - max(begins_ns)) / 1e9


# ------------------------------------------------------------------ jobs of other kinds
def trained_steps(nodes: Sequence[Sequence[StepRecord]]) -> list[list[StepRecord]]:
    """Return the records of training steps, by node."""
    return [[record for record in records if record.phase == "train"] for records in nodes]


class RecordedReplicas(RecordedSteps):
    """Steps of data parallel training, from the records of all nodes."""

    def __init__(self, data: DataParallelSpec, nodes: Sequence[Sequence[StepRecord]], steps: range) -> None:
        """`nodes`: the records of each node's training steps; `steps`: those to simulate."""
        ones = (1,) * data.workers
        aligned = data.aligned is not None
        job = DataParallelJob(data.workers, data.exchange, ones, ones, steps.stop, self._applied, aligned=aligned)
        sizes = [Sizes(partial(self._size, node)) for node in range(len(nodes))]
        took = [[_took_ns(records[step]) for step in steps] for records in nodes]
        super().__init__(job, sizes, took, steps.start)
        self._hop, self._workers, self._records = job.hop, data.workers, nodes
        self._pairs = data.exchange == "pairs"
        self._coding_ns = [_coding_ns(records, steps) for records in nodes if data.exchange == "all-reduce"]

    def _applied(self, worker: int, step: int) -> list[int]:
        actions = self._records[worker][step].actions
        return [action.microbatch for action in actions if action.kind == "A" and action.microbatch >= self._first]

    def _size(self, node: int, key: Key) -> int:
        sent, hop = self._records[node][key.step].sent, self._hop(node, key)
        if hop >= len(sent):
            raise ResultsError(
                f"node {node}, step {key.step}: message {hop} has no record, so the step has no ideal duration; "
                "remove the run and repeat it"
            )
        return sent[hop].frame_bytes

    def _cost(self, place: int, action: Any) -> int:
        what = type(action)
        if self._coding_ns and what is Encode:
            step: int = action.key.step - self._first
            return self._coding_ns[place][step][self._hop(place, action.key)]
        if self._coding_ns and what is Work and action.what in ("add", "choose"):
            return 0  # like decoding: part of the gap between messages
        if what is Decode and len(action.messages) == 1 and (key := action.messages[0].key).what == "gradient":
            last = self._workers - 1 if place == self._workers else (place - 1) % self._workers
            if self._pairs:
                last = partner(self._workers, place, key.step)
            if self._coding_ns or key.origin != last:
                return 0  # overlaps the next message; the rest counts for the last one
        return super()._cost(place, action)


def _coding_ns(records: Sequence[StepRecord], steps: range) -> list[list[int]]:
    """Return a worker's coding time before each message of each step in a ring all-reduce: the gap between its last
    input, received or computed, and the message that it sent.
    """
    came = defaultdict[int, list[int]](list)
    for record in records:
        for frame in record.received:
            came[frame.microbatch].append(frame.last_byte_ns)
    coding, before_ns = list[list[int]](), 0
    for record in (records[step] for step in steps):
        coding.append([])
        ready_ns = max(before_ns, *(action.encoded_ns for action in record.actions if action.kind == "L"))
        received = sorted(came[record.sent[0].microbatch]) if record.sent else []
        for hop, sent in enumerate(record.sent):
            coding[-1].append(max(0, sent.queued_ns - ready_ns))
            ready_ns = before_ns = max([sent.queued_ns, *received[hop : hop + 1]])
    return coding


def recorded_kind(cell: Cell, nodes: Sequence[Sequence[StepRecord]]) -> RecordedSteps:
    """Return the steps of a job from a `job` table; `nodes`: the records of each node's training steps."""
    kind = kind_of(cell)
    places = [RecordedNode(*each, kind.named) for each in zip(kind.places, nodes, strict=True)]
    return RecordedSteps(kind.played, places, [[_took_ns(record) for record in records] for records in nodes])


def recorded_steps_s(cell: Cell, nodes: Sequence[Sequence[StepRecord]], played_at_ns: int | None) -> list[float] | None:
    """Return the ideal durations of all training steps of a non-pipeline job, simulated in a row, in seconds of the
    lab. `nodes`: the records of each node.

    None without steps, and for asynchronous rounds, whose duration the server's clock decides. ResultsError for
    inconsistent records.
    """
    trained = trained_steps(nodes)
    count = min(map(len, trained), default=0)
    if not count or (cell.data is not None and cell.data.arrivals is not None):
        return None
    steps = recorded_kind(cell, trained) if cell.data is None else RecordedReplicas(cell.data, trained, range(count))
    begins_ns = 0 if played_at_ns is None else min(records[0].start_ns for records in trained) - played_at_ns
    return steps.seconds(Queues(Wires(cell, played_at_ns), begins_ns=begins_ns))


def unshaped_step_s(pipeline: PipelineSpec, *, forward_s: float, backward_s: float, update_s: float = 0.0) -> float:
    """Return a step's seconds: `accumulation * (microbatches + stages - 1) * (forward_s + backward_s) + update_s`.

    It is the same for gpipe (Huang et al. 2019, section 2.3) and 1f1b (Narayanan et al. 2021, section 2.2), which
    differ in memory use. Passes do not overlap, because the first stage both starts and ends a pass. With fewer
    micro-batches in flight than stages, 1f1b may also wait within a pass, and this is only a lower bound.
    """
    rounds = pipeline.accumulation * (pipeline.microbatches + pipeline.stages - 1)
    return rounds * (forward_s + backward_s) + update_s
