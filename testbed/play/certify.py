"""Certify links on the virtual clock: the player plays a probe over each, and what it takes is compared with the pipe.

The probe is a trace like any other, over a lab of two nodes with the link between them, in the same guest and by the
same player as the traces that count: small messages back and forth, messages after a pause, and a stream of them, both
ways. Whatever the kernel, the lab or the player do to a message shows, and
chance and the machine have no part in it: so a link is certified once, and the certificate is kept in the user's cache
by what it depends on (the link, the kernel, and the code that builds and plays).

What is drawn (loss, jitter, order, copies) and what varies is left out of the probe's link, whose pipe is otherwise the
profile's; so are what TCP does with a small buffer, and slow start after idle. They are certified by construction, as
is a direction without a shaper, on which nothing takes time here: the lab reads back from the kernel all that it sets,
and ends with an error where that is not what was asked. The certificate names what it takes on that ground.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, NamedTuple

from testbed import paths
from testbed.directions import EitherOrBoth, LinkDirection
from testbed.errors import LabError
from testbed.frozen import canonical_json
from testbed.metrics.wires import HEADER_BYTES
from testbed.net.certificate import expect
from testbed.net.lab import LabSpec
from testbed.play.guests import play_jobs
from testbed.play.job import PlayJob
from testbed.play.played import Played, read_played
from testbed.play.trace import RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace
from testbed.profiles import LinkProfile, Pipe
from testbed.records import Certificate, Measurement
from testbed.spec import Topology
from testbed.vm.kernel import MANIFEST, GuestKernel

EXACT: Final = 0.001
"""How far a quantity may lie from its ideal, as a share."""
PING_BYTES: Final = 64
MESSAGE_BYTES: Final = (256 * 1024, 1024 * 1024)
STREAM_BYTES: Final = 8 * 256 * 1024
_PINGS = 4
_STEPS = 5
"""The last is judged; in the first ones the windows open."""
_PAUSE_NS = 250_000_000
_PLAYING: Final = ("certify", "connections", "inside", "job", "lanes", "player", "waiting")
_SOURCES: Final = ("net", "tcp_info.py", *(f"play/{name}.py" for name in _PLAYING))
"""What decides how a link behaves and what is measured of it, in the package."""


class ProbeItem(NamedTuple):
    """One thing that the probe does."""

    kind: str
    """ping, message or stream."""
    way: LinkDirection
    sizes: tuple[int, ...]
    """Of its messages: there, back, there ... for a ping, one after the other else."""


def probe_items() -> list[ProbeItem]:
    """Return what a step of the probe consists of, in order."""
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
            for lane in lanes:  # neither goes on before both are done
                lane.add(SIGNAL, tag=event)
                lane.add(WAIT, tag=event, value=len(lanes))
        for lane in lanes:
            lane.end_step()
    return Trace(("near", "far"), ("pause", "probe"), lanes, {"maker": "certificate"})


def plain_profile(profile: LinkProfile) -> LinkProfile:
    """Return the link that is probed: the profile's rates and delays, and a TCP and buffers that hide neither."""

    def plain(pipe: Pipe | None) -> Pipe | None:
        if pipe is None:
            return None
        round_trip_ns = sum(p.delay_ns for p in (profile.up, profile.down) if p)
        roomy = pipe.rate_bps * 2 * round_trip_ns // 8_000_000_000 + 2 * STREAM_BYTES
        return Pipe.plain(
            rate_bps=pipe.rate_bps, delay_ns=pipe.delay_ns, buffer_bytes=max(pipe.buffer_bytes, roomy), seed=0
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
        }
    )


def by_construction(profile: LinkProfile) -> tuple[str, ...]:
    """Name what of a profile the probe leaves to being read back from the kernel."""
    named = []
    ways: tuple[LinkDirection, ...] = ("up", "down")
    for way in ways:
        pipe = profile.pipe(way)
        if pipe is None:
            named.append(f"{way}: there is no shaper, so on this clock nothing takes time")
            continue
        drawn = [name for name in ("jitter_ns", "loss", "reorder", "duplicate", "slot") if getattr(pipe, name)]
        drawn += ["what varies"] if pipe.varies else []
        named.append(f"{way}: {', '.join([name.removesuffix('_ns') for name in drawn] + ['buffer'])} as read back")
    return tuple(named)


def certify_virtual(
    profiles: Sequence[LinkProfile], kernel: GuestKernel, *, guests: int = 1, cache: Path | None = None
) -> list[Certificate]:
    """Return a certificate for each link, from the cache or by playing the probe over it; all that are missing in as
    few boots as there are guests. Call it from the main thread.

    A measurement's link is `node-0`. `cache`: a folder; None: in the user's cache. LabError where a probe cannot be
    played.
    """
    folder = cache or paths.cache_folder() / "certificates"
    about = _environment_digest(kernel)
    files = {
        profile: folder / f"{_digest(canonical_json(plain_profile(profile)) + about)}.json" for profile in profiles
    }
    missing = {files[profile]: plain_profile(profile) for profile in profiles if _kept(files[profile]) is None}
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        paths.give_to_user(folder)
        _measure(missing, kernel, guests)
    certificates = []
    for profile in profiles:
        kept = _kept(files[profile])
        assert kept is not None
        certificates.append(kept.model_copy(update={"by_construction": by_construction(profile)}))
    return certificates


def network_certificate(
    topology: Topology, links: Sequence[LinkProfile], certificates: Mapping[LinkProfile, Certificate]
) -> Certificate:
    """Return the certificate of a network from those of its links, with the names that links have in a lab."""
    name = "node-{}" if topology == "star" else "boundary-{}"
    each = [(name.format(number), certificates[profile]) for number, profile in enumerate(links)]
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


def _measure(missing: dict[Path, LinkProfile], kernel: GuestKernel, guests: int) -> None:
    """Play the probe over links, and write what was found to their files."""
    with tempfile.TemporaryDirectory(prefix="testbed-certificates-") as scratch:
        jobs = []
        for number, (_, profile) in enumerate(missing.items()):
            trace = Path(scratch) / f"{number}.trace"
            probe_trace(_PAUSE_NS + 2 * sum(pipe.delay_ns for pipe in (profile.up, profile.down) if pipe)).write(trace)
            lab = LabSpec(
                topology="line", profiles=(profile,), nodes=2, engine="netem", engine_reason="the virtual clock's"
            )
            jobs.append(PlayJob(trace=trace, lab=lab, output=Path(scratch) / "results" / str(number)))
        outcomes = play_jobs(jobs, clock="virtual", folder=Path(scratch) / "work", kernel=kernel, guests=guests)
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
            part = file.with_suffix(".part")
            part.write_text(certificate.model_dump_json(indent=1) + "\n", encoding="utf8")
            part.rename(file)
            paths.give_to_user(file)


# ------------------------------------------------------------------ what was found
def judge_probe(profile: LinkProfile, trace: Trace, played: Played) -> tuple[Measurement, ...]:
    """Compare the last step that was played with what the pipe formula says."""
    items = zip(probe_items(), _times(trace, played, played.steps - 1), strict=True)
    return tuple(_judged(profile, item, times) for item, times in items)


def _judged(profile: LinkProfile, item: ProbeItem, times: _ItemTimes) -> Measurement:
    # Of the pings the last: the first two after a pause take longer by one bare acknowledgement on the wire.
    measured_ns = times.arrived[-1] - times.sent[-2 if item.kind == "ping" else 0]
    pipe, total = profile.pipe(item.way), sum(item.sizes)
    shaped, unit, found, expected = pipe is not None, "ms", measured_ns / 1e6, 0.0
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
        # From the first byte that arrives on: the delay is not part of a rate.
        delay_ns = pipe.delay_ns if pipe else 0
        quantity, unit, found = "goodput", "bit/s", total * 8e9 / max(1, measured_ns - delay_ns)
        expected = total * 8e3 / (expected - delay_ns / 1e6) if pipe else 0.0
        detail = f"TCP, {total} bytes in {len(item.sizes)} messages"
    exact = not shaped or abs(found - expected) <= EXACT * expected
    return Measurement(
        link="node-0",
        direction=direction,
        quantity=quantity,
        detail=detail,
        unit=unit,
        expected=expected if shaped else None,
        measured=found,
        tolerance=EXACT * expected if shaped else None,
        samples=1,
        verdict="PASS" if exact else "FAIL",
        note="",
    )


class _ItemTimes(NamedTuple):
    """When the messages of an item were handed to the kernel and when they had arrived, in order; nanoseconds."""

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


# ------------------------------------------------------------------ what a certificate depends on
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
