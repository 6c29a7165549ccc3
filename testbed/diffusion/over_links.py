"""Samples requests, one after another, with a worker in each node of a lab, in one guest with a virtual clock.

The workers run the same programs as `workers` and `experts` do in one process, and exchange messages over TCP and the
lab's links (`sample_in_guest`). Images must therefore be bit-identical over all links; and times can be compared with
the played trace of the program.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from testbed import paths
from testbed.diffusion.dit import Dit
from testbed.diffusion.sample_in_guest import MODEL, ORDER, LiveSampling, Order
from testbed.errors import StageError
from testbed.jobs.sampling import numbers_of
from testbed.process import command_line
from testbed.runtime.frame import HEADER_BYTES
from testbed.trace.played import NodeCounters
from testbed.vm.guest import start_guest
from testbed.vm.kernel import GuestKernel

_PROGRAM: Final = "testbed.diffusion.sample_in_guest"
_LAST_WORDS = 4000


class LiveSampled(NamedTuple):
    """The result of a request over links."""

    images: Tensor
    """(B, 64), -1 to 1."""
    frame_bytes: dict[Any, int]
    """Size of each message as sent, a `Part` or a `Crossing`."""
    sends: int
    """Number of messages that crossed a link, counting each sending of a part."""
    counters: tuple[NodeCounters, ...]
    """Counters of the nodes, in IP packets, excluding connecting, including closing."""
    took_ns: int
    """From the start of the request until all workers had finished it."""


def sample_live(model: Dit, samplings: Sequence[LiveSampling], kernel: GuestKernel) -> list[LiveSampled]:
    """Run all samplings with one model, each in its own lab. SpecError for an invalid program; StageError where a
    worker or the guest fails, with its output.
    """
    actions = [sampling.program.actions() for sampling in samplings]
    with ExitStack() as stack:
        folder = stack.enter_context(paths.scratch_folder("testbed-diffusion-"))
        order = Order(size=model.size, samplings=tuple(samplings))
        (folder / ORDER).write_text(order.model_dump_json(), encoding="utf8")
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / MODEL)
        words = stack.enter_context(os.fdopen(os.memfd_create("words"), "rb"))
        guest = stack.enter_context(
            start_guest(
                kernel,
                command_line(_PROGRAM, str(folder)),
                memory="2G",
                share=[folder],
                share_current=False,
                virtual_clock=True,
                stdout=words.fileno(),
                stderr=words.fileno(),
            )
        )
        if status := guest.wait():
            said = os.pread(words.fileno(), 1 << 20, 0).decode(errors="replace").strip()[-_LAST_WORDS:]
            raise StageError(f"the guest that samples over links ended with status {status}: {said or 'no message'}")
        return [_read(folder, place, each) for place, each in enumerate(actions)]


def _read(folder: Path, place: int, actions: Sequence[Any]) -> LiveSampled:
    """Read the workers' results of one sampling."""
    told = [load_file(folder / f"{place}-{number}.safetensors") for number in range(len(actions))]
    parts = list(numbers_of(actions))
    sent = [row for each in told for row in each["sent"].tolist()]
    counted = json.loads((folder / f"{place}.json").read_text(encoding="utf8"))
    return LiveSampled(
        torch.cat([each["images"] for each in told if each["images"].numel()]),
        {parts[number]: payload_bytes + HEADER_BYTES for _, number, payload_bytes in sent},
        len(sent),
        tuple(NodeCounters(**node) for node in counted),
        max(int(each["took_ns"]) for each in told),
    )
