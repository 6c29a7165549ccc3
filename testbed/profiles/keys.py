"""The keys of a profile file, and what they mean: what reading.py accepts, and what the profiles' README says."""

from __future__ import annotations

from typing import NamedTuple


class Key(NamedTuple):
    """One key of a table."""

    name: str
    form: str
    """How a value looks, in Markdown."""
    meaning: str
    required: bool = True
    """Whether it must be stated. What is absent otherwise does not happen."""


NONE = "none"
UNSHAPED = "unshaped"
BY_JITTER = "by-jitter"
GILBERT_ELLIOTT = "gilbert-elliott"

TOP = (
    Key(
        "extends",
        "name of a profile, or `path.toml`",
        "that file is read first; this one states what differs",
        required=False,
    ),
    Key("summary", "text", "what it is, in one line"),
    Key("source", "text", "where the numbers come from; [derived]: computed from a source; [chosen]: ours"),
    Key("layer", '`"ip"` or `"ethernet"`', "what the rate counts: IP packets, or Ethernet frames (14 bytes more each)"),
    Key("mtu", "`1500`, bytes, 576 to 9000", "largest IP packet"),
    Key("congestion_control", '`"cubic"`, `"bbr"`, ...', "of TCP at both ends"),
    Key(
        "slow_start_after_idle",
        "`true` or `false`",
        "whether TCP starts slowly again after a pause (Linux as it comes: true)",
    ),
    Key("up", '`[up]`, or `"unshaped"`', "from the node into the network; in a line, towards the last stage"),
    Key("down", '`[down]`, or `"unshaped"`', "the other way"),
)
PIPE = (
    Key(
        "rate",
        "`80Mbit`, `8kbit` to `100Gbit`",
        "of the wire, in decimal bits per second; a whole number of bytes per second",
    ),
    Key("delay", "`12.5ms`, to `10s`", "one way, without the time on the wire"),
    Key(
        "buffer",
        "`100ms` or `256kB`, to `10GB`",
        "what waits at most for the wire, drop-tail; a time is what the rate carries in it",
    ),
    Key(
        "loss",
        '`"0.1%"`, `"none"`, or a table',
        "share of packets lost, each independent of all others; a table: in bursts",
    ),
    Key(
        "seed",
        "`1`, to 2^63 - 1",
        "of all draws: same seed, same packets lost; each link of a lab draws its own stream from it",
    ),
    Key(
        "jitter",
        "`2ms`, to `delay`",
        "each packet's delay is drawn evenly from delay - jitter to delay + jitter",
        required=False,
    ),
    Key(
        "reorder",
        '`"1%"` or `"by-jitter"`',
        "share of packets that leave at once, before all that wait; by-jitter: packets leave when their own jitter says "
        "(engine relay only)",
        required=False,
    ),
    Key("duplicate", '`"0.1%"`', "share of packets that are sent twice", required=False),
    Key("slot", "table", "packets leave in bursts (engine netem only)", required=False),
    Key("schedule", "list of tables", "changes at stated times", required=False),
    Key("repeat", "`60s`, to 24 h", "after this long the schedule begins again", required=False),
    Key("trace", "table", "the rate follows a file of delivery opportunities; `rate` must be its mean", required=False),
)
LOSS = (
    Key("model", f'`"{GILBERT_ELLIOTT}"`', "a good and a bad state, drawn for each packet"),
    Key("enter_bad", '`"0.05%"`', "chance, at each packet, to go from good to bad (tc: p)"),
    Key(
        "leave_bad",
        '`"30%"`',
        "chance, at each packet, to go from bad to good (tc: r); bursts last about 1 / leave_bad packets",
    ),
    Key("lost_in_bad", '`"100%"`', "share lost in the bad state (tc: 1-h)"),
    Key("lost_in_good", '`"0%"`', "share lost in the good state (tc: 1-k)"),
)
CHANGE = (
    Key("at", "`15s`, to 24 h", "after the run's start"),
    Key("rate", "as above", "from then on; what a change leaves out stays as it is", required=False),
    Key("delay", "as above", "from then on", required=False),
    Key("jitter", "as above", "from then on", required=False),
    Key("loss", "as above", "from then on", required=False),
)
SLOT = (
    Key("wait", "`2ms`, to `10s`", "shortest wait from one burst to the next"),
    Key("wait_max", "`8ms`, to `10s`", "longest; uniform between the two"),
    Key("packets", "`16`, or 0", "most packets in a burst; 0: no such limit"),
    Key("bytes", '`32kB`, or `"none"`', "most bytes in a burst"),
)
TRACE = (
    Key(
        "file",
        '`"traces/lte-down.trace"`',
        "beside the profile; mahimahi's format: a millisecond a line, good for 1500 bytes",
    ),
    Key("loop", "`true` or `false`", "whether it begins again at its end; else `rate` holds from there on"),
    Key("offset", "`5s`, whole milliseconds", "where in the trace the run begins"),
)


def names(keys: tuple[Key, ...]) -> tuple[str, ...]:
    """The keys' names, in order."""
    return tuple(key.name for key in keys)
