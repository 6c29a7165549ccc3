"""What a finished run says of one stage, read as a plan of work: how long everything took, and how large it was. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from testbed import results
from testbed.errors import ResultsError
from testbed.records import ActionRecord, SentRecord, StepRecord


class Work(NamedTuple):
    """One recorded action: what it sent, and how long what took on this machine, in nanoseconds."""

    action: ActionRecord
    pause_ns: int
    """Since the action before it, or the beginning of the step. Where the stage is paced, it idled meanwhile."""
    decode_ns: int
    maths_ns: int
    encode_ns: int
    sent: SentRecord | None


def works(step: StepRecord, dilation: int) -> list[Work]:
    """The actions of a recorded step or evaluation, in order. In a dilated lab codecs are held to `dilation` times their time."""
    sent = {(one.direction, one.microbatch): one for one in step.sent}
    found, end_ns = [], step.start_ns
    for one in step.actions:
        if one.began_ns is None or one.maths_ns is None:
            maths_ns = one.computed_ns - one.decoded_ns
        else:  # paced: the other times are the emulated device's
            maths_ns = one.maths_ns - one.began_ns
        found.append(
            Work(
                action=one,
                pause_ns=one.asked_ns - end_ns,
                decode_ns=(one.decoded_ns - one.input_ns) // dilation,
                maths_ns=maths_ns,
                encode_ns=(one.encoded_ns - one.computed_ns) // dilation,
                sent=sent.get(("forward" if one.kind == "F" else "backward", one.microbatch)),
            )
        )
        end_ns = one.encoded_ns
    return found


def load(folder: Path, stage: int) -> list[StepRecord]:
    """What a recording says of one stage. ResultsError where the run did not end well, or is not there as a whole."""
    run = results.Run(folder)
    summary, steps = run.summary, run.steps(stage)
    trained = sum(step.phase == "train" for step in steps)
    if summary is None or summary.status != "ok":
        found = "it has no summary" if summary is None else f"it {summary.status}: {summary.error}"
    elif trained < summary.steps or steps[-1].phase == "train":
        lost = "" if trained < summary.steps else ", but not the evaluation after them"
        found = f"steps-{stage}.jsonl holds {trained} of {summary.steps} training steps{lost}"
    else:
        return steps
    raise ResultsError(
        f"stage {stage}: cannot replay {folder}: {found}; remove the folder, and the same sweep records the run again"
    )


def set_up_ns(folder: Path, steps: Sequence[StepRecord]) -> int:
    """From the moment at which links that vary began to, to the stage's first step: what building the model took, over links on
    which connecting takes no time. 0 where there were no links.
    """
    began_ns = played_at_ns(folder)
    return 0 if began_ns is None else steps[0].start_ns - began_ns


def played_at_ns(folder: Path) -> int | None:
    """When a run's links began to vary; None where it has no lab."""
    return results.Run(folder).lab.played_at_ns if (folder / "lab.json").exists() else None


def clipping_ns(step: StepRecord) -> int:
    """The longest that the stage can have worked, after its last action, on what clipping needs: it then waited for the others,
    and the record has the two together. 0 in an evaluation.
    """
    if step.optimiser_start_ns is None or step.synchronised_ns is None:
        return 0
    return step.synchronised_ns - step.optimiser_start_ns


def update_ns(step: StepRecord) -> int:
    """From the moment at which the gradient's norm was known to the end of the step. 0 in an evaluation."""
    return 0 if step.synchronised_ns is None else step.end_ns - step.synchronised_ns
