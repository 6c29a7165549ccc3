"""A program for test_process.py: it does what it is asked to."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from testbed.errors import LabError, SpecError
from testbed.process import Parent


def main() -> None:
    parent = Parent()
    request = parent.request
    match request["do"]:
        case "answer":
            print("a library that greets")
            parent.answer({**request, "pid": os.getpid(), "arguments": sys.argv[1:], "folder": str(Path.cwd())})
            while line := sys.stdin.readline():
                parent.answer(line.strip())
            parent.answer("the last answer")
        case "refuse":
            raise SpecError(request["why"])
        case "fail":
            raise LabError(request["why"])
        case "crash":
            raise RuntimeError(request["why"])
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop short":
            os.write(parent.answers_fd, b'{"half": ')
            os.kill(os.getpid(), signal.SIGKILL)
        case "chatter":
            sys.stderr.write("x" * 1_000_000 + "the end\n")
            parent.answer("done")
        case "sleep":
            parent.answer("asleep")
            time.sleep(60)


if __name__ == "__main__":
    main()
