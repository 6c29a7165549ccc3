"""The kit on a stranger's codecs: one that keeps the rules passes, and each broken one fails at what it breaks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from testbed.codecs.catalogue import formula
from testbed.codecs.check.apart import Ends
from testbed.codecs.check.subject import subject_of
from testbed.codecs.check.suite import CHECKS, ask, check_codec
from testbed.codecs.check.verdicts import CheckResult, same
from tests import forked

BROKEN = {
    "LiesAboutItsBytes": "bytes as the formula says",
    "LongerThanItSays": "bytes as the formula says",
    "SaysThatItSharesNothing": "nothing hidden, both ends alike",
    "DithersByHash": "nothing hidden, both ends alike",
    "UsesItsOutputAgain": "ownership",
    "LosesOnlyLater": "its law",
    "LosesTheSignOfZero": "its law",
    "BoundWithoutItsLaw": "its law",
    "ProjectsToNothing": "its law",
    "OwesForAll": "its law",
    "ReadsMemoryInItsOrder": "odd tensors",
    "SwallowsNanLater": "NaN and infinity",
    "LoadsAnything": "state saved and loaded",
    "ExpectsAFriendlyWorld": "repeated frame",
    "RefusesNothing": "hostile bytes",
    "StumblesOverOthers": "foreign payloads",
    "Explodes": "in a model: trains",
    "HidesTheTensor": "nothing hidden, both ends alike",
    "OpenLoop": "nothing hidden, both ends alike",
    "KeepsBf16": "ownership",
    "GoesByItsProcess": "two runs alike",
    "GoesByThreads": "any number of threads",
    "StopsAboveAMillion": "large tensors",
    "KeepsWhatItSends": "bounded memory",
    "DrawsFromTheGlobalGenerator": "deterministic",
    "CountsInTheClass": "deterministic",
    "ChangesItsInput": "ownership",
    "UsesItsPayloadAgain": "ownership",
    "LiesInTheReceiveBuffer": "ownership",
    "NeedsAnAlignedBuffer": "payload at any address",
    "BoundTooTight": "its law",
    "RoundsDown": "its law",
    "KeepsHalf": "its law",
    "OwesMoreAndMore": "its law",
    "NoProjection": "its law",
    "RefusesFlatTensors": "odd tensors",
    "SwallowsNan": "NaN and infinity",
    "TakesAnyType": "unfit tensors",
    "ForgetsToSayThatItRemembers": "no hidden memory",
    "LendsItsState": "state saved and loaded",
    "DriftsSilently": "lost frame, then reset",
    "MixesThePhases": "evaluation apart",
    "ForgetsOnErrors": "errors change nothing",
    "TakesHostileBytesToHeart": "hostile bytes",
    "TrustsItsHeader": "hostile bytes",
    "StumblesOverShortBytes": "hostile bytes",
    "TakesItsTime": "hostile bytes",
    "IsSlow": "cost",
    "SavesTooLittle": "in a model: resumed",
    "ForgetsToWiden": "in a model: shapes",
    "HalvesGradients": "in a model: gradients",
    "SaysExact": "in a model: nothing lost",
    "DrawsItsLayers": "in a model: ends agree",
    "EndsDiffer": "in a model: ends agree",
    "NoBasis": "in a model: ends agree",
    "HalvesWeights": "in a model: twice is once",
    "ConstrainsOnce": "in a model: weights stay",
}


def asked(name: str, which: str, ends: Ends) -> CheckResult:
    found = next(one for one in CHECKS if one.name == which)
    subject = subject_of(f"strangers:{name}", "forward", ends)
    assert subject.fresh().law  # a class that cannot be made fails every check
    return ask(found, subject)


@pytest.mark.slow
def test_a_stranger_who_keeps_the_rules_passes(ends: Ends) -> None:
    found = list(check_codec("strangers:Good", ends))
    assert [one for one in found if one.verdict == "FAIL"] == []
    assert {one.direction for one in found} == {"forward", "backward"}
    assert sum(one.verdict == "PASS" for one in found) >= 2 * (
        sum(not one.name.startswith("in a model") for one in CHECKS) - 4
    )


@pytest.mark.parametrize("name", ["Narrow", "Exact"])
def test_one_that_changes_the_model_and_keeps_the_rules_passes(name: str, ends: Ends) -> None:
    found = [asked(name, one.name, ends) for one in CHECKS if one.name.startswith("in a model")]
    passed = {one.check.removeprefix("in a model: ") for one in found if one.verdict == "PASS"}
    assert [one for one in found if one.verdict == "FAIL"] == []
    always = {"trains", "shapes", "gradients", "ends agree", "twice is once"}
    assert passed == (always | {"nothing lost", "weights stay"} if name == "Exact" else always)


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_codec_fails_where_it_is_broken(name: str, ends: Ends) -> None:
    found = asked(name, BROKEN[name], ends)
    assert found.verdict == "FAIL", found.detail


def test_every_check_has_found_a_broken_codec() -> None:
    assert {one.name for one in CHECKS} == set(BROKEN.values())


@pytest.mark.slow
def test_messages_say_what_was_seen(ends: Ends) -> None:
    assert "not in the payload" in asked("HidesTheTensor", "nothing hidden, both ends alike", ends).detail
    assert "allocated memory based on them" in asked("TrustsItsHeader", "hostile bytes", ends).detail
    assert "not a CodecError: error: unpack_from" in asked("StumblesOverShortBytes", "hostile bytes", ends).detail
    assert "processor time" in asked("TakesItsTime", "hostile bytes", ends).detail
    assert "payload_bytes says" in asked("LiesAboutItsBytes", "bytes as the formula says", ends).detail
    assert "global generator" in asked("DrawsItsLayers", "in a model: ends agree", ends).detail
    assert "orthonormal" in asked("NoBasis", "in a model: ends agree", ends).detail
    assert "differ in basis" in asked("EndsDiffer", "in a model: ends agree", ends).detail


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), [("Good", 0), ("SwallowsNan", 1), ("Missing", 2)])
def test_the_program(name: str, status: int) -> None:
    found = forked.run(
        ["-m", "testbed.codecs.check", f"strangers:{name}"],
        cwd=Path(__file__).parent,
        env={
            "PYTHONPATH": f"{Path(__file__).parents[2]}:{Path(__file__).parent}",
            "OMP_NUM_THREADS": "1",
            "PATH": "/usr/bin:/bin",
        },
    )
    assert found.returncode == status, found.stdout + found.stderr
    if status == 0:
        assert "FAIL" not in found.stdout
        assert "checks passed" in found.stdout
    elif status == 1:
        assert "NaN and infinity" in found.stdout
        assert "asked: NaN and infinity are" in found.stdout
    else:
        assert "Missing" in found.stderr


def test_formulas() -> None:
    names = {"d": 64.0, "bits": 4.0, "token": False, "group": 0.0}
    values = {
        "bits + 16/d": 4.25,
        "ceil(log2(d)) * min(bits, 2)": 12,
        "8 + (32 if token else 16)/min(group or d, d)": 8.25,
        "bits + w where w = 16 if token else 32": 36,
        "k*bits + i where k = kept(0.05, d) and i = k*index_bits(d)": 3 / 64 * 12,
        "kept(0.001, d)*d + raised(0.8, 25)*25 + groups(d, 48)*d": 1 + 20 + 2,
        "index_bits(256) + index_bits(257) + index_bits(65537)": 8 + 16 + 32,
        "2**round(bits/3)": 2,
    }
    for text, value in values.items():
        assert formula.evaluate(text, names.__getitem__) == value
    for text in (
        "8 + 32/unknown",
        "about 3, by the values",
        "__import__('os')",
        "d.real",
        "[d]",
        "max(d, default=1)",
        "inner(d, d)",
    ):
        with pytest.raises(ValueError, match="formula"):
            formula.evaluate(text, names.__getitem__)
    large = {"d": math.inf}
    limits = {"kept(0.1, d) + raised(0.8, d)": 0.9, "16*groups(d, 64)": 0.25, "min(1, ceil(log2(round(d))))": 1}
    for text, value in limits.items():
        assert formula.evaluate(text, large.__getitem__) == pytest.approx(value)


def test_same_is_to_the_bit() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert same({"a": [nan, (1, 2.0)]}, {"a": [nan.clone(), (1, 2.0)]})
    assert not same(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    assert not same({"a": 1}, {"a": 1, "b": 2})
