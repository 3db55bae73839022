"""Scales of a chart: from values to pixels, with ticks that are round numbers.

Owns bounds, ticks and their text. Must not draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

_NUM_TICKS: Final = 5
_MAX_LOG_TICKS: Final = 7
_WIDE_RATIO: Final = 30.0
_TINY: Final = 1e-12


def spans_widely(values: Sequence[float]) -> bool:
    """Whether a logarithmic scale would show what a straight one hides."""
    return bool(values) and min(values) > _TINY and max(values) / min(values) > _WIDE_RATIO


@dataclass(frozen=True, slots=True)
class Scale:
    """A stretch of values from `low` to `high`, `low` < `high`."""

    low: float
    high: float
    is_log: bool = False
    is_share: bool = False

    @classmethod
    def around(cls, values: Sequence[float], *, is_log: bool = False) -> Scale:
        """Return a scale that holds all values, with a little room where it is logarithmic."""
        low, high = min(values), max(values)
        if is_log:
            # A little room on either side, and a span even for a single point.
            return cls(max(low, _TINY) / 1.25, max(high, _TINY) * 1.25, is_log=True)
        # A span that ticks could not tell apart is none.
        least = 1e-9 * max(1.0, abs(low), abs(high))
        return cls(low, high) if high - low > least else cls(low - 0.5, high + 0.5)

    def padded(self, share: float) -> Scale:
        """Return a scale with that much more room at either end, as a share of its length."""
        room = (self.high - self.low) * share
        return replace(self, low=self.low - room, high=self.high + room)

    def up_to_a_tick(self) -> Scale:
        """Return a scale that ends at a tick: the first one that is not below its high end."""
        ticks = self.ticks()
        if self.is_log or len(ticks) < 2 or self.high - ticks[-1] <= 1e-9 * (self.high - self.low):
            return self
        return replace(self, high=2 * ticks[-1] - ticks[-2])

    @classmethod
    def shares(cls) -> Scale:
        """Return the scale from 0 to 100 %."""
        return cls(0.0, 1.0, is_share=True)

    def position(self, value: float) -> float:
        """Return where a value stands, 0 at the low end and 1 at the high one, never beyond."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = (math.log(max(each, _TINY)) for each in (value, low, high))
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def holds(self, value: float) -> bool:
        """Whether a value is on the scale."""
        return self.low <= value <= self.high

    def text(self, value: float) -> str:
        """Return a tick's label."""
        if self.is_share:
            return f"{value:.0%}"
        if abs(value) >= 1e7:
            return f"{value:.2g}"
        return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:g}"

    def ticks(self) -> list[float]:
        """Return a few round values on the scale, lowest first."""
        if self.is_log:
            found = self._log_ticks()
            if found:
                return found
            # A short stretch of a logarithmic axis is as good as straight.
        low, high = self.low, self.high
        raw = (high - low) / _NUM_TICKS
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * m for m in (1.0, 2.0, 2.5, 5.0, 10.0) if size * m >= raw)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        # Rounded to the step's digits, or 0.1 · 3 would be written with seventeen of them.
        return [round(i * step, 12) for i in range(first, last + 1)]

    def _log_ticks(self) -> list[float]:
        """Return 1, 2, 5 of every power of ten, only powers where those are many; or nothing."""
        lowest, highest = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        powers = range(lowest, highest + 1)
        for factors in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
            inside = [v for p in powers for m in factors if self.holds(v := m * 10.0**p)]
            if len(inside) <= _MAX_LOG_TICKS:
                return inside if len(inside) > 1 else []
        every = math.ceil(len(powers) / _MAX_LOG_TICKS)
        return [value for p in powers[::every] if self.holds(value := 10.0**p)]
