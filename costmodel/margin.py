"""How sure we are: an online conformal margin that makes `mean · (1 + margin)` hold nine times in
ten.

Owns the scores of one regime and the level that is steered by misses. Must not know a basis or a
coefficient.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from costmodel.fields import read_number, read_numbers

TARGET_COVERAGE: Final = 0.9
MAX_SCORES: Final = 500
PRIOR_MARGIN: Final = 0.3
# Below that many scores a quantile is little more than the largest of them, and one bad first step
# would rule for a whole burst: the margin is then read off their spread.
_FEW_SCORES: Final = 50
# The prior margin counts like that many scores.
_PRIOR_SCORES: Final = 10
# 90 % of normal residuals lie below 1.2816 σ, and the root mean square of their positive part,
# zeros for the others, is σ/√2.
_SPREADS: Final = 1.2816 * math.sqrt(2.0)
# Step of the level per miss. With γ = 0.03 a level that swings by 0.1 bounds the excess of misses
# to 0.1/0.03 ≈ 3 steps, whatever the noise looks like.
_GAMMA: Final = 0.03
_MIN_LEVEL: Final = -0.1
_MAX_LEVEL: Final = 0.5
# After an alarm the margin is at least doubled until this many steps in a row hold the target.
_WIDENED_STEPS: Final = 20
_WIDENING: Final = 2.0


class ConformalMargin:
    """Margin of one regime: a quantile of recent relative residuals at a level steered by what was
    missed.

    Adaptive conformal inference (Gibbs and Candès, "Adaptive conformal inference under distribution
    shift", 2021): α ← α + γ (0.1 − miss), margin = the ⌈(n + 1)(1 − α)⌉-th smallest of the last n
    <= 500 scores `actual / mean − 1`, never below zero so that the upper bound is never under the
    mean. With fewer than 50 scores it is 1.28 σ, with σ from the positive scores and the prior:
    only steps that took longer than predicted argue for a wider bound.
    """

    def __init__(self, prior: float = PRIOR_MARGIN) -> None:
        """Start without scores: the margin is `prior` (a share of the mean)."""
        self._prior = prior
        self._level = 1.0 - TARGET_COVERAGE
        self._scores: deque[float] = deque()
        self._sorted: list[float] = []
        self._is_widened = False
        # Coverage of the last steps since the alarm that widened the margin.
        self._recent: deque[bool] = deque(maxlen=_WIDENED_STEPS)
        self.margin = prior

    @property
    def is_widened(self) -> bool:
        """Whether an alarm still keeps the margin wide."""
        return self._is_widened

    def record(self, score: float, *, is_covered: bool) -> None:
        """Learn the score of a step and whether its upper bound held."""
        self._scores.append(score)
        insort(self._sorted, score)
        if len(self._scores) > MAX_SCORES:
            del self._sorted[bisect_left(self._sorted, self._scores.popleft())]
        self.record_coverage(is_covered=is_covered)

    def record_coverage(self, *, is_covered: bool) -> None:
        """Steer by a step whose score is not to be trusted (an outlier)."""
        step = _GAMMA * (1.0 - TARGET_COVERAGE - (not is_covered))
        self._level = min(_MAX_LEVEL, max(_MIN_LEVEL, self._level + step))
        if self._is_widened:
            self._recent.append(is_covered)
            is_full = len(self._recent) == _WIDENED_STEPS
            self._is_widened = not (
                is_full and sum(self._recent) >= TARGET_COVERAGE * _WIDENED_STEPS
            )
        self.margin = self._current()

    @property
    def num_scores(self) -> int:
        """Scores in memory, at most `MAX_SCORES`."""
        return len(self._sorted)

    def borrow(self, prior: float) -> None:
        """Replace the prior margin (a share of the mean) by what other regimes have learnt."""
        self._prior = prior
        self.margin = self._current()

    def widen(self) -> None:
        """Keep the margin wide until coverage is back: the residuals of the past no longer describe
        the present.
        """
        self._is_widened = True
        self._recent.clear()
        self.margin = self._current()

    def _current(self) -> float:
        num = len(self._sorted)
        if num < _FEW_SCORES:
            margin = self._from_spread()
        else:
            rank = math.ceil((num + 1) * (1.0 - self._level))
            margin = self._sorted[min(max(rank, 1), num) - 1]
            margin = max(margin, self._prior * _PRIOR_SCORES / num * (num < MAX_SCORES), 0.0)
        return margin * _WIDENING if self._is_widened else margin

    def _from_spread(self) -> float:
        positive = self._sorted[bisect_right(self._sorted, 0.0) :]
        squares = 0.0
        if positive:
            # One step out of line counts as far as the others bear it out (winsorised).
            cap = max(2.0 * self._prior, 3.0 * positive[len(positive) // 2])
            squares = sum(min(score, cap) ** 2 for score in positive)
        prior = _PRIOR_SCORES * (self._prior / _SPREADS) ** 2
        spread = math.sqrt((prior + squares) / (_PRIOR_SCORES + len(self._sorted)))
        largest = max(self._prior, self._sorted[-1]) if self._sorted else self._prior
        return min(_SPREADS * spread, largest)

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON numbers."""
        return {
            "prior": self._prior,
            "level": self._level,
            "scores": list(self._scores),
            "is_widened": int(self._is_widened),
            "recent": [int(is_covered) for is_covered in self._recent],
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any], path: str) -> ConformalMargin:
        """Rebuild from `state()`; SnapshotError names the field below `path` that is wrong."""
        margin = cls(read_number(state, "prior", path, low=0.0))
        margin._level = read_number(state, "level", path, _MIN_LEVEL, _MAX_LEVEL)
        margin._scores.extend(read_numbers(state, "scores", path, MAX_SCORES))
        margin._sorted = sorted(margin._scores)
        margin._is_widened = read_number(state, "is_widened", path, 0.0, 1.0) == 1.0
        recent = read_numbers(state, "recent", path, _WIDENED_STEPS)
        margin._recent.extend(value == 1.0 for value in recent)
        margin.margin = margin._current()
        return margin
