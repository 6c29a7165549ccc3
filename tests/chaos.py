"""Kill -9 of any process of a command at any moment, and what must be true afterwards, whatever the command was.

`python -m tests.chaos KILLS [SEED]` strikes all commands in turn and prints a table; test_chaos.py strikes a few times.

Nothing is left: no process, mount, namespace, device, temporary file or held lock. What was finished before is as it
was. The same command completes, and what it makes equals what an undisturbed command made.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from testbed import results, vm
from testbed.exec.order import RESULT, ExecResult
from tests.commands import EXPERIMENT, OVERLAPPED, PACED, PLAYED_EXPERIMENT, keep_speed, outside
from tests.forked import command_line, is_running

PATIENCE_S = 600
"""How long a command may take on a machine that does much else besides."""
_PR_SET_CHILD_SUBREAPER = 36
_ROOT = Path(__file__).resolve().parents[1]
_OF_THE_DAY = re.compile(r'"(taken_at|seconds|build_seconds|rtt_us)": ?("[^"]*"|[-+.e\d]+)')
"""Also TCP's smoothed round-trip time, which differs by a microsecond where no time of a step does."""
"""What differs between any two equal runs."""
_TOLD = re.compile("SIGKILL|killed|ended with status|died|lost node|failed: ")
"""Words with which a command says that a process of its own is gone."""

Outcome = Callable[[Path, str], dict[str, str]]
"""What a finished command has made in its folder, and printed, by name."""


class ChaosJob(NamedTuple):
    """A command, as small as it can be."""

    arguments: tuple[str, ...]
    outcome: Outcome
    files: Mapping[str, str] = {}
    needs: tuple[str, ...] = ("clock_kernel",)
    """Markers of tests/conftest.py."""


def _runs(*, exact: bool) -> Outcome:
    """What the finished runs of a sweep recorded: all, or where times are the real clock's the losses."""

    def outcome(folder: Path, said: str) -> dict[str, str]:
        made = {}
        for run in _finished(folder):
            nodes = sorted(run.folder.glob("steps-*.jsonl"))
            name = run.folder.parent.name
            if exact:
                files = [*nodes, run.folder / "cell.json", run.folder / "summary.json", run.folder / "certificate.json"]
                made |= {f"{name} {path.name}": _OF_THE_DAY.sub("", path.read_text()) for path in files}
            else:
                losses = [[step.loss for step in run.steps(node)] for node in range(len(nodes))]
                made[name] = f"{losses} {run.cell.model_dump_json()}"
        for path in (folder / "results").glob("*/tuning.json"):
            made[path.name] = path.read_text()
        return made

    return outcome


def _programs(*, exact: bool) -> Outcome:
    """What the programs of `exec` printed, how they ended, and where the clock is virtual, when."""

    def outcome(folder: Path, said: str) -> dict[str, str]:
        result = ExecResult.model_validate_json(_exec_folders(folder)[-1].joinpath(RESULT).read_text())
        made = {node.name: f"{node.status} {node.last_words}" for node in result.nodes}
        assert (_exec_folders(folder)[-1] / "report.html").is_file()
        return made | ({"times": str([result.lasted_ns, *(node.ended_ns for node in result.nodes)])} if exact else {})

    return outcome


def _exec_folders(folder: Path) -> list[Path]:
    return sorted((folder / "results" / "exec").iterdir(), key=lambda path: int(path.name))


def _predicted(folder: Path, said: str) -> dict[str, str]:
    """The table to two digits: what a guest has played before decides which packet is lost, where queues overflow."""
    (home,) = (folder / "results").iterdir()
    tables = {path.name: path.read_text() for path in home.glob("*.csv")}
    rounded = {
        name: re.sub(r"\d+\.\d+(e[-+]?\d+)?", lambda m: f"{float(m[0]):.2g}", text) for name, text in tables.items()
    }
    return rounded | {path.name: "" for path in home.glob("*/*.json")}


def _benchmark(folder: Path, said: str) -> dict[str, str]:
    rows = json.loads((folder / "found.json").read_text())["results"]
    kept = ("payload_bytes", "bits_per_value", "relative_error")
    return {f"{row['codec']} {row['direction']} {row.get('package')}": str([row[key] for key in kept]) for row in rows}


def _verdict(folder: Path, said: str) -> dict[str, str]:
    return {"verdict": said.strip().splitlines()[-1]}


_LIVE = 'profile = ["datacenter"]\ncodec = ["int8"]\n"pipeline.stages" = [2]\n"training.steps" = [3]\n'
_TUNE = """
[tune]
field = "optimiser.learning_rate"
values = [1e-4, 3e-3]
steps = 2
seeds = [0]
quick = true
"""
_TALK = """
import os, socket, time
first = os.environ["TESTBED_ADDRESSES"].split(",")[0]
if os.environ["TESTBED_NODE"] == "0":
    with socket.create_server((first, 4000)) as server:
        peer, _ = server.accept()
        print("received", sum(len(part) for part in iter(lambda: peer.recv(1 << 16), b"")), flush=True)
        peer.sendall(b"x" * 1234)
        peer.close()
else:
    while True:
        try:
            peer = socket.create_connection((first, 4000))
            break
        except OSError:
            time.sleep(0.05)
    for _ in range(20):
        peer.sendall(b"y" * 5000)
        time.sleep(0.1)
    peer.shutdown(socket.SHUT_WR)
    print("answered", sum(len(part) for part in iter(lambda: peer.recv(1 << 16), b"")), flush=True)
"""
_COUNT = "i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done; echo counted $i"
_CHECKPOINTS = 'steps" = [60]\n"training.checkpoint_every" = [7]\nplayed_steps = [4]'
_SWEEP = ("sweep", "sweep.toml", "--no-report")

JOBS = {
    "sweep played": ChaosJob((*_SWEEP, "--clock", "virtual"), _runs(exact=True), {"sweep.toml": PLAYED_EXPERIMENT}),
    "sweep live, relay": ChaosJob(
        (*_SWEEP, "--clock", "real", "--engine", "relay"),
        _runs(exact=False),
        {"sweep.toml": EXPERIMENT.format(head="", compute=PACED, axes=_LIVE)},
        ("root",),
    ),
    "exec, virtual": ChaosJob(
        ("exec", "--clock", "virtual", "--memory", "1G", "--", sys.executable, "talk.py"),
        _programs(exact=True),
        {"talk.py": _TALK},
    ),
    "predict": ChaosJob(
        ("predict", "cells.toml"), _predicted, {"cells.toml": OVERLAPPED.replace("steps = 40", "steps = 20")}
    ),
    "sweep tuned": ChaosJob(
        (*_SWEEP, "--clock", "virtual"),
        _runs(exact=True),
        {"sweep.toml": PLAYED_EXPERIMENT.replace('profile = ["datacenter", ', "profile = [") + _TUNE},
    ),
    "exec, real": ChaosJob(
        ("exec", "--clock", "real", "--engine", "relay", "--no-certify", "--", sys.executable, "talk.py"),
        _programs(exact=False),
        {"talk.py": _TALK},
        ("root",),
    ),
    "codecs check": ChaosJob(("codecs", "check", "int8"), _verdict, needs=()),
    "sweep with checkpoints": ChaosJob(
        (*_SWEEP, "--clock", "virtual"),
        _runs(exact=True),
        {"sweep.toml": PLAYED_EXPERIMENT.replace('steps" = [3]', _CHECKPOINTS).replace("fp32", "delta-int8")},
    ),
    "sweep live, virtual": ChaosJob(
        (*_SWEEP, "--clock", "virtual"),
        _runs(exact=True),
        {"sweep.toml": EXPERIMENT.format(head="", compute=PACED, axes=f'{_LIVE}codec_cost = ["zero"]')},
    ),
    "vm": ChaosJob(("vm", "--virtual-clock", "--memory", "256M", "--", "sh", "-c", _COUNT), _verdict),
    "bench codecs": ChaosJob(("bench", "codecs", "int8", "-o", "found.json"), _benchmark, needs=()),
}
"""The commands that are struck, by name; the short form has the first ones."""


class Undisturbed(NamedTuple):
    """A command that nobody killed."""

    seconds: float
    outcome: dict[str, str]


class Strike(NamedTuple):
    """One kill, and what was wrong afterwards."""

    job: str
    seed: int
    moment_s: float
    role: str
    """What the killed process was: controller, guest, relay, forks server, program, launcher."""
    line: str
    """Its command line."""
    kept: int
    """Files of finished work that were there at that moment."""
    status: int | None
    """Exit status of the command whose process was killed."""
    faults: list[str]


class Arena:
    """A folder in which one command is run, again and again, with a cache of its own. A context manager."""

    def __init__(self, name: str, folder: Path) -> None:
        self.job, self.folder = JOBS[name], folder
        self.cache, self.temporary = folder / "cache", folder / "tmp"
        self.work = folder / "work"
        self.mark = f"TESTBED_CHAOS_MARK={uuid.uuid4().hex}"
        self._before = outside(), _abandoned()
        for path in (self.cache / "testbed", self.temporary, self.work):
            path.mkdir(parents=True)
        keep_speed(self.cache)
        if (kernel := vm.find_clock_kernel()) is not None:
            (self.cache / "testbed" / kernel.folder.name).symlink_to(kernel.folder)
        draw = np.random.default_rng(0)
        tensors = {way: draw.standard_normal((3, 2, 16, 64), np.float32) for way in ("forward", "backward")}
        about = np.array(json.dumps({"model": "none", "text": "no", "steps": 3, "loss": 4.5}))
        np.savez(self.cache / "testbed" / "boundary-tensors-1.npz", about=about, **tensors)  # else trained for minutes
        for name_of_file, text in self.job.files.items():
            (self.work / name_of_file).write_text(text, encoding="utf8")

    def start(self, *more: str, before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start the command as people do: in an interpreter of its own, not as a fork of ours. `before` runs it."""
        name, _, value = self.mark.partition("=")
        places = {"XDG_CACHE_HOME": str(self.cache), "TMPDIR": str(self.temporary), "PYTHONPATH": str(_ROOT)}
        with (self.folder / "said").open("w") as said:
            return subprocess.Popen(
                [*before, sys.executable, "-m", "testbed", *self.job.arguments, *more],
                cwd=self.work,
                env={**os.environ, **places, name: value, "OMP_NUM_THREADS": "1"},
                stdout=said,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        """What the last command printed."""
        return (self.folder / "said").read_text(errors="replace")

    def finish(self) -> Undisturbed:
        """Run the command to its end. AssertionError, with what it said, where it fails."""
        began = time.monotonic()
        process = self.start()
        status = process.wait(PATIENCE_S)
        assert status == 0, f"status {status}: {self.said[-2000:]}"
        return Undisturbed(time.monotonic() - began, self.job.outcome(self.work, self.said))

    def processes(self) -> dict[int, str]:
        """Return what runs and was started here, with command lines: it carries the mark, or descends from who does.

        A guest's environment is empty; who loses its parent is ours (`adopting`).
        """
        return {pid: line for pid, (_, line) in _tree(self.mark).items()}

    def residue(self, *, within_s: float = 10) -> list[str]:
        """Return what the command has left outside its results, in words; it has a while to go."""
        deadline = time.monotonic() + within_s
        while True:
            running, shared = self.processes(), _abandoned() - self._before[1]
            if not (running or shared) or time.monotonic() > deadline:
                break
            _reap()
            time.sleep(0.05)
        left = [f"process {pid} still runs: {line}" for pid, line in running.items()]
        for pid in running:  # the next strike must not suffer
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        here = outside()
        left += [f"outside: {here} instead of {self._before[0]}"] if here != self._before[0] else []
        left += [f"shared memory that nobody has mapped: {sorted(shared)}"] if shared else []
        stray = [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]
        return left + ([f"temporary files: {stray}"] if stray else [])

    def unfinished(self) -> list[str]:
        """Return the files of the results and the cache whose names say that they are not lasting."""
        folders = (self.work, self.cache / "testbed")
        names = [path.relative_to(self.folder) for folder in folders for path in folder.rglob("*")]
        passing = [name for name in names if name.suffix == ".part" or any(part[0] == "." for part in name.parts)]
        return [str(name) for name in passing if name.name != ".lock"]

    def finished_work(self) -> dict[str, str]:
        """Return the digest of each file of a finished run or training."""
        folders = [run.folder for run in _finished(self.work)]
        folders += [path.parent for path in (self.work / "results").glob("*/trained/[!.]*/training.json")]
        files = [path for folder in folders for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
        files += sorted((self.work / "results").glob("*/cells/*.json"))
        return {str(path.relative_to(self.work)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def strike(name: str, seed: int, undisturbed: Undisturbed, folder: Path) -> Strike:
    """Kill a process of a command at a moment that the seed draws; look around; run the command again."""
    chance = random.Random(f"{name} {seed}")
    arena = Arena(name, folder)
    moment_s, role = chance.uniform(0.02, 0.95) * undisturbed.seconds, ""
    with adopting():
        while not role:
            process = arena.start()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(moment_s)
            role, line = _kill_one(arena, process, chance)
            if not role:  # the machine had more to do before, and the command has ended: sooner
                shutil.rmtree(folder)
                arena, moment_s = Arena(name, folder), moment_s / 2
        try:
            status: int | None = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            status = None
            process.kill()
            process.wait()
        faults = [] if status is not None else [f"the command went on for {PATIENCE_S} s: {arena.said[-500:]}"]
        # Not what programs in nodes have said.
        own = "\n".join(line for line in arena.said.splitlines() if not line.startswith(("node-", " ")))
        if "Traceback" in own or "a bug in testbed" in arena.said:
            faults.append(f"no clear message: {arena.said[-1500:]}")
        elif role != "controller" and status != 0 and not _TOLD.search(arena.said):
            faults.append(f"status {status} without a reason: {arena.said[-500:]}")
        faults += arena.residue()
        kept = arena.finished_work()
        try:
            again = arena.finish()
        except (AssertionError, subprocess.TimeoutExpired) as error:
            faults.append(f"the same command failed: {error}")
        except Exception as error:
            faults.append(f"the same command left what cannot be read: {error!r}")
        else:
            faults += _differences(again.outcome, undisturbed.outcome)
            now = arena.finished_work()
            faults += [f"{path} was finished and changed" for path in kept if now.get(path) != kept[path]]
            faults += [f"unfinished files stay: {stays}"] if (stays := arena.unfinished()) else []
        faults += [f"after the second command: {each}" for each in arena.residue()]
    return Strike(name, seed, moment_s, role, line, len(kept), status, faults)


def undisturbed_of(name: str, folder: Path) -> Undisturbed:
    """Run a command that nobody kills, with an empty cache."""
    with adopting():
        arena = Arena(name, folder)
        made = arena.finish()
        left = [*arena.residue(), *arena.unfinished()]
        assert not left, left
        assert made.outcome
    return made


def _differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    faults = [f"{key} is not as in an undisturbed run" for key in theirs if ours.get(key) != theirs[key]]
    return faults + [f"{key} is in no undisturbed run" for key in ours.keys() - theirs.keys()]


def _finished(folder: Path) -> list[results.Run]:
    homes = [path for path in (folder / "results").glob("*/") if path.name != "exec"]
    every = [run for home in homes for run in results.runs(home)]
    return [run for run in every if run.summary is not None and run.summary.status == "ok"]


# ------------------------------------------------------------------ processes
@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Make this process the parent of whatever loses its own, so that nothing that was started gets out of sight."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        _reap()


def _abandoned() -> set[str]:
    """Return the files of shared memory that no process has mapped: other programs come and go with theirs."""
    mapped: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            mapped |= {int(inode) for inode in re.findall(r"(\d+) +/dev/shm/", maps.read_text(errors="replace"))}
    return {entry.path for entry in os.scandir("/dev/shm") if entry.inode() not in mapped}


def _reap() -> None:
    """Take the status of children that were adopted, and ended."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] == "Z" and int(fields[1]) == os.getpid():
                os.waitpid(int(folder.name), os.WNOHANG)


def _tree(mark: str) -> dict[int, tuple[int, str]]:
    """Return (parent, command line) of the running processes that carry a mark, of what descends from them, and of
    what was adopted from them.
    """
    parents, lines, marked = {}, {}, set()
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError):
            if is_running(pid):
                parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                lines[pid] = command_line(pid)
                marked |= {pid} if mark.encode() in (folder / "environ").read_bytes() else set()
    found = set(marked)
    # A child of ours that lacks the mark is a guest that was adopted: we start nothing else.
    found |= {pid for pid, parent in parents.items() if parent == os.getpid() and "/linux" in lines[pid]}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: (parents[pid], lines[pid]) for pid in found}


def _role(pid: int, tree: Mapping[int, tuple[int, str]], controller: int) -> str:
    """Return what a process is to its command."""
    parent, line = tree[pid]
    if pid == controller:
        return "controller"
    if "/linux" in line.partition(" ")[0]:
        return "guest"
    if "testbed.net.relay" in line:
        return "relay"
    if "testbed.forks" in line or "exec.script" in line:
        return "forked program" if parent in tree and tree[parent][1] == line else "forks server"
    module = re.search(r"testbed/program\.py \d+ (\S+)", line) or re.search(r"-m (testbed\.\S+)", line)
    return module.group(1) if module else "program"


def _kill_one(arena: Arena, process: subprocess.Popen[bytes], chance: random.Random) -> tuple[str, str]:
    """Kill a process of the command: its kind is drawn, then one of that kind. ("", "") where the command has ended."""
    while process.poll() is None:
        tree = _tree(arena.mark)
        roles: dict[str, list[int]] = {}
        for pid in sorted(tree):
            roles.setdefault(_role(pid, tree, process.pid), []).append(pid)
        if roles:
            role = chance.choice(sorted(roles))
            chosen = chance.choice(roles[role])
            with contextlib.suppress(ProcessLookupError):
                os.kill(chosen, signal.SIGKILL)
                return role, tree[chosen][1]
    return "", ""


# ------------------------------------------------------------------ the long form
def main(arguments: Sequence[str]) -> int:
    """Strike all commands in turn; print a line for each kill, and a table. The status says whether all was well."""
    kills, first = int(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 0
    names = arguments[2:] or list(JOBS)
    base = Path(tempfile.mkdtemp(prefix="chaos-"))
    known_runs: dict[str, Undisturbed] = {}
    faulty = 0
    for number in range(kills):
        name = names[number % len(names)]
        if name not in known_runs:
            known_runs[name] = undisturbed_of(name, base / f"{name.replace(' ', '-')}-undisturbed")
            print(f"{name}: undisturbed, {known_runs[name].seconds:.1f} s", flush=True)
        folder = base / f"{number}"
        struck = strike(name, first + number // len(names), known_runs[name], folder)
        said = json.dumps(struck._asdict())
        print(said, flush=True)
        faulty += bool(struck.faults)
        if not struck.faults:
            shutil.rmtree(folder)
    print(f"{kills} kills, {faulty} with faults; {base}", flush=True)
    if not faulty:
        shutil.rmtree(base)
    return int(bool(faulty))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
