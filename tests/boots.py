"""Run an example again and again, and compare all step times of all nodes to the nanosecond.

python -m tests.boots NAME [--boots N] [--busy M] [--fresh K] [--kept FOLDER]

NAME     a folder in examples/; its page's command is run in a copy of it, a boot of the guest each time
--busy   loops that compute beside every boot, on this machine's processors
--fresh  more boots, each with the code of a git worktree of HEAD that was just made: no module is compiled there
--kept   where reports go (default: a folder that is removed); a folder whose reports are there already is compared only

Prints a line per boot and node. Status 1 where a boot's steps differ from the first one's. A boot takes about 16 s.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from testbed.exec.order import RESULT, ExecResult, step_times
from testbed.process import ROOT

_FOLDER = ROOT / "examples"
_PATIENCE_S = 600


def main() -> None:
    """Run the boots that the command line asks for, and print what they gave."""
    parser = argparse.ArgumentParser(description="Boots an example several times and compares its step times.")
    parser.add_argument("name", choices=sorted(path.name for path in _FOLDER.iterdir() if path.is_dir()))
    parser.add_argument("--boots", type=int, default=3)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--fresh", type=int, default=0)
    parser.add_argument("--kept", type=Path)
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        kept = asked.kept or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="boots-")))
        kept.mkdir(parents=True, exist_ok=True)
        stack.enter_context(busy(asked.busy))
        first: ExecResult | None = None
        differing = 0
        for number in range(asked.boots + asked.fresh):
            with contextlib.ExitStack() as code:
                fresh = number >= asked.boots
                root = code.enter_context(_worktree()) if fresh else ROOT
                result = _boot(asked.name, root, kept / f"{asked.name}-{number}")
            first = first or result
            differing += not _told(number, f"{asked.busy} busy{', fresh' if fresh else ''}", result, first)
    boots = asked.boots + asked.fresh
    print(f"{asked.name}: {boots - differing} of {boots} boots equal the first to the nanosecond")
    sys.exit(1 if differing else 0)


def _told(number: int, where: str, result: ExecResult, first: ExecResult) -> bool:
    """Print a boot; return whether its steps took as long as the first one's, on all nodes."""
    expected = step_times(first)
    for node, times in step_times(result).items():
        off = [(step, ours - theirs) for step, (ours, theirs) in enumerate(zip(times, expected[node], strict=True), 1)]
        wrong = [f"step {step} by {by:+d} ns" for step, by in off if by]
        said = f"differs in {len(wrong)} of {len(times)} steps: {', '.join(wrong[:3])}" if wrong else "equal"
        print(
            f"boot {number}  {where:14} {node}  {len(times)} steps  median {sorted(times)[len(times) // 2]} ns"
            f"  last {times[-1]} ns  job {result.lasted_ns} ns  {result.seconds:.1f} s here  {said}",
            flush=True,
        )
    return step_times(result) == expected


def _boot(name: str, root: Path, folder: Path) -> ExecResult:
    """Run the command of an example's page with the code in `root`; keep what it leaves in `folder`."""
    out = folder / "out"
    if not (out / RESULT).exists():
        shutil.copytree(_FOLDER / name, folder, dirs_exist_ok=True)
        words = [sys.executable, *_command(name)[1:4], "-o", "out", *_command(name)[4:]]
        environment = os.environ | {"PYTHONPATH": str(root)}
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
        if done.returncode:
            sys.exit(f"cannot boot {name}: it ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return ExecResult.model_validate_json((out / RESULT).read_text(encoding="utf8"))


def _command(name: str) -> list[str]:
    page = (_FOLDER / name / "README.md").read_text(encoding="utf8").replace("\\\n", " ")
    found = re.search(r"^python -m testbed exec .*$", page, re.MULTILINE)
    assert found is not None, f"the page of {name} has no command"
    return shlex.split(found[0])


@contextlib.contextmanager
def _worktree() -> Iterator[Path]:
    """Check HEAD out into a folder of its own, and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="boots-") as above:
        folder = Path(above, "code")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(folder), "HEAD"], check=True, capture_output=True)
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True, capture_output=True)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` processes computing."""
    loops = [multiprocessing.get_context("spawn").Process(target=_compute, daemon=True) for _ in range(count)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.join()


def _compute() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        until_s = time.monotonic() + 0.1
        while time.monotonic() < until_s:
            pass


if __name__ == "__main__":
    main()
