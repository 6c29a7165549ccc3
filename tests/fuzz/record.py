"""What was fuzzed so far: record.json, by parser."""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import json
from pathlib import Path
from typing import Any

from tests.fuzz.engine import Count
from tests.fuzz.parsers import PARSERS

RECORD = Path(__file__).parent / "record.json"


def read_record() -> dict[str, dict[str, Any]]:
    """Return the fields of `Count` by parser, and `last`, the day."""
    return json.loads(RECORD.read_text(encoding="utf8")) if RECORD.is_file() else {}


def read_count(name: str) -> Count:
    """Return what was done to a parser."""
    return Count(**{key: value for key, value in read_record().get(name, {}).items() if key != "last"})


def write_count(name: str, count: Count) -> None:
    """Replace what was done to a parser. Several may be fuzzed side by side."""
    with (RECORD.parent / ".record.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        told = {**dataclasses.asdict(count), "last": today}
        told |= {key: round(told[key], 1) for key in ("cpu_s", "guided_s")}
        record = read_record() | {name: told}
        text = json.dumps({key: record[key] for key in PARSERS if key in record}, indent=1)
        RECORD.write_text(text + "\n", encoding="utf8")
