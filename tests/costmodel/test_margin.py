from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.fields import SnapshotError
from costmodel.margin import (
    MAX_COVERAGE,
    MAX_SCORES,
    MIN_COVERAGE,
    PRIOR_MARGIN,
    TARGET_COVERAGE,
    ConformalMargin,
    prior_scale,
)


def _run(margin: ConformalMargin, scores: list[float]) -> list[bool]:
    covered = []
    for score in scores:
        is_covered = score <= margin.margin
        margin.record(score, is_covered=bool(is_covered))
        covered.append(is_covered)
    return covered


def test_without_data_the_prior_margin_holds() -> None:
    assert ConformalMargin().margin == PRIOR_MARGIN
    assert ConformalMargin(0.5).margin == 0.5


def test_few_scores_narrow_the_prior_slowly_and_one_bad_step_does_not_rule() -> None:
    margin = ConformalMargin()
    _run(margin, [0.0] * 5)
    assert margin.margin == pytest.approx(PRIOR_MARGIN * (10 / 15) ** 0.5)
    _run(margin, [0.8])
    assert PRIOR_MARGIN < margin.margin < 0.5
    # What took longer than predicted, again and again, is believed.
    _run(margin, [0.8] * 20)
    assert margin.margin > 0.75


def test_a_lone_outlier_counts_only_so_far() -> None:
    lone, usual = ConformalMargin(0.12), ConformalMargin(0.12)
    _run(lone, [0.55, *[0.02] * 11])
    _run(usual, [0.02] * 12)
    assert usual.margin < lone.margin < 0.15
    many = ConformalMargin(0.12)
    _run(many, [0.55, 0.5, 0.6, 0.02] * 3)
    assert many.margin > 0.5


def test_steps_faster_than_predicted_do_not_widen_the_bound() -> None:
    fast, still = ConformalMargin(), ConformalMargin()
    _run(fast, [-0.4] * 12)
    _run(still, [0.0] * 12)
    assert fast.margin == still.margin < PRIOR_MARGIN


@pytest.mark.parametrize("seed", range(5))
def test_a_young_margin_covers_normal_residuals(seed: int) -> None:
    rng = np.random.default_rng(seed)
    runs = [_run(ConformalMargin(0.1), rng.normal(0.0, 0.05, 40).tolist()) for _ in range(50)]
    assert np.mean(runs) >= 0.9


def test_the_prior_shrinks_with_the_number_of_scores() -> None:
    margin = ConformalMargin()
    seen = []
    for _ in range(MAX_SCORES):
        _run(margin, [0.0])
        seen.append(margin.margin)
    assert seen == sorted(seen, reverse=True)
    assert seen[99] == pytest.approx(0.03)
    assert seen[-1] == 0.0


@pytest.mark.parametrize("noise", ["normal", "skewed", "heavy"])
def test_coverage_is_held_whatever_the_noise_looks_like(noise: str) -> None:
    rng = np.random.default_rng(1)
    scores = {
        "normal": rng.normal(0.0, 0.05, 3000),
        "skewed": rng.exponential(0.1, 3000) - 0.1,
        "heavy": rng.standard_t(2, 3000) * 0.05,
    }[noise]
    covered = _run(ConformalMargin(), scores.tolist())
    for end in range(1000, 3001, 250):
        assert 0.87 <= np.mean(covered[end - 500 : end]) <= 0.93


def test_coverage_comes_back_after_the_noise_grows() -> None:
    rng = np.random.default_rng(2)
    scores = [*rng.normal(0.0, 0.02, 1000), *rng.normal(0.0, 0.2, 800)]
    covered = _run(ConformalMargin(), scores)
    assert 0.87 <= np.mean(covered[-500:]) <= 0.93


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.floats(-0.999, 7.0), max_size=700))
def test_the_margin_is_never_negative_and_never_beyond_what_was_seen(scores: list[float]) -> None:
    margin = ConformalMargin()
    _run(margin, scores)
    assert 0.0 <= margin.margin <= max([PRIOR_MARGIN, *scores])


def test_memory_is_bounded_to_the_newest_scores() -> None:
    margin = ConformalMargin()
    _run(margin, [5.0] * MAX_SCORES)
    _run(margin, [0.01] * MAX_SCORES)
    assert margin.state()["scores"] == [0.01] * MAX_SCORES
    assert margin.margin == 0.01


def test_an_alarm_doubles_the_margin_until_coverage_is_back() -> None:
    margin = ConformalMargin()
    _run(margin, [0.0, 0.1] * 300)
    usual = margin.margin
    margin.widen()
    assert margin.margin == 2.0 * usual
    for _ in range(19):
        margin.record(0.0, is_covered=True)
        assert margin.is_widened
    margin.record(0.0, is_covered=True)
    assert not margin.is_widened
    assert margin.margin <= usual


def test_misses_after_an_alarm_keep_the_margin_wide() -> None:
    margin = ConformalMargin()
    margin.widen()
    for index in range(60):
        margin.record_coverage(is_covered=index % 5 > 0)
    assert margin.is_widened
    for _ in range(20):
        margin.record_coverage(is_covered=True)
    assert not margin.is_widened


def test_a_miss_whose_score_is_not_trusted_steers_the_level_only() -> None:
    margin = ConformalMargin()
    _run(margin, np.random.default_rng(4).uniform(0.0, 0.5, 400).tolist())
    before = margin.margin
    for _ in range(3):
        margin.record_coverage(is_covered=False)
    assert margin.margin > before
    assert len(margin.state()["scores"]) == 400


def test_a_restored_margin_has_the_same_future() -> None:
    margin = ConformalMargin()
    rng = np.random.default_rng(3)
    _run(margin, rng.normal(0.0, 0.1, 600).tolist())
    margin.widen()
    _run(margin, [0.5, 0.0])
    twin = ConformalMargin.restore(margin.state(), "margin")
    future = rng.normal(0.0, 0.1, 100).tolist()
    assert _run(margin, future) == _run(twin, future)
    assert margin.margin == twin.margin
    assert margin.state() == twin.state()


def test_a_borrowed_margin_takes_the_place_of_the_prior() -> None:
    margin = ConformalMargin()
    margin.borrow(0.08)
    assert margin.margin == 0.08
    _run(margin, [0.0] * 20)
    assert margin.num_scores == 20
    assert margin.margin == pytest.approx(0.08 * (10 / 30) ** 0.5)


@pytest.mark.parametrize("coverage", [MIN_COVERAGE, 0.6, 0.75, 0.95, MAX_COVERAGE])
@pytest.mark.parametrize("noise", ["normal", "heavy"])
def test_any_target_is_held(coverage: float, noise: str) -> None:
    rng = np.random.default_rng(5)
    # Steps that take longer than predicted: the bound is never below the mean, so where half of
    # them are quicker it cannot be missed half of the time.
    scores = {
        "normal": rng.normal(0.04, 0.05, 3000),
        "heavy": 0.04 + rng.standard_t(2, 3000) * 0.05,
    }[noise]
    covered = _run(ConformalMargin(coverage=coverage), scores.tolist())
    for end in range(1000, 3001, 250):
        assert abs(np.mean(covered[end - 500 : end]) - coverage) <= 0.03


@pytest.mark.parametrize("coverage", [0.75, 0.95, MAX_COVERAGE])
def test_a_young_margin_covers_normal_residuals_at_any_target(coverage: float) -> None:
    rng = np.random.default_rng(6)
    prior = 0.05 * 1.2816 * prior_scale(coverage)
    runs = [
        _run(ConformalMargin(prior, coverage), rng.normal(0.0, 0.05, 40).tolist())
        for _ in range(100)
    ]
    assert abs(np.mean(runs) - coverage) <= 0.03


def test_a_new_target_takes_what_was_learnt_along() -> None:
    scores = np.random.default_rng(7).normal(0.0, 0.1, 2000).tolist()
    margin = ConformalMargin()
    _run(margin, scores[:500])
    at_90 = margin.margin
    margin.aim_for(TARGET_COVERAGE)
    assert margin.margin == at_90
    margin.aim_for(0.99)
    assert margin.coverage == 0.99
    assert margin.margin > 1.3 * at_90
    margin.aim_for(0.5)
    assert margin.margin < 0.5 * at_90
    covered = _run(margin, scores[500:])
    assert 0.47 <= np.mean(covered[-500:]) <= 0.53
    assert margin.num_scores == MAX_SCORES


def test_a_prior_is_as_wide_as_the_target_asks() -> None:
    margin = ConformalMargin(0.2)
    margin.aim_for(0.99)
    assert margin.margin == pytest.approx(0.2 * 2.3263 / 1.2816)
    margin.aim_for(TARGET_COVERAGE)
    assert margin.margin == pytest.approx(0.2)
    margin.aim_for(MIN_COVERAGE)
    assert 0.0 < margin.margin < 0.02


def test_a_state_knows_its_target_and_one_from_before_targets_had_the_usual_one() -> None:
    margin = ConformalMargin(0.2, 0.6)
    _run(margin, np.random.default_rng(8).normal(0.0, 0.1, 300).tolist())
    twin = ConformalMargin.restore(margin.state(), "margin")
    assert (twin.coverage, twin.margin) == (0.6, margin.margin)
    old = ConformalMargin(0.2).state()
    del old["coverage"]
    assert ConformalMargin.restore(old, "margin").coverage == TARGET_COVERAGE
    with pytest.raises(SnapshotError, match=r"margin\.coverage"):
        ConformalMargin.restore({**old, "coverage": 1.0}, "margin")
