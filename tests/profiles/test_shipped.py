"""The profiles and traces that are shipped, and what is drawn from them."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from testbed import paths, profiles
from testbed.commands.profiles import profile_table
from testbed.errors import UserError
from testbed.net.kernel.netem_plan import plan_netem
from testbed.profiles import LinkProfile, rate_trace, trace_sources
from testbed.profiles.profiles_page import draw_profiles_page
from testbed.profiles.timeline import timeline

FOLDER = paths.profile_folders()[-1]
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


@pytest.fixture(params=FILES)
def profile(request: pytest.FixtureRequest) -> LinkProfile:
    return profiles.read_profile(FILES[request.param])


def test_a_shipped_profile_names_its_source_and_fits_on_a_line(profile: LinkProfile) -> None:
    assert len(profile.source) > 20
    assert not re.search(
        r"\b(assum|chosen|derived|guess)\w*(?!\])\b", re.sub(r"\[(chosen|derived)\]", "", profile.source)
    )
    assert len(profile.name) <= 20
    assert len(profile.summary) <= 50


def test_both_engines_carry_a_shipped_profile(profile: LinkProfile) -> None:
    for pipe in (profile.up, profile.down):
        if pipe is None:
            continue
        assert pipe.slot is None  # netem alone
        assert not pipe.jitter_reorders  # the relay alone
        assert pipe.rate_bps <= 350_000_000  # what the relay, in Python, carries
        for step in timeline(pipe).steps:
            assert plan_netem(pipe, mtu=profile.mtu, layer=profile.layer, step=step).rate_bytes == step.rate_bps // 8


def test_a_shipped_profile_reads_back_as_it_is_shown(profile: LinkProfile, tmp_path: Path) -> None:
    shown = tmp_path / f"{profile.name}.toml"
    shown.write_text(profiles.write_profile(profile), encoding="utf8")
    (tmp_path / "traces").symlink_to(FOLDER / "traces")
    assert profiles.read_profile(shown) == profile


def test_starlinks_satellites_carry_its_rate_on_average() -> None:
    found = profiles.read_profile(FILES["starlink"])
    for pipe in (found.up, found.down):
        line = timeline(pipe)
        assert line.repeat_ns == 60_000_000_000
        assert line.bits_between(0, line.repeat_ns) / 60 == pytest.approx(pipe.rate_bps)
        assert {step.at_ns % 15_000_000_000 for step in line.steps} == {0, 100_000_000}


def test_the_regions_lie_apart_as_their_pairs_were_measured() -> None:
    up = {
        name: profiles.read_profile(FILES[f"region-{name}"]).up for name in ("virginia", "ireland", "tokyo", "sydney")
    }
    measured = {
        ("virginia", "ireland"): 80.5,
        ("virginia", "tokyo"): 145.3,
        ("ireland", "tokyo"): 212.4,
        ("virginia", "sydney"): 230,
    }
    for pair, rtt_ms in measured.items():
        assert 2 * sum(pipe.delay_ns for name in pair if (pipe := up[name])) / 1e6 == pytest.approx(rtt_ms)


# --- traces


def test_every_shipped_trace_is_what_its_recipe_makes() -> None:
    recipes = trace_sources.read_recipes(FOLDER / "traces")
    assert recipes.keys() == {path.name for path in (FOLDER / "traces").glob("*.trace")}
    for file, recipe in recipes.items():
        content = (FOLDER / "traces" / file).read_bytes()
        assert content == rate_trace.format_trace(recipe.make()).encode("ascii"), recipe.command(file)
        assert len(content) < 300_000


@pytest.mark.parametrize("kind", trace_sources.KINDS)
def test_a_generated_trace_has_its_length_and_mean_and_depends_on_the_seed(kind: str) -> None:
    def make(seed: int) -> tuple[int, ...]:
        return trace_sources.checked_recipe("here", kind=kind, seed=seed, seconds=40, mean_rate="6Mbit").make()

    times = make(1)
    assert times == make(1)
    assert (times != make(2)) == (kind != "constant")
    assert times[-1] == 40_000
    assert rate_trace.mean_rate_bps(times) == pytest.approx(6_000_000, rel=1e-3)


def test_starlinks_trace_changes_every_15_seconds() -> None:
    times = trace_sources.checked_recipe("here", kind="starlink", seed=3, seconds=60, mean_rate="24Mbit").make()
    rates = rate_trace.bin_rates(times, 100)
    slow = [number for number, rate in enumerate(rates) if rate < 0.3 * 24_000_000]
    assert slow == [150, 300, 450]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "celular"}, "there is no kind of trace 'celular'; did you mean 'cellular'?"),
        ({"seed": -1}, "here: seed: -1 is out of range; choose 0 to"),
        ({"seconds": 0}, "here: seconds: 0 s is out of range; choose 1 s to 86400 s"),
        ({"mean_rate": "1kbit"}, "here: mean_rate: 1kbit is out of range; choose 8kbit to 100Gbit"),
        ({"mean_rate": "12"}, "rate '12' is not a number with a unit"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_told(change: dict[str, object], message: str) -> None:
    recipe: dict[str, object] = {"kind": "cellular", "seed": 1, "seconds": 10, "mean_rate": "12Mbit"}
    with pytest.raises(UserError) as caught:
        trace_sources.checked_recipe("here", **{**recipe, **change})  # type: ignore[arg-type]
    assert message in str(caught.value)


# --- what people read


def test_the_readmes_examples_are_read(tmp_path: Path) -> None:
    examples = re.findall(r"```toml\n(.*?)```", draw_profiles_page(FOLDER), flags=re.DOTALL)
    assert len(examples) == 3
    (tmp_path / "traces").symlink_to(FOLDER / "traces")
    for number, example in enumerate(examples):
        base = "" if "extends" in example else 'extends = "lte"\n'
        (tmp_path / f"{number}.toml").write_text(base + example, encoding="utf8")
        assert profiles.read_profile(tmp_path / f"{number}.toml").shaped


@pytest.mark.parametrize("width", [80, 130])
def test_the_list_has_one_line_a_profile_on_any_terminal(width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    found = [profiles.read_profile(path) for path in FILES.values()]
    console.print(profile_table(found, width))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[0] for line in lines] == ["profile", *FILES]
    assert all(len(line) <= width for line in lines)
    if width == 130:
        assert all(line.rstrip().endswith(profile.summary) for line, profile in zip(lines[1:], found, strict=True))
