"""Time as an argument. This is the only module that may read a clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, and the wall clock for storage."""

    def now(self) -> float:
        """Return monotonic seconds since an arbitrary origin."""
        ...

    def epoch_ms(self) -> int:
        """Return milliseconds since 1970-01-01 UTC."""
        ...


class MonotonicClock:
    """The machine's clock: `time.monotonic` for instants, one wall-clock reading to anchor them."""

    def __init__(self) -> None:
        # Anchored once, so that stored times never run backwards when the wall clock is set.
        self._epoch_offset_s = time.time() - time.monotonic()

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def epoch_ms(self) -> int:
        """Return UTC milliseconds, monotonic within this process."""
        return int((time.monotonic() + self._epoch_offset_s) * 1000)


class VirtualClock:
    """A clock that stands still until it is advanced; for the simulator and for tests."""

    def __init__(self, now: float = 0.0, epoch_ms: int = 1_700_000_000_000) -> None:
        self._now = now
        self._origin_ms = epoch_ms - int(now * 1000)

    def now(self) -> float:
        """Return virtual seconds."""
        return self._now

    def epoch_ms(self) -> int:
        """Return virtual UTC milliseconds."""
        return self._origin_ms + int(self._now * 1000)

    def advance(self, duration_s: float) -> None:
        """Move forward by `duration_s` seconds; ValueError if negative or not finite."""
        if not 0 <= duration_s < float("inf"):
            raise ValueError(f"duration_s must be finite and not negative, got {duration_s}")
        self._now += duration_s
