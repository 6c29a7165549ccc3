"""Time how fast a lab stands and is gone again, ours beside other emulators where they are installed: `bench lab`.

Every one builds the same star: N hosts round one router, 80 Mbit/s and, where the kernel has netem, 25 ms on both ends
of a link (ours: consumer-80mbps).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from statistics import median
from typing import NamedTuple

from testbed import profiles
from testbed.errors import LabError
from testbed.net.lab import Lab, LabSpec
from testbed.spec import Engine

_LIMIT_S = 120.0
_INTERPRETERS = (sys.executable, "/usr/bin/python3")

# Each prints [seconds to build, seconds to take down] and imports its tool before the clock starts.
_MININET = """
import json, sys, time
from mininet.link import TCLink
from mininet.net import Mininet
nodes, delay = int(sys.argv[1]), sys.argv[2]
options = {"bw": 80, **({"delay": delay} if delay else {})}
start = time.monotonic()
net = Mininet(controller=None, link=TCLink)
router = net.addHost("r")
for i in range(nodes):
    net.addLink(net.addHost(f"h{i}"), router, **options)
net.build()
built = time.monotonic()
net.stop()
print(json.dumps([built - start, time.monotonic() - built]))
"""
_NEST = """
import json, sys, time
from nest.clean_up import delete_namespaces
from nest.topology import Node, Router, connect
nodes, delay = int(sys.argv[1]), sys.argv[2] or "0ms"
start = time.monotonic()
router = Router("r")
for i in range(nodes):
    near, far = connect(Node(f"h{i}"), router)
    near.set_address(f"10.0.{i}.2/24")
    far.set_address(f"10.0.{i}.1/24")
    near.set_attributes("80mbit", delay)
    far.set_attributes("80mbit", delay)
built = time.monotonic()
delete_namespaces()
print(json.dumps([built - start, time.monotonic() - built]))
"""


class LabSpeed(NamedTuple):
    """Medians of several repetitions; a number that could not be had is None, and `note` says why."""

    tool: str
    nodes: int
    build_s: float | None
    teardown_s: float | None
    repetitions: int
    note: str


def time_our_lab(nodes: int, engine: Engine, repetitions: int) -> LabSpeed:
    """Time stars of our own, without certificates; the first is not counted."""
    spec = LabSpec(
        topology="star",
        profiles=(profiles.load_profile("consumer-80mbps"),),
        nodes=nodes,
        engine=engine,
        engine_reason="bench lab",
    )
    Lab(spec).close()
    build, teardown = [], []
    for _ in range(repetitions):
        start = time.monotonic()
        lab = Lab(spec)
        built = time.monotonic()
        lab.close()
        build.append(built - start)
        teardown.append(time.monotonic() - built)
    return LabSpeed("testbed", nodes, median(build), median(teardown), repetitions, f"engine {engine}, read back")


class Emulator(NamedTuple):
    """Another emulator."""

    tool: str
    module: str
    program: str
    wants: tuple[str, ...]
    """Programs that it starts."""

    def measure(self, nodes: int, repetitions: int, *, netem: bool) -> LabSpeed:
        """Time it in a process and network namespaces of its own; an emulator that is not installed has no numbers."""

        def without(reason: str) -> LabSpeed:
            return LabSpeed(self.tool, nodes, None, None, 0, reason)

        if missing := [program for program in self.wants if shutil.which(program) is None]:
            return without(f"not installed: there is no {', '.join(missing)}")
        python = next((path for path in _INTERPRETERS if shutil.which(path) and self._imports(path)), None)
        if python is None:
            return without(f"not installed: no module {self.module}")
        try:
            runs = [self._run(python, nodes, "25ms" if netem else "") for _ in range(repetitions)]
        except LabError as error:
            return without(str(error))
        note = "HTB and netem" if netem else "HTB only, without delay: no netem here"
        return LabSpeed(
            self.tool, nodes, median(run[0] for run in runs), median(run[1] for run in runs), repetitions, note
        )

    def _imports(self, python: str) -> bool:
        return subprocess.run([python, "-c", f"import {self.module}"], capture_output=True, check=False).returncode == 0

    def _run(self, python: str, nodes: int, delay: str) -> tuple[float, float]:
        command = ["unshare", "--net", "--mount", python, "-c", self.program, str(nodes), delay]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
            build_s, teardown_s = json.loads(done.stdout.strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            raise LabError(f"was not done after {_LIMIT_S:.0f} s") from None
        except subprocess.CalledProcessError as error:
            raise LabError(f"failed: {(error.stderr.strip() or 'without a message').splitlines()[-1]}") from None
        except (ValueError, IndexError):
            raise LabError(f"failed: it printed {done.stdout[-200:]!r}") from None
        return float(build_s), float(teardown_s)


EMULATORS = (
    Emulator("Mininet", "mininet", _MININET, ("mnexec",)),
    Emulator("NeST", "nest", _NEST, ("tc", "ip")),
)
