"""The keys of a profile file and their meaning: the loader accepts them, and the README is generated from them."""

from __future__ import annotations

from typing import NamedTuple


class ProfileKey(NamedTuple):
    """One key of a table."""

    name: str
    form: str
    """Form of a value, in Markdown."""
    meaning: str
    required: bool = True
    """Whether the key is required. An effect without its key is off."""


NONE = "none"
UNSHAPED = "unshaped"
BY_JITTER = "by-jitter"
GILBERT_ELLIOTT = "gilbert-elliott"

TOP = (
    ProfileKey(
        "extends",
        "name of a profile, or `path.toml`",
        "base profile, which this file overrides",
        required=False,
    ),
    ProfileKey("summary", "text", "one-line description"),
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
    ProfileKey("down", '`[down]`, or `"unshaped"`', "the opposite direction"),
    ProfileKey(
        "background",
        '`["1 cubic up", "call down"]`',
        "flows of another machine behind the same link. `N ALGORITHM up`: greedy TCP; `web down`: objects and "
        "pauses; `call 3Mbit up`: a constant rate",
        required=False,
    ),
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
        "capacity of the drop-tail queue; a time is multiplied by the rate",
    ),
    ProfileKey(
        "loss",
        '`"0.1%"`, `"none"`, or a table',
        "share of packets lost, independently; `100%`: an outage; a table: loss in bursts",
    ),
    ProfileKey(
        "seed",
        "`1`, to 2^63 - 1",
        "seed of all random draws: the same seed loses the same packets; each link of a lab derives its own stream "
        "from it",
    ),
    ProfileKey(
        "jitter",
        "`2ms`, to `delay`",
        "each packet's delay is uniform between delay - jitter and delay + jitter",
        required=False,
    ),
    ProfileKey(
        "reorder",
        '`"1%"` or `"by-jitter"`',
        "share of packets that overtake the queue; by-jitter: each packet leaves after its own jitter, in any order "
        "(engine relay only)",
        required=False,
    ),
    ProfileKey("duplicate", '`"0.1%"`', "share of packets sent twice", required=False),
    ProfileKey(
        "queue",
        '`"fifo"`, `"fq_codel"`, `"cake"` or `"red"`',
        "queue discipline (relay: fifo only); without it a drop-tail queue, which netem bounds in packets of the MTU's "
        "size; cake and fq_codel bound theirs themselves, not by `buffer`",
        required=False,
    ),
    ProfileKey("slot", "table", "packets leave in bursts (engine netem only)", required=False),
    ProfileKey("schedule", "list of tables", "the link changes at stated times", required=False),
    ProfileKey("repeat", "`60s`, to 24 h", "period after which the schedule repeats", required=False),
    ProfileKey(
        "trace", "table", "the rate follows a file of delivery opportunities; `rate` must be its mean", required=False
    ),
)
LOSS = (
    ProfileKey("model", f'`"{GILBERT_ELLIOTT}"`', "two states, good and bad, with transitions at each packet"),
    ProfileKey("enter_bad", '`"0.05%"`', "probability per packet of a transition from good to bad (tc: p)"),
    ProfileKey(
        "leave_bad",
        '`"30%"`',
        "probability per packet of a transition from bad to good (tc: r); bursts last about 1 / leave_bad packets",
    ),
    ProfileKey("lost_in_bad", '`"100%"`', "share lost in the bad state (tc: 1-h)"),
    ProfileKey("lost_in_good", '`"0%"`', "share lost in the good state (tc: 1-k)"),
)
CHANGE = (
    ProfileKey("at", "`15s`, to 24 h", "time after the start of the run"),
    ProfileKey("rate", "as above", "new value; values that a change omits stay the same", required=False),
    ProfileKey("delay", "as above", "new value", required=False),
    ProfileKey("jitter", "as above", "new value", required=False),
    ProfileKey("loss", "as above", "new value", required=False),
)
SLOT = (
    ProfileKey("wait", "`2ms`, to `10s`", "shortest interval between bursts"),
    ProfileKey("wait_max", "`8ms`, to `10s`", "longest interval; uniform between the two"),
    ProfileKey("packets", "`16`, or 0", "maximum packets per burst; 0: unlimited"),
    ProfileKey("bytes", '`32kB`, or `"none"`', "maximum bytes per burst"),
)
TRACE = (
    ProfileKey(
        "file",
        '`"traces/lte-down.trace"`',
        "path relative to the profile; mahimahi's format: a millisecond per line, worth 1500 bytes",
    ),
    ProfileKey("loop", "`true` or `false`", "whether it repeats; if not, `rate` applies after its end"),
    ProfileKey("offset", "`5s`, whole milliseconds", "position in the trace at the start of the run"),
)


def names(keys: tuple[ProfileKey, ...]) -> tuple[str, ...]:
    """Return the names of the keys, in order."""
    return tuple(key.name for key in keys)
