"""Profile files: what they become, and the one message that each mistake gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed import profiles
from testbed.errors import SpecError, UnknownNameError
from testbed.profiles import Bernoulli, Change, GilbertElliott, LinkProfile, Pipe, Slot, keys
from tests.drawn_links import pipes

GOOD = """
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
BURSTS = (
    'loss = { model = "gilbert-elliott", enter_bad = "1%", leave_bad = "30%", '
    'lost_in_bad = "100%", lost_in_good = "0%" }'
)
SLOT = 'slot = { wait = "2ms", wait_max = "8ms", packets = 16, bytes = "none" }'


def _write(folder: Path, text: str, name: str = "mine") -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf8")
    return path


def _read(folder: Path, text: str, *overrides: str) -> LinkProfile:
    return profiles.read_profile(_write(folder, text), overrides)


def _up(folder: Path, more: str, *overrides: str) -> Pipe:
    pipe = _read(folder, _edited(more), *overrides).up
    assert pipe is not None
    return pipe


def test_a_profile_is_resolved_to_integers_of_base_units(tmp_path: Path) -> None:
    profile = _read(tmp_path, GOOD)
    assert profile.up == Pipe(
        rate_bps=80_000_000,
        delay_ns=10_000_000,
        jitter_ns=0,
        buffer_bytes=1_000_000,
        loss=None,
        reorder=0,
        jitter_reorders=False,
        duplicate=0,
        slot=None,
        seed=1,
        schedule=None,
        trace=None,
    )
    assert profile.up.buffer_ns == 100_000_000
    assert not profile.varies
    assert profile.down is None
    assert _read(tmp_path, GOOD.replace('"100ms"', '"1MB"')).up == profile.up


def test_every_effect_is_read(tmp_path: Path) -> None:
    pipe = _up(tmp_path, f'jitter = "2ms"\nreorder = "1%"\nduplicate = "0.5%"\n{SLOT}\n')
    assert (pipe.jitter_ns, pipe.reorder, pipe.duplicate) == (2_000_000, 0.01, 0.005)
    assert pipe.slot == Slot(wait_ns=2_000_000, wait_max_ns=8_000_000, packets=16, max_bytes=0)
    assert _up(tmp_path, 'jitter = "2ms"\nreorder = "by-jitter"\n').jitter_reorders
    assert _up(tmp_path, 'loss = "0.1%"').loss == Bernoulli(probability=0.001)
    assert _up(tmp_path, BURSTS).loss == GilbertElliott(enter_bad=0.01, leave_bad=0.3, lost_in_bad=1, lost_in_good=0)


def test_a_change_of_the_schedule_keeps_what_it_does_not_state(tmp_path: Path) -> None:
    pipe = _up(
        tmp_path,
        'schedule = [{ at = "1s", rate = "8Mbit" }, { at = "2s", delay = "5ms", loss = "1%" }, '
        '{ at = "3s", loss = "none" }]\n'
        'repeat = "10s"\n',
    )
    one, two, three = pipe.schedule.changes
    assert one == Change(at_ns=10**9, rate_bps=8_000_000, delay_ns=10_000_000, jitter_ns=0, loss=None)
    assert two == Change(
        at_ns=2 * 10**9, rate_bps=8_000_000, delay_ns=5_000_000, jitter_ns=0, loss=Bernoulli(probability=0.01)
    )
    assert three == two.model_copy(update={"at_ns": 3 * 10**9, "loss": None})
    assert pipe.schedule.repeat_ns == 10 * 10**9


def _edited(edit: str) -> str:
    """GOOD with these lines in place of those that state the same keys; others are of [up]."""
    lines = {line.partition(" =")[0]: line for line in (GOOD + edit).splitlines()}
    return "\n".join(lines.values())


_MISTAKES = {
    'rate = "80"': "up.rate: rate '80' is not a number with a unit; write for example '80Mbit'",
    'rate = "7992bit"': "up.rate: 7.992kbit is out of range; choose 8kbit to 100Gbit",
    'rate = "101Gbit"': "up.rate: 101Gbit is out of range; choose 8kbit to 100Gbit",
    'rate = "8.001kbit"': "is not a whole number of bytes per second, the kernel's unit; write 8kbit or 8.008kbit",
    "delay = 10": "up.delay: time 10 is not a number with a unit; write for example '25ms'",
    'delay = "10.000000001s"': "up.delay: 10.000000001s is out of range; choose 0ns to 10s",
    'jitter = "10.5ms"': "up: jitter 10.5ms exceeds delay 10ms, so packets would arrive",
    'buffer = "1499B"': "up.buffer holds 1499 bytes, less than one packet of 1500; enlarge it",
    'buffer = "0ms"': "up.buffer: 0B is out of range; choose 1B to 10GB",
    'buffer = "11GB"': "up.buffer: 11GB is out of range; choose 1B to 10GB",
    "buffer = 100": "up.buffer: buffer 100 is neither a time nor a size; write for example",
    'loss = "101%"': "up.loss: share '101%' is more than 100%",
    "loss = 0.1": "up.loss: share 0.1 is not a percentage; write for example '0.1%'",
    BURSTS.replace('"1%"', '"0%"'): "up.loss.enter_bad: 0% is out of range; choose more than 0% to 100%",
    BURSTS.replace('"30%"', '"0%"'): "up.loss.leave_bad: 0% is out of range; choose more than 0% to 100%",
    BURSTS.replace('"100%"', '"0%"'): "up.loss.lost_in_bad: 0% is out of range; choose more than 0% to 100%",
    BURSTS.replace(
        'lost_in_good = "0%"', 'lost_in_good = "100%"'
    ): "up.loss.lost_in_good: 100% is out of range; choose 0% to less than 100%",
    BURSTS.replace(', lost_in_good = "0%"', ""): "up.loss lacks lost_in_good",
    BURSTS.replace("gilbert-elliott", "gilbert-eliot"): "did you mean 'gilbert-elliott'?",
    BURSTS.replace("enter_bad", "enter_bed"): "there is no key of up.loss 'enter_bed'; did you mean",
    'reorder = "101%"': "up.reorder: share '101%' is more than 100%",
    "duplicate = 0.1": "up.duplicate: share 0.1 is not a percentage",
    'reorder = "by-jitter"': "up: reorder is 'by-jitter' without a jitter; set one",
    "seed = -1": "up.seed: -1 is out of range; choose 0 to 9223372036854775807",
    "seed = 1.0": "up.seed: Input should be a valid integer, found 1.0",
    SLOT.replace("8ms", "1ms"): "up.slot: wait_max 1ms is less than wait 2ms",
    SLOT.replace("2ms", "0ms"): "up.slot.wait: 0ns is out of range; choose 1ns to 10s",
    SLOT.replace("16", "-1"): "up.slot.packets: -1 is out of range; choose 0 to 2147483647",
    SLOT.replace('"none"', '"3GB"'): "up.slot.bytes: 3GB is out of range; choose 0B to 2.14",
    'schedule = [{ at = "2s", loss = "1%" }, { at = "1s", loss = "2%" }]': (
        "up.schedule: change [1] is at 1s, change [0] at 2s; a schedule's times must increase"
    ),
    'schedule = [{ at = "1s" }]': "up.schedule[0] changes nothing; set at least one of rate",
    'schedule = [{ rate = "8Mbit" }]': "up.schedule[0] lacks at",
    "schedule = []": "up.schedule must be a list of changes such as { at = '10s', rate = '40Mbit' }",
    'schedule = [{ at = "86401s", rate = "8Mbit" }]': "up.schedule[0].at: 86401s is out of range; choose 0ns to 86400s",
    'schedule = [{ at = "1s", rate = "1kbit" }]': "up.schedule[0].rate: 1kbit is out of range; choose 8kbit to 100Gbit",
    'schedule = [{ at = "1s", jitter = "20ms" }]': "up.schedule[0]: jitter 20ms exceeds delay 10ms",
    'schedule = [{ at = "2s", rate = "8Mbit" }]\nrepeat = "2s"': (
        "up.schedule: it repeats after 2s, but its last change is at 2s; set a longer repeat"
    ),
    'schedule = [{ at = "0s", rate = "8Mbit" }]\nrepeat = "0s"': "up.repeat: 0ns is out of range; choose 1ns to 86400s",
    'repeat = "2s"': "up.repeat needs up.schedule; remove it, or add a schedule",
    "mtu = 100": "mtu: 100 bytes is out of range; choose 576 bytes to 9000 bytes",
    'mtu = "1500"': "mtu: Input should be a valid integer, found '1500'",
    'layer = "l3"': "layer: Input should be 'ip' or 'ethernet', found 'l3'",
    'congestion_control = "BBR v3"': (
        "congestion_control: 'BBR v3' is not a TCP congestion control; use a name that Linux knows"
    ),
    'slow_start_after_idle = "false"': "slow_start_after_idle: Input should be a valid boolean, found 'false'",
    'source = ""': "source: String should have at least 1 character",
    'down = "fast"': "down must be a table or 'unshaped', found 'fast'",
    "summary = ": "is not TOML",
}


def _told(folder: Path, text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        _read(folder, text)
    assert message in str(caught.value)
    assert "mine.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("edit", "message"), _MISTAKES.items(), ids=[message[:40] for message in _MISTAKES.values()])
def test_a_mistake_is_one_message_with_file_and_key(tmp_path: Path, edit: str, message: str) -> None:
    _told(tmp_path, _edited(edit), message)


@pytest.mark.parametrize(
    ("text", "instead", "message"),
    [
        ('buffer = "100ms"\n', "", "[up] lacks buffer; a profile must set every value"),
        ("buffer =", "bufer =", "there is no key of [up] 'bufer'; did you mean 'buffer'?"),
        ("mtu =", "mut =", "there is no key 'mut'; did you mean 'mtu'?"),
        ('source = "t"\n', "", "it lacks source; set every value, or extend a profile that does"),
    ],
)
def test_a_key_that_is_missing_or_misspelt_is_named(tmp_path: Path, text: str, instead: str, message: str) -> None:
    assert text in GOOD
    _told(tmp_path, GOOD.replace(text, instead), message)


def test_an_unknown_profile_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'consumer-80mbps'"):
        profiles.load_profile("consumer-80mbp")
    with pytest.raises(SpecError, match=r"cannot read .*nowhere\.toml: No such file"):
        profiles.load_profile("nowhere.toml")


def test_own_profiles_come_before_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netem_profiles").mkdir()
    _write(tmp_path / "netem_profiles", GOOD, "cable")
    monkeypatch.chdir(tmp_path)
    assert profiles.load_profile("cable").summary == "s"
    assert profiles.load_profile("lte").summary != "s"


# --- extends


def test_what_a_file_leaves_out_is_that_of_the_file_it_extends(tmp_path: Path) -> None:
    _write(tmp_path, GOOD, "base")
    _write(tmp_path, 'extends = "base"\nsummary = "middle"\n[up]\ndelay = "20ms"\n', "middle")
    found = _read(tmp_path, 'extends = "middle.toml"\nmtu = 1400\n[up]\nrate = "8Mbit"\n')
    assert (found.name, found.summary, found.source, found.mtu) == ("mine", "middle", "t", 1400)
    assert (found.up.rate_bps, found.up.delay_ns, found.up.buffer_bytes) == (8_000_000, 20_000_000, 100_000)


def test_extends_in_a_circle_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, 'extends = "two"\n', "one")
    _write(tmp_path, 'extends = "three"\n', "two")
    three = _write(tmp_path, 'extends = "one"\n', "three")
    with pytest.raises(SpecError, match=r"three\.toml: extends is circular: three -> one -> two -> three; remove one"):
        profiles.read_profile(three)
    with pytest.raises(SpecError, match="circular: mine -> mine"):
        _read(tmp_path, 'extends = "mine"\n')


def test_a_mistake_below_names_the_files(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"mine\.toml: there is no profile 'cabel'; did you mean 'cable'\?"):
        _read(tmp_path, 'extends = "cabel"\n')
    with pytest.raises(SpecError, match="extends must be the name of a profile, found 3"):
        _read(tmp_path, "extends = 3\n")
    _write(tmp_path, GOOD.replace("mtu =", "mut ="), "base")
    with pytest.raises(SpecError, match=r"mine\.toml: there is no key of base\.toml 'mut'; did you mean 'mtu'\?"):
        _read(tmp_path, 'extends = "base"\n')
    _write(tmp_path, GOOD.replace("80Mbit", "80"), "base")
    with pytest.raises(SpecError, match=r"mine\.toml \(it extends base\): up\.rate: rate '80'"):
        _read(tmp_path, 'extends = "base"\n')
    _write(tmp_path, GOOD, "base")
    with pytest.raises(SpecError, match=r"\[down\] lacks delay, buffer, loss, seed"):
        _read(tmp_path, 'extends = "base"\n[down]\nrate = "8Mbit"\n')


# --- --set


def test_set_changes_what_the_file_says(tmp_path: Path) -> None:
    profile = _read(
        tmp_path, GOOD, "up.rate=8Mbit", "mtu=1400", "slow_start_after_idle=true", "up.loss = 1%", "source=mine"
    )
    assert (profile.up.rate_bps, profile.up.buffer_ns) == (8_000_000, 100_000_000)  # a buffer of 100 ms stays one
    assert (profile.mtu, profile.slow_start_after_idle, profile.up.mean_loss) == (1400, True, 0.01)
    assert profile.source.startswith("mine Changed by --set: up.rate=8Mbit, ")
    assert _read(tmp_path, GOOD, "up=unshaped").up is None
    bursts = _up(tmp_path, BURSTS, "up.loss.leave_bad=50%").loss
    assert bursts == GilbertElliott(enter_bad=0.01, leave_bad=0.5, lost_in_bad=1, lost_in_good=0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("up.rate", "--set 'up.rate': write KEY=VALUE, for example up.rate=40Mbit"),
        ("up.rate=", "write KEY=VALUE"),
        ("up.rat=40Mbit", "there is no key of up 'rat'; did you mean 'rate'?"),
        ("upp.rate=40Mbit", "there is no key of a profile 'upp'; did you mean 'up'?"),
        ("extends=lte", "there is no key of a profile 'extends'"),
        ("up.rate=80000000", "up.rate: rate 80000000 is not a number with a unit"),
        ("up.loss.leave_bad=1%", "loss is 'none', without a key leave_bad; write the whole table in a file"),
        ("up.rate.x=1", "there is no key of up.rate 'x'"),
        ("down.rate=40Mbit", "down is 'unshaped', without a key rate; write the whole table in a file"),
        ("mtu=100", "mtu: 100 bytes is out of range"),
    ],
)
def test_a_mistake_in_set_is_told(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        _read(tmp_path, GOOD, override)
    assert message in str(caught.value)


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_override_is_understood_or_a_spec_error(text: str) -> None:
    try:
        profiles.load_profile("consumer-80mbps", [text])
    except SpecError as error:
        assert "consumer-80mbps" in str(error)  # noqa: PT017


_KEYS = [
    *keys.names(keys.TOP),
    *(f"up.{name}" for name in keys.names(keys.PIPE)),
    "up.loss.enter_bad",
    "up.trace.offset",
]
_words_of_files = st.sampled_from(
    ["none", "unshaped", "by-jitter", "80Mbit", "10ms", "1%", "1500B", "0s", "ip", "bbr", ""]
)
_values = st.recursive(
    st.booleans() | st.integers() | st.floats() | _words_of_files | st.text(st.characters(codec="ascii"), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["at", "rate", "delay", "loss", "model", "file", "loop", "offset"]), inner, max_size=4
        )
    ),
    max_leaves=6,
)


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf").replace("\x7f", "")


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(_KEYS), _values), min_size=1, max_size=3))
def test_any_value_of_any_key_is_understood_or_told_in_one_line(changes: list[tuple[str, object]]) -> None:
    try:
        found = profiles.load_profile("bursty-80mbps", [f"{key}={_toml(value)}" for key, value in changes])
    except SpecError as error:
        assert "bursty-80mbps" in str(error)  # noqa: PT017
    else:
        assert found.name == "bursty-80mbps"


# --- there and back

_words = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=30)
_link_profiles = st.builds(
    LinkProfile,
    name=st.just("mine"),
    summary=_words,
    source=_words,
    layer=st.sampled_from(["ip", "ethernet"]),
    mtu=st.integers(576, 9000),
    congestion_control=st.from_regex(r"[a-z0-9_]{1,15}", fullmatch=True),
    slow_start_after_idle=st.booleans(),
    up=st.none() | pipes(),
    down=st.none() | pipes(),
)


@pytest.mark.slow
@settings(deadline=None)
@given(_link_profiles)
def test_a_written_profile_reads_back_as_itself(tmp_path_factory: pytest.TempPathFactory, profile: LinkProfile) -> None:
    folder = tmp_path_factory.getbasetemp()
    assert profiles.read_profile(_write(folder, profiles.write_profile(profile))) == profile
