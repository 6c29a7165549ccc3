"""Samples requests with a worker in each node of a lab: in one guest whose clock is virtual, one after the other.

The workers run the same programs as `workers` and `experts` do in one process, and what these hand to each other goes
over TCP and the lab's links (`inside`). So images must be the same, bit for bit, over whatever links; and when what was
done can be set against what a trace of the program is played to.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from testbed.diffusion.dit import Dit
from testbed.diffusion.inside import MODEL, ORDER, LiveSampling, Order
from testbed.errors import StageError
from testbed.jobs.sampling import numbers_of
from testbed.pipeline.frame import HEADER_BYTES
from testbed.play.played import NodeCounters
from testbed.vm.guest import start_guest
from testbed.vm.kernel import GuestKernel

_PROGRAM: Final = "testbed.diffusion.inside"
_LAST_WORDS = 4000


class LiveSampled(NamedTuple):
    """What came of a request over links."""

    images: Tensor
    """(B, 64), -1 to 1."""
    frame_bytes: dict[Any, int]
    """Of each message as it was sent, a `Part` or a `Crossing`."""
    sends: int
    """How many messages crossed a link: a part as often as it was sent."""
    counters: tuple[NodeCounters, ...]
    """Of the nodes, in IP packets; connecting is not counted, closing is."""
    took_ns: int
    """From when the request began until all workers had ended it."""


def sample_live(model: Dit, samplings: Sequence[LiveSampling], kernel: GuestKernel) -> list[LiveSampled]:
    """Make all samplings with one model; each has a lab of its own. SpecError for a program that cannot be; StageError
    where a worker or the guest fails, with what it said.
    """
    actions = [sampling.program.actions() for sampling in samplings]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="testbed-diffusion-")))
        order = Order(size=model.size, samplings=tuple(samplings))
        (folder / ORDER).write_text(order.model_dump_json(), encoding="utf8")
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / MODEL)
        words = stack.enter_context(os.fdopen(os.memfd_create("words"), "rb"))
        guest = stack.enter_context(
            start_guest(
                kernel,
                [sys.executable, "-m", _PROGRAM, str(folder)],
                memory="2G",
                share=[folder],
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
    """Read what the workers wrote of one sampling."""
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
