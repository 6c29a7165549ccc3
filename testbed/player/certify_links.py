"""Certifies links on the virtual clock: the player plays a probe over each link, whose times are compared with the pipe
formula.

The probe is an ordinary trace over a lab of two nodes joined by the link, in the same guest and with the same player as
the traces of a sweep: small messages back and forth, messages after a pause, and a stream of messages, in both
directions. It shows any influence of the kernel, the lab or the player, and depends neither on chance nor on the
machine: so a link is certified once, and the certificate is cached by everything it depends on (the link, the kernel,
and the code that builds and plays).

The probe's link has the profile's pipe, but without its random quantities (loss, jitter, order, copies), its varying
rates, its buffer limits, a queue discipline that drops early, and slow start after idle. These are certified by
construction, as is a direction without a shaper, on which nothing takes time: the lab reads all its settings back from
the kernel, and fails if they differ from the requested ones. The certificate lists the quantities that rest on this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, NamedTuple

from testbed import paths, results
from testbed.directions import EitherOrBoth, LinkDirection
from testbed.errors import LabError
from testbed.frozen import canonical_json
from testbed.metrics.wires import HEADER_BYTES
from testbed.net.certificate import expect
from testbed.net.lab import LabSpec
from testbed.player.guests import PlayJobs, play_jobs
from testbed.player.play_job import PlayJob
from testbed.profiles import LinkProfile, Pipe
from testbed.records import Certificate, Measurement
from testbed.trace.format import RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace
from testbed.trace.played import Played, read_played
from testbed.vm.kernel import MANIFEST, GuestKernel

EXACT: Final = 0.001
"""Largest relative deviation of a quantity from its ideal."""
PING_BYTES: Final = 64
MESSAGE_BYTES: Final = (256 * 1024, 1024 * 1024)
STREAM_BYTES: Final = 8 * 256 * 1024
_PINGS = 4
_STEPS = 5
"""Steps of the probe. The last one is judged; during the first ones, TCP's windows open."""
_PAUSE_NS = 250_000_000
_PLAYING: Final = ("certify_links", "connections", "lanes", "play_in_guest", "play_job", "play_trace", "steady")
_SOURCES: Final = (
    *("net", "profiles", "trace", "vm/init.py", "metrics/wires.py"),
    *("faults.py", "process.py", "runtime/pacing.py", "tcp_info.py", "waiting.py", "waking.py"),
    *(f"player/{name}.py" for name in _PLAYING),
)
"""Sources in the package that determine a link's behaviour and its measurement."""


class ProbeItem(NamedTuple):
    """One item of the probe."""

    kind: str
    """ping, message or stream."""
    way: LinkDirection
    sizes: tuple[int, ...]
    """Sizes of its messages: alternately there and back for a ping, otherwise one after the other."""


def probe_items() -> list[ProbeItem]:
    """Return the items of a step of the probe, in order."""
    items = [ProbeItem("ping", "up", (PING_BYTES,) * (2 * _PINGS))]
    ways: tuple[LinkDirection, ...] = ("up", "down")
    for size in MESSAGE_BYTES:
        items += [ProbeItem("message", way, (size,)) for way in ways]
    return items + [ProbeItem("stream", way, (MESSAGE_BYTES[0],) * (STREAM_BYTES // MESSAGE_BYTES[0])) for way in ways]


def probe_trace(pause_ns: int, steps: int = _STEPS) -> Trace:
    """Return the probe: node 0 at the near end of the link, node 1 at the far end; a pause before each item."""
    lanes = (Lane(0, "probe"), Lane(1, "probe"))
    for step in range(steps):
        tags = [0, 0]
        for event, item in enumerate(probe_items(), step * 1000):
            sender = 0 if item.way == "up" else 1
            lanes[sender].add(WORK, value=pause_ns)
            for number, size in enumerate(item.sizes):
                turned = item.kind == "ping" and number % 2
                source, target = (1 - sender, sender) if turned else (sender, 1 - sender)
                tag = step * 1000 + tags[source]
                tags[source] += 1
                lanes[source].add(SEND, label=1, peer=target, tag=tag, value=size)
                lanes[target].add(RECEIVE, label=1, peer=source, tag=tag)
            for lane in lanes:  # neither continues before both are done
                lane.add(SIGNAL, tag=event)
                lane.add(WAIT, tag=event, value=len(lanes))
        for lane in lanes:
            lane.end_step()
    return Trace(("near", "far"), ("pause", "probe"), lanes, {"maker": "certificate"})


def plain_profile(profile: LinkProfile) -> LinkProfile:
    """Return the link to probe: the profile's rates and delays, with TCP settings and buffers that hide neither."""

    def plain(pipe: Pipe | None) -> Pipe | None:
        if pipe is None:
            return None
        round_trip_ns = sum(p.delay_ns for p in (profile.up, profile.down) if p)
        roomy = pipe.rate_bps * 2 * round_trip_ns // 8_000_000_000 + 2 * STREAM_BYTES
        return Pipe.plain(
            rate_bps=pipe.rate_bps,
            delay_ns=pipe.delay_ns,
            buffer_bytes=max(pipe.buffer_bytes, roomy),
            seed=0,
            queue="fifo" if pipe.scheduled or pipe.queue else None,  # the same qdiscs
        )

    return profile.model_copy(
        update={
            "name": "probe",
            "summary": "probe",
            "source": "probe",
            "up": plain(profile.up),
            "down": plain(profile.down),
            "congestion_control": "cubic",
            "slow_start_after_idle": False,
            "background": None,
        }
    )


def by_construction(profile: LinkProfile) -> tuple[str, ...]:
    """List the quantities of a profile that are not probed, but read back from the kernel."""
    named = []
    if profile.background is not None:
        named.append("both: measured without its background flows")
    ways: tuple[LinkDirection, ...] = ("up", "down")
    for way in ways:
        pipe = profile.pipe(way)
        if pipe is None:
            named.append(f"{way}: there is no shaper, so on this clock nothing takes time")
            continue
        drawn = [name for name in ("jitter_ns", "loss", "reorder", "duplicate", "slot") if getattr(pipe, name)]
        drawn += ["what varies"] if pipe.scheduled else []
        drawn += ["faults"] if pipe.faults else []
        drawn += [f"queue {pipe.queue}"] if pipe.queue else []
        named.append(f"{way}: {', '.join([name.removesuffix('_ns') for name in drawn] + ['buffer'])} as read back")
    return tuple(named)


def certify_virtual(
    profiles: Sequence[LinkProfile],
    kernel: GuestKernel,
    *,
    guests: int = 1,
    cache: Path | None = None,
    play: PlayJobs = play_jobs,
) -> list[Certificate]:
    """Return a certificate for each link, from the cache or by playing the probe over it; missing ones are played in
    one boot per guest. Call it from the main thread.

    The link of a measurement is `node-0`. `cache`: a folder; None: in the user's cache. `play`: `play_jobs`, or
    what plays elsewhere. LabError if a probe cannot be played.
    """
    folder = cache or paths.cache_folder() / "certificates"
    about = _environment_digest(kernel)
    files = {
        profile: folder / f"{_digest(canonical_json(plain_profile(profile)) + about)}.json" for profile in profiles
    }
    missing = {files[profile]: plain_profile(profile) for profile in profiles if _kept(files[profile]) is None}
    if missing:
        paths.make_folders(folder)
        _measure(missing, kernel, guests, play)
    certificates = []
    for profile in profiles:
        kept = _kept(files[profile])
        assert kept is not None
        certificates.append(kept.model_copy(update={"by_construction": by_construction(profile)}))
    return certificates


def network_certificate(
    names: Sequence[str], links: Sequence[LinkProfile], certificates: Mapping[LinkProfile, Certificate]
) -> Certificate:
    """Return the certificate of a network from those of its links, which have these names in the lab."""
    each = [(name, certificates[profile]) for name, profile in zip(names, links, strict=True)]
    newest = max((certificate for _, certificate in each), key=lambda certificate: certificate.taken_at)
    return newest.model_copy(
        update={
            "seconds": sum(certificates[profile].seconds for profile in set(links)),
            "measurements": tuple(
                m.model_copy(update={"link": link}) for link, certificate in each for m in certificate.measurements
            ),
            "by_construction": tuple(
                f"{link} {words}" for link, certificate in each for words in certificate.by_construction
            ),
        }
    )


def _kept(file: Path) -> Certificate | None:
    try:
        return Certificate.model_validate_json(file.read_text(encoding="utf8"))
    except (FileNotFoundError, ValueError):
        return None


def _measure(missing: dict[Path, LinkProfile], kernel: GuestKernel, guests: int, play: PlayJobs) -> None:
    """Play the probe over links, and write their certificates to the cache."""
    with paths.scratch_folder("testbed-certificates-") as scratch:
        jobs = []
        for number, (_, profile) in enumerate(missing.items()):
            trace = scratch / f"{number}.trace"
            probe_trace(_PAUSE_NS + 2 * sum(pipe.delay_ns for pipe in (profile.up, profile.down) if pipe)).write(trace)
            lab = LabSpec(
                topology="line", profiles=(profile,), nodes=2, engine="netem", engine_reason="the virtual clock's"
            )
            jobs.append(PlayJob(trace=trace, lab=lab, output=scratch / "results" / str(number)))
        outcomes = play(jobs, clock="virtual", folder=scratch / "work", kernel=kernel, guests=guests)
        for (file, profile), job, outcome in zip(missing.items(), jobs, outcomes, strict=True):
            if outcome.output is None:
                raise LabError(f"cannot certify a link on the virtual clock: {outcome.error}")
            certificate = Certificate(
                form="full",
                clock="virtual",
                engine="netem",
                taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
                seconds=outcome.host_seconds,
                measurements=judge_probe(profile, probe_trace(0), read_played(job.output)),
                rejected=(),
            )
            results.write_json(file, certificate)


# ------------------------------------------------------------------ judging the probe
def judge_probe(profile: LinkProfile, trace: Trace, played: Played) -> tuple[Measurement, ...]:
    """Compare the last played step with the pipe formula."""
    items = zip(probe_items(), _times(trace, played, played.steps - 1), strict=True)
    return tuple(_judged(profile, item, times) for item, times in items)


def _judged(profile: LinkProfile, item: ProbeItem, times: _ItemTimes) -> Measurement:
    # The last ping: after a pause, one bare acknowledgement on the wire delays each of the first two.
    measured_ns = times.arrived[-1] - times.sent[-2 if item.kind == "ping" else 0]
    pipe, total = profile.pipe(item.way), sum(item.sizes)
    shaped, unit, measured, expected = pipe is not None, "ms", measured_ns / 1e6, 0.0
    direction: EitherOrBoth = item.way
    quantity: Literal["rtt", "message", "goodput"] = "message"
    if pipe is not None:
        expected = expect.message_ms(profile, pipe, total, profile.mtu - HEADER_BYTES)
    if item.kind == "ping":
        shaped, direction, quantity = profile.shaped, "both", "rtt"
        expected = expect.rtt_ms(profile, PING_BYTES + HEADER_BYTES)
        detail = f"{PING_BYTES} bytes and the same back"
    elif item.kind == "message":
        detail = f"{total} bytes after a pause"
    else:
        # From the arrival of the first byte: the delay is not part of a rate.
        delay_ns = pipe.delay_ns if pipe else 0
        quantity, unit, measured = "goodput", "bit/s", total * 8e9 / max(1, measured_ns - delay_ns)
        expected = total * 8e3 / (expected - delay_ns / 1e6) if pipe else 0.0
        detail = f"TCP, {total} bytes in {len(item.sizes)} messages"
    exact = not shaped or abs(measured - expected) <= EXACT * expected
    return Measurement(
        link="node-0",
        direction=direction,
        quantity=quantity,
        detail=detail,
        unit=unit,
        expected=expected if shaped else None,
        measured=measured,
        tolerance=EXACT * expected if shaped else None,
        samples=1,
        verdict="PASS" if exact else "FAIL",
        note="",
    )


class _ItemTimes(NamedTuple):
    """When the messages of an item were handed to the kernel, and when they had arrived, in order; nanoseconds."""

    sent: list[int]
    arrived: list[int]


def _times(trace: Trace, played: Played, step: int) -> list[_ItemTimes]:
    items = [_ItemTimes([], []) for _ in probe_items()]
    for lane, times in zip(trace.lanes, played.lanes, strict=True):
        number = 0
        for at in range(lane.starts[step], lane.starts[step + 1]):
            kind = lane.kind[at]
            if kind == SEND:
                items[number].sent.append(times.first_byte_ns[at])
            elif kind == RECEIVE:
                items[number].arrived.append(times.last_byte_ns[at])
            elif kind == WAIT:
                number += 1
    return [_ItemTimes(sorted(item.sent), sorted(item.arrived)) for item in items]


# ------------------------------------------------------------------ dependencies of a certificate
def _environment_digest(kernel: GuestKernel) -> str:
    """Return a digest of the kernel and of the code."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256((kernel.folder / MANIFEST).read_bytes())
    for name in _SOURCES:
        place = package / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
