"""A bounded memory of steps that a long phase of one kind cannot fill.

Owns which samples are kept. Must not fit anything.

Steps are kept by stratum: their regime and the magnitude of their tokens. Each stratum keeps its
newest samples, so an idle night of single decodes displaces single decodes only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from costmodel.basis import MAX_FEATURE
from costmodel.features import NUM_FEATURES, FloatArray, Regime, StepFeatures
from costmodel.fields import MAX_COUNT, SnapshotError, read_array, read_count, read_numbers

# Tokens of a step by powers of two: 1, 2-3, 4-7 ... and everything beyond 2^14 together.
_MAGNITUDES: Final = 16
_REGIMES: Final = tuple(Regime)
NUM_STRATA: Final = len(_REGIMES) * _MAGNITUDES
STRATUM_SAMPLES: Final = 48
# What is kept is rescaled with every change of speed, so it may leave the range of what is learnt;
# squares of this are still far from overflow.
_MAX_KEPT_S: Final = 1e30


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
        seen = read_array(state, "seen", path, (NUM_STRATA,))
        if (seen < 0.0).any() or (seen > MAX_COUNT).any():
            raise SnapshotError(f"{path}.seen", f"must be counts in [0, {MAX_COUNT}]")
        window._seen = [int(each) for each in seen]
        places = np.array(read_numbers(state, "slots", path, window._numbers.size))
        count = places.size
        is_inside = (places >= 0.0) & (places < window._numbers.size) & (places % 1.0 == 0.0)
        if not is_inside.all() or np.unique(places).size != count:
            raise SnapshotError(f"{path}.slots", "must be distinct places of the window")
        slots = places.astype(np.int64)
        shape = (count, NUM_FEATURES) if count else (0,)
        features = read_array(state, "features", path, shape)
        window._features[slots] = features.reshape(count, NUM_FEATURES)
        if (features < 0.0).any() or (features > MAX_FEATURE).any():
            raise SnapshotError(f"{path}.features", f"must be in [0, {MAX_FEATURE:g}]")
        latency_s = read_array(state, "latency_s", path, (count,))
        if (latency_s <= 0.0).any() or (latency_s > _MAX_KEPT_S).any():
            raise SnapshotError(f"{path}.latency_s", f"must be positive, at most {_MAX_KEPT_S:g}")
        numbers = read_array(state, "numbers", path, (count,))
        if (numbers < 1.0).any() or (numbers > window._num_added).any():
            raise SnapshotError(f"{path}.numbers", "must be in [1, num_added]")
        window._latency_s[slots] = latency_s
        window._numbers[slots] = numbers
        return window


def stratum_of(features: StepFeatures) -> int:
    """Return the stratum of a step with work: its regime and the magnitude of its tokens."""
    tokens = int(features.num_prefill_tokens + features.num_decode_requests)
    magnitude = min(tokens.bit_length(), _MAGNITUDES) - 1
    return _REGIMES.index(features.regime) * _MAGNITUDES + max(0, magnitude)
