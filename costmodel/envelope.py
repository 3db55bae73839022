"""The envelope: predictions, upper bounds and marginal costs from exported coefficients.

Owns the arithmetic that every learner of this package predicts with. Must not learn.

`mean(x) = max over planes p of c_p · φ(x)`, all coefficients non-negative: convex, positive, and
never falling in any kind of work, across regimes too. Three planes, because a memory-bound step
costs reading the weights whatever its batch and a compute-bound one costs its tokens, and because
the floor of a decode-only step (a captured graph, say) need not be that of a step with prompts.

The upper bound takes the largest of three bounds that each hold: that of the step's decode part
alone, that of its prefill part alone, and that of the whole, each with its own regime's margin. A
mixed step is never promised to be quicker than the decodes in it; so the upper bound is monotone
across regimes too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from costmodel.base import LatencyEstimate, MarginalCosts
from costmodel.basis import NUM_BASIS, NUM_PARTS, PART_MASKS, expand
from costmodel.features import FloatArray, Regime, StepFeatures

# Steps without prefill work, prefill steps up to the usual size, and those beyond: where a plane is
# expected to be the largest one.
DECODE_PLANE: Final = 0
PREFILL_PLANE: Final = 1
WORK_PLANE: Final = 2
NUM_PLANES: Final = 3
KNEE_SHARE: Final = 0.9
# Reported where throughput never flattens (no cost per prefill token is known).
MAX_KNEE_TOKENS: Final = 1 << 20


class StepPrediction(NamedTuple):
    """One step's prediction: seconds, what each plane says of it, and what its decodes and its
    prompts would take as two steps (the mean itself where one kind is missing).
    """

    mean_s: float
    upper_s: float
    plane_s: list[float]
    apart_s: float


class Envelope:
    """Exported coefficients of the planes: for candidates in bulk, and for one step in floats."""

    def __init__(self, planes: Sequence[FloatArray]) -> None:
        """Start from unscaled coefficients, one vector of shape (NUM_BASIS,) per plane."""
        self._rows: FloatArray = np.zeros((len(planes) * NUM_PARTS, NUM_BASIS))
        self._planes: list[list[float]] = [[] for _ in planes]
        for index, coefficients in enumerate(planes):
            self.set_plane(index, coefficients)

    def set_plane(self, index: int, coefficients: FloatArray) -> None:
        """Swap one plane's unscaled coefficients, shape (NUM_BASIS,)."""
        start = index * NUM_PARTS
        np.multiply(PART_MASKS.T, coefficients, out=self._rows[start : start + NUM_PARTS])
        self._planes[index] = coefficients.tolist()

    def estimate(self, features: FloatArray, margins: Mapping[Regime, float]) -> LatencyEstimate:
        """Return mean and upper seconds, shape (n,), for features of shape (n, NUM_FEATURES)."""
        basis = expand(features).T
        # Shape (planes · NUM_PARTS, n): everything below works on stretches of memory, in place.
        values = self._rows.dot(basis)
        parts = values[:NUM_PARTS]
        for start in range(NUM_PARTS, values.shape[0], NUM_PARTS):
            np.maximum(parts, values[start : start + NUM_PARTS], out=parts)
        whole, upper, prefill = parts
        has_prefill = basis[1]
        np.multiply(upper, 1.0 + margins[Regime.DECODE_ONLY], out=upper)
        np.multiply(prefill, has_prefill * (1.0 + margins[Regime.PREFILL_ONLY]), out=prefill)
        np.maximum(upper, prefill, out=upper)
        # 1, or 1 + margin where there are both kinds of work.
        mixed = np.sign(basis[3])
        np.multiply(mixed, has_prefill, out=mixed)
        np.multiply(mixed, margins[Regime.MIXED], out=mixed)
        np.add(mixed, 1.0, out=mixed)
        np.multiply(mixed, whole, out=mixed)
        np.maximum(upper, mixed, out=upper)
        return LatencyEstimate(whole, upper)

    def predict_step(
        self, features: StepFeatures, margins: Mapping[Regime, float]
    ) -> StepPrediction:
        """Return what `estimate` says of one step, without the cost of an array."""
        prefill, decodes, context, past, squared, chunks, logits = features
        jump = 1.0 if prefill > 0.0 else 0.0
        extra = chunks - 1.0 if chunks > 1.0 else 0.0
        wholes = []
        decode_s = prefill_s = 0.0
        for plane in self._planes:
            base, jumps, per_prefill, per_decode, per_context, *per_prompt = plane
            per_past, per_square, per_chunk, per_logit = per_prompt
            decode_part = decodes * per_decode + context * per_context
            prefill_part = (
                jump * jumps
                + prefill * per_prefill
                + past * per_past
                + squared * per_square
                + extra * per_chunk
                + logits * per_logit
            )
            wholes.append(base + decode_part + prefill_part)
            decode_s = max(decode_s, base + decode_part)
            prefill_s = max(prefill_s, base + prefill_part)
        mean_s = max(wholes)
        apart_s = mean_s
        upper_s = decode_s * (1.0 + margins[Regime.DECODE_ONLY])
        if jump:
            upper_s = max(upper_s, prefill_s * (1.0 + margins[Regime.PREFILL_ONLY]))
            if decodes > 0.0:
                upper_s = max(upper_s, mean_s * (1.0 + margins[Regime.MIXED]))
                apart_s = decode_s + prefill_s
        return StepPrediction(mean_s, max(upper_s, mean_s), wholes, apart_s)

    def marginals(self) -> MarginalCosts:
        """Return marginal costs of a busy step: the plane with the dearer prefill token."""
        busy = max(self._planes, key=lambda plane: plane[2])
        floor_s = max(plane[0] for plane in self._planes)
        return MarginalCosts(
            prefill_token_s=busy[2],
            decode_request_s=busy[3],
            decode_context_token_s=busy[4],
            floor_s=floor_s,
            knee_tokens=self._knee_tokens(),
            extra_chunk_s=busy[7],
            prompt_logit_s=busy[8],
        )

    def _knee_tokens(self) -> int:
        """Return the smallest chunk n on an idle engine whose rate n / L(n) is 90 % of the best
        rate that every plane allows: never below the knee of the envelope, a little beyond it where
        planes cross before either reaches its best.

        Each plane says L(n) = c + a·n + s·n² (c: intercept and prefill jump; one chunk, no past).
        Its rate is highest at n = √(c/s), where it is 1 / (a + 2√(cs)); without a square it tends
        to 1/a. With r the smaller of the planes' best rates, n / L(n) >= 0.9 r is s·n² − B·n + c <=
        0 with B = 1/(0.9 r) − a; its smaller root, written so that s = 0 needs no case of its own,
        is 2c / (B + √(B² − 4sc)): 9·c/a for a plain line. The knee is the larger of the planes'
        roots.
        """
        lines = [(plane[0] + plane[1], plane[2], plane[6]) for plane in self._planes]
        slowest = max(a + 2.0 * math.sqrt(c * s) for c, a, s in lines)
        if slowest <= 0.0:
            return MAX_KNEE_TOKENS
        knee = 1.0
        for c, a, s in lines:
            b = slowest / KNEE_SHARE - a
            knee = max(knee, 2.0 * c / (b + math.sqrt(max(0.0, b * b - 4.0 * s * c))))
        return min(MAX_KNEE_TOKENS, math.ceil(knee))
