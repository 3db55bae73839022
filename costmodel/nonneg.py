"""Non-negative least squares for a handful of coefficients, warm-started from the last solution.

Owns one pure function. Must not know what the coefficients mean.
"""

from __future__ import annotations

import numpy as np

from costmodel.features import FloatArray

# Gradients below this share of the moment's size count as zero: an entering coefficient must be
# worth its round.
_RELATIVE_TOLERANCE = 1e-10


def solve_nonnegative(
    gram: FloatArray, moment: FloatArray, start: FloatArray, max_rounds: int = 24
) -> FloatArray:
    """Return argmin over x >= 0 of ½ x'Gx − m'x, for a positive definite G.

    Lawson and Hanson's active set (Solving Least Squares Problems, 1974, chapter 23) on the normal
    equations, started from the feasible `start`: where the set of positive coefficients has not
    changed it costs one small solve and one gradient. `gram` has shape (k, k), `moment` and `start`
    (k,), `start >= 0`. The point returned is feasible and no worse than `start`, even where
    `max_rounds` do not reach the optimum.
    """
    solution = start
    passive = start > 0.0
    tolerance = _RELATIVE_TOLERANCE * float(np.abs(moment).max())
    for _ in range(max_rounds):
        index = passive.nonzero()[0]
        inner = np.linalg.solve(gram[index[:, None], index], moment[index])
        trial = np.zeros(moment.size)
        trial[index] = inner
        if index.size and inner[inner.argmin()] <= 0.0:
            blocked = passive & (trial <= 0.0)
            # Walk towards the trial point until the first coefficient reaches its bound; that one
            # leaves.
            steps = solution[blocked] / (solution[blocked] - trial[blocked])
            solution = solution + steps.min() * (trial - solution)
            leaving = blocked.nonzero()[0][int(steps.argmin())]
            passive[leaving] = False
            solution = np.where(passive, np.maximum(solution, 0.0), 0.0)
            continue
        solution = trial
        gain = moment - gram.dot(solution)
        gain[index] = 0.0
        entering = int(gain.argmax())
        if gain[entering] <= tolerance:
            break
        passive[entering] = True
    return solution
