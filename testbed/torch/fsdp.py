"""All-gathers of weights and reduce-scatters of gradients of FSDP2 (`fully_shard`), coded.

    coded = testbed.torch.code_fsdp(model, "all_gather: int8(group=64); reduce_scatter: ef(int4(64))")

FSDP2 passes one flat tensor per module: use codecs whose scales are for groups of values. Unless a module keeps its
weights, they are gathered twice per step, before the forward and the backward pass, with separate codecs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from testbed.errors import SpecError
from testbed.torch.coded import Coder, parse_group_codecs


class CodedFsdp(list["_Comm"]):
    """The coders of a model's modules."""

    def state_dict(self) -> list[Any]:
        """Return the state of this rank's codecs, between two steps."""
        return [comm.coder.state_dict() if comm.coder else comm.loaded for comm in self]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Load what `state_dict` returned on this rank, before the first step."""
        for comm, loaded in zip(self, state, strict=True):
            comm.coder, comm.loaded = None, loaded


class _Comm:
    """An all-gather and a reduce-scatter as FSDP2 calls them."""

    def __init__(self, *told: Any) -> None:
        """`told`: the arguments of a coder after its group."""
        self._told = told
        self.coder: Coder | None = None
        self.loaded: Mapping[str, Any] | None = None

    def allocate(self, size: Sequence[int], **of: Any) -> Tensor:
        return torch.empty(size, **of)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any = None, async_op: bool = False
    ) -> dist.Work | None:
        if self.coder is None:
            self.coder = Coder(group, *self._told)
            if self.loaded is not None:
                self.coder.load_state_dict(self.loaded)
        operation, options = ("_allgather_base" if op is None else "_reduce_scatter_base"), dist.ReduceScatterOptions()
        options.reduceOp = op or dist.ReduceOp.SUM  # type: ignore[assignment]
        work = self.coder.call(operation, output_tensor, input_tensor, *([] if op is None else [options]))
        return work if async_op else (work.wait() and None)


def code_fsdp(model: nn.Module, text: str, *, seed: int = 0) -> CodedFsdp:
    """Code the traffic of a model's modules, those made by `fully_shard`. SpecError or UnknownNameError for a text that
    is invalid or codes nothing here, and for a model that is not sharded.
    """
    codecs = parse_group_codecs(text)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise SpecError("no module of the model is sharded; call fully_shard first")
    if others := codecs.pairs.keys() - {"all_gather", "reduce_scatter"}:
        raise SpecError(f"codecs {text!r}: FSDP2 gathers and scatters; it has no {', '.join(sorted(others))}")
    coded = CodedFsdp(_Comm(codecs, seed, number) for number in range(len(modules)))
    for module, comm in zip(modules, coded, strict=True):
        module.set_custom_all_gather(comm)  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]
    return coded
