"""How sure we are: an online conformal margin that makes `mean · (1 + margin)` hold as often as
asked, nine times in ten by default.

Owns the scores of one regime and the level that is steered by misses. Must not know a basis or a
coefficient.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Final

from costmodel.fields import SnapshotError, read_number, read_numbers

TARGET_COVERAGE: Final = 0.9
MIN_COVERAGE: Final = 0.5
MAX_COVERAGE: Final = 0.99
MAX_SCORES: Final = 500
PRIOR_MARGIN: Final = 0.3
# An hour over the least prediction, a microsecond: no score of a step that taught is larger.
MAX_SCORE: Final = 4e9
# No prior is wider than the mean itself; those in use end at 0.55.
MAX_PRIOR: Final = 1.0
# Below that many scores a quantile is little more than the largest of them, and one bad first step
# would rule for a whole burst: the margin is then read off their spread.
_FEW_SCORES: Final = 50
# The prior margin counts like that many scores.
_PRIOR_SCORES: Final = 10
# Half of the residuals lie below 0 σ: a margin of nothing could not be told from a prior of none.
_LEAST_QUANTILE: Final = 0.1
# Step of the level per miss. With γ = 0.03 a level that swings by 0.1 bounds the excess of misses
# to 0.1/0.03 ≈ 3 steps, whatever the noise looks like.
_GAMMA: Final = 0.03
_MIN_LEVEL: Final = -0.1
_MAX_LEVEL: Final = 0.5
# How far below the target the level may swing where that is more.
_MAX_SWING: Final = 0.4
# After an alarm the margin is at least doubled until this many steps in a row hold the target.
_WIDENED_STEPS: Final = 20
_WIDENING: Final = 2.0


class ConformalMargin:
    """Margin of one regime: a quantile of recent relative residuals at a level steered by what was
    missed.

    Adaptive conformal inference (Gibbs and Candès, "Adaptive conformal inference under distribution
    shift", 2021): α ← α + γ (1 − target − miss), margin = the ⌈(n + 1)(1 − α)⌉-th smallest of the
    last n <= 500 scores `actual / mean − 1`, never below zero so that the upper bound is never
    under the mean. With fewer than 50 scores it is z σ, z being the target's quantile of a standard
    normal (1.28 for 0.9) and σ from the positive scores and the prior: only steps that took longer
    than predicted argue for a wider bound.
    """

    def __init__(self, prior: float = PRIOR_MARGIN, coverage: float = TARGET_COVERAGE) -> None:
        """Start without scores: the margin is `prior` (a share of the mean).

        `coverage` is the target, within [`MIN_COVERAGE`, `MAX_COVERAGE`].
        """
        self._prior = prior
        self._coverage = coverage
        self._spreads = _spreads(coverage)
        self._level = 1.0 - coverage
        self._scores: deque[float] = deque()
        self._sorted: list[float] = []
        self._is_widened = False
        # Coverage of the last steps since the alarm that widened the margin.
        self._recent: deque[bool] = deque(maxlen=_WIDENED_STEPS)
        self.margin = prior

    @property
    def coverage(self) -> float:
        """The target: the share of steps that the upper bound is to hold for."""
        return self._coverage

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
        step = _GAMMA * (1.0 - self._coverage - (not is_covered))
        self._level = min(_max_level(self._coverage), max(_MIN_LEVEL, self._level + step))
        if self._is_widened:
            self._recent.append(is_covered)
            is_full = len(self._recent) == _WIDENED_STEPS
            self._is_widened = not (
                is_full and sum(self._recent) >= self._coverage * _WIDENED_STEPS
            )
        self.margin = self._current()

    @property
    def num_scores(self) -> int:
        """Scores in memory, at most `MAX_SCORES`."""
        return len(self._sorted)

    def aim_for(self, coverage: float) -> None:
        """Change the target; what was learnt stays: scores as they are, the level and the prior
        moved along with it.
        """
        if coverage == self._coverage:
            return
        shifted = self._level + (self._coverage - coverage)
        self._level = min(_max_level(coverage), max(_MIN_LEVEL, shifted))
        self._prior *= prior_scale(coverage) / prior_scale(self._coverage)
        self._coverage, self._spreads = coverage, _spreads(coverage)
        self.margin = self._current()

    def borrow(self, prior: float) -> None:
        """Replace the prior margin (a share of the mean) by what other regimes have learnt."""
        if prior == self._prior and self._sorted:
            # Lent at every step, and mostly the same.
            return
        self._prior = prior
        self.margin = self._current()

    def widen(self) -> None:
        """Keep the margin wide until coverage is back: the residuals of the past no longer describe
        the present.
        """
        self._is_widened = True
        self._recent.clear()
        self.margin = self._current()

    def unsteered(self) -> float:
        """Return the margin that the scores alone ask for, whatever was missed."""
        return self._at(1.0 - self._coverage)

    def _current(self) -> float:
        return self._at(self._level)

    def _at(self, level: float) -> float:
        num = len(self._sorted)
        if num < _FEW_SCORES:
            margin = self._from_spread()
        else:
            rank = math.ceil((num + 1) * (1.0 - level))
            margin = self._sorted[min(max(rank, 1), num) - 1]
            margin = max(margin, self._prior * _PRIOR_SCORES / num * (num < MAX_SCORES), 0.0)
        return margin * _WIDENING if self._is_widened else margin

    def _from_spread(self) -> float:
        positive = self._sorted[bisect_right(self._sorted, 0.0) :]
        squares = 0.0
        if positive:
            # One step out of line counts as far as the others bear it out (winsorised).
            cap = max(2.0 * self._prior, 3.0 * positive[len(positive) // 2])
            squares = sum([min(score, cap) ** 2 for score in positive])
        prior = _PRIOR_SCORES * (self._prior / self._spreads) ** 2
        spread = math.sqrt((prior + squares) / (_PRIOR_SCORES + len(self._sorted)))
        largest = max(self._prior, self._sorted[-1]) if self._sorted else self._prior
        return min(self._spreads * spread, largest)

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON numbers."""
        return {
            "coverage": self._coverage,
            "prior": self._prior,
            "level": self._level,
            "scores": list(self._scores),
            "is_widened": int(self._is_widened),
            "recent": [int(is_covered) for is_covered in self._recent],
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any], path: str) -> ConformalMargin:
        """Rebuild from `state()`; SnapshotError names the field below `path` that is wrong.

        A state without a target is from when there was but one.
        """
        coverage = TARGET_COVERAGE
        if "coverage" in state:
            coverage = read_number(state, "coverage", path, MIN_COVERAGE, MAX_COVERAGE)
        margin = cls(read_number(state, "prior", path, 0.0, MAX_PRIOR), coverage)
        margin._level = read_number(state, "level", path, _MIN_LEVEL, _max_level(coverage))
        margin._scores.extend(read_numbers(state, "scores", path, MAX_SCORES))
        margin._sorted = sorted(margin._scores)
        if margin._sorted and not -1.0 <= margin._sorted[0] <= margin._sorted[-1] <= MAX_SCORE:
            raise SnapshotError(f"{path}.scores", f"must be in [-1, {MAX_SCORE:g}]")
        margin._is_widened = read_number(state, "is_widened", path, 0.0, 1.0) == 1.0
        recent = read_numbers(state, "recent", path, _WIDENED_STEPS)
        margin._recent.extend(value == 1.0 for value in recent)
        margin.margin = margin._current()
        return margin


def prior_scale(coverage: float) -> float:
    """How many times a prior margin for `TARGET_COVERAGE` is wanted for `coverage`."""
    return _quantile(coverage) / _quantile(TARGET_COVERAGE)


@lru_cache(maxsize=64)
def _quantile(coverage: float) -> float:
    """The standard normal's quantile, to four digits: it stands in for an unknown distribution."""
    return max(_LEAST_QUANTILE, round(NormalDist().inv_cdf(coverage), 4))


def _spreads(coverage: float) -> float:
    """The margin in root mean squares of positive residuals.

    Those of a normal distribution, zeros for the others, have one of σ/√2.
    """
    return _quantile(coverage) * math.sqrt(2.0)


@lru_cache(maxsize=64)
def _max_level(coverage: float) -> float:
    return max(_MAX_LEVEL, min(1.0, 1.0 - coverage + _MAX_SWING))
