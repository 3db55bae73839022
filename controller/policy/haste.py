"""How much a step hurries: the prompt tokens wanted between N⁻ and N⁺ (control.md section 3.4).

Owns the choice between short steps, which the streams feel, and efficient ones, which the queue
feels. Must not know what a step may hold or who is seated in it.
"""

from __future__ import annotations

import math

import numpy as np

from controller.policy.budget import (
    LatencyCurve,
    choose_tokens,
    demanded_tokens,
    knee_tokens,
)
from controller.policy.settings import PolicyConfig
from costmodel.features import FloatArray

# A budget whose step takes so much longer at most is as good as the smaller one: a floor is free.
_NEARLY_FREE = 0.02


def wanted_tokens(
    curve: LatencyCurve,
    work: FloatArray,
    left_s: FloatArray,
    lower: int,
    upper: int,
    config: PolicyConfig,
    *,
    is_paced: bool,
) -> int:
    """Return the budget that is wanted, at most N⁺ (`upper`).

    `work` (n,) are the tokens left of everybody in serving order, `left_s` (n,) the seconds to
    their first-token deadlines, +inf without one; `lower` is N⁻, `is_paced` says that some running
    stream has a token promise.

    Beside paced streams prompts that all have deadlines are in no hurry: they shall be done within
    `patience` of the time left, `patience_s` seconds at most, in steps that reach
    `stream_knee_share` of the best rate. So a light load makes short steps, and what a burst needs
    is demanded at once. Whoever has no deadline gains from every token, and without paced streams
    nobody gains from a short step: then `knee_share` of the best rate is wanted, and the backlog
    within `drain_steps` steps.
    """
    is_dated = left_s < math.inf
    if not is_paced or not is_dated.all():
        backlog = work if not is_paced else work[~is_dated]
        knee = knee_tokens(curve, config.knee_share)
        return choose_tokens(lower, upper, knee, int(backlog.sum()), config.drain_steps)
    if lower >= upper:
        return upper
    allowed_s = np.minimum(config.patience * left_s, config.patience_s)
    early = demanded_tokens(curve, work, allowed_s)
    knee = knee_tokens(curve, config.stream_knee_share)
    wanted = min(upper, max(lower, early, knee))
    return nearly_free_tokens(curve, wanted, upper)


def nearly_free_tokens(curve: LatencyCurve, num_tokens: int, most: int) -> int:
    """Return the most tokens, `most` at most, whose step takes hardly longer than one with
    `num_tokens`.
    """
    mean_s = float(np.interp(num_tokens, curve.tokens, curve.mean_s))
    last = int(curve.mean_s.searchsorted(mean_s * (1.0 + _NEARLY_FREE), side="right")) - 1
    return max(num_tokens, min(most, int(curve.tokens[last])))
