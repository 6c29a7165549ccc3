"""The ideal duration of recorded steps: how long they would take if the links did exactly what the profile says.

The job's own program is run on the event loop over links that are formulas (`metrics.links`, which says what they
bound). From the records come how long every node worked on what, the bytes of every message, and when the run began,
which matters where links vary. All waiting for messages is replaced by the formula. All times are the lab's own,
dilation included.

A pipeline's step is taken alone: each stage begins when it could in the run. Where stages are paced, maths and updates
last as long as the emulated device takes, whatever they took here. In jobs of other kinds nodes may be ahead of each
other and of what they wait for, so all steps are run in a row, from the first.

`unshaped_step_s` is the closed form for links that take no time and equally fast stages: the law for both a paced
pipeline on unshaped links and the simulation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from testbed.errors import ResultsError
from testbed.jobs.actions import Begin, Decode, Encode, EndStep, Job, Key, Meet, Node, Program, Sizes, Work
from testbed.jobs.data_parallel import DataParallelJob
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
"""An action of the records, by kind and number; None: what belongs to the step."""
_Took = dict[tuple[_Owner, type], int]
"""How long a step's actions took to decode, compute and encode; and the step, to compute after all places have met."""


class RecordedSteps:
    """Steps of a job, as all places recorded them. The total time that an action of the records decoded, computed and
    encoded is charged once each, at its first such operation.
    """

    def __init__(self, job: Job, nodes: Sequence[Node], took: Sequence[Sequence[_Took]], first: int = 0) -> None:
        """`nodes` know how long messages were. `took`: by place, of the steps from `first` on. These are run as if all
        places began with the first of them, and all before were over.
        """
        self._job, self._nodes, self._took, self._first = job, nodes, took, first
        self._steps, self._places = len(took[0]), range(len(nodes))

    def seconds(self, links: Links) -> list[float]:
        """Return how long each step takes, up to where the last node ends it, over links, in seconds of the lab."""
        return [(after - before) / 1e9 for before, after in pairwise([0, *accumulate(self.ends_ns(links), max)])]

    def ends_ns(self, links: Links, begins_ns: Sequence[int] | None = None) -> list[int]:
        """Return when the last place has ended each step. `begins_ns`: when each place begins; None: all at 0.

        ResultsError where places wait for each other for ever.
        """
        ends = [0] * self._steps
        self._step, self._owner = [0 for _ in self._places], list[_Owner](None for _ in self._places)
        self._done = [{Work} for _ in self._places]
        """What each has done of the action that it is in."""

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
                f"the recorded actions of {stuck} cannot be done in their order: an input never comes"
            ) from None
        return ends

    def did(self, lane: NodeLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        """Note which action of the records a place is in."""
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
    """Return how long each stage takes from the moment at which the last one's actions have ended."""
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

    `step` holds one record per stage, first stage first. `free_ns` says when each stage could begin; the duration
    counts from the latest of these moments (a stage that is free earlier has a head start, as it had in the run). None:
    all begin together, which paced stages do in any case. `compute` is the cell's.

    After the actions comes the moment at which all stages know the gradient norm, as long after the last stage's
    actions as in the run, then each stage's own update; where stages are paced, both together last as long as the
    update that was asked for. ResultsError when the records are inconsistent.
    """
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
    """Steps of data parallel training, as all nodes recorded them."""

    def __init__(self, data: DataParallelSpec, nodes: Sequence[Sequence[StepRecord]], steps: range) -> None:
        """`nodes`: the records of each node's training steps; `steps`: those that are run."""
        ones = (1,) * data.workers
        job = DataParallelJob(data.workers, data.exchange, ones, ones, steps.stop, self._applied)
        sizes = [Sizes(partial(self._size, node)) for node in range(len(nodes))]
        took = [[_took_ns(records[step]) for step in steps] for records in nodes]
        super().__init__(job, sizes, took, steps.start)
        self._hop, self._workers, self._records = job.hop, data.workers, nodes
        self._coding_ns = [_coding_ns(records, steps) for records in nodes if data.exchange == "all-reduce"]

    def _applied(self, worker: int, step: int) -> list[int]:
        actions = self._records[worker][step].actions
        return [action.microbatch for action in actions if action.kind == "A" and action.microbatch >= self._first]

    def _size(self, node: int, key: Key) -> int:
        sent, hop = self._records[node][key.step].sent, self._hop(node, key)
        if hop >= len(sent):
            raise ResultsError(
                f"node {node}, step {key.step}: there is no record of message {hop}, so the step's ideal duration "
                "cannot be computed"
            )
        return sent[hop].frame_bytes

    def _cost(self, place: int, action: Any) -> int:
        what = type(action)
        if self._coding_ns and what is Encode:
            step: int = action.key.step - self._first
            return self._coding_ns[place][step][self._hop(place, action.key)]
        if self._coding_ns and what is Work and action.what == "add":
            return 0  # as decoding: part of what lies between the message before and the next one
        if what is Decode and len(action.messages) == 1 and (key := action.messages[0].key).what == "gradient":
            last = self._workers - 1 if place == self._workers else (place - 1) % self._workers
            if self._coding_ns or key.origin != last:
                return 0  # while the next message was on its way: what was not is part of the last one's
        return super()._cost(place, action)


def _coding_ns(records: Sequence[StepRecord], steps: range) -> list[list[int]]:
    """Return how long a member of a ring that reduces took before each message of each step: that is what lies between
    what it had received, or made, and what it sent.
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
    """Return the steps of a job of a table `job`; `nodes`: the records of each node's training steps."""
    kind = kind_of(cell)
    places = [RecordedNode(*each, kind.named) for each in zip(kind.places, nodes, strict=True)]
    return RecordedSteps(kind.played, places, [[_took_ns(record) for record in records] for records in nodes])


def recorded_steps_s(cell: Cell, nodes: Sequence[Sequence[StepRecord]], played_at_ns: int | None) -> list[float] | None:
    """Return the ideal durations of all training steps of a job that is no pipeline, run in a row, in seconds of the
    lab. `nodes`: the records of each node.

    None where there are none, and where a server waits for nobody: its rounds take what its clock says. ResultsError
    when the records are inconsistent.
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
    differ in what they hold in memory. Passes do not overlap: the first stage, with which a pass begins, is the last to
    end it. With fewer micro-batches in flight than stages 1f1b may also wait within a pass, and this is only a lower
    bound.
    """
    rounds = pipeline.accumulation * (pipeline.microbatches + pipeline.stages - 1)
    return rounds * (forward_s + backward_s) + update_s
