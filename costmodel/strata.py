"""A bounded memory of steps that a long phase of one kind cannot fill.

Owns which samples are kept. Must not fit anything.

Steps are kept by stratum: their regime and the magnitude of their tokens. Each stratum keeps its
newest samples, so an idle night of single decodes displaces single decodes only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from costmodel.features import NUM_FEATURES, FloatArray, Regime, StepFeatures
from costmodel.fields import SnapshotError, read_array, read_count

# Tokens of a step by powers of two: 1, 2-3, 4-7 ... and everything beyond 2^14 together.
_MAGNITUDES: Final = 16
_REGIMES: Final = tuple(Regime)
NUM_STRATA: Final = len(_REGIMES) * _MAGNITUDES
STRATUM_SAMPLES: Final = 48


class Samples(NamedTuple):
    """Steps in the order in which they came: features (n, NUM_FEATURES), seconds (n,), and how many
    steps came after each (n,).
    """

    features: FloatArray
    latency_s: FloatArray
    ages: FloatArray


class StratifiedWindow:
    """At most `NUM_STRATA` × `STRATUM_SAMPLES` samples, the newest ones of each stratum."""

    def __init__(self) -> None:
        self._features = np.zeros((NUM_STRATA * STRATUM_SAMPLES, NUM_FEATURES))
        self._latency_s = np.zeros(NUM_STRATA * STRATUM_SAMPLES)
        # When each sample came, counted from 1; 0 where there is none.
        self._numbers = np.zeros(NUM_STRATA * STRATUM_SAMPLES)
        self._seen = [0] * NUM_STRATA
        self._num_added = 0

    @property
    def num_added(self) -> int:
        """Samples that ever came."""
        return self._num_added

    def add(self, features: StepFeatures, latency_s: float) -> None:
        """Keep a step that took `latency_s`, in place of the oldest of its stratum."""
        stratum = stratum_of(features)
        slot = stratum * STRATUM_SAMPLES + self._seen[stratum] % STRATUM_SAMPLES
        self._seen[stratum] += 1
        self._num_added += 1
        self._features[slot] = features
        self._latency_s[slot] = latency_s
        self._numbers[slot] = self._num_added

    def rescale(self, factor: float) -> None:
        """Let everything that is kept have taken `factor` times as long: the machine changed."""
        self._latency_s *= factor

    def samples(self) -> Samples:
        """Return copies of what is kept, oldest first."""
        slots = self._numbers.nonzero()[0]
        slots = slots[np.argsort(self._numbers[slots])]
        ages = self._num_added - self._numbers[slots]
        return Samples(self._features[slots], self._latency_s[slots], ages)

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON numbers."""
        slots = self._numbers.nonzero()[0]
        return {
            "num_added": self._num_added,
            "seen": list(self._seen),
            "slots": slots.tolist(),
            "features": self._features[slots].tolist(),
            "latency_s": self._latency_s[slots].tolist(),
            "numbers": self._numbers[slots].tolist(),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any], path: str) -> StratifiedWindow:
        """Rebuild from `state()`; SnapshotError names the field below `path` that is wrong."""
        window = cls()
        window._num_added = read_count(state, "num_added", path)
        window._seen = [int(seen) for seen in read_array(state, "seen", path, (NUM_STRATA,))]
        count = len(state.get("slots", ()))
        slots = read_array(state, "slots", path, (count,)).astype(np.int64)
        is_inside = (slots >= 0) & (slots < window._numbers.size)
        if not is_inside.all() or np.unique(slots).size != count or min(window._seen) < 0:
            raise SnapshotError(f"{path}.slots", "must be distinct places of the window")
        shape = (count, NUM_FEATURES) if count else (0,)
        features = read_array(state, "features", path, shape)
        window._features[slots] = features.reshape(count, NUM_FEATURES)
        window._latency_s[slots] = read_array(state, "latency_s", path, (count,))
        window._numbers[slots] = read_array(state, "numbers", path, (count,))
        if (window._latency_s[slots] <= 0.0).any() or (features < 0.0).any():
            raise SnapshotError(f"{path}.latency_s", "samples must be positive")
        return window


def stratum_of(features: StepFeatures) -> int:
    """Return the stratum of a step with work: its regime and the magnitude of its tokens."""
    tokens = int(features.num_prefill_tokens + features.num_decode_requests)
    magnitude = min(tokens.bit_length(), _MAGNITUDES) - 1
    return _REGIMES.index(features.regime) * _MAGNITUDES + max(0, magnitude)
