"""The keys of a profile file and what they mean: the loader accepts them, and the README is drawn from them."""

from __future__ import annotations

from typing import NamedTuple


class ProfileKey(NamedTuple):
    """One key of a table."""

    name: str
    form: str
    """How a value looks, in Markdown."""
    meaning: str
    required: bool = True
    """Whether it must be stated. An effect whose key is absent does not happen."""


NONE = "none"
UNSHAPED = "unshaped"
BY_JITTER = "by-jitter"
GILBERT_ELLIOTT = "gilbert-elliott"

TOP = (
    ProfileKey(
        "extends",
        "name of a profile, or `path.toml`",
        "that file is read first; this one states what differs",
        required=False,
    ),
    ProfileKey("summary", "text", "what it is, in one line"),
    ProfileKey(
        "source", "text", "where the numbers come from; [derived]: computed from a source; [chosen]: our choice"
    ),
    ProfileKey(
        "layer", '`"ip"` or `"ethernet"`', "what the rate counts: IP packets, or Ethernet frames (14 bytes more each)"
    ),
    ProfileKey("mtu", "`1500`, bytes, 576 to 9000", "largest IP packet"),
    ProfileKey("congestion_control", '`"cubic"`, `"bbr"`, ...', "of TCP at both ends"),
    ProfileKey(
        "slow_start_after_idle",
        "`true` or `false`",
        "whether TCP starts slowly again after a pause (Linux's default: true)",
    ),
    ProfileKey("up", '`[up]`, or `"unshaped"`', "from the node into the network; in a line, towards the last stage"),
    ProfileKey("down", '`[down]`, or `"unshaped"`', "the other way"),
)
PIPE = (
    ProfileKey(
        "rate",
        "`80Mbit`, `8kbit` to `100Gbit`",
        "rate of the wire, in decimal bits per second; a whole number of bytes per second",
    ),
    ProfileKey("delay", "`12.5ms`, to `10s`", "one way, without serialisation"),
    ProfileKey(
        "buffer",
        "`100ms` or `256kB`, to `10GB`",
        "the most that may wait for the wire, drop-tail; a time means what the rate carries in it",
    ),
    ProfileKey(
        "loss",
        '`"0.1%"`, `"none"`, or a table',
        "share of packets lost, each independent of all others; a table: loss in bursts",
    ),
    ProfileKey(
        "seed",
        "`1`, to 2^63 - 1",
        "seed of all draws: same seed, same packets lost; each link of a lab draws its own stream from it",
    ),
    ProfileKey(
        "jitter",
        "`2ms`, to `delay`",
        "each packet's delay is drawn evenly from delay - jitter to delay + jitter",
        required=False,
    ),
    ProfileKey(
        "reorder",
        '`"1%"` or `"by-jitter"`',
        "share of packets that leave at once, before all that wait; by-jitter: packets leave when their own jitter "
        "says (engine relay only)",
        required=False,
    ),
    ProfileKey("duplicate", '`"0.1%"`', "share of packets that are sent twice", required=False),
    ProfileKey("slot", "table", "packets leave in bursts (engine netem only)", required=False),
    ProfileKey("schedule", "list of tables", "the link changes at stated times", required=False),
    ProfileKey("repeat", "`60s`, to 24 h", "the schedule's period: it begins again after this long", required=False),
    ProfileKey(
        "trace", "table", "the rate follows a file of delivery opportunities; `rate` must be its mean", required=False
    ),
)
LOSS = (
    ProfileKey("model", f'`"{GILBERT_ELLIOTT}"`', "a good and a bad state, drawn for each packet"),
    ProfileKey("enter_bad", '`"0.05%"`', "chance, at each packet, to go from good to bad (tc: p)"),
    ProfileKey(
        "leave_bad",
        '`"30%"`',
        "chance, at each packet, to go from bad to good (tc: r); bursts last about 1 / leave_bad packets",
    ),
    ProfileKey("lost_in_bad", '`"100%"`', "share lost in the bad state (tc: 1-h)"),
    ProfileKey("lost_in_good", '`"0%"`', "share lost in the good state (tc: 1-k)"),
)
CHANGE = (
    ProfileKey("at", "`15s`, to 24 h", "after the run's start"),
    ProfileKey("rate", "as above", "from then on; what a change leaves out stays as it is", required=False),
    ProfileKey("delay", "as above", "from then on", required=False),
    ProfileKey("jitter", "as above", "from then on", required=False),
    ProfileKey("loss", "as above", "from then on", required=False),
)
SLOT = (
    ProfileKey("wait", "`2ms`, to `10s`", "shortest time from one burst to the next"),
    ProfileKey("wait_max", "`8ms`, to `10s`", "longest; drawn uniformly between the two"),
    ProfileKey("packets", "`16`, or 0", "most packets in a burst; 0: no such limit"),
    ProfileKey("bytes", '`32kB`, or `"none"`', "most bytes in a burst"),
)
TRACE = (
    ProfileKey(
        "file",
        '`"traces/lte-down.trace"`',
        "beside the profile; mahimahi's format: a millisecond a line, good for 1500 bytes",
    ),
    ProfileKey("loop", "`true` or `false`", "whether it begins again at its end; else `rate` holds from there on"),
    ProfileKey("offset", "`5s`, whole milliseconds", "where in the trace the run begins"),
)


def names(keys: tuple[ProfileKey, ...]) -> tuple[str, ...]:
    """Return the keys' names, in order."""
    return tuple(key.name for key in keys)
