"""The ideal duration of recorded steps: how long they would take if the links did exactly what the profile says.

The job's own program (`jobs.pipeline`, `jobs.data_parallel`) is run on the event loop over links that are formulas
(`metrics.links`, which says what they bound). From the records come how long every node worked on what, the bytes of
every message, and when the run began, which matters where links vary. All waiting for messages is replaced by the
formula. All times are the lab's own, dilation included.

A pipeline's step is taken alone: each stage begins when it could in the run. Where stages are paced, maths and updates
last as long as the emulated device takes, whatever they took here. In data parallel training workers may be ahead of
each other and of what they wait for, so all steps are run in a row, from the first.

`unshaped_step_s` is the closed form for links that take no time and equally fast stages: the law for both a paced
pipeline on unshaped links and the simulation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from testbed.errors import ResultsError
from testbed.jobs.actions import Begin, Decode, Encode, EndStep, Job, Key, Node, Program, Sizes, Work
from testbed.jobs.data_parallel import DataParallelJob
from testbed.jobs.kind import JobKind, RecordedNode, kind_of
from testbed.jobs.loop import Cost, Lane, Links, Loop, Observer, StuckError
from testbed.jobs.pipeline import MATHS, MESSAGES, PipelineJob
from testbed.jobs.schedule import Action
from testbed.message_key import Direction
from testbed.metrics.links import Queues
from testbed.metrics.wires import Wires
from testbed.records import ActionKind, ActionRecord, StepRecord
from testbed.spec import Cell, Compute, DataParallelSpec, Measured, Paced, PipelineSpec

MEASURED = Measured()
_WAYS: Mapping[str, Direction] = {"F": "forward", "B": "backward"}
_KINDS: Mapping[str, ActionKind] = {"forward": "F", "backward": "B"}


def run_steps(
    job: Job,
    nodes: Sequence[Node],
    cost: Cost,
    links: Links,
    *,
    steps: int,
    begins_ns: Sequence[int] | None = None,
    observers: Sequence[Observer] = (),
) -> list[int]:
    """Run a job without maths; return when the last place has ended each of its steps.

    `nodes` know the sizes of messages, `cost` how long a place takes for what; `begins_ns`: when each place begins;
    None: all at 0. ResultsError where places wait for each other for ever.
    """
    ends = [0] * steps

    def goes_on(place: int, step: int) -> bool:
        ends[step] = max(ends[step], loop.now_ns)
        return step + 1 < steps

    def program(place: int) -> Program:
        if begins_ns is not None:
            yield Work("", Key("begin", 0), begins_ns[place])
        yield from job.program(place)

    def costs(place: int, action: Any) -> int | None:
        return action.value if type(action) is Work and action.key.what == "begin" else cost(place, action)

    loop = Loop(
        [program(place) for place in range(len(nodes))],
        nodes,
        cost=costs,
        links=links,
        observers=observers,
        goes_on=goes_on,
    )
    try:
        loop.run()
    except StuckError as error:
        stuck = job.places[error.lanes[0].node]
        raise ResultsError(
            f"the recorded actions of {stuck} cannot be done in their order: an input never comes"
        ) from None
    return ends


def _sized(places: int, size: Callable[[int, Key], int]) -> list[Node]:
    """Return nodes that know how many bytes a place makes of a message."""
    return [Sizes(partial(size, place)) for place in range(places)]


# ------------------------------------------------------------------ pipelines
def paced_ns(paced: Paced, stage: int, what: str) -> int:
    """Return how long the maths of an action, or the update, lasts in the lab."""
    if what == "update":
        return paced.update_ns * paced.dilation
    durations = paced.forward_ns if what == MATHS["F"] else paced.backward_ns
    return (durations[stage] if len(durations) > 1 else durations[0]) * paced.dilation


def _duration_ns(action: ActionRecord, stage: int, compute: Compute) -> int:
    if not isinstance(compute, Paced):
        return action.encoded_ns - action.input_ns
    codec_ns = action.decoded_ns - action.input_ns + action.encoded_ns - action.computed_ns
    return paced_ns(compute, stage, MATHS[action.kind]) + codec_ns


def _frame_bytes(step: Sequence[StepRecord]) -> list[dict[tuple[str, int], int]]:
    """Return the bytes of what each stage sent, by kind of action and micro-batch."""
    by_stage = []
    for stage, record in enumerate(step):
        frames = {(sent.direction, sent.microbatch): sent.frame_bytes for sent in record.sent}
        by_stage.append(dict[tuple[str, int], int]())
        for kind, microbatch in ((action.kind, action.microbatch) for action in record.actions):
            if stage == (len(step) - 1 if kind == "F" else 0):
                continue
            way = _WAYS[kind]
            if (way, microbatch) not in frames:
                raise ResultsError(
                    f"stage {stage}, {record.phase} step {record.step}: there is no record of the {way} frame of "
                    f"micro-batch {microbatch}, so the step's ideal duration cannot be computed"
                )
            by_stage[-1][MESSAGES[kind], microbatch] = frames[way, microbatch]
    return by_stage


def _updates_ns(step: Sequence[StepRecord], compute: Compute) -> list[int]:
    """Return how long each stage takes from the moment at which the last one's actions have ended."""
    actions_end = [record.optimiser_start_ns for record in step if record.optimiser_start_ns is not None]
    norm_known = [record.synchronised_ns for record in step if record.synchronised_ns is not None]
    if len(actions_end) < len(step) or len(norm_known) < len(step):
        return [0] * len(step)
    if isinstance(compute, Paced):
        return [paced_ns(compute, 0, "update")] * len(step)
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
    frames, updates_ns = _frame_bytes(step), _updates_ns(step, compute)
    durations = [
        {(action.kind, action.microbatch): _duration_ns(action, stage, compute) for action in record.actions}
        for stage, record in enumerate(step)
    ]

    def cost(stage: int, action: Any) -> int:
        if type(action) is not Work:
            return 0
        if action.what in _KINDS:
            return durations[stage][_KINDS[action.what], action.key.part]
        return updates_ns[stage] if action.what == "update" else 0

    first_ns = min(free_ns)
    job = PipelineJob([[Action(action.kind, action.microbatch) for action in record.actions] for record in step], 1)
    links = Queues(wires, begins_ns=0 if wires.played_at_ns is None else first_ns - wires.played_at_ns)
    begins_ns = [stage_ns - first_ns for stage_ns in free_ns]
    (end_ns,) = run_steps(
        job,
        _sized(len(step), lambda stage, key: frames[stage][key.what, key.part]),
        cost,
        links,
        steps=1,
        begins_ns=begins_ns,
    )
    return (end_ns - max(begins_ns)) / 1e9


def stated_step_s(
    wires: Wires,
    orders: Sequence[Sequence[tuple[ActionKind, int]]],
    frame_bytes: int,
    compute: Compute,
) -> float:
    """Return the ideal duration of a pipeline's step that nobody has run: each stage's actions (kind, micro-batch),
    with frames of this size. They take no time, except where stages are paced.
    """

    def cost(stage: int, action: Any) -> int:
        if type(action) is not Work or action.what not in _KINDS or not isinstance(compute, Paced):
            return 0
        return paced_ns(compute, stage, action.what)

    job = PipelineJob([[Action(*action) for action in order] for order in orders], 1)
    nodes = _sized(len(orders), lambda stage, key: frame_bytes)
    return run_steps(job, nodes, cost, Queues(wires), steps=1)[0] / 1e9


# ------------------------------------------------------------------ data parallel training
class RecordedReplicas:
    """Steps of data parallel training, as all nodes recorded them."""

    def __init__(self, data: DataParallelSpec, nodes: Sequence[Sequence[StepRecord]], steps: range) -> None:
        """`nodes`: the records of each node's training steps; `steps`: those that are run, as if all began with the
        first of them, and all before were over.
        """
        self._reduces, self._workers = data.exchange == "all-reduce", data.workers
        self._nodes = [[_Recorded(records[step], steps.start) for step in steps] for records in nodes]
        self._job = DataParallelJob(
            data.workers,
            data.exchange,
            staleness=(0,) * data.workers,
            local_steps=(1,) * data.workers,
            steps=len(steps),
            applies=lambda worker, step: [due for due in self._nodes[worker][step].applying if due >= 0],
        )
        self._applying = [{k: v for record in records for k, v in record.applying.items()} for records in self._nodes]
        self._coding_ns = [_coding_ns(*each) for each in zip(self._nodes, nodes, strict=True) if self._reduces]

    def seconds(self, links: Links) -> list[float]:
        """Return how long each step takes, up to where the last node ends it, over links, in seconds of the lab."""
        ends = run_steps(self._job, _sized(len(self._nodes), self._size), self._cost, links, steps=self._job.steps)
        return [(after - before) / 1e9 for before, after in pairwise([0, *accumulate(ends, max)])]

    def _hop(self, node: int, key: Key) -> int:
        """Return which of the messages that a node made in a step one is."""
        if not self._reduces:
            return 0
        return (node - key.part) % self._workers if key.what == "gradient" else self._workers - 1

    def _size(self, node: int, key: Key) -> int:
        sent, hop = self._nodes[node][key.step].sent, self._hop(node, key)
        if hop >= len(sent):
            raise ResultsError(
                f"node {node}, step {key.step}: there is no record of message {hop}, so the step's ideal duration "
                "cannot be computed"
            )
        return sent[hop].frame_bytes

    def _cost(self, node: int, action: Any) -> int:
        if type(action) is Work:
            if action.what == "local step":
                *local, last = self._nodes[node][action.key.step].local_steps
                return sum(each.encoded_ns - each.input_ns for each in local) + last.computed_ns - last.input_ns
            if action.what not in ("update", "sum"):
                return 0
            own = self._applying[node][action.key.step]
            return (own.encoded_ns if action.what == "update" else own.computed_ns) - own.decoded_ns
        if type(action) is Encode:
            if self._reduces:
                return self._coding_ns[node][action.key.step][self._hop(node, action.key)]
            step = action.key.step
            own = self._applying[node][step] if node == self._workers else self._nodes[node][step].local_steps[-1]
            return own.encoded_ns - own.computed_ns
        if type(action) is Decode:
            key = action.messages[0].key
            if self._reduces and key.what == "gradient":
                return 0  # part of what lies between its arrival and the next message
            at_the_end = self._workers - 1 if node == self._workers else (node - 1) % self._workers
            if len(action.messages) == 1 and key.what == "gradient" and key.origin != at_the_end:
                return 0  # while the next message was on its way: what was not is part of the last one's
            own = self._applying[node][key.step]
            return own.decoded_ns - own.input_ns
        return 0


class _Recorded:
    """A step of one node."""

    def __init__(self, record: StepRecord, first: int) -> None:
        self.sent = record.sent
        self.local_steps = [action for action in record.actions if action.kind == "L"]
        self.applying = {action.microbatch - first: action for action in record.actions if action.kind == "A"}
        """By step whose aggregate it is."""


def _coding_ns(steps: Sequence[_Recorded], records: Sequence[StepRecord]) -> list[list[int]]:
    """Return how long a member of a ring that reduces took before each message of each step: that is what lies between
    what it had received, or made, and what it sent.
    """
    came = defaultdict[int, list[int]](list)
    for record in records:
        for frame in record.received:
            came[frame.microbatch].append(frame.last_byte_ns)
    coding, before_ns = list[list[int]](), 0
    for step in steps:
        coding.append([])
        ready_ns = max(before_ns, step.local_steps[-1].encoded_ns)
        received = sorted(came[step.sent[0].microbatch]) if step.sent else []
        for hop, sent in enumerate(step.sent):
            coding[-1].append(max(0, sent.queued_ns - ready_ns))
            ready_ns = before_ns = max([sent.queued_ns, *received[hop : hop + 1]])
    return coding


def replica_steps_s(cell: Cell, nodes: Sequence[Sequence[StepRecord]], played_at_ns: int | None) -> list[float] | None:
    """Return the ideal durations of all training steps of data parallel training, run in a row, in seconds of the lab.

    None where a server waits for nobody: its rounds take what its clock says. ResultsError when the records are
    inconsistent.
    """
    assert cell.data is not None
    trained = [[record for record in records if record.phase == "train"] for records in nodes]
    count = min(map(len, trained), default=0)
    if cell.data.arrivals is not None or not count:
        return None
    wires = Wires(cell, played_at_ns)
    begins_ns = 0 if played_at_ns is None else min(records[0].start_ns for records in trained) - played_at_ns
    return RecordedReplicas(cell.data, trained, range(count)).seconds(Queues(wires, begins_ns=begins_ns))


# ------------------------------------------------------------------ jobs of other kinds
class RecordedKind:
    """The steps of a job of a table `job`, as all nodes recorded them."""

    def __init__(self, kind: JobKind, nodes: Sequence[Sequence[StepRecord]]) -> None:
        """`nodes`: the records of each node's training steps."""
        self._kind, self._nodes, self._steps = kind, nodes, len(nodes[0])
        self._actions: list[list[dict[tuple[str, int], ActionRecord]]] = [
            [{(action.kind, action.microbatch): action for action in record.actions} for record in records]
            for records in nodes
        ]
        self._places = [RecordedNode(kind, place, records) for place, records in enumerate(nodes)]

    def seconds(self, links: Links) -> list[float]:
        """Return how long each step takes, up to where the last node ends it, over links, in seconds of the lab."""
        doing = _Doing(len(self._nodes))
        ends = run_steps(
            self._kind.played,
            self._places,
            lambda node, action: self._cost(doing, node, action),
            links,
            steps=self._steps,
            observers=[doing],
        )
        return [(after - before) / 1e9 for before, after in pairwise([0, *accumulate(ends, max)])]

    def _cost(self, doing: _Doing, node: int, action: Any) -> int:
        """Return how long what a node does took: all work of one action of the records together, at the first of it."""
        step, owner, begun = doing.step[node], doing.owner[node], doing.begun[node]
        what = type(action)
        if what not in (Work, Encode, Decode) or what in begun or step >= self._steps:
            return 0
        begun.add(what)
        if owner is None:
            record = self._nodes[node][step]
            return 0 if record.synchronised_ns is None else record.end_ns - record.synchronised_ns
        own = self._actions[node][step][owner]
        spans = {Decode: (own.input_ns, own.decoded_ns), Work: (own.decoded_ns, own.computed_ns)}
        begin_ns, end_ns = spans.get(what, (own.computed_ns, own.encoded_ns))
        return end_ns - begin_ns


class _Doing:
    """Observes which action of the records each node is in."""

    def __init__(self, nodes: int) -> None:
        self.step = [0] * nodes
        self.owner: list[tuple[str, int] | None] = [None] * nodes
        """None: what belongs to the step."""
        self.begun: list[set[type]] = [set() for _ in range(nodes)]
        """What it has done of this action."""

    def did(self, lane: Lane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        """Note what follows."""
        if type(action) is Begin:
            self.owner[lane.node] = None if action.kind is None else (action.kind, action.number)
            self.begun[lane.node].clear()
        elif type(action) is EndStep and action.phase == "train":
            self.step[lane.node] = action.number + 1


def kind_steps_s(cell: Cell, nodes: Sequence[Sequence[StepRecord]], played_at_ns: int | None) -> list[float]:
    """Return the ideal durations of all training steps of a job of a table `job`, run in a row, in seconds of the lab.

    ResultsError when the records are inconsistent.
    """
    trained = [[record for record in records if record.phase == "train"] for records in nodes]
    begins_ns = 0 if played_at_ns is None else min(records[0].start_ns for records in trained) - played_at_ns
    links = Queues(Wires(cell, played_at_ns), begins_ns=begins_ns)
    return RecordedKind(kind_of(cell), trained).seconds(links)


def unshaped_step_s(pipeline: PipelineSpec, *, forward_s: float, backward_s: float, update_s: float = 0.0) -> float:
    """Return a step's seconds: `accumulation * (microbatches + stages - 1) * (forward_s + backward_s) + update_s`.

    It is the same for gpipe (Huang et al. 2019, section 2.3) and 1f1b (Narayanan et al. 2021, section 2.2), which
    differ in what they hold in memory. Passes do not overlap: the first stage, with which a pass begins, is the last to
    end it. With fewer micro-batches in flight than stages 1f1b may also wait within a pass, and this is only a lower
    bound.
    """
    rounds = pipeline.accumulation * (pipeline.microbatches + pipeline.stages - 1)
    return rounds * (forward_s + backward_s) + update_s
