"""What one line of a table says about a profile."""

from __future__ import annotations

from typing import NamedTuple

from testbed.profiles.model import LinkProfile, Pipe


class Line(NamedTuple):
    """A profile in a table. Rates in Mbit/s, times in ms, shares in percent; '-' where a direction is unshaped."""

    name: str
    up: str
    down: str
    rtt: str
    """Of a small packet through an idle link and back: both delays."""
    loss: str
    varies: str
    tcp: str
    summary: str


def line(profile: LinkProfile) -> Line:
    """What one line says about a profile."""
    pipes = [pipe for pipe in (profile.up, profile.down) if pipe]
    kinds = {"schedule" if pipe.schedule else "trace" for pipe in pipes if pipe.varies}
    return Line(
        name=profile.name,
        up=_megabits(profile.up),
        down=_megabits(profile.down),
        rtt=f"{sum(pipe.delay_ns for pipe in pipes) / 1e6:.6g}" if pipes else "-",
        loss=f"{max(pipe.mean_loss for pipe in pipes) * 100:.2g}" if pipes else "-",
        varies=", ".join(sorted(kinds)) or "-",
        tcp=profile.congestion_control + (", idle" if profile.slow_start_after_idle else ""),
        summary=profile.summary,
    )


def _megabits(pipe: Pipe | None) -> str:
    return f"{pipe.rate_bps / 1e6:.6g}" if pipe else "-"
