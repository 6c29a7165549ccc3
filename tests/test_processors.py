"""/proc is read right: by its columns, and as this kernel writes it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from hypothesis import given
from hypothesis import strategies as st

from testbed.processors import granted_share, parse_processors, read_processors

TICKS = st.lists(st.integers(0, 2**40), min_size=10, max_size=10)


@given(st.dictionaries(st.integers(0, 999), TICKS, min_size=1, max_size=5))
def test_the_lines_are_read_by_their_columns(processors: dict[int, list[int]]) -> None:
    rows = [f"cpu{number} {' '.join(map(str, ticks))}" for number, ticks in processors.items()]
    read = parse_processors("\n".join([*rows, "intr 1 2 3", "ctxt 4"]) + "\n")
    assert set(read) == {f"cpu{number}" for number in processors}
    for number, ticks in processors.items():
        expected = (ticks[3], ticks[4], ticks[7], sum(ticks[:8]))  # guests' time is in the user's already
        assert read[f"cpu{number}"] == expected


def test_time_passes_on_this_machine() -> None:
    before = read_processors()
    time.sleep(0.1)
    after = read_processors()
    assert "cpu" in after
    assert "cpu0" in after
    assert after["cpu"].total > before["cpu"].total
    assert after["cpu"].idle + after["cpu"].waiting + after["cpu"].stolen <= after["cpu"].total


def test_who_has_a_processor_for_himself_or_is_gone_has_all_of_it() -> None:
    assert granted_share([]) == 1
    assert granted_share([2**22 + 1]) == 1  # no process has such a number


def test_two_on_one_processor_have_a_part_of_it_each() -> None:
    spin = f"import os, time; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\nwhile True: pass"
    both = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    try:
        while granted_share(each.pid for each in both) > 0.75:  # nothing else would end it
            time.sleep(0.01)
    finally:
        for each in both:
            each.kill()
            each.wait()
