from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from testbed import spec
from testbed.errors import SpecError, UnknownNameError

_GOOD = """
summary = "s"
source = "t"
layer = "ip"
mtu = 1500
congestion_control = "cubic"
slow_start_after_idle = false
down = "unshaped"
[up]
rate = "80Mbit"
delay = "10ms"
buffer = "100ms"
loss = "none"
seed = 1
"""


def _read(folder: Path, text: str) -> spec.LinkProfile:
    (folder / "mine.toml").write_text(text, encoding="utf8")
    return spec.read_profile(folder / "mine.toml")


def test_every_shipped_profile_is_read_and_names_its_source() -> None:
    names = spec.profile_files()
    assert {"datacenter", "consumer-80mbps", "cable", "lte", "lossy-80mbps"} <= names.keys()
    for name in names:
        profile = spec.load_profile(name)
        assert profile.name == name
        assert len(profile.source) > 20


def test_a_profile_is_resolved_to_integers_of_base_units(tmp_path: Path) -> None:
    profile = _read(tmp_path, _GOOD)
    assert profile.up == spec.Pipe(rate_bps=80_000_000, delay_ns=10_000_000, buffer_bytes=1_000_000, loss=0.0, seed=1)
    assert profile.up is not None
    assert profile.up.buffer_ns == 100_000_000
    assert profile.down is None
    assert _read(tmp_path, _GOOD.replace('"100ms"', '"1MB"')).up == profile.up


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('rate = "80Mbit"', 'rate = "80"'), "rate '80' is not a number with a unit; write for example '80Mbit'"),
        (('rate = "80Mbit"', "rate = 80000000"), "rate 80000000 is not a number with a unit"),
        (('rate = "80Mbit"', 'rate = "1kbit"'), "greater than or equal to 8000"),
        (("buffer =", "bufer ="), "there is no key of [up] 'bufer'; did you mean 'buffer'?"),
        (('buffer = "100ms"\n', ""), "[up] lacks buffer; a profile states every number"),
        (('buffer = "100ms"', 'buffer = "1000B"'), "up.buffer holds 1000 bytes, less than one packet of 1500"),
        (("mtu = 1500", "mtu = 100"), "mtu: Input should be greater than or equal to 576, found 100"),
        (("mtu =", "mut ="), "there is no key 'mut'; did you mean 'mtu'?"),
        (('layer = "ip"', 'layer = "l3"'), "layer: Input should be 'ip' or 'ethernet', found 'l3'"),
        (('loss = "none"', 'loss = "100%"'), "loss: Input should be less than 1"),
        (('loss = "none"', "loss = 0.1"), "share 0.1 is not a percentage"),
        (('delay = "10ms"', 'delay = "0.5ns"'), "not a whole number of ns"),
        (('down = "unshaped"', 'down = "fast"'), "down must be a table or the word 'unshaped', found 'fast'"),
        (('summary = "s"', "summary = "), "is not TOML"),
    ],
)
def test_a_bad_profile_is_one_message_with_file_and_key(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        _read(tmp_path, _GOOD.replace(*change))
    assert message in str(caught.value)
    assert "mine.toml" in str(caught.value)


def test_an_unknown_profile_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'consumer-80mbps'"):
        spec.load_profile("consumer-80mbp")
    with pytest.raises(SpecError, match=r"cannot read .*nowhere\.toml"):
        spec.load_profile("nowhere.toml")


def test_own_profiles_come_before_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netem_profiles").mkdir()
    (tmp_path / "netem_profiles" / "cable.toml").write_text(_GOOD, encoding="utf8")
    monkeypatch.chdir(tmp_path)
    assert spec.load_profile("cable").summary == "s"
    assert spec.load_profile("lte").summary != "s"


def test_records_are_frozen() -> None:
    profile = spec.load_profile("cable")
    with pytest.raises(ValidationError):
        profile.mtu = 9000  # type: ignore[misc]
