"""Certificates on the virtual clock: the probe, what it leaves out, what is kept; and links for real in a guest."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.directions import LINK_DIRECTIONS
from testbed.metrics.bound import pipeline_step
from testbed.player import certify_links
from testbed.player.certify_links import (
    EXACT,
    by_construction,
    certify_virtual,
    network_certificate,
    plain_profile,
    probe_trace,
)
from testbed.profiles import Bernoulli, LinkProfile, load_profile, profile_files
from testbed.records import Certificate, Measurement, RunCertificates
from testbed.trace.check import check_trace
from testbed.trace.format import Trace
from testbed.trace.played import Played
from testbed.vm.kernel import GuestKernel
from tests.synthetic import Pipeline, certified, pipe, profile, reading

LINK = profile("asked", pipe(80_000_000, 10_000_000), pipe(20_000_000, 30_000_000))


def test_the_probe_is_a_trace_that_makes_sense() -> None:
    trace = probe_trace(1_000_000)
    check_trace(trace, "the probe")
    assert trace.steps > 1


def test_only_what_the_probe_can_show_is_probed_and_the_rest_is_named() -> None:
    lossy = pipe(80_000_000, 10_000_000, loss=Bernoulli(probability=0.01), jitter_ns=1_000_000)
    wanted = profile("lossy", lossy, None, congestion_control="bbr")
    plain = plain_profile(wanted)
    assert (plain.up.rate_bps, plain.up.delay_ns) == (lossy.rate_bps, lossy.delay_ns)
    assert (plain.up.loss, plain.up.jitter_ns, plain.down) == (None, 0, None)
    up, down = by_construction(wanted)
    assert "loss" in up
    assert "jitter" in up
    assert "no shaper" in down


@pytest.mark.parametrize("name", sorted(profile_files()))
def test_every_shipped_profile_can_be_probed(name: str) -> None:
    plain = plain_profile(load_profile(name))
    for way in LINK_DIRECTIONS:
        line = plain.pipe(way)
        assert line is None or not (line.varies or line.loss or line.jitter_ns or line.reorder or line.duplicate)


def test_what_lies_in_the_cache_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[LinkProfile] = []

    def measure(missing: dict[Path, LinkProfile], kernel: GuestKernel, guests: int, play: object) -> None:
        for file, link in missing.items():
            measured.append(link)
            file.write_text(virtual(40.0).model_dump_json())

    monkeypatch.setattr(certify_links, "_measure", measure)
    folder = tmp_path / "kernel"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    kernel = GuestKernel(folder=folder, version="7", packages={})
    other = profile("other", pipe(80_000_000, 11_000_000), pipe(80_000_000, 11_000_000))
    certify_virtual([LINK, other, LINK.model_copy(update={"name": "again"})], kernel, cache=tmp_path / "cache")
    assert len(measured) == 2  # a name is no part of a link
    certify_virtual([LINK, other], kernel, cache=tmp_path / "cache")
    assert len(measured) == 2
    (folder / "manifest.json").write_text('{"another": "kernel"}')
    certify_virtual([LINK], kernel, cache=tmp_path / "cache")
    assert len(measured) == 3
    for file in (tmp_path / "cache").iterdir():
        file.write_text("cut off")
    certify_virtual([LINK], kernel, cache=tmp_path / "cache")
    assert len(measured) == 4


def virtual(found_ms: float) -> Certificate:
    verdict = "PASS" if abs(found_ms - 40) <= 0.04 else "FAIL"
    measurement = reading("message", 40.0, found_ms, unit="ms", tolerance=0.04, verdict=verdict)
    about = {"form": "full", "clock": "virtual", "engine": "netem"}
    return certified(measurement, **about, by_construction=("up: buffer as read back",))


@pytest.mark.parametrize(("found_ms", "verdict"), [(40.01, "PASS"), (40.1, "FAIL")])
def test_a_network_s_certificate_has_those_of_its_links_and_stands_alone(found_ms: float, verdict: str) -> None:
    """Nothing excuses a deviation on the virtual clock, even one that moves the step by less than the bound."""
    other = profile("other", LINK.up, LINK.up)
    pipeline = Pipeline((LINK, other, LINK))
    pipeline.run(0)
    pipeline.run(1)
    step = pipeline_step(pipeline.cell, pipeline.records, None)
    whole = network_certificate(
        pipeline.cell.link_names, pipeline.cell.links, {LINK: virtual(40.0), other: virtual(found_ms)}
    )
    assert [m.link for m in whole.measurements] == ["node-0", "node-1", "node-2"]
    assert whole.by_construction[1] == "node-1 up: buffer as read back"
    run = RunCertificates(before=step.assess(whole), after=None)
    assert run.verdict == verdict
    assert 0 < run.bound < 0.02


@pytest.mark.slow
@pytest.mark.clock_kernel
def test_links_on_the_virtual_clock_are_exact(kernel: GuestKernel, tmp_path: Path) -> None:
    unshaped = profile("unshaped")
    slow = profile("slow", pipe(10_000_000, 5_000_000), pipe(10_000_000, 5_000_000))
    both, fast, nothing = certify_virtual([LINK, slow, unshaped], kernel, cache=tmp_path / "cache")
    for certificate in (both, fast):
        assert certificate.verdict == "PASS", certificate
        assert certificate.clock == "virtual"
        shown = [(m.measured, m.expected) for m in certificate.measurements]
        assert all(abs(measured / asked - 1) <= EXACT for measured, asked in shown if measured is not None and asked)
    assert {m.quantity for m in both.measurements} == {"rtt", "message", "goodput"}
    assert nothing.verdict == "PASS"
    assert all(m.expected is None for m in nothing.measurements)
    assert all("no shaper" in words for words in nothing.by_construction)


@pytest.mark.slow
@pytest.mark.clock_kernel
def test_a_wrong_link_is_found(kernel: GuestKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe crosses a link that is half a percent slower than what it is compared with."""
    judge = certify_links.judge_probe

    def compare(link: LinkProfile, trace: Trace, played: Played) -> tuple[Measurement, ...]:
        asked = profile("asked", pipe(80_400_000, 10_000_000), pipe(20_000_000, 30_000_000))
        return judge(asked, trace, played)

    monkeypatch.setattr(certify_links, "judge_probe", compare)
    (certificate,) = certify_virtual([LINK], kernel, cache=tmp_path / "cache")
    failed = {(m.quantity, m.direction) for m in certificate.measurements if m.verdict == "FAIL"}
    assert failed == {("message", "up"), ("goodput", "up")}


@pytest.mark.slow
@pytest.mark.clock_kernel
def test_every_shipped_profile_is_what_it_says(kernel: GuestKernel) -> None:
    """The certificates are kept in the user's cache by what they depend on, so this takes time after a change only."""
    names = sorted(profile_files())
    certificates = certify_virtual([load_profile(name) for name in names], kernel, guests=2)
    assert {name for name, made in zip(names, certificates, strict=True) if made.verdict != "PASS"} == set()
