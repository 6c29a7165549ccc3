"""Runs tasks on the nodes of a Ray cluster (`executor.Cluster`). Needs the extra `ray`; nothing else imports Ray.

Every task is idempotent, and carries the files that it reads (`on_node`): Ray runs those of a lost node again on
another one. Versions on the nodes are compared first, and again by every task, because a node may join later. A node
with other versions is avoided. Results are files, written on the machine of the driver as tasks end.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed import paths
from testbed.errors import CapabilityError, StageError, UserError
from testbed.sweep import on_node
from testbed.sweep.calibrations import kind_of
from testbed.sweep.executor import Task, TaskResult

_RETRIES = 3
"""How often a task whose node or process was lost runs again."""
_AHEAD = 2
"""Tasks sent per core: one runs, one waits there."""
_LOOK_S = 1.0
_PROBE_S = 180.0
"""Time allowed to start testbed on a node."""
_HEAD_S = 10.0
"""Time after which a head that does not answer is lost."""
_WAIT_S = 30.0
"""Time without an ended task before the cores of the cluster are looked at."""
_NODE = "ray.io/node-id"


def work_remotely(shipment: on_node.Shipment) -> tuple[on_node.Done, str]:
    """Run a task in a worker of Ray; return its outcome and the id of the node."""
    import ray

    return on_node.work(shipment, ray.get), ray.get_runtime_context().get_node_id()


def describe_remotely() -> on_node.NodeFacts:
    """Describe the node of a worker of Ray."""
    return on_node.facts()


class RayCluster:
    """A connection to a cluster; closed by `close`."""

    def __init__(self, address: str, runtime_env: dict[str, Any] | None, note: Callable[[str], None]) -> None:
        """Connect, and compare versions. CapabilityError without Ray, without a cluster and without cores; UserError if
        no node has the versions of this machine.
        """
        try:
            import ray
        except ImportError:
            raise CapabilityError(
                "--executor ray needs Ray, which is not installed; in the checkout: pip install '.[ray]'"
            ) from None
        self._ray, self._note = ray, note
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # otherwise Ray warns of a later version
        try:
            if address != "auto":  # Ray tries for minutes
                _reach(address, _HEAD_S).close()
            ray.init(address, runtime_env=runtime_env, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, OSError, RuntimeError, TypeError, ValueError, ray.exceptions.RayError) as error:
            raise CapabilityError(
                f"cannot connect to the Ray cluster {address!r}: {_first_line(error)}; start one with 'ray start "
                "--head' on one machine and 'ray start --address=HEAD:6379' on the others, and see docs/scale.md"
            ) from None
        self._head = ray.get_runtime_context().gcs_address
        self._closed = threading.Event()
        threading.Thread(target=self._watch_head, daemon=True).start()
        self._needed = on_node.facts().versions
        self._facts: dict[str, on_node.NodeFacts] = {}
        self._unlike: dict[str, str] = {}
        """By node, why it is not used."""
        self._kind: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}
        """Prepared data in the object store, by SHA-256."""
        try:
            self._compare_nodes()
        except BaseException:
            self.close()
            raise

    @property
    def cores(self) -> int:
        """Number of cores of the nodes that are used."""
        return int(sum(node["Resources"].get("CPU", 0) for node in self._nodes().values()))

    def close(self) -> None:
        """Disconnect: tasks that still run are ended."""
        self._closed.set()
        self._ray.shutdown()

    # ------------------------------------------------------------------ nodes
    def _nodes(self) -> dict[str, dict[str, Any]]:
        """Return the living nodes that are not avoided, by id."""
        living = (node for node in self._ray.nodes() if node["Alive"])
        return {node["NodeID"]: node for node in living if node["NodeID"] not in self._unlike}

    def _compare_nodes(self) -> None:
        ray, nodes = self._ray, self._nodes()
        probe = ray.remote(describe_remotely)
        at = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        options = {name: {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": at(name, False)} for name in nodes}
        asked = {probe.options(**options[name]).remote(): name for name in nodes}
        ended, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_PROBE_S) if asked else ([], [])
        for ref, name in asked.items():
            host = nodes[name]["NodeManagerHostname"]
            try:
                if ref not in ended:
                    raise TimeoutError(f"testbed did not start there within {_PROBE_S:.0f} s")
                self._facts[name] = facts = ray.get(ref)
            except (TimeoutError, ray.exceptions.RayError) as error:
                ray.cancel(ref, force=True)
                self._avoid(name, host, f"it cannot run testbed: {_first_line(error)}")
            else:
                if unlike := on_node.differences(facts.versions, self._needed):
                    self._avoid(name, host, unlike)
        self._check_left()
        kinds = Counter(_text(kind_of(self._facts[name].machine)) for name in self._nodes())
        self._note(f"cluster {self._head}: {sum(kinds.values())} nodes with {self.cores} cores")
        if len(kinds) > 1:
            self._note(f"its nodes are of {len(kinds)} kinds: on another one, the last digits of a loss may differ")

    def _avoid(self, name: str, host: str, why: str) -> None:
        if name not in self._unlike:
            self._unlike[name] = f"{_named(host, name)}: {why}"
            self._note(f"not used: {self._unlike[name]}")

    def _check_left(self) -> None:
        """Raise an error if no living node can run tasks."""
        if any(node["Resources"].get("CPU", 0) >= 1 for node in self._nodes().values()):
            return
        if self._unlike:
            raise UserError(
                f"no node of the cluster {self._head} can run these tasks: {'; '.join(self._unlike.values())}; install "
                "the versions of this machine there, or ship testbed with --runtime-env"
            )
        raise CapabilityError(f"no living node of the cluster {self._head} has a core: start one with 'ray start'")

    def machine(self, before: Mapping[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
        """Choose the kind of node that durations are measured on: that of `before`; otherwise the one of most nodes,
        the first in alphabetical order among equals. Return the description of such a node.
        """
        machines = [self._facts[name].machine for name in self._nodes() if name in self._facts]
        if not machines:
            raise StageError(f"all nodes of the cluster {self._head} are lost; the same command resumes")
        counts = Counter(_text(kind_of(machine)) for machine in machines)
        earlier = _text(kind_of(before))
        chosen = min(counts, key=lambda kind: (kind != earlier, -counts[kind], kind))
        self._kind = json.loads(chosen)
        if len(counts) > 1:
            note(
                f"durations are those of {counts[chosen]} of {len(machines)} nodes: {self._kind['cpu_model']}, "
                f"{self._kind['cores']} cores, kernel {self._kind['kernel']}"
            )
        return next(machine for machine in machines if _text(kind_of(machine)) == chosen)

    # ------------------------------------------------------------------ tasks
    def execute(
        self, tasks: Sequence[Task], *, note: Callable[[str], None], measured: bool = False
    ) -> Generator[TaskResult]:
        """Run tasks on the nodes; yield each result as its task ends. See `executor.Cluster`."""
        waiting, running = deque(tasks), dict[Any, Task]()
        heard_s = time.monotonic()
        if not self._ray.available_resources().get("CPU"):
            note("no living node of the cluster has a core free; waiting")
        try:
            while waiting or running:
                for _ in range(min(len(waiting), max(1, _AHEAD * self.cores) - len(running))):
                    task = waiting.popleft()
                    running[self._send(task, measured)] = task
                ended, _ = self._ray.wait(list(running), timeout=_LOOK_S)
                for ref in ended:
                    heard_s = time.monotonic()
                    task = running.pop(ref)
                    if (result := self._result(task, ref)) is None:
                        waiting.append(task)
                    else:
                        yield result
                if time.monotonic() - heard_s > _WAIT_S:
                    self._check_left()
                    if measured and not self._alike():
                        raise StageError("all nodes whose durations are measured are lost; the same command resumes")
        finally:
            for ref in running:
                self._ray.cancel(ref, force=True)

    def _alike(self) -> list[str]:
        """Return the living nodes of the kind that durations are measured on."""
        known = (name for name in self._nodes() if name in self._facts)
        return [name for name in known if kind_of(self._facts[name].machine) == self._kind]

    def _send(self, task: Task, measured: bool) -> Any:
        """Send a task and the files that it reads. A node that avoids nothing takes any."""
        ray, nodes = self._ray, self._nodes().values()
        files = [self._put(path) for path in task.reads]
        largest = int(max((node["Resources"].get("memory", 0) for node in nodes), default=0))
        guests = task.guest and all("guest" in node["Resources"] for node in nodes)
        options: dict[str, Any] = {"resources": {"guest": 1}, "num_cpus": 0} if guests else {"num_cpus": 1}
        place = ray.util.scheduling_strategies
        if measured or self._unlike:
            wanted = place.In(*self._alike()) if measured else place.NotIn(*self._unlike)
            options["scheduling_strategy"] = place.NodeLabelSchedulingStrategy(hard={_NODE: wanted})
        memory = min(task.memory_bytes, largest) or None
        remote = ray.remote(work_remotely).options(max_retries=_RETRIES, name=task.attempt, memory=memory, **options)
        return remote.remote(on_node.Shipment(task, files, str(paths.cache_folder()), self._needed))

    def _put(self, path: Path) -> on_node.SentFile:
        """Put a file into the object store, which keeps it while something refers to it, on disk if memory is short.
        Prepared data, which many tasks read, stays until the end; else its task alone refers to it.
        """
        sha256 = paths.digest(path)
        ref = self._kept.get(sha256) or self._ray.put(path.read_bytes())
        if path.is_relative_to(paths.cache_folder()):
            self._kept[sha256] = ref
        return on_node.SentFile(str(path), sha256, ref)

    def _result(self, task: Task, ref: Any) -> TaskResult | None:
        """Return what became of a task; None if it must run elsewhere."""
        ray = self._ray
        try:
            done, node = ray.get(ref)
        except ray.exceptions.RayError as error:
            self._kept.clear()  # perhaps it is what was lost
            lost = f"cannot {task.attempt}: its node or process was lost, {1 + _RETRIES} times at most: "
            return TaskResult(task, StageError(lost + _first_line(error)), "")
        name = _named(done.host, node)
        if done.unlike:
            self._avoid(node, done.host, done.unlike)
            self._check_left()
            return None
        if done.error is not None:
            return TaskResult(task, type(done.error)(f"{done.error} (on {name})"), done.said, name)
        if task.writes is not None:
            on_node.place_results(task.writes, done.files)
        return TaskResult(task, None, done.said, name)

    def _watch_head(self) -> None:
        """End this process when the head has not answered for a while: every call of Ray would block, and then abort
        it.
        """
        heard_s = time.monotonic()
        while not self._closed.wait(_LOOK_S):
            try:
                with _reach(self._head, _LOOK_S):
                    heard_s = time.monotonic()
            except OSError as error:
                if time.monotonic() - heard_s > _HEAD_S:
                    lost = f"the head of the cluster {self._head} is lost: {error.strerror or error}"
                    sys.stderr.write(f"testbed: error: {lost}; start a cluster, and repeat the command: it resumes\n")
                    sys.stderr.flush()
                    os._exit(StageError.exit_status)


def _reach(address: str, patience_s: float) -> socket.socket:
    """Connect to HOST:PORT. OSError if nothing answers, ValueError for another form of address."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), patience_s)


def _text(kind: Mapping[str, Any]) -> str:
    return json.dumps(kind, sort_keys=True)


def _named(host: str, node: str) -> str:
    """Return the name of a node for messages: several may run on one host."""
    return f"node {host} ({node[:8]})"


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()
