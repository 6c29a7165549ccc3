"""How much longer does something take because whoever does it has just been woken?

A processor that idled has forgotten: its caches hold what others left there, and a virtual one may have been given to
somebody else. Measured here (2 cores of a cloud machine, fp32 of 66 kB and int8 of 17 kB): a decode takes 0.02 and 0.05
ms in a row with others, 0.06 and 0.08 ms after 0.2 ms of sleep, 0.09 and 0.14 ms after 1 ms, and from 5 ms on 0.3 and
0.5 ms, however long the sleep.
"""

from typing import Final

WHOLE_NS: Final = 5_000_000
"""After a wait of so long, and of any longer one, waking costs all of what it can cost."""


def waking_ns(most_ns: int, waited_ns: int) -> int:
    """Return what waking costs after a wait, where it costs `most_ns` after a long one: in proportion to the wait."""
    return most_ns * min(waited_ns, WHOLE_NS) // WHOLE_NS
