"""Checkpoints of a training: all its places at the end of a step, when nothing is on the way.

checkpoint-<step>/ has node-<place>.json and .safetensors of each place (`codecs.kept_state`), rest.json and
rest.safetensors (over links, rest-<place> of each), and last a manifest. It is written as a draft, and renamed once it
is on the disk; two are kept.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from testbed import manifest, paths
from testbed.codecs.kept_state import load_into, state_of
from testbed.codecs.wire.header import DeviceMessage, DevicePayload
from testbed.errors import CodecError, ResultsError
from testbed.jobs.actions import Key, Message, Node
from testbed.jobs.loop import Resting
from testbed.jobs.recorder import StepRecorder
from testbed.results import CHECKPOINT, checkpoint_steps, checkpoint_subject, newest_checkpoint
from testbed.runtime.live import PlaceResting
from testbed.runtime.place_job import PlaceJob
from testbed.runtime.step_log import OnHostClock, Records
from testbed.spec import Recipe
from testbed.tagged import read_tagged, write_tagged

_KEPT = 2
_DRAFT = f".{CHECKPOINT}draft"
_TYPES = (Key, Message, Resting, PlaceResting, DevicePayload, DeviceMessage)


class TogetherRun(NamedTuple):
    """The parts of a run in one process that outlive a step."""

    nodes: Sequence[Node]
    outputs: Sequence[IO[str]]
    """The files of its records."""
    recorder: StepRecorder
    records: Records
    clock: OnHostClock


class Checkpoints:
    """The checkpoints of a training, in its folder: the `jobs.loop.Pause` that writes them."""

    def __init__(self, folder: Path, every: int, recipe: Recipe) -> None:
        """Write one after every this many steps."""
        self._folder, self._every, self._recipe = folder, every, recipe
        self.newest = newest_checkpoint(folder, recipe)
        """The last step that has a valid checkpoint; None: none has."""
        self.resumed: tuple[int, ...] = ()
        """The steps at which the training was resumed."""
        self._run: TogetherRun

    def resume(self, run: TogetherRun) -> tuple[int, Resting | None]:
        """Restore the newest checkpoint, if any, into a run that has not begun; returns its first step, and what rested
        there. SpecError for a node that cannot be saved, ResultsError for a checkpoint that does not fit the run.
        """
        self._run = run
        for node in run.nodes:
            state_of(node)
        if (step := self.newest) is None:
            return 0, None
        path = self._folder / f"{CHECKPOINT}{step}"
        rest = read_tagged(path / "rest", _TYPES)
        for place, node in enumerate(run.nodes):
            _load(path, place, node)
        run.recorder.load(rest["recorder"])
        run.clock.set_back(rest["elapsed_ns"])
        for output, size in zip(run.outputs, rest["written_bytes"], strict=True):
            output.truncate(size)
        self.resumed = (*rest["resumed"], step)
        return step, rest["resting"]

    def due(self, step: int) -> bool:
        """Return whether to pause before this step."""
        return step % self._every == 0 and step < self._recipe.training.steps

    def paused(self, step: int, resting: Resting) -> None:
        """Write a checkpoint. SpecError for a node or value that cannot be saved."""
        run, draft = self._run, _new_draft(self._folder)
        assert run.records.written, "all places have ended the same steps"
        sizes = []
        for output in run.outputs:
            output.flush()
            os.fsync(output.fileno())
            sizes.append(os.fstat(output.fileno()).st_size)
        for place, node in enumerate(run.nodes):
            write_tagged(draft / f"node-{place}", state_of(node), _TYPES)
        rest = {
            "resting": resting,
            "recorder": run.recorder.state(),
            "elapsed_ns": run.clock.last_ns,
            "written_bytes": sizes,
            "resumed": self.resumed,
        }
        write_tagged(draft / "rest", rest, _TYPES)
        _complete(draft, step, self._recipe)


class PlaceCheckpoints:
    """One place's part of the checkpoints of a training over links: the `runtime.live.PlacePause` that writes them. The
    first place makes and completes their folders.
    """

    def __init__(self, job: PlaceJob, node: Node) -> None:
        """Checkpoints of a job that states their folder."""
        assert job.checkpoints is not None
        self._job, self._node, self._folder = job, node, Path(job.checkpoints)

    def resume(self) -> PlaceResting | None:
        """Restore the checkpoint that the job resumes, if any; returns what rested there. SpecError for a node that
        cannot be saved, ResultsError for a checkpoint that does not fit.
        """
        state_of(self._node)
        if not self._job.resumes_at:
            return None
        path = self._folder / f"{CHECKPOINT}{self._job.resumes_at}"
        _load(path, self._job.place, self._node)
        resting: PlaceResting = read_tagged(path / f"rest-{self._job.place}", _TYPES)
        return resting

    def due(self, step: int) -> bool:
        """Return whether to pause before this step."""
        return step % self._job.checkpoint_every == 0 and step < self._job.recipe.training.steps

    def begin(self, step: int) -> None:
        """Make the draft, at the first place."""
        if self._job.place == 0:
            _new_draft(self._folder)

    def save(self, step: int, resting: PlaceResting) -> None:
        """Write this place's files. SpecError for a node or value that cannot be saved."""
        place, draft = self._job.place, self._folder / _DRAFT
        write_tagged(draft / f"node-{place}", state_of(self._node), _TYPES)
        write_tagged(draft / f"rest-{place}", resting, _TYPES)

    def finish(self, step: int) -> None:
        """Complete the folder, at the first place."""
        if self._job.place == 0:
            _complete(self._folder / _DRAFT, step, self._job.recipe)


def _load(path: Path, place: int, node: Node) -> None:
    """Restore a node. ResultsError for a checkpoint that does not fit it."""
    try:
        load_into(node, read_tagged(path / f"node-{place}", _TYPES))
    except (CodecError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ResultsError(f"cannot resume from {path}: {error}; the same command starts from the beginning") from None


def _new_draft(folder: Path) -> Path:
    draft = folder / _DRAFT
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    return draft


def _complete(draft: Path, step: int, recipe: Recipe) -> None:
    """Make a draft the checkpoint before this step, and remove all but the two last."""
    folder = draft.parent
    manifest.write_manifest(draft / manifest.NAME, checkpoint_subject(recipe), draft.iterdir())
    path = folder / f"{CHECKPOINT}{step}"
    shutil.rmtree(path, ignore_errors=True)  # an altered one, before which the training was resumed
    draft.rename(path)
    paths.sync_folder(folder)
    for older in [each for each in checkpoint_steps(folder) if each < step][: 1 - _KEPT]:
        shutil.rmtree(folder / f"{CHECKPOINT}{older}")
