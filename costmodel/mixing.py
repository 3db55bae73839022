"""Whether mixing beats alternating: what mixed steps take against their decodes and prompts apart.

Owns one running ratio. Must not predict anything.

By its form the mean can only say that mixing saves (planes with intercepts are subadditive: two
steps pay two floors). So this is measured: the seconds of each mixed step over what is predicted of
its decode part and its prefill part as two steps of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from costmodel.fields import read_count, read_number

# Steps that the ratio remembers; a plain mean while it has seen fewer.
MEMORY_STEPS: Final = 500
MAX_RATIO: Final = 1e6


class MixingRatio:
    """Mean of mixed over alternating seconds: below 1 mixing wins, above 1 two steps would."""

    def __init__(self) -> None:
        """Start without a mixed step."""
        self.num_observed = 0
        self._ratio = 0.0

    @property
    def ratio(self) -> float | None:
        """The mean over the last mixed steps (exponential, `MEMORY_STEPS`); None before any."""
        return self._ratio if self.num_observed else None

    def record(self, latency_s: float, apart_s: float) -> None:
        """Account for a mixed step; `apart_s` > 0 is predicted of its two parts as two steps."""
        self.num_observed += 1
        share = 1.0 / min(self.num_observed, MEMORY_STEPS)
        self._ratio += share * (min(latency_s / apart_s, MAX_RATIO) - self._ratio)

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON numbers."""
        return {"num_observed": self.num_observed, "ratio": self._ratio}

    @classmethod
    def restore(cls, state: Mapping[str, Any], path: str) -> MixingRatio:
        """Rebuild from `state()`; SnapshotError names the field below `path` that is wrong."""
        mixing = cls()
        mixing.num_observed = read_count(state, "num_observed", path)
        mixing._ratio = read_number(state, "ratio", path, 0.0, MAX_RATIO)
        return mixing
