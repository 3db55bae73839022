"""The recent past of predictions: error and coverage over at most 500 steps.

Owns two running sums. Must not decide anything.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from costmodel.fields import SnapshotError, read_count, read_number, read_numbers

WINDOW_STEPS: Final = 500
MAX_ERROR: Final = 1e6
# A running sum of that many errors, however long it has run, is not off by more.
_MAX_ROUNDING: Final = 1e-3


class QualityWindow:
    """Mean absolute percentage error (as a share) and coverage over the last `WINDOW_STEPS` steps.

    A step refused as an outlier has no error worth averaging, but it did break its upper bound or
    keep it: it counts for coverage alone.
    """

    def __init__(self) -> None:
        self.num_observed = 0
        self._errors: deque[float] = deque()
        self._covered: deque[bool] = deque()
        self._error_sum = 0.0
        self._num_covered = 0

    @property
    def mape(self) -> float:
        """Mean of |actual − predicted| / actual; 0 before the first step."""
        return max(0.0, self._error_sum) / len(self._errors) if self._errors else 0.0

    @property
    def coverage(self) -> float:
        """Share of steps at or below their upper bound; 0 before the first step."""
        return self._num_covered / len(self._covered) if self._covered else 0.0

    def record(self, absolute_error: float, *, is_covered: bool) -> None:
        """Account for one step that taught; `absolute_error` is |actual − predicted| / actual.

        It counts up to `MAX_ERROR`: the actual may be as good as nothing.
        """
        absolute_error = min(absolute_error, MAX_ERROR)
        self.num_observed += 1
        self._errors.append(absolute_error)
        self._error_sum += absolute_error
        if len(self._errors) > WINDOW_STEPS:
            self._error_sum -= self._errors.popleft()
        self.record_coverage(is_covered=is_covered)

    def record_coverage(self, *, is_covered: bool) -> None:
        """Account for one step that did not teach."""
        self._covered.append(is_covered)
        self._num_covered += is_covered
        if len(self._covered) > WINDOW_STEPS:
            self._num_covered -= self._covered.popleft()

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON numbers."""
        return {
            "num_observed": self.num_observed,
            "errors": list(self._errors),
            # As it is, rounding included: a restored window must not differ in its last bit.
            "error_sum": self._error_sum,
            "covered": [int(covered) for covered in self._covered],
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any], path: str) -> QualityWindow:
        """Rebuild from `state()`; SnapshotError names the field below `path` that is wrong."""
        window = cls()
        window.num_observed = read_count(state, "num_observed", path)
        window._errors.extend(read_numbers(state, "errors", path, WINDOW_STEPS))
        if any(not 0.0 <= error <= MAX_ERROR for error in window._errors):
            raise SnapshotError(f"{path}.errors", f"must be in [0, {MAX_ERROR:g}]")
        total = math.fsum(window._errors)
        low, high = total - _MAX_ROUNDING, total + _MAX_ROUNDING
        window._error_sum = read_number(state, "error_sum", path, low, high)
        covered = read_numbers(state, "covered", path, WINDOW_STEPS)
        if any(value not in (0.0, 1.0) for value in covered):
            raise SnapshotError(f"{path}.covered", "must be zeros and ones")
        window._covered.extend(value == 1.0 for value in covered)
        window._num_covered = sum(window._covered)
        return window
