"""Drift: Page–Hinkley on standardised residuals, both directions.

Owns two cumulative sums. Must not know what happens on an alarm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from costmodel.fields import read_number

# In units of the residual's typical size, the median of |residual|: of normal noise that is
# 0.674 σ, so σ is 1.48 units. The excess of a random walk with drift −δ over its minimum passes h
# with probability of order exp(−2δh/σ²) = e⁻⁹ per excursion: a stable series raises a false alarm
# in some 100,000 steps of normal noise, in some 5,000 where its tails are heavy, and each widens
# the margin for 20 steps. With δ = 0.75 and h = 30 (e⁻²⁰) there were none on synthetic devices, but
# back under 8 % after ×1.5 took up to twice as long.
DRIFT_ALLOWANCE: Final = 0.5
DRIFT_ALARM: Final = 20.0
_MAX_RESIDUAL: Final = 4.0


class PageHinkley:
    """Two one-sided cumulative sums of `residual ∓ δ`, restarted at zero (Page, "Continuous
    inspection schemes", 1954).

    `max(0, s + residual − δ)` is Page–Hinkley's `m_t − min m` written as one number.
    """

    def __init__(self) -> None:
        self._rise = 0.0
        self._fall = 0.0

    def record(self, residual: float) -> bool:
        """Add a standardised residual (clipped to ±4); True on an alarm, after which the sums start
        again.
        """
        residual = min(_MAX_RESIDUAL, max(-_MAX_RESIDUAL, residual))
        self._rise = max(0.0, self._rise + residual - DRIFT_ALLOWANCE)
        self._fall = max(0.0, self._fall - residual - DRIFT_ALLOWANCE)
        if max(self._rise, self._fall) <= DRIFT_ALARM:
            return False
        self.reset()
        return True

    def reset(self) -> None:
        """Start again: the cause has been dealt with."""
        self._rise = self._fall = 0.0

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON numbers."""
        return {"rise": self._rise, "fall": self._fall}

    @classmethod
    def restore(cls, state: Mapping[str, Any], path: str) -> PageHinkley:
        """Rebuild from `state()`; SnapshotError names the field below `path` that is wrong."""
        detector = cls()
        detector._rise = read_number(state, "rise", path, 0.0, DRIFT_ALARM)
        detector._fall = read_number(state, "fall", path, 0.0, DRIFT_ALARM)
        return detector
