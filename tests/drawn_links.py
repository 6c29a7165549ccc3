"""Links for hypothesis to draw: every pipe that a profile file can state, or those that netem can carry out."""

from __future__ import annotations

from hypothesis import strategies as st

from testbed.profiles import Bernoulli, Change, GilbertElliott, Loss, Pipe, Schedule, Slot

RATES = st.integers(1_000, 12_500_000_000).map(lambda count: 8 * count)
_SHARES = st.floats(0, 1).map(lambda share: float(f"{share:.12g}"))
_SOME = st.floats(1e-9, 0.999999)
_CHANCES = st.just(1.0) | _SOME
LOSSES: st.SearchStrategy[Loss | None] = st.one_of(
    st.none(),
    st.builds(Bernoulli, probability=_SOME),
    st.builds(
        GilbertElliott, enter_bad=_CHANCES, leave_bad=_CHANCES, lost_in_bad=_CHANCES, lost_in_good=st.just(0.0) | _SOME
    ),
)
_COUNTS = st.integers(0, 2**31 - 1)
_SLOTS = st.builds(
    Slot,
    wait_ns=st.integers(1, 10**6),
    wait_max_ns=st.integers(10**6, 10**10),
    packets=_COUNTS,
    max_bytes=_COUNTS,
)


@st.composite
def _delays(draw: st.DrawFn, most_jitter_ns: int) -> dict[str, int]:
    delay_ns = draw(st.integers(0, 10**10))
    return {"delay_ns": delay_ns, "jitter_ns": draw(st.integers(0, min(delay_ns, most_jitter_ns)))}


@st.composite
def _schedules(draw: st.DrawFn, most_jitter_ns: int) -> Schedule:
    times = sorted(draw(st.sets(st.integers(0, 10**13), min_size=1, max_size=4)))
    changes = [
        Change(at_ns=at_ns, rate_bps=draw(RATES), loss=draw(LOSSES), **draw(_delays(most_jitter_ns))) for at_ns in times
    ]
    return Schedule(changes=tuple(changes), repeat_ns=draw(st.none() | st.integers(times[-1] + 1, 2 * 10**13)))


@st.composite
def pipes(draw: st.DrawFn, *, netem: bool = False) -> Pipe:
    """`netem`: what netem can carry out."""
    most_jitter_ns = 2**31 - 1 if netem else 10**10
    delays = draw(_delays(most_jitter_ns))
    by_jitter = not netem and delays["jitter_ns"] > 0 and draw(st.booleans())
    return Pipe(
        rate_bps=draw(RATES),
        **delays,
        buffer_bytes=draw(st.integers(9_000, 10**10)),
        loss=draw(LOSSES),
        reorder=0 if by_jitter else draw(_SHARES),
        jitter_reorders=by_jitter,
        duplicate=draw(_SHARES),
        slot=draw(st.none() | _SLOTS),
        seed=draw(st.integers(0, 2**63 - 1)),
        schedule=draw(st.none() | _schedules(most_jitter_ns)),
        trace=None,
    )
