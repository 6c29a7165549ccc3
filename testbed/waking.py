"""Models the cold-cache cost: how much longer an action takes on a processor that was idle before.

The caches of an idle processor are filled by other programs, and a virtual processor may have been preempted. Measured
on 2 cores of a cloud machine, with fp32 of 66 kB and int8 of 17 kB: a decode takes 0.02 and 0.05 ms in a series, 0.06
and 0.08 ms after 0.2 ms of sleep, 0.09 and 0.14 ms after 1 ms, and 0.3 and 0.5 ms after any sleep of 5 ms or more.
"""

from typing import Final

WHOLE_NS: Final = 5_000_000
"""Wait from which on the waking cost is at its maximum."""


def waking_ns(most_ns: int, waited_ns: int) -> int:
    """Return the waking cost after a wait: proportional to the wait, and `most_ns` from WHOLE_NS on."""
    return most_ns * min(waited_ns, WHOLE_NS) // WHOLE_NS
