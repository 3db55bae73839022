"""The ladder: where attainment falls, for every seed, without a run too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from controller.bench.goals_ladder import (
    DEPTH,
    HEIGHT,
    RATIO,
    Race,
    Span,
    rate_of,
    rung_above,
    rung_near,
    walk,
)
from controller.simulation.sweep import search_budget

LEVELS = (0.9, 0.99)


@pytest.mark.parametrize("rung", [-30, -1, 0, 7, 40])
def test_the_rung_above_a_rate_is_faster_than_it(rung: int) -> None:
    assert rung_above(rate_of(rung)) == rung + 1
    assert rung_above(rate_of(rung) * 1.01) == rung + 1
    assert rung_above(rate_of(rung) / 1.01) == rung


class Asked:
    """A made-up policy: attainment by (policy, rung, seed); counts who was asked what."""

    def __init__(self, attainment: Callable[[str, int, int], float]) -> None:
        self._attainment = attainment
        self.calls: Counter[tuple[str, int, int]] = Counter()

    def __call__(self, policy: str, rung: int, seeds: Sequence[int]) -> list[float]:
        self.calls.update((policy, rung, seed) for seed in seeds)
        return [self._attainment(policy, rung, seed) for seed in seeds]

    @property
    def rungs(self) -> set[int]:
        return {rung for _, rung, _ in self.calls}


def falling(policy: str, rung: int, seed: int) -> float:
    """1 to rung 4, then 2 % less with every rung to 0.9 at rung 9, then 0.7."""
    return 1.0 - 0.02 * max(0, rung - 4) if rung <= 9 else 0.7


@pytest.mark.parametrize("start", [-3, 4, 7, 9, 12])
def test_the_walk_finds_both_falls_from_anywhere(start: int) -> None:
    asked = Asked(falling)

    curve = walk(asked, "slo", LEVELS, (0, 1), start, Span.around(6))

    # 0.9 at rung 9 and 0.7 at rung 10; 1 at rung 4 and 0.98 at rung 5.
    assert curve.goodput(0.9).rate == pytest.approx(rate_of(9))
    between = rate_of(4) + 0.5 * (rate_of(5) - rate_of(4))
    assert curve.goodput(0.99).rate == pytest.approx(between)
    assert [each.rate for each in curve.goodput_by_seed(0.9)] == pytest.approx([rate_of(9)] * 2)
    # The other seed ran around the falls only.
    assert {rung for _, rung, seed in asked.calls if seed == 1} == {4, 5, 9, 10}


def test_the_walk_goes_on_until_each_seed_has_fallen_and_has_held() -> None:
    def by_seed(policy: str, rung: int, seed: int) -> float:
        return 1.0 if rung < (6, 9, 3)[seed] else 0.5

    curve = walk(Asked(by_seed), "slo", (0.9,), (0, 1, 2), 6, Span.around(6))

    assert [rung for rung, _ in curve.points] == [2, 3, 4, 5, 6, 7, 8, 9]
    rates = [each.rate or 0.0 for each in curve.goodput_by_seed(0.9)]
    assert all(
        rate_of(at - 1) < rate < rate_of(at) for rate, at in zip(rates, (6, 9, 3), strict=True)
    )
    assert not any(each.is_bound for each in curve.goodput_by_seed(0.9))


def test_a_policy_that_never_falls_is_a_bound() -> None:
    curve = walk(Asked(lambda *_: 1.0), "slo", LEVELS, (0, 1), 5, Span.around(5))

    assert curve.goodput(0.9).is_bound
    assert curve.goodput(0.9).rate == pytest.approx(rate_of(5 + HEIGHT))


def test_a_policy_that_never_holds_has_no_goodput() -> None:
    curve = walk(Asked(lambda *_: 0.2), "slo", (0.9,), (0, 1), 5, Span.around(5))

    assert curve.goodput(0.9).rate is None
    assert curve.lowest_rate == pytest.approx(rate_of(5 - DEPTH))


def test_a_level_that_is_out_of_reach_is_not_looked_for_step_by_step() -> None:
    asked = Asked(lambda policy, rung, seed: 0.95 if rung < 6 else 0.5)

    curve = walk(asked, "slo", LEVELS, (0,), 5, Span.around(5))

    assert curve.goodput(0.99).rate is None
    assert rate_of(5) < (curve.goodput(0.9).rate or 0.0) < rate_of(6)
    assert asked.rungs == {6, 5, 4, 3, 2, 1, 5 - DEPTH}


def test_a_low_level_is_still_found_where_a_high_one_is_out_of_reach() -> None:
    asked = Asked(lambda policy, rung, seed: 0.95 if rung < -3 else 0.5)

    curve = walk(asked, "slo", LEVELS, (0,), 5, Span.around(5))

    assert rate_of(-4) < (curve.goodput(0.9).rate or 0.0) < rate_of(-3)


def test_the_walk_stays_in_its_span() -> None:
    asked = Asked(falling)

    walk(asked, "slo", LEVELS, (0, 1), 40, Span(2, 6))

    assert asked.rungs <= set(range(2, 7))


def test_rungs_are_15_percent_apart() -> None:
    assert rate_of(8) / rate_of(7) == pytest.approx(RATIO)
    assert [rung_near(rate_of(rung) * 1.05) for rung in (-9, 0, 14)] == [-9, 0, 14]
    with pytest.raises(ValueError, match="rate"):
        rung_near(0.0)


def budget_of(policy: str) -> int:
    return int(policy.rpartition("-")[2])


def test_the_race_finds_the_best_budget_and_spares_the_losers() -> None:
    def attainment(policy: str, rung: int, seed: int) -> float:
        # Holds up to a rung that is the higher, the nearer the budget is to 384.
        budget = budget_of(policy)
        holds_to = 10 - abs(budget - 384) // 64
        return 1.0 if rung <= holds_to else max(0.0, 0.9 - 0.1 * (rung - holds_to) - budget * 1e-6)

    asked = Asked(attainment)
    race = Race(asked, 0.9, (0,), 14, Span.around(10))

    found = search_budget("edf", race, coarse=(128, 256, 512, 1024, 2048, 4096))

    assert found.policy == "edf-368"
    assert race.scores["edf-368"][0] == 11
    # Far from the best: asked where the best so far had failed, and where it had held.
    for loser in ("edf-1024", "edf-2048", "edf-4096", "edf-128"):
        assert sum(count for (policy, *_), count in asked.calls.items() if policy == loser) == 2
        assert race.scores[loser][0] < race.scores["edf-368"][0]


def test_what_is_left_of_a_collapse_wins_no_race() -> None:
    def attainment(policy: str, rung: int, seed: int) -> float:
        # 512 holds to rung 8 and then collapses; the others fail from rung 3 on, by and by.
        if policy == "edf-512":
            return 1.0 if rung <= 8 else 0.2
        return 1.0 if rung < 3 else 0.95 - 0.05 * (rung - 2)

    race = Race(Asked(attainment), 0.9, (0,), 5, Span(0, 12))
    scores = race(["edf-512", "edf-1024", "edf-256"])
    assert scores[0] == (9.0, 0.2)
    assert max(race.scores, key=lambda name: race.scores[name]) == "edf-512"
    # Who comes after a loser is still held against the best.
    assert scores[1][0] == scores[2][0] == 8.0


def test_the_race_ends_at_the_floor_and_at_the_ceiling() -> None:
    span = Span(0, 4)
    assert Race(Asked(lambda *_: 0.1), 0.9, (0,), 2, span)(["edf-512"]) == [(0.0, 0.1)]
    assert Race(Asked(lambda *_: 1.0), 0.9, (0,), 2, span)(["slack-greedy:1"]) == [(4.0, 1.0)]


def test_a_race_of_several_seeds_is_scored_by_their_mean() -> None:
    # 0.88 and 0.96 at rung 3: the first seed alone would have failed there.
    asked = Asked(lambda policy, rung, seed: 0.88 + 0.08 * seed if rung <= 3 else 0.5)
    assert Race(asked, 0.9, (0, 1), 2, Span(0, 6))(["edf-512"]) == [(4.0, 0.5)]
    assert Race(asked, 0.9, (0,), 2, Span(0, 6))(["edf-512"]) == [(0.0, 0.88)]
    # Far below the level the second seed is not asked.
    lost = Asked(lambda policy, rung, seed: 0.95 if rung <= 3 else 0.87)
    assert Race(lost, 0.9, (0, 1), 2, Span(0, 6))(["edf-512"]) == [(4.0, 0.87)]
    assert ("edf-512", 4, 1) not in lost.calls
