"""A communication hook for DistributedDataParallel that codes gradients as in a cell of data parallel training."""

from collections.abc import Mapping
from multiprocessing.pool import ThreadPool
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from testbed.errors import SpecError
from testbed.torch.exchanges import CODED, Among, CodedSum, Exchange, sums_by_parts


class ddp_hook:
    """`ddp.register_comm_hook(model, ddp_hook(...))`: averages the decoded gradients of all ranks.

    Tensors are numbered as in `model.parameters()`; those of fewer than 1,024 values are sent as fp32. A step ends with
    DDP's last bucket. Encoding, sending and decoding run in a thread in parallel to the backward pass, over a separate
    gloo group.
    """

    def __init__(
        self, codec: str, *, exchange: Exchange = "auto", seed: int = 0, group: dist.ProcessGroup | None = None
    ) -> None:
        """Every rank of `group` (DDP's; all ranks, if it has none) makes a hook at the same point of the program.

        `exchange`: how the mean is computed, see `exchanges`. SpecError or UnknownNameError for an unsuitable codec.
        """
        sums_by_parts(codec, 1)  # raises for unsuitable codecs
        self.__name__ = self.__qualname__ = "testbed.torch.ddp_hook"  # DDP logs it
        self._codec, self._exchange, self._seed = codec, exchange, seed
        self._group = dist.new_group(
            dist.get_process_group_ranks(group or dist.group.WORLD), backend="gloo", use_local_synchronization=True
        )
        self._numbers: dict[int, int] = {}
        """By `id` of a parameter."""
        self._sum: CodedSum | None = None
        self._loaded: Mapping[str, Any] = {}
        self._step = 0
        self._thread = ThreadPool(1)

    # DDP compares annotations with types, so this module does without `from __future__ import annotations`.
    def __call__(self, state: nn.Module, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Return the mean of a bucket's gradients; `state` is the model. SpecError for another, or for float64.

        A CodecError, as for a gradient that is NaN or infinite, is raised by DDP when the backward pass ends.
        """
        if self._sum is None:
            self._sum = self._begin(state)
        numbers = [self._numbers[id(parameter)] for parameter in bucket.parameters()]
        buffer: Tensor = bucket.buffer()
        gradients: list[Tensor] = bucket.gradients()
        if buffer.dtype not in CODED:
            raise SpecError(f"cannot code gradients of {buffer.dtype}, only of {', '.join(map(str, CODED))}")
        values = [gradient.to("cpu", torch.float32) for gradient in gradients]
        begun: Future[None] = Future(devices=None if buffer.is_cpu else [buffer.device])
        coded, step, weights = self._sum, self._step, [1 / self._group.size()] * self._group.size()
        self._step += bucket.is_last()

        def exchange(_: Any) -> Tensor:
            means = coded.start(self._group, values, weights, step, numbers).wait()
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean)
            return buffer

        mean = begun.then(exchange)  # in the thread that completes the exchange
        self._thread.apply_async(begun.set_result, [None])
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, which all later steps depend on: save it with the model, one per rank."""
        if self._sum is None:
            return dict(self._loaded)
        return {
            "codec": self._codec,
            "step": self._step,
            "ranks": self._group.size(),
            "codecs": self._sum.memory.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank. SpecError or CodecError for the state of another hook."""
        expected = {"codec": self._codec, "ranks": self._group.size()}
        for name, value in expected.items() if state else ():
            if state.get(name) != value:
                raise SpecError(f"cannot load a hook's state: its {name} is {state.get(name)!r}, the hook's {value!r}")
        self._loaded, self._sum, self._step = state, None, state.get("step", 0)

    def _begin(self, model: object) -> CodedSum:
        if not isinstance(model, nn.Module):
            raise SpecError(
                f"a hook of DDP needs the model as its state, because it numbers its parameters, and got {model!r}; "
                "write ddp.register_comm_hook(model, testbed.torch.ddp_hook(...))"
            )
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        shapes = [parameter.shape for parameter in parameters]
        among = Among(self._group.rank(), self._group.size(), self._seed)
        made = CodedSum(shapes, self._codec, among, exchange=self._exchange)
        if self._loaded:
            made.memory.load(self._loaded["codecs"])
        return made
