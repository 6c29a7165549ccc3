"""Checkpoints of a training in one process: all its places at the end of a step, when nothing is on the way.

checkpoint-<step>/ has node-<place>.json and .safetensors of each place (`codecs.kept_state`), rest.json and
rest.safetensors, and last a manifest. It is written as a draft, and renamed once it is on the disk; two are kept.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

import torch

import testbed
from testbed import manifest, paths
from testbed.codecs.kept_state import load_into, state_of
from testbed.errors import CodecError, ResultsError
from testbed.jobs.actions import Key, Message, Node
from testbed.jobs.loop import Resting
from testbed.jobs.recorder import StepRecorder
from testbed.results import CHECKPOINT, checkpoint_steps
from testbed.runtime.step_log import OnHostClock, Records
from testbed.spec import Recipe
from testbed.tagged import read_tagged, write_tagged

_KEPT = 2
_TYPES = (Key, Message, Resting)


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
        self._folder, self._every, self._steps = folder, every, recipe.training.steps
        self._subject = f"{manifest.subject_of(recipe)} testbed {testbed.__version__} torch {torch.__version__}"
        self.newest = next((step for step in reversed(checkpoint_steps(folder)) if self._is_whole(step)), None)
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
        path = self._path(step)
        try:
            rest = read_tagged(path / "rest", _TYPES)
            for place, node in enumerate(run.nodes):
                load_into(node, read_tagged(path / f"node-{place}", _TYPES))
        except (CodecError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ResultsError(
                f"cannot resume from {path}: {error}; the same command starts from the beginning"
            ) from None
        run.recorder.load(rest["recorder"])
        run.clock.set_back(rest["elapsed_ns"])
        for output, size in zip(run.outputs, rest["written_bytes"], strict=True):
            output.truncate(size)
        self.resumed = (*rest["resumed"], step)
        return step, rest["resting"]

    def due(self, step: int) -> bool:
        """Return whether to pause before this step."""
        return step % self._every == 0 and step < self._steps

    def paused(self, step: int, resting: Resting) -> None:
        """Write a checkpoint. SpecError for a node or value that cannot be saved."""
        run, draft = self._run, self._folder / f".{CHECKPOINT}draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
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
        manifest.write_manifest(draft / manifest.NAME, self._subject, draft.iterdir())
        shutil.rmtree(self._path(step), ignore_errors=True)  # an altered one, before which the training was resumed
        draft.rename(self._path(step))
        paths.sync_folder(self._folder)
        for older in [each for each in checkpoint_steps(self._folder) if each < step][: 1 - _KEPT]:
            shutil.rmtree(self._path(older))

    def remove(self) -> None:
        """Remove all."""
        for step in checkpoint_steps(self._folder):
            shutil.rmtree(self._path(step))

    def _path(self, step: int) -> Path:
        return self._folder / f"{CHECKPOINT}{step}"

    def _is_whole(self, step: int) -> bool:
        return not manifest.find_fault(self._path(step) / manifest.NAME, lambda: self._subject)
