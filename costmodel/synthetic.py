"""Synthetic steps with a known truth: what the conformance checks learn from.

Owns two make-believe devices and a reproducible stream of steps. Must not be used to predict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from costmodel.features import StepFeatures

_CHUNKS: Final = (16, 32, 64, 128, 256, 512)
_MAX_CHUNKS: Final = 4
_MAX_DECODES: Final = 64
_MAX_CONTEXT: Final = 4096
_MAX_PAST: Final = 2048
# Shares of decode-only, mixed and prefill-only steps.
_REGIME_SHARES: Final = (0.45, 0.4, 0.15)


@dataclass(frozen=True, slots=True)
class SyntheticDevice:
    """A device as in control.md section 9, in seconds.

    `overhead + max(floor, prefill·n + decode·d) + context·Σ context + pair·(Σ chunk·past + Σ
    chunk²/2) + chunk·(chunks − 1) + logit·logits`.
    """

    overhead_s: float
    floor_s: float
    prefill_token_s: float
    decode_request_s: float
    context_token_s: float
    attention_pair_s: float
    extra_chunk_s: float = 0.0
    prompt_logit_s: float = 0.0

    def latency_s(self, features: StepFeatures) -> float:
        """Return the noiseless seconds of a step."""
        tokens_s = (
            self.prefill_token_s * features.num_prefill_tokens
            + self.decode_request_s * features.num_decode_requests
        )
        pairs = features.chunk_past_tokens + features.chunk_squared_tokens / 2.0
        return (
            self.overhead_s
            + max(self.floor_s, tokens_s)
            + self.context_token_s * features.decode_context_tokens
            + self.attention_pair_s * pairs
            + self.extra_chunk_s * max(0.0, features.num_chunks - 1.0)
            + self.prompt_logit_s * features.num_prompt_logits
        )


# An 8B-class model on an A100-class chip: a floor of weight reads. And a 270M-class model on two
# CPU cores: no floor to speak of, decodes dearer than prompt tokens.
ACCELERATOR: Final = SyntheticDevice(5e-3, 9e-3, 85e-6, 85e-6, 66e-9, 1.6e-9, 2e-5, 2e-5)
TWO_CORES: Final = SyntheticDevice(0.09, 0.0, 2.3e-3, 6e-3, 2e-7, 1.5e-6, 6e-3, 4e-3)
DEVICES: Final = (ACCELERATOR, TWO_CORES)


class SyntheticStep(NamedTuple):
    """A step, what it took by the clock, and what it would have taken without noise or outlier."""

    features: StepFeatures
    measured_s: float
    true_s: float


def synthetic_steps(
    device: SyntheticDevice,
    seed: int = 0,
    *,
    noise: float = 0.03,
    outlier_share: float = 0.0,
    outlier_factor: float = 1000.0,
) -> Iterator[SyntheticStep]:
    """Yield steps for ever: every regime, log-normal noise of size `noise`, rare outliers."""
    rng = np.random.default_rng(seed)
    while True:
        features = _features(rng)
        true_s = device.latency_s(features)
        measured_s = true_s * math.exp(noise * rng.standard_normal())
        if rng.random() < outlier_share:
            measured_s *= outlier_factor
        yield SyntheticStep(features, measured_s, true_s)


def _features(rng: np.random.Generator) -> StepFeatures:
    regime = int(rng.choice(3, p=_REGIME_SHARES))
    decodes = context = prefill = past = squared = chunks = logits = 0
    if regime < 2:
        decodes = int(rng.integers(1, _MAX_DECODES + 1))
        context = int(rng.integers(1, _MAX_CONTEXT + 1, decodes).sum())
    if regime > 0:
        chunks = int(rng.integers(1, _MAX_CHUNKS + 1))
        # Several chunks are short ones: a step's tokens are bounded.
        for chunk in rng.choice(_CHUNKS[: len(_CHUNKS) + 1 - chunks], chunks).tolist():
            prefill += chunk
            past += chunk * int(rng.integers(0, _MAX_PAST))
            squared += chunk * chunk
            logits += int(rng.integers(0, 2))
    return StepFeatures(
        float(prefill),
        float(decodes),
        float(context),
        float(past),
        float(squared),
        float(chunks),
        float(logits),
    )
