"""Make live runs on the virtual clock: each in a guest of its own, with torch and TCP together inside.

For training whose maths depends on the network: such a run repeats to the last bit and nanosecond, which no run on the
real clock does. In the guest computing takes no time, so the cells' actions are paced. In data parallel training codecs
cost what they cost in a played cell, by its rule; in other jobs nothing. Inside are only the lab and the stages
(`inside`); texts, certificates and summaries are made here.
"""

from __future__ import annotations

import functools
import os
import selectors
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from testbed import paths
from testbed.errors import CapabilityError, SpecError, StageError, TestbedError
from testbed.pipeline.memory import available_memory, predict_live_memory
from testbed.pipeline.pacing import Coding
from testbed.play import pipelines, replicas
from testbed.profiles import LinkProfile
from testbed.records import Calibration, Certificate
from testbed.spec import Cell, recipe_of
from testbed.sweep import playing
from testbed.sweep.calibration import BUDGET_S
from testbed.sweep.controller import floor_of, prepare
from testbed.sweep.environment import hold_folder
from testbed.sweep.inside import LiveRun, Told
from testbed.sweep.means import Means
from testbed.sweep.progress import SweepProgress
from testbed.sweep.recording import RunRecorder
from testbed.sweep.session import Tokens
from testbed.units import format_size
from testbed.vm.guest import Guest, start_guest
from testbed.vm.kernel import GuestKernel

_PROGRAM: Final = "testbed.sweep.inside"
_GUEST_BYTES = 768 << 20
"""Of the guest's memory, for its kernel, the files that it reads, and who follows the stages."""
_SILENCE_S = 900.0
"""How long a guest may say nothing, on this machine's clock: importing torch takes it 15 s, a step of a large model
minutes."""
_LOOK_S = 0.5
_LAST_WORDS = 2000


def run_cells(runs: Sequence[Cell], folder: Path, means: Means, progress: SweepProgress) -> list[TestbedError]:
    """Make a run for each of `runs`, in their order, into `folder`; returns why some failed.

    Of the runs of one cell each has another seed for its links. Ctrl-C ends it at once. CapabilityError before the
    first run where this machine has too little memory for one of them.
    """
    failures: list[TestbedError] = []
    with hold_folder(folder), playing.clock_kernel(means, progress) as kernel:
        for cell in runs:
            check_memory(cell)
        tokens = functools.cache(prepare)
        for cell in runs:
            tokens(cell.workload)
        guest_kernel = kernel()
        assert guest_kernel is not None  # live cells are on the virtual clock only where there is one
        links = playing.certified(runs, guest_kernel, len(os.sched_getaffinity(0)))
        calibrated = filter(pipelines.needs_calibration, runs)
        costs = playing.measured_costs(calibrated, folder, means, progress, BUDGET_S)
        seeds = playing.LinkSeeds(folder, runs)
        for cell in runs:
            progress.begin(cell)
            runner = _VirtualRunner(folder, cell, progress)
            try:
                runner.make(guest_kernel, tokens(cell.workload), seeds.take(cell), links, _coding(cell, costs))
            except BaseException as error:
                runner.close(error)
                if not isinstance(error, TestbedError):
                    raise
                failures.append(error)
            else:
                runner.close()
    return failures


def _coding(cell: Cell, costs: Calibration) -> Coding | None:
    """Return how long codecs work in data parallel training; None: not at all."""
    if cell.data is None or cell.codec_cost == "zero":
        return None
    return replicas.node_times(cell, costs.replicas.get(recipe_of(cell).id))[0].coding


def guest_memory(cell: Cell) -> int:
    """Return how much memory a cell's guest gets, in bytes: what its stages are predicted to need, and its own."""
    asked = predict_live_memory(recipe_of(cell)) + _GUEST_BYTES
    return -(-asked // (256 << 20)) * (256 << 20)


def check_memory(cell: Cell) -> None:
    """Raise CapabilityError where this machine has less free memory than the cell's guest is given."""
    asked, free = guest_memory(cell), available_memory()
    if asked > free:
        raise CapabilityError(
            f"cannot run {cell.id} live on the virtual clock: its guest needs {format_size(asked)} of memory as "
            f"predicted, and {format_size(max(0, free))} are free; take a smaller model or batch, or fewer stages, or "
            "end other programs"
        )


class _VirtualRunner(RunRecorder):
    """One run of one cell."""

    def make(
        self,
        kernel: GuestKernel,
        tokens: Tokens,
        link_seed: int,
        links: Mapping[LinkProfile, Certificate],
        coding: Coding | None,
    ) -> None:
        """Boot a guest that makes the run, and follow it to its end. StageError, or SpecError for what the user can
        mend, where it fails. `links`: what was certified.
        """
        self.known["floor"], self.link_seed = floor_of(self.cell.workload, tokens), link_seed
        with ExitStack() as stack:
            aside = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="testbed-live-")))
            order = LiveRun(
                cell=self.cell,
                link_seed=link_seed,
                folder=str(self.run.folder.resolve()),
                tokens=str(tokens.path.resolve()),
                vocabulary=tokens.vocabulary,
                coding=coding,
            )
            (aside / "run.json").write_text(order.model_dump_json(), encoding="utf8")
            words = stack.enter_context(os.fdopen(os.memfd_create("words"), "rb"))
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            self.progress.phase("booting the guest")
            try:
                guest = stack.enter_context(
                    start_guest(
                        kernel,
                        [sys.executable, "-m", _PROGRAM, str(aside / "run.json")],
                        memory=f"{guest_memory(self.cell) >> 20}M",
                        share=[self.run.folder],
                        virtual_clock=True,
                        stdout=writing,
                        stderr=words.fileno(),
                    )
                )
                told = self._follow(guest, reading)
            finally:
                os.close(writing)
                for path in self.run.folder.iterdir():
                    paths.give_to_user(path)
            if told is None:
                said = os.pread(words.fileno(), 1 << 20, 0).decode(errors="replace").strip()[-_LAST_WORDS:]
                raise StageError(f"the guest of {self.cell.id} ended without a word: {said or 'no message'}")
            self.note_lost(told.lost)
            if told.failed is not None:
                raise (SpecError if told.by_user else StageError)(told.failed)
        played_at_ns = self.lab.played_at_ns if self.lab else None
        self.note_certificates(playing.virtual_certificates(self.cell, links, self.read_steps(), played_at_ns))

    def _follow(self, guest: Guest, reading: int) -> Told | None:
        """Note what the guest says until it has ended; returns its last word, None where that is missing."""
        last: Told | None = None
        text, heard_s = b"", time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(reading, selectors.EVENT_READ)
            while True:
                status = guest.poll()  # before looking: what it said last is then there to be read
                if selector.select(0 if status is not None else _LOOK_S):
                    text, heard_s = text + os.read(reading, 1 << 16), time.monotonic()
                elif status is not None:
                    return last
                elif time.monotonic() - heard_s > _SILENCE_S:
                    raise StageError(
                        f"the guest of {self.cell.id} said nothing for {_SILENCE_S:.0f} s of this machine's time and "
                        "was ended"
                    )
                *lines, text = text.split(b"\n")
                for line in lines:
                    told = Told.model_validate_json(line)
                    self._note(told)
                    last = told if told.ended or told.failed is not None else last

    def _note(self, told: Told) -> None:
        if told.phase is not None:
            self.progress.phase(told.phase)
        if told.lab is not None:
            # How long building took says nothing on a clock that stood still.
            self.note_lab(told.lab.model_copy(update={"build_seconds": 0.0}))
        if told.step is not None:
            self.progress.step(told.step)
        if told.evaluated is not None:
            self.progress.evaluated(told.evaluated)
