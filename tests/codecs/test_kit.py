"""The kit on the whole table: every codec is checked by being listed, with its example and settings worth it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from testbed.codecs.catalogue import table
from testbed.codecs.check import cost
from testbed.codecs.check.apart import Ends
from testbed.codecs.check.subject import subject_of
from testbed.codecs.check.suite import CHECKS, ask, check_codec
from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.make import make
from testbed.errors import CodecError
from testbed.message_key import Direction

SETTINGS: dict[str, tuple[str, ...]] = {
    "fp8": ("fp8", "fp8(e5m2)"),
    "int8": ("int8", "int8(group=64, asymmetric)", "int8(group=32, asymmetric, stochastic)"),
    "int6": ("int6", "int6(group=32)"),
    "int4": ("int4", "int4(group=64)", "int4(group=32, asymmetric)", "int4(group=128, stochastic)", "int4(midrise)"),
    "int3": ("int3(group=64)", "int3(midrise, stochastic)"),
    "int2": ("int2(group=64)", "int2(group=32, asymmetric)"),
    "int1": ("int1", "int1(group=64)"),
    "blockwise-8": ("blockwise-8", "blockwise-8(256)"),
    "hadamard": ("hadamard(int4(group=64))", "hadamard(int8, size=128)", "hadamard(topk(0.1))", "hadamard(delta-int8)"),
    "tah": ("tah", "tah(tile=128, share=0.5)", "tah(sample)"),
    "acsgd": ("acsgd", "acsgd(2)"),
    "topk": ("topk(0.1)", "topk(0.1, sample)", "topk(0.1, tensor)", "topk(0.02, index, fp32)", "topk(0.25, bitmap)"),
    "ht": ("ht(0.01)", "ef(ht(0.5, fp32))"),
    "topk-shared": ("topk-shared(0.1)", "fwd=topk-shared(0.1), bwd=ef(topk-shared(0.1))"),
    "columns": ("columns(0.1)",),
    "randk": ("randk(0.1)", "randk(0.1, channels)", "randk(0.1, none)", "randk(0.1, rms)"),
    "mask": ("mask(0.05)", "mask(0.1, channels)", "mask(0.1, rms)"),
    "powersgd": ("powersgd(8)", "powersgd(4, cold)"),
    "ef-decay": ("ef-decay(topk-chunk(0.0156))",),
    "uniform": ("zstd(uniform(0.1))", "uniform(0.001)", "delta(uniform(0.01, absolute))"),
    "haar": ("zstd(haar(int8(group=64, asymmetric)))", "haar(delta(int4(group=64)))", "haar(topk(0.1))"),
    "dct": ("dct(topk-chunk(0.0078, 1024))", "dct(int8, size=8)"),
    "cocktail": ("cocktail", "ef(cocktail(0.1, 5, 2))"),
    "ef": ("ef(topk(0.1))", "ef(int2(group=64))", "ef(powersgd(4))", "ef(delta(int8))"),
    "lazy": ("lazy(powersgd(4))",),
    "ef21": ("ef21(topk(0.1))", "ef21(powersgd(4))"),
    "delta": ("delta(int4(group=64))", "delta(delta(int8))", "delta(topk(0.1), bf16)", "delta(powersgd(4))"),
    "delta-open": ("delta-open(int4(group=64))",),
    "aqsgd": ("aqsgd", "aqsgd(int2(group=64), bf16, memory_mb=0.01)", "aqsgd(acsgd, direct)", "aqsgd(powersgd(2))"),
    "compactfusion": ("compactfusion", "compactfusion(lowrank(4))"),
    "lowrank": ("lowrank(8)",),
    "zstd": ("zstd(bf16)", "zstd(int8)", "zstd(delta(int8))", "zstd(ef(topk(0.1)))", "zstd(topk-shared(0.1))"),
    "entropy": ("entropy(int4(group=64))", "entropy(fp32)"),
    "adaptive": ("adaptive(10)",),
    "subspace": ("subspace", "subspace(reparametrised)", "subspace(grassmann, every=16)"),
    "bottleneck": ("bottleneck", "bottleneck(maxout)", "bottleneck(3, maxout)"),
    "resbm": ("resbm", "resbm(16)"),
    "subspace-free": ("subspace-free", "zstd(subspace-free)"),
}
"""How each codec is checked; one that is not here, by its example."""

FAIL_AS_THEY_MUST = {("delta-open(int4(group=64))", "forward"): {"nothing hidden, both ends alike"}}
"""A negative control: what is wrong with it, the kit sees."""
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
CHECKED = [(rows[0].name, 0, "forward") for rows in table.FAMILIES.values() if not rows[0].hook]
"""What `make check` takes: a codec of each family that leaves the model alone, in its first setting, forward."""
CASES = [
    pytest.param(text, direction, marks=[] if (name, number, direction) in CHECKED else [pytest.mark.slow])
    for name, row in table.CODECS.items()
    for number, text in enumerate(SETTINGS.get(name, (row.example_text,)))
    # Settings of one codec share what tells directions apart, so the first is checked in both, the others in one.
    for direction in (DIRECTIONS if not number or "bwd=" in text else DIRECTIONS[:1])
]


def test_settings_are_of_codecs_in_the_table() -> None:
    assert set(SETTINGS) <= set(table.CODECS)


@pytest.mark.parametrize(("text", "direction"), CASES)
def test_every_codec_passes_the_kit(text: str, direction: Direction, ends: Ends) -> None:
    subject = subject_of(text, direction, ends)
    # The check of cost is a person's to read: a timing decides no test.
    found = [ask(one, subject) for one in CHECKS if one.name != "cost"]
    expected = FAIL_AS_THEY_MUST.get((text, direction), set())
    assert [f"{one.check}: {one.detail}" for one in found if one.verdict == "FAIL" and one.check not in expected] == []
    assert {one.check for one in found if one.verdict == "FAIL"} == expected
    law = next(one for one in found if one.check == "its law")
    assert subject.law == "none" or law.verdict == "PASS", law.detail
    assert sum(one.verdict == "PASS" for one in found) >= len(CHECKS) // 2
    in_model = {one.check: one.verdict for one in found if one.check.startswith("in a model")}
    changes = direction == "forward" and any(part.row.hook for part in subject.spec.parts())
    assert list(in_model.values()).count("PASS") >= (5 if changes else 0)
    assert changes or set(in_model.values()) == {"-"}
    exact = changes and any(part.row.exact for part in subject.spec.parts())
    assert (in_model["in a model: nothing lost"] == "PASS") == exact


class _BusyMachine:
    """A clock on which all takes `slower` times as long three quarters of the time."""

    def __init__(self, reading_s: float, slower: int) -> None:
        self._reading_s, self._slower, self._now_s, self._readings = reading_s, slower, 0.0, 0

    def process_time(self) -> float:
        self._readings += 1
        self._now_s += self._reading_s * (1 if self._readings // 20 % 4 == 3 else self._slower)
        return self._now_s

    monotonic = process_time


@pytest.mark.slow
@pytest.mark.parametrize("text", ["int8", "subspace"])
@pytest.mark.parametrize(("reading_s", "verdict"), [(0.002, "PASS"), (0.02, "FAIL")])
def test_a_busy_machine_does_not_decide_what_a_codec_costs(
    text: str, reading_s: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "time", _BusyMachine(reading_s, 10))
    found = ask(next(check for check in CHECKS if check.name == "cost"), subject_of(text, "forward"))
    assert found.verdict == verdict, found.detail


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("int8", "4"),
        ("zstd(int8)", "inner/4"),
        ("subspace", "8"),
        # A few bytes for each token, or each value of a small message.
        ("int8", "8 + 16/d"),
        ("topk(0.05)", "share*values + min(1, 16*share)"),
        ("lowrank(int4, 4)", "inner*rank*(1/d + 1/bn)"),
        ("haar(int4)", "inner + 32/bn"),
        ("mapl", "inner/ratio*2"),
    ],
)
def test_a_row_whose_formula_is_wrong_fails(text: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "bf16" if text == "subspace" else text.partition("(")[0]  # what crosses of a subspace is bf16's
    row = dataclasses.replace(table.CODECS[name], bits=wrong)
    monkeypatch.setitem(table.CODECS, name, row)
    size = next(check for check in CHECKS if check.name == "bytes as the formula says")
    result = ask(size, subject_of(text, "forward"))
    assert result.verdict == "FAIL"
    assert "the table's formula" in result.detail


@pytest.mark.parametrize(
    "text", ["int8(midrise)", "int6(midrise)", "bottleneck(9)", "bottleneck(9, maxout)", "uniform(0.25, absolute)"]
)
def test_every_setting_has_the_bytes_of_its_formula(text: str) -> None:
    size = next(check for check in CHECKS if check.name == "bytes as the formula says")
    assert (result := ask(size, subject_of(text, "forward"))).verdict == "PASS", result.detail


@pytest.mark.slow
def test_the_example_of_the_readme_passes_the_kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (Path(table.__file__).parents[1] / "README.md").read_text(encoding="utf8")
    (tmp_path / "halves.py").write_text(readme.partition("```python\n")[2].partition("```")[0], encoding="utf8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "halves", raising=False)
    with Ends(["halves:Fp16"]) as ends:
        results = list(check_codec("halves:Fp16", ends, directions=("forward",)))
    found = {one.check: one for one in results if one.check != "cost"}
    narrow, wide = (make(f"halves:Fp16{of}", Context(0, 0, "backward")) for of in ("(largest=3)", ""))
    sys.modules.pop("halves")
    key = MessageKey("train", 0, 0, ())
    assert torch.equal(wide.decode(narrow.encode(torch.tensor([-3.0]), key), key), torch.tensor([-3.0]))
    with pytest.raises(CodecError):
        narrow.encode(torch.tensor([3.5]), key)
    assert [one for one in found.values() if one.verdict == "FAIL"] == []
    # It claims these, and is held to them.
    assert "of its bound" in found["its law"].detail
    assert "payload_bytes" in found["bytes as the formula says"].detail
