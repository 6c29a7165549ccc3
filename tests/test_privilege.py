"""What root runs, and to whom what it makes belongs: no code of the current folder, and nothing of root's is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from testbed import paths
from testbed.errors import SpecError
from testbed.process import ROOT
from testbed.report import publishing
from tests.commands import PATIENCE_S, SMALL, for_all_users, sets
from tests.forked import is_gone

NOTE = """
with open({note!r}, "a") as note:
    note.write(__name__ + "\\n")
raise SystemExit("a fake of " + __name__ + " was imported")
"""
"""A module that does not go unnoticed. `open` is a builtin, so that it needs no other fake."""
INSTALLED = (
    "numpy",
    "torch",
    "pydantic",
    "typer",
    "rich",
    "click",
    "matplotlib",
    "pandas",
    "yaml",
    "PIL",
    "transformers",
)
TINY = sets(*SMALL, "codec_cost=zero", "pipeline.stages=2", "training.steps=2", "training.warmup_steps=1")
"""A cell that takes seconds."""
REAL = ["--clock", "real", "--engine", "relay"]
LIVE = ["run", "--timing", "live", *TINY, *sets("codec_cost=host"), *REAL]
MINE = ["--codec", "mycodec:Mine", "--profile", "cable"]
USER, OTHER = 61234, 61235
"""Users whom this machine does not have."""
MYCODEC = """
import os
import beside
from testbed.codecs.dense.cast import Fp32

if os.geteuid() == 0 and "SUDO_UID" in os.environ and "TESTBED_GUEST" not in os.environ:
    raise SystemExit("sudo has run this as root")


class Mine(Fp32):
    pass
"""


def console_script(folder: Path) -> Path:
    """Write the script that an installation makes of pyproject.toml's entry point."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))
    module, _, function = about["project"]["scripts"]["testbed"].partition(":")
    path = folder / "testbed"
    path.write_text(f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a fake of every module of the standard library, of what testbed needs, and of testbed."""
    folder, note = tmp_path_factory.mktemp("fakes"), str(tmp_path_factory.mktemp("noted") / "note")
    text = NOTE.format(note=note)
    for name in {*sys.stdlib_module_names, *INSTALLED, "sitecustomize", "usercustomize"}:
        (folder / f"{name}.py").write_text(text)
    (folder / "testbed").mkdir()
    for name in ("__init__", "__main__", "process", "cli"):
        (folder / "testbed" / f"{name}.py").write_text(text)
    (folder / "trace.csv").write_text("0\n5\n9\n")
    (folder / "bin").mkdir()
    console_script(folder / "bin")
    (folder / "note").write_text(note)
    return folder


def in_fakes(fakes: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script `testbed` in the folder; no fake may have been imported."""
    note = Path((fakes / "note").read_text())
    note.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, str(fakes / "bin" / "testbed"), *arguments],
        cwd=fakes,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(note.parent / "cache"), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert not note.exists(), f"imported: {note.read_text()}"
    assert "a fake of" not in done.stdout + done.stderr
    return done


def test_a_fake_does_not_go_unnoticed(fakes: Path) -> None:
    """As `python -m` finds them: Python itself imports some before testbed is asked."""
    note = Path((fakes / "note").read_text())
    subprocess.run([sys.executable, "-c", "import json"], cwd=fakes, capture_output=True, check=False)
    assert "json" in note.read_text().split()
    note.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("plan", 0),
        ("profiles", 0),
        ("codecs", 0),
        ("codecs show int8", 0),
        ("devices", 0),
        ("trace show nowhere", 2),
        ("rate-trace generate cellular --seed 1 --seconds 5 --mean-rate 12Mbit -o my.trace", 0),
        ("reproduce --list", 0),
        ("report nowhere", 2),
        ("export nowhere --to csv", 2),
        ("shell --pid 1 node-0", 2),
    ],
)
def test_root_runs_no_code_of_the_current_folder(fakes: Path, words: str, status: int) -> None:
    done = in_fakes(fakes, *words.split())
    assert done.returncode == status, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.clock_kernel
def test_no_helper_process_of_root_runs_code_of_the_current_folder(fakes: Path) -> None:
    """Probes, relays, labs, programs of nodes, guests, players, trainings, stage hosts, the kit for codecs, figures."""
    for words in (
        ["doctor"],
        ["link", "cable", "--quick", "--engine", "relay"],
        ["link", "cable", "--clock", "virtual"],
        ["vm", "--", "/bin/true"],
        ["vm", "--virtual-clock", "--", "/bin/true"],
        ["exec", "--profile", "cable", "-o", "virtual", "--", "/bin/true"],
        [
            "exec",
            "--profile",
            "cable",
            "--clock",
            "real",
            "--engine",
            "relay",
            "--no-certify",
            "-o",
            "r",
            "--",
            "/bin/true",
        ],
        ["codecs", "check", "fp16"],
        ["run", "--codec", "int8", "--profile", "cable", *TINY],
        [*LIVE, "--codec", "int8", "--profile", "cable"],
        ["report", "results/run"],
        ["export", "results/run", "--to", "csv"],
    ):
        done = in_fakes(fakes, *words)
        # A link of the real clock may be late on a busy machine: that is not what is asked here.
        assert done.returncode == 0 or words[0] == "link", (words, done.stdout + done.stderr)


@pytest.mark.root
def test_sudo_is_given_the_script(fakes: Path, tmp_path: Path) -> None:
    sudo = {**os.environ, "SUDO_UID": str(USER), "SUDO_GID": str(USER), "PYTHONDONTWRITEBYTECODE": "1"}

    def refused(folder: Path, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "testbed", "plan", "--quick"],
            cwd=folder,
            env={**sudo, **more},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    line = f"run: sudo {Path(sys.executable).with_name('testbed')} plan --quick"
    assert line in refused(tmp_path, PYTHONPATH=str(ROOT))
    assert line in refused(tmp_path, PYTHONPATH=f"{ROOT}:", PYTHONSAFEPATH="1"), "an empty entry is the current folder"
    (tmp_path / "typer.py").write_text("raise SystemExit('typer of the current folder')")
    assert line in refused(tmp_path, PYTHONPATH=str(ROOT)), "it was not imported"
    (open_to_all := tmp_path / "open").mkdir()
    open_to_all.chmod(0o777)
    words = refused(tmp_path, PYTHONPATH=f"{ROOT}:{open_to_all}", PYTHONSAFEPATH="1")
    assert f"anybody may write to {open_to_all}" in words
    done = in_fakes(fakes, "codecs", SUDO_UID=str(USER), SUDO_GID=str(USER), PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done.stderr


def test_without_sudo_the_command_line_finds_modules_of_the_current_folder_after_all_others(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise SystemExit('typer of the current folder')")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "testbed", "codecs", "show", "mycodec:Mine"]
    for text, status in (("class Mine: pass\n", 0), (None, 2)):
        if text is None:
            (tmp_path / "mycodec.py").unlink()
        else:
            (tmp_path / "mycodec.py").write_text(text)
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("mycodec", lambda folder: paths.import_named("mycodec")),
        ("figures", lambda folder: publishing.figures_program(folder).__enter__()),
    ],
)
def test_a_process_that_sudo_made_root_imports_no_code_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: Callable[[Path], object]
) -> None:
    (tmp_path / f"{name}.py").write_text("raise AssertionError('sudo ran it as root')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUDO_UID", str(USER))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(SpecError, match="run without sudo"):
        call(tmp_path)
    monkeypatch.delenv("SUDO_UID")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(AssertionError, match="sudo ran it as root"):
        call(tmp_path)


# ------------------------------------------------------------------ sudo, and another user of this machine
PROGRAM = """
import json, os, pathlib, sys
status = pathlib.Path("/proc/self/status").read_text()
told = dict(line.split(":", 1) for line in status.splitlines())
print(json.dumps({name: told[name].split()[0] for name in told if name[:3] in ("Uid", "Cap", "NoN")}))
"""
"""What a node may do, as it says itself."""


class BehindSudo:
    """Runs commands as sudo would for USER, in a folder of USER's; removes it at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()  # not in the folder itself, which Python would search
        self.script = console_script(folder / "bin")
        self.environment = {
            **os.environ,
            "SUDO_UID": str(USER),
            "SUDO_GID": str(USER),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPYCACHEPREFIX": str(folder / "pyc"),
        }
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [*for_all_users(), sys.executable, str(self.script), *arguments]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str) -> str:
        with self.start(*arguments) as process:
            said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, said
        return said


@pytest.fixture
def sudo() -> Iterator[BehindSudo]:
    with tempfile.TemporaryDirectory(prefix="testbed-of-a-user-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "mycodec.py").write_text(MYCODEC)
        (folder / "beside.py").write_text("")
        (folder / "tmp").mkdir()
        (folder / "program.py").write_text(PROGRAM)
        for path in (folder, *folder.iterdir()):
            os.chown(path, USER, USER)
        yield BehindSudo(folder)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.clock_kernel
@pytest.mark.parametrize(
    "commands",
    [
        [["run", *TINY, *MINE], ["report", "results/run"], ["link", "cable", "--clock", "virtual"]],
        [[*LIVE, *MINE], ["vm", "--", "sh", "-c", "echo inside > made-in-a-guest"]],
        [["exec", "--profile", "cable", "-o", "virtual", "--", "true"], ["exec", *REAL, "-o", "real", "--", "true"]],
    ],
    ids=["played", "live", "programs"],
)
def test_what_is_made_behind_sudo_is_the_users(sudo: BehindSudo, commands: list[list[str]]) -> None:
    """Also where a codec of the user's folder takes part, which no process of root's may import."""
    for words in commands:
        sudo.run(*words)
    compiled = {path.relative_to(sudo.folder / "pyc") for path in (sudo.folder / "pyc").rglob("*.pyc")}
    ours = {path for path in compiled if path.is_relative_to(str(ROOT / "testbed").lstrip("/"))}
    assert {path.name.partition(".")[0] for path in ours} <= {"__init__", "__main__"}, "root compiled others"
    # Libraries have caches of their own: root's where sudo passes no XDG_CACHE_HOME on.
    rest = [path for path in sudo.folder.rglob("*") if not {"pyc", "bin", "matplotlib", "scapy"} & set(path.parts)]
    assert [str(path) for path in rest if path.lstat().st_uid != USER] == []


@pytest.mark.root
def test_a_program_behind_sudo_is_the_users_and_gains_nothing(sudo: BehindSudo) -> None:
    sudo.run("exec", *REAL, "--no-certify", "-o", "real", "--", sys.executable, "program.py")
    said = re.findall(r"\{.*\}", (sudo.folder / "real" / "node-0.log").read_text())[0]
    assert f'"Uid": "{USER}"' in said
    assert '"NoNewPrivs": "1"' in said
    assert re.findall(r'"Cap(?:Eff|Prm|Inh|Amb)": "(\w+)"', said) == ["0" * 16] * 4


FORKED = """
import pathlib
import torch
print("the fork server's" if b"forks" in pathlib.Path("/proc/self/cmdline").read_bytes() else "started alone")
"""


@pytest.mark.root
def test_no_program_behind_sudo_comes_from_a_server_of_roots(sudo: BehindSudo) -> None:
    """An agent of torchrun asks that server for workers, with an environment of its choice."""
    (sudo.folder / "forked.py").write_text(FORKED)
    sudo.run("exec", *REAL, "--no-certify", "-o", "real", "--", sys.executable, "forked.py")
    assert "started alone" in (sudo.folder / "real" / "node-0.log").read_text()


PLANTS = """
import os, sys
(victim,) = sys.argv[1:]
for name in ("exec.json", "report.html"):
    # The numbers of processes in a lab's namespace are small.
    for number in range(1, 200) if os.environ["TESTBED_NODE"] == "0" else ():
        os.symlink(victim, f"real/.{name}.{number}")
"""


@pytest.mark.root
def test_root_follows_no_link_that_a_program_has_left(sudo: BehindSudo, tmp_path: Path) -> None:
    victim, evil = tmp_path / "victim", sudo.folder / "evil"
    victim.write_text("root's")
    evil.mkdir()
    (evil / "sitecustomize.py").write_text(f"import os\nopen({str(evil)!r} + '/as-' + str(os.getuid()), 'w')\n")
    (sudo.folder / "plants.py").write_text(PLANTS)
    evil.chmod(0o777)
    words = "--", sys.executable, "plants.py", str(victim)
    sudo.run("exec", *REAL, "--no-certify", "--env", f"PYTHONPATH={evil}", "--ends-with", "0", "-o", "real", *words)
    assert victim.read_text() == "root's"
    assert {path.name for path in evil.glob("as-*")} == {f"as-{USER}"}, "root imported what --env names"


SWAPS = """
import os, sys
if os.environ["TESTBED_NODE"] == "0":
    os.rename("real", "moved")
    os.symlink(sys.argv[1], "real")
"""


@pytest.mark.root
def test_root_writes_to_no_folder_that_a_program_put_in_the_place_of_its_own(sudo: BehindSudo, tmp_path: Path) -> None:
    (tmp_path / "shadow").write_text("root's")
    (sudo.folder / "swaps.py").write_text(SWAPS)
    words = "--", sys.executable, "swaps.py", str(tmp_path)
    with sudo.start("exec", *REAL, "--no-certify", "--ends-with", "0", "-o", "real", *words) as process:
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, said
    assert "real" in said
    assert [path.name for path in tmp_path.iterdir()] == ["shadow"], said
    assert (tmp_path / "shadow").stat().st_uid == 0


ATTEMPTS = """
import ctypes, json, os, signal, socket, sys
from pathlib import Path
folder, *pids = sys.argv[1:]
done = []

def attempt(what, do):
    try:
        do()
    except OSError:
        return
    done.append(what)

libc = ctypes.CDLL(None, use_errno=True)
for pid in map(int, pids):
    for name in ("environ", "mem", "maps"):
        attempt(f"read {name} of {pid}", lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
    attempt(f"list descriptors of {pid}", lambda: os.listdir(f"/proc/{pid}/fd"))
    for name in ("net", "mnt", "user"):
        attempt(f"open namespace {name} of {pid}", lambda: os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY))
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
        attempt(f"send {number} to {pid}", lambda: os.kill(pid, number))
    if libc.ptrace(0x4206, pid, 0, 0) == 0:
        done.append(f"trace {pid}")
for path in Path(folder).rglob("*"):
    attempt(f"write to {path}", lambda: os.close(os.open(path, os.O_WRONLY)))
    attempt(f"remove {path}", path.unlink)
    if "lock" in path.name:
        attempt(f"open {path}, to lock it", lambda: os.close(os.open(path, os.O_RDONLY)))
for scratch in Path(folder, "tmp").iterdir():
    attempt(f"look into {scratch}", lambda: os.listdir(scratch))
print(json.dumps(done))
"""
"""What another user might try: read memory, environment and files, join a network, stop or remove."""


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.clock_kernel
@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_another_user_can_neither_read_nor_join_nor_stop_a_run(sudo: BehindSudo, clock: str) -> None:
    live = [*LIVE] if clock == "real" else ["run", "--timing", "live", *TINY, "--clock", "virtual"]
    live += ["--codec", "int8", "--profile", "cable", *sets("training.steps=100000")]
    with sudo.start(*live) as process:
        try:
            pids = within(400, lambda: at_work(sudo, process), process)
            lines = {pid: Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids}
            assert not [line for line in lines.values() if re.search(r"\b[0-9a-f]{32}\b", line)], "a job's token"
            assert listening(pids) == []
            prefix = ["setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups"]
            command = [*for_all_users(), *prefix, sys.executable, "-c", ATTEMPTS, str(sudo.folder), *map(str, pids)]
            tried = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
            assert json.loads(tried.stdout) == []
            assert process.poll() is None
            payloads = [path for path in (sudo.folder / "results").rglob("*") if path.is_file() and not is_record(path)]
            assert payloads == [], "a run keeps records, and no payload"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert all(map(is_gone, pids))


def is_record(path: Path) -> bool:
    return path.suffix in (".json", ".jsonl", ".log", ".lock", ".trace") or path.name == ".lock"


def at_work(sudo: BehindSudo, process: subprocess.Popen[str]) -> list[int]:
    """Return the processes of a run that has made its first steps, or whose guest has booted; none before."""
    results = sudo.folder / "results"
    steps = any(path.stat().st_size for path in results.rglob("steps-*.jsonl"))
    if not steps and not any(results.rglob("cell.json")):
        return []
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    family = {process.pid}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    with contextlib.suppress(OSError):
        guest = any("time-travel" in Path(f"/proc/{pid}/cmdline").read_text() for pid in family)
        return sorted(family) if steps or guest else []
    return []


def within(seconds: float, ready: Callable[[], list[int]], process: subprocess.Popen[str]) -> list[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if found := ready():
            return found
        time.sleep(0.2)
    pytest.fail(f"it made no step; status {process.poll()}")


def listening(pids: Iterable[int]) -> list[str]:
    """Return the lines of this machine's listening sockets that these processes hold."""
    held = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                held |= set(re.findall(r"socket:\[(\d+)\]", str(descriptor.readlink())))
    lines = []
    for name in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
        lines += [" ".join(row) for row in rows if row[3] == "0A" and row[9] in held]
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return lines + [" ".join(row) for row in rows if int(row[3], 16) & 0x10000 and row[6] in held]
