"""An entry of a table or figure: the runs of one codec over one network, and their combined numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median, median_low
from typing import Any, NamedTuple, get_args

from testbed.errors import ResultsError
from testbed.message_key import Direction
from testbed.metrics.compare import RunSteps, run_steps
from testbed.metrics.statistics import combined_step_time
from testbed.records import CONTENDED, NEAR_FLOOR, Certificate, LabRecord, RunCertificates, Split, StepRecord, Summary
from testbed.report.numbers import percent
from testbed.report.remarks import remark
from testbed.results import Run
from testbed.spec import Cell

OVERRUNS = 0.01
"""Share of overrun actions above which an entry is marked."""
TOO_MANY_OVERRUNS = 0.05
"""Share of overrun actions above which its times are invalid."""


class Result(NamedTuple):
    """One run, read back."""

    run: Run
    cell: Cell
    summary: Summary | None
    """Summary of the run; None: it has not ended, or was killed."""
    tuning: str = ""
    """Caveat about the tuned value of its cell; empty if none."""
    stated: bool = False
    """Whether its cell states the field that was tuned for others."""
    proof: str = "verified"
    """The state of its `results.Proof`."""

    @property
    def ok(self) -> bool:
        return self.summary is not None and self.summary.status == "ok"

    @property
    def certified(self) -> bool:
        return self.summary is not None and self.summary.certificate == "PASS"

    @property
    def overruns(self) -> float:
        """Share of actions whose maths took longer than on the emulated device; 0 if nothing is paced."""
        return 0.0 if self.summary is None else self.summary.overrun_share or 0.0

    @property
    def contended(self) -> float:
        """Relative deviation of its durations from the calibration; 0 if unknown."""
        return 0.0 if self.summary is None else abs(self.summary.contended or 0.0)

    @property
    def sound(self) -> bool:
        """Whether its numbers are reliable; other runs are drawn hollow."""
        return self.certified and self.overruns <= TOO_MANY_OVERRUNS and self.contended <= CONTENDED

    @property
    def measured(self) -> Summary:
        """The summary of a successful run. ResultsError for any other."""
        if self.summary is None or not self.ok:
            raise ResultsError(f"{self.run.folder} holds no successful run")
        return self.summary

    @property
    def outcome(self) -> str:
        """'ok', or the reason why there are no numbers, in one line."""
        if self.summary is None:
            return "has not ended, or was killed"
        if self.ok:
            return "ok"
        reason = (self.summary.error or "no reason was recorded").strip().splitlines()[0]
        return f"{self.summary.status}: {reason}"

    @property
    def records(self) -> list[list[StepRecord]]:
        """The steps of each node, the first node's first."""
        return [self.run.steps(node) for node in range(self.cell.nodes)]

    @property
    def lab(self) -> LabRecord | None:
        return self.run.lab if (self.run.folder / "lab.json").exists() else None

    @property
    def certificates(self) -> RunCertificates | None:
        return self.run.certificates if (self.run.folder / "certificate.json").exists() else None

    @property
    def taken(self) -> list[tuple[str, Certificate]]:
        """Its certificates, each with its time: before or after."""
        both = self.certificates
        pairs = (("before", both.before), ("after", both.after)) if both else ()
        return [(when, certificate) for when, certificate in pairs if certificate is not None]


@dataclass(frozen=True, eq=False)
class Entry:
    """The runs of one codec over one network: repeats of a cell, and cells that differ only in their seed."""

    results: tuple[Result, ...]

    @property
    def cell(self) -> Cell:
        """The first run's cell; the others differ only in the seed."""
        return self.results[0].cell

    @property
    def name(self) -> str:
        return f"{self.cell.codec} over {self.cell.network}"

    @cached_property
    def cell_ids(self) -> dict[str, int]:
        """The id of each of its cells, with its seed."""
        return {result.run.folder.parent.name: result.cell.training.seed for result in self.results}

    @cached_property
    def good(self) -> tuple[Result, ...]:
        """The successful runs, on which all numbers are based."""
        return tuple(result for result in self.results if result.ok)

    @property
    def ok(self) -> bool:
        return bool(self.good)

    @property
    def outcome(self) -> str:
        """'ok', or the outcome of the last run."""
        return "ok" if self.ok else self.results[-1].outcome

    @property
    def certified(self) -> bool:
        """Whether each of its runs has two passing certificates."""
        return self.ok and all(result.certified for result in self.good)

    @property
    def overruns(self) -> float:
        """Share of overrun actions in the worst run."""
        return max((result.overruns for result in self.good), default=0.0)

    @property
    def contended(self) -> bool:
        """Whether any of its runs did not have the machine to itself; then no speed-up is computed."""
        return any(result.contended > CONTENDED for result in self.good)

    @property
    def doubt(self) -> str:
        """Short reason why its numbers are unreliable; empty if they are reliable."""
        if self.sound:
            return ""
        return "not certified" if not self.certified else "contended" if self.contended else "overruns"

    @property
    def sound(self) -> bool:
        """Whether all of its runs are sound."""
        return self.ok and all(result.sound for result in self.good)

    @property
    def marks(self) -> tuple[str, ...]:
        """Caveats about its numbers."""
        marks = [] if self.certified else ["not certified"]
        lost = {*self.cell_ids.values()} - {result.cell.training.seed for result in self.good}
        marks += [f"no successful run of seed {seed}" for seed in sorted(lost) if self.ok]
        marks += ["unverified: no manifest"] * any(result.proof == "unverified" for result in self.good)
        if self.overruns > OVERRUNS:
            invalid = "invalid: " if self.overruns > TOO_MANY_OVERRUNS else ""
            marks.append(f"{invalid}{percent(self.overruns)} overruns")
        if self.contended:
            worst = max((result.measured.contended or 0.0 for result in self.good), key=abs)
            marks.append(f"contended: durations {percent(worst, '{:+.0f}')} from the calibration")
        marks += [f"resumed before step {at}" for result in self.good if (at := result.measured.resumed_at) is not None]
        if self.ok and (slow := self.measured.worst) is not None:
            marks.append(f"one step took {slow.medians:.3g} times the median")
        if said := remark(self.cell.codec):
            marks.append(said)
        marks += dict.fromkeys(result.tuning for result in self.good if result.tuning)
        if any(result.measured.at_floor for result in self.good):
            unigram, *bigram = self.good[0].measured.floors.values()
            below = "".join(f" (bigram floor: {floor:.2f})" for floor in bigram)
            marks.append(f"within {NEAR_FLOOR:g} of the unigram floor or above, {unigram:.2f}{below}")
        ended = {result.measured.ended for result in self.good}
        marks += [f"ended by {why}" for why in ("target", "budget") if why in ended]
        return tuple(marks)

    @property
    def count(self) -> str:
        """'1 run', '3 runs', '3 seeds', '6 runs of 3 seeds'."""
        runs, seeds = len(self.good), len({result.cell.training.seed for result in self.good})
        if seeds in (1, runs):
            word = "run" if seeds == 1 else "seed"
            return f"{runs} {word}{'s' * (runs != 1)}"
        return f"{runs} runs of {seeds} seeds"

    @cached_property
    def steps(self) -> tuple[RunSteps, ...]:
        """Step times and loss curves of each successful run."""
        return tuple(
            run_steps(result.cell, result.run.number, result.records, result.measured.steady_from)
            for result in self.good
        )

    @cached_property
    def choices(self) -> dict[tuple[int, Direction], Counter[str]]:
        """Number of times an adaptive codec chose each of its codecs in training, by boundary and direction."""
        choices: dict[tuple[int, Direction], Counter[str]] = {}
        for result in self.good:
            for stage, records in enumerate(result.records):
                for frame in (frame for record in records if record.phase == "train" for frame in record.sent):
                    if frame.choice is not None:
                        boundary = stage if frame.direction == "forward" else stage - 1
                        choices.setdefault((boundary, frame.direction), Counter())[frame.choice] += 1
        return dict(sorted(choices.items()))

    def only(self, cell_id: str) -> Entry | None:
        """Return an entry with only the runs of one cell, i.e. of one seed; None if there are none."""
        runs = tuple(result for result in self.results if result.run.folder.parent.name == cell_id)
        if len(runs) == len(self.results):
            return self  # whose numbers are already cached
        return Entry(runs) if runs else None

    @property
    def typical(self) -> Result:
        """The successful run whose step time is nearest to the entry's."""
        middle = self.measured.step_s or 0.0
        return min(self.good, key=lambda result: abs((result.measured.step_s or 0.0) - middle))

    @cached_property
    def measured(self) -> Summary:
        """Combine the summaries of the successful runs; a single run keeps its own. ResultsError if none succeeded.

        The step's time and interval are those of `metrics.statistics`, losses and accuracies the means over seeds,
        overruns and the worst step those of the worst run, measured steps the sum. Every other number is the median of
        the runs that have it; other fields keep the value on which all runs agree, or None.
        """
        if not self.ok:
            raise ResultsError(f"{self.results[-1].run.folder} holds no successful run")
        summaries = [result.measured for result in self.good]
        return summaries[0] if len(summaries) == 1 else self._combined(summaries)

    def _combined(self, summaries: list[Summary]) -> Summary:
        step = combined_step_time([run.seconds for run in self.steps])
        step_s = None if step is None else step.value
        quartiles = [summary.step_quartiles_s for summary in summaries if summary.step_quartiles_s is not None]
        splits = [summary.split for summary in summaries if summary.split is not None]
        special = {
            "cell_id": summaries[0].cell_id,
            "certificate": "PASS" if self.certified else "FAIL" if all(s.certificate for s in summaries) else None,
            "measured_steps": sum(summary.measured_steps for summary in summaries),
            "step_s": step_s,
            "step_interval_s": None if step is None else step.interval,
            "step_quartiles_s": tuple(map(median, zip(*quartiles, strict=True))) if quartiles else None,
            "split": None if step_s is None else _combined_split(splits, step_s),
            "worst": max(filter(None, (s.worst for s in summaries)), key=lambda worst: worst.medians, default=None),
            "lost": {name: why for summary in summaries for name, why in summary.lost.items()},
            "overrun_share": _of_known(max, (summary.overrun_share for summary in summaries)),
        }
        # Runs of a seed have equal losses: each seed counts once.
        seeds = {result.cell.training.seed: result.measured for result in self.good}.values()
        for name in ("train_loss", "validation_loss", "uncompressed_loss", "validation_accuracy"):
            special[name] = _of_known(fmean, (getattr(summary, name) for summary in seeds))
        others = {
            name: _common(field.annotation, [getattr(summary, name) for summary in summaries])
            for name, field in Summary.model_fields.items()
            if name not in special
        }
        return Summary.model_validate(special | others)


def _of_known(make: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return make(known) if known else None


def _common(annotation: Any, values: list[Any]) -> Any:
    """Combine one field of several runs by its type: the median of numbers, otherwise the common value, or None."""
    kinds = {annotation, *get_args(annotation)}
    if kinds & {int, float}:
        return _of_known(median if float in kinds else median_low, values)
    return values[0] if all(value == values[0] for value in values) else None


def _combined_split(splits: list[Split], step_s: float) -> Split | None:
    """Average the runs' shares, and scale them to their combined step."""
    if not splits:
        return None
    totals = [sum(split.model_dump().values()) for split in splits]
    shares = {
        name: fmean(getattr(split, name) / total for split, total in zip(splits, totals, strict=True))
        for name in Split.model_fields
    }
    return Split(**{name: share * step_s for name, share in shares.items()})
