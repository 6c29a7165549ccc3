"""Tensors on a GPU are coded as those on the CPU, bit for bit, and observed; over gloo and one GPU that ranks share."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import testbed.torch
from testbed.torch import autoload, pace
from testbed.trace.observations import read_observations, totals
from tests.small_replicas import Data, Net, same
from tests.torch_codecs.ranks import in_processes
from tests.torch_codecs.test_coded_groups import CODED, SIZE, drawn

STEPS = 4
_CYCLES = 50_000_000
"""What a GPU of less than 2.5 GHz waits in more than 20 ms."""
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def on_cpu(values: Any) -> list[Tensor]:
    return [value.detach().cpu() for value in values]


# ---------------------------------------------------------------------- codecs
def exchanged(device: str) -> list[list[Tensor]]:
    """Do each operation in every step; on a GPU in a stream of its own, which has not computed the tensors by then."""
    rank, ranks, done = dist.get_rank(), dist.get_world_size(), []
    stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
    with stream:
        for step in range(STEPS):
            own = drawn(rank, step).to(device)
            parts = torch.cat([drawn(rank, 100 * p + step) for p in range(ranks)]).to(device)
            if device == "cuda":
                torch.cuda._sleep(_CYCLES)
            own = own * 2
            summed, halves = own.clone(), own.bfloat16()
            dist.all_reduce(halves)
            dist.all_reduce(summed, async_op=True).wait()
            gathered = [torch.empty_like(own) for _ in range(ranks)]
            dist.all_gather(gathered, own)
            flat, part, got = (own.new_empty(size) for size in (ranks * SIZE, SIZE, SIZE))
            dist.all_gather_into_tensor(flat, own)
            dist.reduce_scatter_tensor(part, parts)
            works = [dist.isend(own, (rank + 1) % ranks), dist.irecv(got, (rank - 1) % ranks)]
            for work in works:
                work.wait()
            done.append(on_cpu(value * 2 for value in (halves, summed, *gathered, flat, part, got)))
            testbed.torch.step()
    return done


@pytest.mark.gpu
def test_operations_on_a_gpu_have_the_results_of_the_cpu(tmp_path: Path, one_thread: None) -> None:
    here = in_processes(exchanged, tmp_path / "cpu", "cpu", codecs=CODED)
    there = in_processes(exchanged, tmp_path / "cuda", "cuda", codecs=CODED)
    assert all(same(*steps) for ranks in zip(here, there, strict=True) for steps in zip(*ranks, strict=True))


class Given(nn.Module):
    """A model whose gradients are what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in ((64, 64), (100,), (3, 700)))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]).sum()


def hooked(device: str, codec: str) -> list[list[Tensor]]:
    """Average gradients with our hook, in several buckets."""
    net, done = Given().to(device), []
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.001)
    ddp.register_comm_hook(net, testbed.torch.ddp_hook(codec))
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        net.zero_grad()
        ddp([torch.randn(w.shape, generator=draw).to(device) for w in net.weights]).backward()
        done.append(on_cpu(w.grad for w in net.weights))
    return done


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["fp32", "int8", "ef(topk(0.05))", "zstd(int4(64))"])
def test_the_hook_averages_a_gpus_gradients_as_the_cpus(codec: str, tmp_path: Path, one_thread: None) -> None:
    here = in_processes(hooked, tmp_path / "cpu", "cpu", codec)
    there = in_processes(hooked, tmp_path / "cuda", "cuda", codec)
    assert all(same(*steps) for ranks in zip(here, there, strict=True) for steps in zip(*ranks, strict=True))


def own_reducer(device: str) -> list[Tensor]:
    """Train with DDP's own reducer, whose C++ waits for the sums."""
    net, data = Net().to(device), Data()
    ddp = DistributedDataParallel(net.layers)
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(STEPS):
        batch = data.train(step, dist.get_rank(), dist.get_world_size())
        optimiser.zero_grad()
        net.loss(ddp(batch.inputs.to(device)), batch.targets.to(device)).backward()
        optimiser.step()
    return on_cpu(net.parameters())


def sharded(device: str) -> list[Tensor]:
    """Train with FSDP2."""
    mesh, data, net = dist.device_mesh.init_device_mesh(device, (dist.get_world_size(),)), Data(), Net().to(device)
    for layer in net.layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    testbed.torch.code_fsdp(net, "all_gather: fp32; reduce_scatter: fp32")
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(STEPS):
        batch = data.train(step, dist.get_rank(), dist.get_world_size())
        optimiser.zero_grad()
        net.loss(net.layers(batch.inputs.to(device)), batch.targets.to(device)).backward()
        optimiser.step()
    return on_cpu(parameter.to_local() for parameter in net.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize(("job", "codecs"), [(own_reducer, "all_reduce: fp32"), (sharded, "")])
def test_training_on_a_gpu_learns_as_on_the_cpu(job: Any, codecs: str, tmp_path: Path, one_thread: None) -> None:
    here = in_processes(job, tmp_path / "cpu", "cpu", codecs=codecs)
    there = in_processes(job, tmp_path / "cuda", "cuda", codecs=codecs)
    for one, other in zip(here, there, strict=True):
        for weights, expected in zip(other, one, strict=True):
            torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- observing
class Slow(nn.Module):
    """A layer that takes more than 20 ms of a GPU, and returns at once."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            torch.cuda._sleep(_CYCLES)
        return x * 2


def observed(device: str, notes: str) -> list[Tensor]:
    """Train over the backend "testbed", observed."""
    autoload.install({"folder": notes, "record": True})
    group = dist.new_group(backend="testbed")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), Slow(), nn.Linear(64, 8)).to(device)
    ddp = DistributedDataParallel(net, process_group=group)
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(STEPS):
        optimiser.zero_grad()
        ddp(torch.full((4, 64), 0.1 * (1 + dist.get_rank()), device=device)).square().mean().backward()
        optimiser.step()
    return on_cpu(net.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_job_over_our_backend_is_observed(device: str, tmp_path: Path, one_thread: None) -> None:
    notes = tmp_path / "notes"
    one, other = in_processes(observed, tmp_path / "job", device, str(notes))
    assert same(one, other), "gradients were averaged"
    job = read_observations(notes)
    (reduced,) = [total for total in totals(job) if total.what == "all_reduce"]
    assert reduced.operations >= 2 * STEPS
    for rank in job:
        assert len(rank.steps) == STEPS
        slow = [line["ns"] for line in rank.of("module") if line["phase"] == pace.LEAVE and "Slow" in line["name"]]
        assert len(slow) == STEPS
        if device == "cuda":
            assert min(slow) > 20_000_000, "the GPU is waited for before a time is read"
