"""A check that cannot fail is worth nothing: each one meets a model that breaks its promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from costmodel import checks
from costmodel.base import LatencyEstimate, MarginalCosts, ModelQuality
from costmodel.checks import ConformanceError
from costmodel.features import FloatArray, StepFeatures
from costmodel.prior import flat_prior
from costmodel.recursive import RecursiveLeastSquares


class _Wrapped:
    """A sound model; subclasses break one promise each."""

    def __init__(self) -> None:
        self.inner: RecursiveLeastSquares = flat_prior()

    @property
    def kind(self) -> str:
        return self.inner.kind

    def predict(self, features: FloatArray) -> LatencyEstimate:
        return self.inner.predict(features)

    def observe(self, features: StepFeatures, latency_s: float) -> bool:
        return self.inner.observe(features, latency_s)

    def marginals(self) -> MarginalCosts:
        return self.inner.marginals()

    def quality(self) -> ModelQuality:
        return self.inner.quality()

    def state(self) -> dict[str, Any]:
        return self.inner.state()


class _Deaf(_Wrapped):
    def observe(self, features: StepFeatures, latency_s: float) -> bool:
        return True


class _Zero(_Wrapped):
    def predict(self, features: FloatArray) -> LatencyEstimate:
        zeros = np.zeros(len(features))
        return LatencyEstimate(zeros, zeros)


class _Shapeless(_Wrapped):
    def predict(self, features: FloatArray) -> LatencyEstimate:
        return LatencyEstimate(np.ones(1), np.ones(1))


class _Infinite(_Wrapped):
    def predict(self, features: FloatArray) -> LatencyEstimate:
        mean_s, upper_s = super().predict(features)
        return LatencyEstimate(mean_s, upper_s * np.inf)


class _Optimistic(_Wrapped):
    def predict(self, features: FloatArray) -> LatencyEstimate:
        mean_s = super().predict(features).mean_s
        return LatencyEstimate(mean_s, mean_s * 0.9)


class _Falling(_Wrapped):
    """Quicker with more decodes, as an unconstrained fit may be."""

    def predict(self, features: FloatArray) -> LatencyEstimate:
        mean_s, upper_s = super().predict(features)
        factor = 1.0 + 1.0 / (1.0 + features[:, 1])
        return LatencyEstimate(mean_s * factor, upper_s * factor)


class _CheaperMixed(_Wrapped):
    """Margins per regime without a rule across regimes."""

    def predict(self, features: FloatArray) -> LatencyEstimate:
        mean_s = super().predict(features).mean_s
        return LatencyEstimate(mean_s, mean_s * np.where(features[:, 0] > 0.0, 1.0, 3.0))


class _Narrow(_Wrapped):
    def predict(self, features: FloatArray) -> LatencyEstimate:
        mean_s = super().predict(features).mean_s
        return LatencyEstimate(mean_s, mean_s * 1.001)


class _WideWhenMixed(_Wrapped):
    """Right on the whole of a narrow regime, wrong in another one."""

    def predict(self, features: FloatArray) -> LatencyEstimate:
        mean_s, upper_s = super().predict(features)
        is_mixed = (features[:, 0] > 0.0) & (features[:, 1] == 0.0)
        return LatencyEstimate(mean_s, np.where(is_mixed, mean_s * 9.0, upper_s))


class _Boastful(_Wrapped):
    def quality(self) -> ModelQuality:
        return replace(super().quality(), coverage=0.5, mape=0.2)


class _Moody(_Wrapped):
    instances = count()

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0 + 1e-9 * next(self.instances)

    def predict(self, features: FloatArray) -> LatencyEstimate:
        mean_s, upper_s = super().predict(features)
        return LatencyEstimate(mean_s * self.factor, upper_s * self.factor)


class _MoodyQuality(_Wrapped):
    instances = count()

    def __init__(self) -> None:
        super().__init__()
        self.number = next(self.instances)

    def quality(self) -> ModelQuality:
        return replace(super().quality(), version=self.number)


class _Hoarder(_Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def observe(self, features: StepFeatures, latency_s: float) -> bool:
        self.seen.extend([latency_s] * 50)
        return super().observe(features, latency_s)


class _Agreeable(_Wrapped):
    """Accepts what is no sample."""

    def observe(self, features: StepFeatures, latency_s: float) -> bool:
        super().observe(features, latency_s)
        return True


class _Uncounted(_Wrapped):
    def quality(self) -> ModelQuality:
        return replace(super().quality(), num_rejected={})


class _Impressionable(_Wrapped):
    """Refuses a sample that is not positive, but learns from it all the same."""

    def observe(self, features: StepFeatures, latency_s: float) -> bool:
        if latency_s <= 0.0:
            super().observe(features, 0.05)
        return super().observe(features, latency_s)


class _Poisoned(_Wrapped):
    """One number that is not finite is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.is_poisoned = False

    def observe(self, features: StepFeatures, latency_s: float) -> bool:
        self.is_poisoned |= not np.isfinite(latency_s)
        return super().observe(features, latency_s)

    def predict(self, features: FloatArray) -> LatencyEstimate:
        mean_s, upper_s = super().predict(features)
        factor = np.nan if self.is_poisoned else 1.0
        return LatencyEstimate(mean_s * factor, upper_s * factor)


class _PoisonedQuality(_Poisoned):
    def predict(self, features: FloatArray) -> LatencyEstimate:
        return self.inner.predict(features)

    def quality(self) -> ModelQuality:
        return replace(super().quality(), mape=np.nan if self.is_poisoned else 0.0)


class _Doubled(_Wrapped):
    def predict(self, features: FloatArray) -> LatencyEstimate:
        mean_s, upper_s = super().predict(features)
        return LatencyEstimate(mean_s * 2.0, upper_s * 2.0)


class _Stubborn(_Wrapped):
    """Learns for a thousand steps, then never again."""

    def observe(self, features: StepFeatures, latency_s: float) -> bool:
        return self.quality().num_observed < 950 and super().observe(features, latency_s)


class _Gullible(_Wrapped):
    """Remembers its wildest step for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def observe(self, features: StepFeatures, latency_s: float) -> bool:
        self.factor += 0.1 * (latency_s > 60.0)
        return super().observe(features, latency_s)

    def predict(self, features: FloatArray) -> LatencyEstimate:
        mean_s, upper_s = super().predict(features)
        return LatencyEstimate(mean_s * self.factor, upper_s * self.factor)


class _WrongMarginals(_Wrapped):
    def marginals(self) -> MarginalCosts:
        return replace(super().marginals(), prefill_token_s=-1.0)


class _WrongFloor(_Wrapped):
    def marginals(self) -> MarginalCosts:
        return replace(super().marginals(), floor_s=0.0)


class _DearPrefill(_Wrapped):
    def marginals(self) -> MarginalCosts:
        costs = super().marginals()
        return replace(costs, prefill_token_s=costs.prefill_token_s * 9.0)


class _Forgetful(_Wrapped):
    """Its snapshot is that of a fresh model."""

    def state(self) -> dict[str, Any]:
        return flat_prior().state()


class _ForgetsQuality(_Wrapped):
    def state(self) -> dict[str, Any]:
        state = super().state()
        return {**state, "window": flat_prior().state()["window"]}


class _ForgetsScreens(_Wrapped):
    """Predicts the same after a restart, but takes what follows for surprises."""

    def state(self) -> dict[str, Any]:
        return {**super().state(), "screens": flat_prior().state()["screens"]}


BROKEN: list[tuple[Callable[..., None], type[_Wrapped], str]] = [
    (checks.check_estimates, _Zero, "not positive"),
    (checks.check_estimates, _Shapeless, "shape"),
    (checks.check_estimates, _Infinite, "not finite"),
    (checks.check_estimates, _Optimistic, "upper below mean"),
    (checks.check_monotone, _Falling, "mean, column 1"),
    (checks.check_monotone, _CheaperMixed, "upper, column 0"),
    (checks.check_marginals, _WrongMarginals, "marginal cost"),
    (checks.check_marginals, _WrongFloor, "floor"),
    (checks.check_marginals, _DearPrefill, "a prefill token costs"),
    (checks.check_deterministic, _Moody, "two models differ"),
    (checks.check_deterministic, _MoodyQuality, "two qualities differ"),
    (checks.check_bounded_memory, _Hoarder, "bytes after"),
    (checks.check_refusals, _Agreeable, "was accepted"),
    (checks.check_refusals, _Uncounted, "was not counted"),
    (checks.check_refusals, _Impressionable, "taught"),
    (checks.check_survives_poison, _Poisoned, "broke a prediction"),
    (checks.check_survives_poison, _PoisonedQuality, "broke the quality"),
    (checks.check_survives_poison, _Deaf, "among poison"),
    (checks.check_learns, _Deaf, "after 500 steps"),
    (checks.check_learns, _Boastful, "reports MAPE"),
    (checks.check_coverage, _Narrow, "coverage"),
    (checks.check_coverage, _Boastful, "reports coverage"),
    (checks.check_coverage, _WideWhenMixed, "coverage"),
    (checks.check_recovers, _Stubborn, "after ×"),
    (checks.check_robust, _Gullible, "outliers"),
    (checks.check_snapshot, _Forgetful, "another prediction"),
    (checks.check_snapshot, _ForgetsQuality, "another quality"),
    (checks.check_snapshot, _ForgetsScreens, "another future"),
]


@pytest.mark.parametrize(
    ("check", "broken", "problem"), BROKEN, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_model_that_breaks_a_promise_is_found_out(
    check: Callable[..., None], broken: type[_Wrapped], problem: str
) -> None:
    with pytest.raises(ConformanceError, match=problem):
        check(broken)


def test_every_check_of_the_suite_has_met_a_model_that_breaks_it() -> None:
    assert {check for check, _, _ in BROKEN} == {*checks.CHECKS, checks.check_snapshot}
