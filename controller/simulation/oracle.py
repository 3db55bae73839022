"""`OracleModel`: a cost model that knows the machine's formula; what prediction can gain at most.

Owns the truth behind the cost model's seam. Must not learn: it knows neither the next step's noise
nor a slowdown.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

import numpy as np

from controller.simulation.hardware import HardwareProfile
from costmodel.base import LatencyEstimate, MarginalCosts, ModelQuality
from costmodel.features import FloatArray, Regime, StepFeatures
from costmodel.hygiene import RejectReason
from costmodel.margin import TARGET_COVERAGE

_KNEE_SHARE: Final = 0.9
_MAX_KNEE: Final = 1 << 20


class OracleModel:
    """A `CostModel` that answers with the profile's own seconds, and the noise's quantile
    `coverage` as the upper bound.

    Of recorded noise it is each regime's own; a bound never falls when work grows, so that of a
    mixed step is the largest of the three.
    """

    def __init__(self, profile: HardwareProfile, coverage: float = TARGET_COVERAGE) -> None:
        self._profile = profile
        self._coverage = coverage
        if profile.recorded is None:
            z = NormalDist().inv_cdf(coverage)
            # The mean of a noise that is skewed lies above its median.
            quantile = math.exp(z * profile.noise - profile.noise**2 / 2.0)
            decode = prefill = mixed = max(1.0, quantile)
        else:
            decode, prefill, mixed = (
                max(1.0, profile.recorded.quantile(regime, coverage))
                for regime in (Regime.DECODE_ONLY, Regime.PREFILL_ONLY, Regime.MIXED)
            )
        # No work, decodes, prompts, both: in binary.
        self._upper = np.array([decode, decode, prefill, max(decode, prefill, mixed)])
        self._marginals = _marginals(profile)

    @property
    def version(self) -> int:
        """It never changes."""
        return 0

    @property
    def num_drift_alarms(self) -> int:
        """It expects nothing else."""
        return 0

    def predict(self, features: FloatArray) -> LatencyEstimate:
        """Return mean and upper seconds for candidates of shape (n, NUM_FEATURES)."""
        mean_s = self._profile.seconds_of(features)
        kinds = (features[:, 1] > 0.0) + 2 * (features[:, 0] > 0.0)
        return LatencyEstimate(mean_s, mean_s * self._upper[kinds])

    def observe(self, features: StepFeatures, latency_s: float) -> bool:
        """There is nothing to learn; always False."""
        return False

    def reject(self, reason: RejectReason) -> None:
        """Nothing is counted."""

    def marginals(self) -> MarginalCosts:
        """Return marginal costs of a busy step."""
        return self._marginals

    def quality(self) -> ModelQuality:
        """Nothing was observed."""
        return ModelQuality(0, 0, 0.0, 0.0, (), {}, self._coverage)


def _marginals(profile: HardwareProfile) -> MarginalCosts:
    """The plane with the dearer prompt token is the busy one, as in `costmodel.envelope`."""
    busy = max(profile.planes, key=lambda plane: plane[2])
    sizes = [1 << power for power in range(_MAX_KNEE.bit_length())]
    rates = [
        size / profile.seconds(StepFeatures(float(size), chunk_squared_tokens=float(size * size)))
        for size in sizes
    ]
    best = max(rates)
    knee = next(s for s, rate in zip(sizes, rates, strict=True) if rate >= _KNEE_SHARE * best)
    return MarginalCosts(
        prefill_token_s=busy[2],
        decode_request_s=busy[3],
        decode_context_token_s=busy[4],
        floor_s=max(plane[0] for plane in profile.planes),
        knee_tokens=knee,
    )
