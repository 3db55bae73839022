"""When prompts had better have steps of their own now and then instead of a share of every step.

Owns that comparison: on a machine where any prompt token makes a step much longer, streams that
would be late in every mixed step keep their mean pace if quick steps of decodes alone come first.
Must not know a stream, a block or a clock.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from controller.policy.budget import LatencyCurve
from controller.policy.ordering import BoolArray
from costmodel.features import FloatArray

# A long step is a long gap for every stream: alternating must at least double the rate.
_LEAST_GAIN = 2.0
# Of the budgets whose rate is so near to the best one's the smallest is taken: the shortest gap.
_NEAR_BEST = 1.25


class Sustained(NamedTuple):
    """The rate that prompts can have beside streams for long: `token_s` seconds per prompt token,
    in steps of `tokens` of them; infinite and 0 where there is none. Arrays of shape (k,).

    `is_alternating` says that such a step comes after steps of decodes alone.
    """

    token_s: FloatArray
    tokens: FloatArray
    is_alternating: BoolArray


def sustained_rate(
    curve: LatencyCurve, steered_s: FloatArray, period_s: FloatArray, saved_s: FloatArray
) -> Sustained:
    """Return the best rate that keeps the mean period of the streams at `period_s` (k,), where
    every step takes `saved_s` (k,) less than the curve says.

    A step of N prompt tokens that takes S(N) is either short enough, or it follows steps of decodes
    alone, D each, that are ahead of the period P by P - D: (S - P) / (P - D) of them. On a curve
    that rises evenly from D both give the same rate, and only mixing keeps every gap short.
    """
    tokens = np.interp(period_s + saved_s, steered_s, curve.tokens)
    step_s = np.interp(tokens, curve.tokens, curve.mean_s) - saved_s
    token_s = np.full(tokens.size, math.inf)
    np.divide(step_s, tokens, out=token_s, where=tokens >= 1.0)
    is_alternating: BoolArray = np.zeros(tokens.size, dtype=np.bool_)
    if may_alternate(curve):
        idle_s = curve.mean_s[0] - saved_s
        spare_s = period_s - idle_s
        over_s = np.maximum(steered_s[1:] - (saved_s + period_s)[:, None], 0.0)
        num_idle = over_s / np.where(spare_s > 0.0, spare_s, math.nan)[:, None]
        cycle_s = curve.mean_s[1:] - saved_s[:, None] + num_idle * idle_s[:, None]
        each_s = np.where(np.isnan(cycle_s), math.inf, cycle_s / curve.tokens[1:])
        least_s = each_s.min(axis=1)
        is_alternating = least_s * _LEAST_GAIN < token_s
        best = (each_s <= _NEAR_BEST * least_s[:, None]).argmax(axis=1)
        token_s = np.where(is_alternating, each_s[np.arange(best.size), best], token_s)
        tokens = np.where(is_alternating, curve.tokens[1 + best], tokens)
    return Sustained(token_s, tokens, is_alternating)


def may_alternate(curve: LatencyCurve) -> bool:
    """Whether the first prompt tokens of a step cost much more than those of a large one: where
    they do not, mixing is never the worse. By the mean: a wide margin is no cost of a machine.
    """
    if curve.tokens.size < 2:
        return False
    extra_s = (curve.mean_s[1:] - curve.mean_s[0]) / curve.tokens[1:]
    return bool(extra_s[0] > _LEAST_GAIN * extra_s.min())
