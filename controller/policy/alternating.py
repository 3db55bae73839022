"""When prompts had better have steps of their own now and then instead of a share of every step.

Owns that comparison: on a machine where any prompt token makes a step much longer, streams that
would be late in every mixed step keep their mean pace if quick steps of decodes alone come first.
Must not know a request, a block or a clock.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from controller.policy.budget import LatencyCurve
from controller.policy.facts import greatest, least
from costmodel.features import FloatArray

BoolArray = npt.NDArray[np.bool_]

# A long step is a long gap for every stream: alternating must at least double the rate.
_LEAST_GAIN = 2.0
# Of the budgets whose rate is so near to the best one's the smallest is taken: the shortest gap.
_NEAR_BEST = 1.25
# A stream is waited for as long as it takes to bank for so many steps of prompts.
_MOST_SAVED = 4.0


class Banks(NamedTuple):
    """What running streams have in hand of their means, shape (n,): seconds until the next token
    must come for the mean to keep its pace (`due_s`, negative where it is behind), and that pace in
    seconds per token (`paced_s`).
    """

    due_s: FloatArray
    paced_s: FloatArray

    def saving(self, step_s: float, idle_s: float) -> Banks:
        """Return those that a step of `step_s` waits for, where steps of decodes alone take
        `idle_s`.

        Whoever would have to save for more than `_MOST_SAVED` of such steps is behind for good, or
        for so long that prompts cannot wait for it; whose pace is no longer than `idle_s` saves
        nothing.
        """
        is_near = step_s - self.due_s <= _MOST_SAVED * np.maximum(step_s - self.paced_s, 0.0)
        is_saving = (is_near | (self.due_s >= self.paced_s)) & (self.paced_s > idle_s)
        return Banks(self.due_s[is_saving], self.paced_s[is_saving])

    def limit_s(self) -> float:
        """Return how long a step may last with everything spent; +inf without a stream."""
        return least(self.due_s) if self.due_s.size else math.inf

    def wait_s(self, step_s: float, idle_s: float) -> float:
        """Return how long the streams, all of them saving, take to bank for a step of `step_s`."""
        if not self.due_s.size:
            return 0.0
        num_idle = (step_s - self.due_s) / (self.paced_s - idle_s)
        return max(0.0, greatest(np.ceil(num_idle))) * idle_s


NO_BANKS = Banks(np.empty(0), np.empty(0))


class Sustained(NamedTuple):
    """The rate that prompts can have beside streams for long: `token_s` seconds per prompt token,
    in steps of `tokens` of them; infinite and 0 where there is none. Arrays of shape (k,).

    `is_alternating` says that such a step comes after steps of decodes alone.
    """

    token_s: FloatArray
    tokens: FloatArray
    is_alternating: BoolArray


def sustained_rate(
    curve: LatencyCurve,
    steered_s: FloatArray,
    period_s: FloatArray,
    saved_s: FloatArray,
    longest_s: float = math.inf,
) -> Sustained:
    """Return the best rate that keeps the mean period of the streams at `period_s` (k,) and no step
    longer than `longest_s`, where every step takes `saved_s` (k,) less than the curve says.

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
        is_out = np.isnan(cycle_s) | (steered_s[1:] > longest_s)
        each_s = np.where(is_out, math.inf, cycle_s / curve.tokens[1:])
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
