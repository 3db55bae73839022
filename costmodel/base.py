"""The seam of the cost model: two verbs and the numbers that operators see.

Owns protocols and frozen records. Must not hold a learner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from costmodel.features import FloatArray, Regime, StepFeatures
from costmodel.margin import TARGET_COVERAGE


class LatencyEstimate(NamedTuple):
    """Seconds for n candidate steps: the mean, and an upper bound of known coverage.

    Both have shape (n,), are finite, positive, and never fall when any kind of work grows;
    `upper_s >= mean_s`. The upper bound holds with the model's target coverage.
    """

    mean_s: FloatArray
    upper_s: FloatArray


@dataclass(frozen=True, slots=True)
class MarginalCosts:
    """What one more unit of work costs, in seconds, and where throughput flattens.

    `knee_tokens` is the prefill budget beyond which tokens per second grow little (about 90 % of
    the best rate is reached). `floor_s` is the cost of an almost empty step. `extra_chunk_s` is
    what one more prompt in the step costs beside its tokens, `prompt_logit_s` a prompt that ends.
    """

    prefill_token_s: float
    decode_request_s: float
    decode_context_token_s: float
    floor_s: float
    knee_tokens: int
    extra_chunk_s: float = 0.0
    prompt_logit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RegimeQuality:
    """How well the model did in one regime over its last steps (at most 500), as shares."""

    regime: Regime
    num_observed: int
    mape: float
    coverage: float
    margin: float


@dataclass(frozen=True, slots=True)
class ModelQuality:
    """Quality per regime and over all, plus counted updates and rejected samples by reason.

    `target_coverage` is what `coverage` is steered to. `mixing_ratio` is the mean of measured
    seconds of mixed steps over those predicted of their decodes and prompts in two steps: below 1
    mixing beats alternating on this machine; None before a mixed step.
    """

    version: int
    num_observed: int
    mape: float
    coverage: float
    regimes: tuple[RegimeQuality, ...]
    num_rejected: dict[str, int]
    target_coverage: float = TARGET_COVERAGE
    mixing_ratio: float | None = None


class CostModel(Protocol):
    """Predicts step latency and learns from every step.

    Single writer: call both verbs from the loop's thread.
    """

    def predict(self, features: FloatArray) -> LatencyEstimate:
        """Return mean and upper seconds for candidates of shape (n, NUM_FEATURES).

        Candidates are finite and not negative.
        """
        ...

    def observe(self, features: StepFeatures, latency_s: float) -> bool:
        """Learn from one executed step of `latency_s` seconds.

        False if the sample was refused (not finite, not positive, no work).
        """
        ...

    def marginals(self) -> MarginalCosts:
        """Return marginal costs under the current coefficients."""
        ...

    def quality(self) -> ModelQuality:
        """Return error and coverage over the recent past, and the model's version."""
        ...
