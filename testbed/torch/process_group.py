"""A process group of torch.distributed that wraps another one, and installation of such wrappers on every gloo group.

    install(Layer, ...)      # every gloo group that is made from now on is wrapped: the first layer is the innermost

A layer is a callable that takes a process group and returns one, usually a subclass of `WrappedGroup`; layers nest
(gloo, then a codec, then an observer). Every operation passes through Python, including those that
DistributedDataParallel's reducer, functional collectives and pipelining start in C++.

torch has no public interface for this. `install` replaces `distributed_c10d._new_process_group_helper` and moves the
tables of `distributed_c10d._world` to the wrapper; `PRIVATE_NAMES` lists the private names that it needs.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from testbed.errors import CapabilityError

BACKEND: Final = "testbed"
"""Backend name of gloo in the installed layers: `init_process_group("testbed")` after `register_backend()`."""
OPERATIONS: Final = (
    "broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "all_gather_single", "_allgather_base",
    "allgather_coalesced", "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "all_to_all_single", "alltoall_base", "alltoall", "send", "recv",
    "recv_anysource", "barrier", "monitored_barrier",
)  # fmt: skip
"""Methods that communicate; all of them pass through `WrappedGroup.call`. Some versions of torch lack some."""
_FORWARDED: Final = (
    "get_group_store", "shutdown", "abort", "set_timeout", "_set_sequence_number_for_group",
    "_get_sequence_number_for_group", "_wait_for_pending_works", "_has_hooks", "_start_coalescing", "_end_coalescing",
    "_enable_collectives_timing", "_get_backend_name", "_backend_id", "_register_on_completion_hook",
)  # fmt: skip
"""Methods that the wrapped group answers."""
_REMADE: Final = ("split_group", "merge_remote_group")
"""Methods that return another group, which is wrapped in the same layers."""
_TABLES: Final = (
    "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "pg_coalesce_state",
)  # fmt: skip
"""Dictionaries of `distributed_c10d._world` whose keys are process groups."""
_FUNCTIONS: Final = ("_new_process_group_helper", "_register_process_group", "_unregister_process_group")
PRIVATE_NAMES: Final = (*_FUNCTIONS, *(f"_world.{name}" for name in (*_TABLES, "tags_to_pg")))
"""Names that torch.distributed.distributed_c10d must have."""

Layer = Callable[[dist.ProcessGroup], dist.ProcessGroup]
_layers: tuple[Layer, ...] = ()
_inners: list[tuple[weakref.ref[dist.ProcessGroup], dist.ProcessGroup]] = []
"""Every wrapper and its wrapped group, which must outlive it. Otherwise DistributedDataParallel's reducer would destroy
gloo while holding the interpreter's lock, and join threads that wait for this lock to release tensors known to Python.
Python itself does not hold the lock then."""


@atexit.register
def _let_go() -> None:
    """Destroy the groups whose wrappers are gone."""
    _inners[:] = [(wrapper, inner) for wrapper, inner in _inners if wrapper() is not None]


class WrappedGroup(dist.ProcessGroup):
    """A process group that does everything through `inner`.

    A subclass overrides an operation (`allreduce`), or `call` for all that are not overridden.

    Calls from C++ to a group's backend go to the backend of the wrapped group.
    """

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        for device in inner._device_types:
            self._register_backend(device, dist.ProcessGroup.BackendType.GLOO, inner._get_backend(device))
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        _let_go()
        _inners.append((weakref.ref(self), inner))

    def call(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """Perform one of `OPERATIONS`; return its Work."""
        return getattr(self.inner, operation)(*arguments, **keywords)

    def rank(self) -> int:
        return self.inner.rank()

    def size(self) -> int:
        return self.inner.size()

    def name(self) -> str:
        return self.inner.name()

    def _set_group_name(self, name: Any) -> None:
        self.inner._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        self.inner._set_group_desc(desc)

    @property
    def group_name(self) -> Any:
        return self.inner.group_name

    @property
    def group_desc(self) -> str:
        return self.inner.group_desc

    @property
    def bound_device_id(self) -> torch.device | None:
        return self.inner.bound_device_id

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self.inner.bound_device_id = device

    # C++ calls these names.
    getRank = rank
    getSize = size
    getBackendName = name
    setGroupName = _set_group_name
    setGroupDesc = _set_group_desc

    def getGroupName(self) -> Any:
        return self.inner.group_name

    def getGroupDesc(self) -> str:
        return self.inner.group_desc


def _operation(name: str) -> Callable[..., Any]:
    def operation(self: WrappedGroup, *arguments: Any, **keywords: Any) -> Any:
        return self.call(name, *arguments, **keywords)

    operation.__name__ = name
    return operation


def _forwarded(name: str) -> Callable[..., Any]:
    def forwarded(self: WrappedGroup, *arguments: Any, **keywords: Any) -> Any:
        return getattr(self.inner, name)(*arguments, **keywords)

    forwarded.__name__ = name
    return forwarded


def _remade(name: str) -> Callable[..., Any]:
    def remade(self: WrappedGroup, *arguments: Any, **keywords: Any) -> Any:
        made = getattr(self.inner, name)(*arguments, **keywords)
        return wrapped(made) if isinstance(made, dist.ProcessGroup) and not isinstance(made, WrappedGroup) else made

    remade.__name__ = name
    return remade


for _make, _names in ((_operation, OPERATIONS), (_forwarded, _FORWARDED), (_remade, _REMADE)):
    for _name in _names:
        if hasattr(dist.ProcessGroup, _name):
            setattr(WrappedGroup, _name, _make(_name))


def wrapped(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group in all installed layers; in `WrappedGroup` alone if there are none."""
    for layer in _layers or (WrappedGroup,):
        group = layer(group)
    return group


def install(*layers: Layer) -> None:
    """Wrap every gloo group that is made from now on, and register the backend; replaces the layers of an earlier call.

    Groups of other or several backends are not wrapped. CapabilityError if this torch lacks a private name.
    """
    global _layers
    if missing := missing_names():
        raise CapabilityError(
            f"cannot observe process groups: torch {torch.__version__} has no torch.distributed.distributed_c10d."
            f"{', '.join(missing)}; use a torch that testbed was tried with (2.13)"
        )
    _layers = layers
    register_backend()
    make = distributed_c10d._new_process_group_helper
    if not hasattr(make, "wraps_groups"):
        distributed_c10d._new_process_group_helper = _wrapping(make)


def missing_names(names: Iterable[str] = PRIVATE_NAMES) -> list[str]:
    """Return which of these private names this torch lacks."""
    return [name for name in names if not _has(distributed_c10d, name)]


def _has(owner: Any, name: str) -> bool:
    first, _, rest = name.partition(".")
    return hasattr(owner, first) and (not rest or _has(getattr(owner, first), rest))


def register_backend() -> None:
    """Make `init_process_group("testbed")` create gloo groups in the installed layers."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        devices = ["cpu", "cuda"]
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=devices)


def _create(options: Any, _: Any) -> dist.ProcessGroup:
    """Create a wrapped gloo group for torch, in the same way as its own."""
    store, rank, size = options.store, options.group_rank, options.group_size
    gloo = dist.ProcessGroupGloo(store, rank, size, options.timeout)
    gloo._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, rank, size)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._set_group_name(options.group_id)
    return wrapped(group)


def _wrapping(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def helper(*arguments: Any, **keywords: Any) -> Any:
        group, store = make(*arguments, **keywords)
        if not isinstance(group, dist.ProcessGroup) or isinstance(group, WrappedGroup) or _others(group):
            return group, store
        outer = wrapped(group)
        _move(group, outer)
        return outer, store

    helper.wraps_groups = True  # type: ignore[attr-defined]
    return helper


def _others(group: dist.ProcessGroup) -> bool:
    """Return whether a group has any backend other than gloo."""
    return {group._get_backend(device).name() for device in group._device_types} != {"gloo"}


def _move(group: dist.ProcessGroup, outer: dist.ProcessGroup) -> None:
    """Replace the inner group by the outer one in torch's tables."""
    world = distributed_c10d._world
    for table in (getattr(world, name) for name in _TABLES):
        if group in table:
            table[outer] = table.pop(group)
    for groups in world.tags_to_pg.values():
        groups[:] = [outer if each is group else each for each in groups]
    name = world.pg_names[outer]
    private: Any = distributed_c10d
    private._unregister_process_group(name)
    private._register_process_group(name, outer)
