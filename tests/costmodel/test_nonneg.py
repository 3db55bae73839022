from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.features import FloatArray
from costmodel.nonneg import solve_nonnegative


def _objective(gram: FloatArray, moment: FloatArray, x: FloatArray) -> float:
    return float(x @ gram @ x / 2.0 - moment @ x)


def _best_by_enumeration(gram: FloatArray, moment: FloatArray) -> float:
    """The smallest objective over every set of positive coefficients."""
    best = 0.0
    for count in range(1, len(moment) + 1):
        for chosen in combinations(range(len(moment)), count):
            index = np.array(chosen)
            x = np.zeros(len(moment))
            x[index] = np.linalg.solve(gram[np.ix_(index, index)], moment[index])
            if (x >= 0.0).all():
                best = min(best, _objective(gram, moment, x))
    return best


@settings(derandomize=True, deadline=None, max_examples=200)
@given(seed=st.integers(0, 10**6), is_warm=st.booleans())
def test_the_minimum_over_non_negative_vectors_is_found(seed: int, is_warm: bool) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(6, 4))
    gram = rows.T @ rows + 0.01 * np.eye(4)
    moment = rng.normal(size=4) * 10.0
    start = rng.uniform(0.0, 2.0, 4) * rng.integers(0, 2, 4) if is_warm else np.zeros(4)
    x = solve_nonnegative(gram, moment, start)
    assert (x >= 0.0).all()
    best = _best_by_enumeration(gram, moment)
    assert abs(_objective(gram, moment, x) - best) <= 1e-8 * (1.0 + abs(best))


def test_an_unconstrained_minimum_inside_is_returned_as_it_is() -> None:
    gram = np.array([[2.0, 0.5], [0.5, 1.0]])
    inside = np.array([3.0, 4.0])
    assert np.allclose(solve_nonnegative(gram, gram @ inside, np.ones(2)), inside)


def test_a_moment_that_pulls_down_everywhere_gives_zero() -> None:
    x = solve_nonnegative(np.eye(3), np.array([-1.0, -2.0, -3.0]), np.ones(3))
    assert x.tolist() == [0.0, 0.0, 0.0]


def test_the_start_is_not_changed() -> None:
    start = np.ones(2)
    solve_nonnegative(np.eye(2), np.array([-1.0, 5.0]), start)
    assert start.tolist() == [1.0, 1.0]


def test_a_system_that_cannot_be_solved_well_still_gives_a_feasible_point() -> None:
    rows = np.array([[1.0, 1.0 + 1e-9, 2.0], [1.0, 1.0, 2.0]])
    gram = rows.T @ rows + 1e-12 * np.eye(3)
    x = solve_nonnegative(gram, np.array([1.0, -1.0, 1.0]), np.array([1.0, 0.0, 0.0]))
    assert (x >= 0.0).all()
    assert np.isfinite(x).all()


def test_too_few_rounds_still_improve_on_the_start() -> None:
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(9, 6))
    gram = rows.T @ rows
    moment = rng.normal(size=6) * 10.0
    start = np.ones(6)
    for max_rounds in range(1, 8):
        x = solve_nonnegative(gram, moment, start, max_rounds)
        assert (x >= 0.0).all()
        assert _objective(gram, moment, x) <= _objective(gram, moment, start)
