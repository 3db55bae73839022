from __future__ import annotations

import numpy as np
import pytest

from costmodel.basis import NUM_BASIS, SCALES
from costmodel.features import FloatArray
from costmodel.plane import (
    MAX_COEFFICIENT_S,
    MIN_INTERCEPT_S,
    SETTLED_SAMPLES,
    SOLVE_EVERY,
    UNTRUSTED_KEEP,
    NonNegativePlane,
)

TRUTH = np.array([0.02, 0.005, 0.03, 0.002, 0.001, 0.004, 0.0, 0.003, 0.001])


def _rows(count: int, seed: int = 0) -> FloatArray:
    rows = np.random.default_rng(seed).uniform(0.0, 3.0, (count, NUM_BASIS))
    rows[:, 0] = 1.0
    return rows


def _guess() -> NonNegativePlane:
    return NonNegativePlane(np.full(NUM_BASIS, 0.03))


def _learn(plane: NonNegativePlane, rows: FloatArray, truth: FloatArray) -> None:
    for row in rows:
        plane.learn(row, float(plane.coefficients @ row), float(truth @ row))


def test_noiseless_samples_teach_the_coefficients() -> None:
    plane = _guess()
    _learn(plane, _rows(3000), TRUTH)
    assert np.allclose(plane.coefficients, TRUTH, atol=1e-4)
    assert np.allclose(plane.physical * SCALES, plane.coefficients)


def test_coefficients_never_turn_negative_and_the_intercept_stays_positive() -> None:
    plane = _guess()
    for row in _rows(200):
        # Faster where there is more work, and free at zero: impossible, so it must not be believed.
        plane.learn(row, float(plane.coefficients @ row), 0.05 / (1.0 + float(row[1:].sum())))
        assert plane.coefficients[0] >= MIN_INTERCEPT_S
        assert (plane.coefficients >= 0.0).all()


def test_a_long_phase_of_one_kind_does_not_wash_out_another() -> None:
    plane = _guess()
    _learn(plane, _rows(3000), TRUTH)
    idle = np.zeros((20_000, NUM_BASIS))
    idle[:, 0] = 1.0
    idle[:, 3] = 1.0
    _learn(plane, idle, TRUTH)
    busy = _rows(20, seed=1)
    assert np.allclose(busy @ plane.coefficients, busy @ TRUTH, rtol=0.01)


def test_a_batch_teaches_what_single_samples_teach() -> None:
    plane = _guess()
    rows = _rows(50)
    plane.believe(rows, rows @ TRUTH)
    assert np.allclose(rows @ plane.coefficients, rows @ TRUTH, rtol=0.05)


def test_a_settled_plane_solves_at_every_fourth_sample() -> None:
    plane = _guess()
    moved = [plane.learn(row, 0.1, 0.1) for row in _rows(SETTLED_SAMPLES + 4 * SOLVE_EVERY)]
    assert all(moved[:SETTLED_SAMPLES])
    assert sum(moved[SETTLED_SAMPLES:]) == 4
    plane.forget_faster(0)
    assert plane.learn(_rows(1)[0], 0.1, 0.1)


def test_after_a_rescale_the_past_agrees_with_the_new_speed() -> None:
    plane = _guess()
    rows = _rows(3000)
    _learn(plane, rows, TRUTH)
    assert plane.rescale(2.0) == 2.0
    assert np.allclose(plane.coefficients, 2.0 * TRUTH, atol=1e-4)
    _learn(plane, rows[:1], 2.0 * TRUTH)
    assert np.allclose(plane.coefficients, 2.0 * TRUTH, atol=1e-4)


def test_rescaling_stops_at_its_bounds() -> None:
    plane = NonNegativePlane(TRUTH)
    for _ in range(10):
        plane.rescale(1e3)
    assert plane.coefficients.max() == pytest.approx(MAX_COEFFICIENT_S)
    for _ in range(10):
        plane.rescale(1e-3)
    assert plane.coefficients[0] == MIN_INTERCEPT_S


def test_a_plane_that_forgets_faster_follows_faster() -> None:
    firm, loose = _guess(), _guess()
    for plane in (firm, loose):
        _learn(plane, _rows(3000), TRUTH)
    loose.forget_faster(0)
    rows = _rows(40, seed=2)
    for plane in (firm, loose):
        _learn(plane, rows, 1.3 * TRUTH)
    errors = [
        float(np.abs(rows @ plane.coefficients / (rows @ TRUTH * 1.3) - 1.0).mean())
        for plane in (firm, loose)
    ]
    assert errors[1] < 0.5 * errors[0]


def test_changes_do_not_hand_what_is_not_excited_over_to_noise() -> None:
    plane = _guess()
    rows = _rows(3000)
    _learn(plane, rows, TRUTH)
    chunk = np.array([1.0, 1.0, 0.5, 1.0, 0.3, 0.0, 0.25, 0.4, 0.2])
    noise = np.exp(np.random.default_rng(6).normal(0.0, 0.1, 3000))
    for index, factor in enumerate(noise.tolist()):
        if index % 50 == 0:
            plane.forget_faster(100)
        plane.learn(chunk, float(plane.coefficients @ chunk), float(TRUTH @ chunk) * factor)
    errors = np.abs(rows[:200] @ plane.coefficients / (rows[:200] @ TRUTH) - 1.0)
    assert errors.max() < 0.25


def test_a_change_among_the_first_samples_scales_all_information_down() -> None:
    young, fitted = _guess(), _guess()
    rows = _rows(20)
    _learn(young, rows, TRUTH)
    fitted.believe(rows, rows @ TRUTH)
    before = [np.array(plane.state()["information"]) for plane in (young, fitted)]
    for plane in (young, fitted):
        plane.forget_faster(0)
    after = [np.array(plane.state()["information"]) for plane in (young, fitted)]
    assert np.allclose(after[0], UNTRUSTED_KEEP * before[0])
    assert np.array_equal(after[1], before[1])
