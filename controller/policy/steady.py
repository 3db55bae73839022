"""`SteadyCurve`: the rate that prompts can have beside streams of one period, in plain numbers.

Owns the same arithmetic as `alternating.sustained_rate`, for a plan that asks for one period after
another: an array of one number costs ten times as much as the number. Must not predict.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

from controller.policy.alternating import LEAST_GAIN, LEAST_JUMP, jumps_by
from controller.policy.budget import LatencyCurve
from costmodel.features import FloatArray


class Rate(NamedTuple):
    """Seconds per prompt token in steps of `tokens` of them; infinite where not one fits a step.

    `is_alternating` says that such a step comes after steps of decodes alone.
    """

    token_s: float
    tokens: float
    is_alternating: bool


class SteadyCurve:
    """A latency curve and what of it is held against a paced limit, `steered_s` of shape (c,)."""

    __slots__ = (
        "_is_uneven",
        "_mean_s",
        "_steered_s",
        "_tokens",
        "_upper_s",
        "curve",
        "steered_s",
    )

    def __init__(self, curve: LatencyCurve, steered_s: FloatArray) -> None:
        self.curve = curve
        self.steered_s = steered_s
        self._tokens: list[float] = curve.tokens.tolist()
        self._mean_s: list[float] = curve.mean_s.tolist()
        self._upper_s: list[float] = curve.upper_s.tolist()
        self._steered_s: list[float] = steered_s.tolist()
        self._is_uneven = self._may_alternate()

    def rate(self, period_s: float, longest_s: float) -> Rate:
        """Return the best rate that keeps the streams' mean period and no step longer than
        `longest_s` (`sustained_rate` with nothing saved).
        """
        tokens = interpolated(period_s, self._steered_s, self._tokens)
        token_s = math.inf
        if tokens >= 1.0:
            token_s = interpolated(tokens, self._tokens, self._mean_s) / tokens
        idle_s = self._mean_s[0]
        spare_s = period_s - idle_s
        # A jump that may be noise takes nothing from a mix that works.
        is_open = self._is_uneven and (tokens < 1.0 or jumps_by(idle_s, self._mean_s[1]))
        if not is_open or spare_s <= 0.0:
            return Rate(token_s, tokens, is_alternating=False)
        best = 0
        best_s = least_s = math.inf
        for k in range(1, len(self._tokens)):
            if self._upper_s[k] > longest_s:
                continue
            gap_s = self._steered_s[k]
            num_idle = max(gap_s - period_s, 0.0) / spare_s
            each_s = (self._mean_s[k] + num_idle * idle_s) / self._tokens[k]
            stretched_s = each_s * max(gap_s / max(period_s, 1e-9), 1.0)
            if stretched_s < least_s:
                best, best_s, least_s = k, each_s, stretched_s
        if least_s * LEAST_GAIN < token_s and self._steered_s[best] > period_s:
            return Rate(best_s, self._tokens[best], is_alternating=True)
        return Rate(token_s, tokens, is_alternating=False)

    def _may_alternate(self) -> bool:
        """`may_alternate` of the curve."""
        tokens, mean_s = self._tokens, self._mean_s
        if len(tokens) < 2:
            return False
        idle_s = mean_s[0]
        first_s = (mean_s[1] - idle_s) / tokens[1]
        # The cheapest token is that of a large step: from there.
        for k in range(len(tokens) - 1, 0, -1):
            if LEAST_JUMP * ((mean_s[k] - idle_s) / tokens[k]) < first_s:
                return True
        return False

    def mean_s(self, num_tokens: float) -> float:
        """Return the mean of a step with so many prompt tokens."""
        return interpolated(num_tokens, self._tokens, self._mean_s)

    def mixed_s(self, period_s: float) -> float:
        """Return the mean of a step that takes as many prompt tokens as the period allows."""
        return self.mean_s(interpolated(period_s, self._steered_s, self._tokens))


def interpolated(x: float, xp: list[float], fp: list[float]) -> float:
    """Return what `numpy.interp` says of one number."""
    low = bisect_right(xp, x) - 1
    if low < 0:
        return fp[0]
    if low >= len(xp) - 1:
        return fp[-1]
    slope = (fp[low + 1] - fp[low]) / (xp[low + 1] - xp[low])
    return slope * (x - xp[low]) + fp[low]
