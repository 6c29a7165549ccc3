"""Makes live runs on the virtual clock, each in its own guest, with torch and TCP together inside.

For training whose maths depends on the network: such a run repeats to the last bit and nanosecond, unlike any run on
the real clock. Compute takes no time in the guest, so the cells' actions are paced. In data parallel training codecs
take as long as in a played cell, by the cell's rule; in other jobs they take no time. The guest holds only the lab and
the stages (`live_in_guest`); texts, certificates and summaries are made here.
"""

from __future__ import annotations

import functools
import os
import selectors
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from testbed import paths, vm
from testbed.errors import CapabilityError, SpecError, StageError, TestbedError
from testbed.process import command_line
from testbed.profiles import LinkProfile
from testbed.records import Calibration, Certificate
from testbed.replay import pipelines, workers
from testbed.runtime.pacing import Coding
from testbed.spec import Cell, recipe_of
from testbed.sweep import playing
from testbed.sweep.calibrations import BUDGET_S
from testbed.sweep.controller import prepare
from testbed.sweep.environment import Means
from testbed.sweep.live_in_guest import LiveRun, Told
from testbed.sweep.live_session import Tokens
from testbed.sweep.progress import SweepProgress
from testbed.sweep.recording import RunRecorder
from testbed.training.memory_need import available_memory, predict_live_memory
from testbed.units import format_size
from testbed.vm.guest import Guest, start_guest
from testbed.vm.kernel import GuestKernel
from testbed.workloads.floor import floors_of

_PROGRAM: Final = "testbed.sweep.live_in_guest"
_GUEST_BYTES = 768 << 20
"""Memory of the guest for its kernel, its page cache and the monitor of the stages."""
_SILENCE_S = 900.0
"""Time without output after which a guest is stopped, on this machine's clock. Importing torch takes 15 s, a step of a
large model minutes."""
_LOOK_S = 0.5
_LAST_WORDS = 2000


def run_cells(runs: Sequence[Cell], folder: Path, means: Means, progress: SweepProgress) -> list[TestbedError]:
    """Make a run for each of `runs`, in order, into `folder`; return the errors of those that failed.

    The runs of one cell have different link seeds. Ctrl-C stops at once. CapabilityError before the first run if this
    machine has too little memory for one of them. The caller holds the folder's lock.
    """
    failures: list[TestbedError] = []
    for cell in runs:
        check_memory(cell)
    tokens = functools.cache(prepare)
    for cell in runs:
        tokens(cell.workload)
    guest_kernel = vm.find_clock_kernel()
    assert guest_kernel is not None  # live cells use the virtual clock only if the kernel exists
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
    """Return the codec durations in data parallel training; None: codecs take no time."""
    if cell.data is None or cell.codec_cost == "zero":
        return None
    return workers.node_times(cell, costs.replicas.get(recipe_of(cell).id))[0].coding


def guest_memory(cell: Cell) -> int:
    """Return the memory of a cell's guest in bytes: the predicted need of its stages, plus its own."""
    asked = predict_live_memory(recipe_of(cell)) + _GUEST_BYTES
    return -(-asked // (256 << 20)) * (256 << 20)


def check_memory(cell: Cell) -> None:
    """Raise CapabilityError if this machine has less free memory than the cell's guest needs."""
    asked, free = guest_memory(cell), available_memory()
    if asked > free:
        raise CapabilityError(
            f"cannot run {cell.id} live on the virtual clock: its guest needs {format_size(asked)} of memory, and "
            f"{format_size(max(0, free))} are free; choose a smaller model or batch, or fewer stages, or end other "
            "programs"
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
        """Boot a guest that makes the run, and monitor it to its end. StageError if it fails, SpecError for a user
        error. `links`: the certificates of the links.
        """
        self.known["floors"] = floors_of(tokens.path, self.cell.workload, tokens.vocabulary)
        self.link_seed = link_seed
        with ExitStack() as stack:
            aside = stack.enter_context(paths.scratch_folder("testbed-live-"))
            order = LiveRun(
                cell=self.cell,
                link_seed=link_seed,
                folder=str(self.run.folder.resolve()),
                tokens=str(tokens.path.resolve()),
                vocabulary=tokens.vocabulary,
                coding=coding,
                checkpoint_every=self.cell.training.checkpoint_every,
                resumes_at=self.resumes_at,
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
                        command_line(_PROGRAM, str(aside / "run.json")),
                        memory=f"{guest_memory(self.cell) >> 20}M",
                        share=[self.run.folder.parent],
                        share_current=False,
                        virtual_clock=True,
                        stdout=writing,
                        stderr=words.fileno(),
                    )
                )
                told = self._follow(guest, reading)
            finally:
                os.close(writing)
                for path in self.run.folder.parent.rglob("*"):
                    paths.give_to_user(path)
            if told is None:
                said = os.pread(words.fileno(), 1 << 20, 0).decode(errors="replace").strip()[-_LAST_WORDS:]
                raise StageError(f"the guest of {self.cell.id} ended without a result: {said or 'no message'}")
            self.note_lost(told.lost)
            if told.failed is not None:
                raise (SpecError if told.by_user else StageError)(told.failed)
        played_at_ns = self.lab.played_at_ns if self.lab else None
        self.note_certificates(playing.virtual_certificates(self.cell, links, self.run.all_steps(), played_at_ns))

    def _follow(self, guest: Guest, reading: int) -> Told | None:
        """Process the guest's messages until it ends; return its final message, None if missing."""
        last: Told | None = None
        text, heard_s = b"", time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(reading, selectors.EVENT_READ)
            while True:
                status = guest.poll()  # before reading, so that its last message is complete
                if selector.select(0 if status is not None else _LOOK_S):
                    text, heard_s = text + os.read(reading, 1 << 16), time.monotonic()
                elif status is not None:
                    return last
                elif time.monotonic() - heard_s > _SILENCE_S:
                    raise StageError(
                        f"the guest of {self.cell.id} printed nothing for {_SILENCE_S:.0f} s of real time and "
                        "was stopped"
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
            # On a stopped clock, the time to build the lab is meaningless.
            self.note_lab(told.lab.model_copy(update={"build_seconds": 0.0}))
        if told.step is not None:
            self.progress.step(told.step)
        if told.evaluated is not None:
            self.progress.evaluated(told.evaluated)
