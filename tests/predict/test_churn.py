"""Absences are what the seed says and as long as stated, and a step takes place with whoever is whole then."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from testbed.predict.churn import Churn, ChurnRound, Held, Presence, rounds
from testbed.predict.scenarios import Sites, load_scenario

HOURLY = Churn(3600.0, 900.0)
LAYOUT = ((0,), (1,), (2, 3, 4), (5, 6))


def sites_of(seed: int, churn: Churn | None = HOURLY, layout: Sequence[Sequence[int]] = LAYOUT) -> dict[int, Presence]:
    return {site: Presence(churn, seed, site) for own in layout for site in own}


def first(count: int, seed: int, layout: Sequence[Sequence[int]] = LAYOUT, *, server: bool = True) -> list[Held]:
    """A step takes 100 s, and 50 s more for each replica that returns."""
    held = rounds(layout, sites_of(seed, layout=layout), lambda who: 100.0 + 50.0 * len(who.returning), server=server)
    return list(itertools.islice(held, count))


def test_it_is_there_for_the_share_that_is_stated_and_as_long_as_stated() -> None:
    many, end_s = 200, 30_000.0
    shares, spans = [], {True: list[float](), False: list[float]()}
    for presence in (Presence(HOURLY, 0, site) for site in range(many)):
        changes = [0.0]
        while changes[-1] < end_s:
            changes.append(presence.until_s(changes[-1]))
        for before, after in itertools.pairwise(changes[1:]):
            spans[presence.there(before)].append(after - before)
        shares.append(sum(presence.there(at * 300.0) for at in range(100)) / 100)
    error = math.sqrt(sum((share - HOURLY.share) ** 2 for share in shares)) / many
    assert abs(sum(shares) / many - HOURLY.share) < 3 * error < 0.04
    for there, stated_s in ((True, HOURLY.stays_s), (False, HOURLY.away_s)):
        # The last span begins before the end and may end after it, so long ones are not missed.
        assert abs(sum(spans[there]) / len(spans[there]) / stated_s - 1) < 4 / math.sqrt(len(spans[there])) < 0.15


@given(seed=st.integers(0, 99), times=st.lists(st.floats(0, 1e6), min_size=1, max_size=5))
def test_the_same_seed_is_the_same_absences_whatever_is_asked_first(seed: int, times: list[float]) -> None:
    one, other = Presence(HOURLY, seed, 3), Presence(HOURLY, seed, 3)
    assert [one.there(at) for at in times] == [other.there(at) for at in reversed(times)][::-1]
    for at_s in times:
        until_s = one.until_s(at_s)
        assert at_s < until_s == other.until_s(at_s)
        assert one.there(at_s) == one.there((at_s + until_s) / 2) != one.there(until_s)


def test_another_seed_or_site_is_other_absences() -> None:
    assert len({Presence(HOURLY, seed, site).until_s(0.0) for seed in range(4) for site in range(4)}) == 16


def test_steps_follow_each_other_with_whoever_is_whole() -> None:
    held, sites = first(400, 1), sites_of(1)
    end_s, missed = 0.0, frozenset[int]()
    for each in held:
        assert each.begin_s - each.waited_s == pytest.approx(end_s)
        for replica, own in enumerate(LAYOUT):
            assert (replica in each.who.away) != all(sites[site].there(each.begin_s) for site in own)
        assert set(each.who.returning) == missed - set(each.who.away)
        end_s, missed = each.begin_s + each.lasts_s, frozenset(each.who.away)
    assert len({each.who for each in held}) > 10
    assert held == first(400, 1) != first(400, 2)


def test_without_churn_everyone_takes_part_and_nobody_waits() -> None:
    held = rounds(LAYOUT, sites_of(0, None), lambda who: 7.0, server=True)
    assert list(itertools.islice(held, 3)) == [Held(7.0 * step, 0.0, 7.0, ChurnRound()) for step in range(3)]


def test_one_pipeline_waits_for_all_of_its_sites_and_keeps_its_weights() -> None:
    own, count = tuple(range(6)), 600
    held = first(count, 0, (own,), server=False)
    assert {each.who for each in held} == {ChurnRound()}
    sites = sites_of(0, layout=(own,)).values()
    for each in held:
        assert all(site.there(each.begin_s) for site in sites)
        assert not each.waited_s or not all(site.there(each.begin_s - each.waited_s) for site in sites)
    # All six are there for 0.8^6 of the time; and who leaves during a step ends it.
    spent_s = held[-1].begin_s + held[-1].lasts_s
    assert HOURLY.share**6 < sum(each.lasts_s for each in held) / spent_s < 2 * HOURLY.share**6


def test_without_a_server_somebody_who_has_the_weights_must_be_there() -> None:
    layout = ((0,), (1,))
    for server in (True, False):
        held = first(1000, 5, layout, server=server)
        alone = [each for each in held if set(each.who.returning) | set(each.who.away) == {0, 1}]
        assert bool(alone) == server


@pytest.mark.parametrize("stated", [{"stays": "60s"}, {"away": "60s"}, {"stays": "0s", "away": "60s"}])
def test_who_leaves_comes_back(stated: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="state"):
        Sites(device="t4", link="cable", **stated)


def test_homes_of_the_community_come_and_go_and_clusters_stay() -> None:
    assert {device.churn for device in load_scenario("community").devices()} == {HOURLY}
    assert {device.churn for device in load_scenario("organisational").devices()} == {None}
