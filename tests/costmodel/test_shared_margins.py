"""Regimes that are rarely seen, and what they do to the bounds of those that are not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest

from costmodel.features import Regime, StepFeatures
from costmodel.judged import JudgedPlanes
from costmodel.prior import flat_prior
from costmodel.recursive import RecursiveLeastSquares
from costmodel.refitted import RefittedLeastSquares
from costmodel.synthetic import TWO_CORES
from costmodel.windowed import WindowedRegression

LEARNERS = (RecursiveLeastSquares, WindowedRegression, RefittedLeastSquares)
# Prompts alone are rare, and of a model that knows nothing the first ones take 4.6 and 2.4 times
# what it says.
SLOW = {0: 1.6, 3: 1.3}
NUM_ALONE = 7


def _latency_s(step: StepFeatures) -> float:
    """A quarter of two cores' time: about what a model believes that has seen nothing."""
    return TWO_CORES.latency_s(step) / 4.0


def _steps(
    count: int, seed: int = 0, num_alone: int = NUM_ALONE
) -> Iterator[tuple[StepFeatures, float]]:
    """A few streams beside prompts: a mixed step is little more than its prompts alone."""
    rng = np.random.default_rng(seed)
    num_left = num_alone
    for index in range(count):
        is_alone = index % 40 == 3 or index == 0
        is_alone = is_alone and num_left > 0
        has_prompt = is_alone or rng.random() < 0.6
        chunk = float(rng.integers(32, 257)) if has_prompt else 0.0
        decodes = 0.0 if is_alone else float(rng.integers(1, 5))
        past = float(rng.integers(0, 512)) if has_prompt else 0.0
        step = StepFeatures(
            chunk, decodes, decodes * 300.0, chunk * past, chunk * chunk, 1.0 * has_prompt, 0.0
        )
        factor = SLOW.get(index, 1.0) * math.exp(0.05 * float(rng.standard_normal()))
        num_left -= is_alone
        yield step, _latency_s(step) * factor


def _margins(model: JudgedPlanes) -> dict[Regime, float]:
    return {each.regime: each.margin for each in model.quality().regimes}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("learner", LEARNERS, ids=lambda learner: learner.kind)
def test_a_cold_start_of_prompts_alone_does_not_widen_mixed_steps(
    learner: type[JudgedPlanes], seed: int
) -> None:
    model = flat_prior(learner)
    covered = []
    for step, latency_s in _steps(1600, seed):
        if step.regime is Regime.MIXED:
            upper_s = float(model.predict(step.to_array()[None]).upper_s[0])
            covered.append(latency_s <= upper_s)
        model.observe(step, latency_s)
    regimes = {each.regime: each for each in model.quality().regimes}
    assert regimes[Regime.PREFILL_ONLY].num_observed == NUM_ALONE
    assert 0.87 <= np.mean(covered[-500:]) <= 0.93


def test_what_mixed_steps_tell_counts_until_there_are_scores_enough() -> None:
    model = flat_prior()
    for step, latency_s in _steps(400):
        model.observe(step, latency_s)
    margins = _margins(model)
    assert margins[Regime.MIXED] <= margins[Regime.PREFILL_ONLY] < 0.15
    # One in three of many more takes half as long again: now they speak for themselves, and nothing
    # is left of what the first two took.
    alone = StepFeatures(64.0, 0.0, 0.0, 0.0, 4096.0, 1.0, 0.0)
    for index in range(110):
        model.observe(alone, _latency_s(alone) * (1.6 if index % 3 == 0 else 1.0))
    margins = _margins(model)
    assert 1.5 * margins[Regime.MIXED] < margins[Regime.PREFILL_ONLY] < 0.8


def test_what_a_part_was_told_does_not_steer_its_own_margin() -> None:
    # Noisier than mixed steps, so that what it is told covers too few. Had its own margin been
    # steered by that, it would begin as the largest of its scores: those of the first two.
    rng = np.random.default_rng(0)
    model = flat_prior()
    for step, latency_s in _steps(12_000, num_alone=110):
        noise = 0.1 if step.regime is Regime.PREFILL_ONLY else 0.0
        model.observe(step, latency_s * math.exp(noise * float(rng.standard_normal())))
        if model.quality().regimes[2].num_observed == 100:
            break
    assert _margins(model)[Regime.MIXED] < _margins(model)[Regime.PREFILL_ONLY] < 0.25


def test_a_part_is_not_told_nothing_where_the_other_part_holds_mixed_steps() -> None:
    # Decodes are noisy and are most of every mixed step: its own margin is steered down to nothing.
    rng = np.random.default_rng(0)
    model = flat_prior()
    covered = []
    for index in range(6000):
        is_alone = index % 70 == 3
        chunk = float(rng.integers(32, 257)) if is_alone else float(rng.integers(4, 17))
        chunk *= is_alone or rng.random() < 0.4
        decodes = 0.0 if is_alone else float(rng.integers(24, 64))
        step = StepFeatures(
            chunk, decodes, decodes * 600.0, 0.0, chunk * chunk, 1.0 * (chunk > 0), 0.0
        )
        sigma = 0.2 if step.regime is Regime.DECODE_ONLY else 0.04
        latency_s = _latency_s(step) * math.exp(sigma * float(rng.standard_normal()))
        if is_alone and index > 1000:
            covered.append(latency_s <= float(model.predict(step.to_array()[None]).upper_s[0]))
        model.observe(step, latency_s)
    assert _margins(model)[Regime.MIXED] < 0.01
    assert 0.82 <= np.mean(covered) <= 0.98


def test_an_alarm_of_a_rare_regime_widens_nothing_for_long() -> None:
    model = flat_prior()
    for step, latency_s in _steps(400):
        model.observe(step, latency_s)
    before = _margins(model)
    model.change_speed(2.0)
    # All are doubled until coverage is back, which a rare one would take thousands of steps for.
    for regime, margin in _margins(model).items():
        assert margin == 2.0 * before[regime]
    for step, latency_s in islice(_steps(900), 400, None):
        model.observe(step, 2.0 * latency_s)
    assert _margins(model)[Regime.PREFILL_ONLY] < 1.5 * before[Regime.PREFILL_ONLY]


def test_shared_margins_survive_a_snapshot() -> None:
    model = flat_prior()
    for step, latency_s in _steps(400):
        model.observe(step, latency_s)
    again = RecursiveLeastSquares.restore(model.state())
    assert _margins(again) == _margins(model)
