"""A program for test_cluster.py: it copies what it reads into the folder that it makes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from testbed.errors import SpecError


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    if job.get("refuse"):
        raise SpecError("line one: this cannot be")
    folder = Path(job["folder"])
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "copy").write_bytes(Path(job["tokens"]).read_bytes())
    (folder / "stated").write_text(job["recipe"]["text"])
    print("done")


if __name__ == "__main__":
    main()
