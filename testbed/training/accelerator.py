"""The device that a recipe is trained on: `python -m testbed.training.accelerator cuda` prints its `DeviceMemory`, or
exits with status 2, and says why, where there is no GPU.

On a GPU, results repeat bit for bit on one kind of device, driver and torch: kernels are deterministic, attention is
torch's own sequence of matrix products, and fp32 is not rounded to TF32.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from testbed.codecs.catalogue.placement import parse_placement
from testbed.codecs.contract import Context
from testbed.codecs.make import build_codec
from testbed.codecs.wrap import works_on_devices
from testbed.errors import CapabilityError, status_of
from testbed.records import TrainedOn
from testbed.spec import Recipe
from testbed.training.memory_need import DeviceMemory, available_memory, peak_memory


def device_of(recipe: Recipe, place: int = 0) -> torch.device:
    """Return the device of a recipe's tensors; live places take turns on this machine's. CapabilityError if it has
    none, or torch cannot use it.
    """
    if recipe.training.device == "cpu":
        return torch.device("cpu")
    check_device()
    _set_up()
    return torch.device("cuda", place % torch.cuda.device_count() if place else 0)


def check_device() -> None:
    """Raise CapabilityError unless torch can compute on a CUDA device."""
    if torch.cuda.is_available():
        return
    found = "torch finds no GPU" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
    raise CapabilityError(
        f"training.device is 'cuda', but {found}; install a driver and a torch with CUDA (make "
        "PIP_TORCH='--index-url URL'), or train on the CPU (--device cpu)"
    )


def measure_memory(device: str) -> DeviceMemory:
    """Measure the memory of a device, `cpu` or `cuda`. CapabilityError if this machine has none."""
    if device == "cpu":
        return DeviceMemory(free_bytes=available_memory(), process_bytes=0, host_bytes=peak_memory())
    check_device()
    _set_up()
    x = torch.ones(64, 64, device=device, requires_grad=True)
    torch.autograd.backward((x @ x).sum())  # loads the libraries
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return DeviceMemory(free_bytes=free, process_bytes=total - free, host_bytes=peak_memory())


def _set_up() -> None:
    # Read by cuBLAS when it first computes; without it, its results depend on what else runs on the device.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    for kernel in ("flash", "mem_efficient", "cudnn", "math"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(kernel == "math")


def trained_on(recipe: Recipe, device: torch.device) -> TrainedOn | None:
    """Describe the device, for the record of a training or the log of a live place; None for the CPU, which
    `environment` describes.
    """
    if device.type == "cpu":
        return None
    name, peak, cuda = device.type, None, torch.version.cuda or ""
    if device.type == "cuda":
        name, peak = torch.cuda.get_device_name(device), torch.cuda.max_memory_reserved(device)
    return TrainedOn(device=name, driver=_driver(), cuda=cuda, copied=copied(recipe), peak_bytes=peak)


def copied(recipe: Recipe) -> tuple[str, ...]:
    """Return a recipe's codecs that work only on the CPU, so that their messages are copied there and back."""
    texts = [recipe.codec, *([] if recipe.data is None or recipe.data.answer is None else [recipe.data.answer])]
    found = dict[str, bool]()
    for placement in map(parse_placement, texts):
        for pair in (*dict(placement.numbered).values(), *([] if placement.rest is None else [placement.rest])):
            found[pair.forward.text] = works_on_devices(build_codec(pair.forward, Context(0, 0, "forward")))
            found[pair.backward.text] = works_on_devices(build_codec(pair.backward, Context(0, 0, "backward")))
    return tuple(name for name, able in found.items() if not able)


def _driver() -> str:
    """Describe the GPU's driver; empty where the system does not say."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="ascii").partition("\n")[0].strip()
    except OSError:
        return ""


def main() -> None:
    """Measure the device's memory, for a sweep."""
    sys.exit(status_of(lambda: sys.stdout.write(measure_memory(sys.argv[1]).model_dump_json() + "\n")))


if __name__ == "__main__":
    main()
