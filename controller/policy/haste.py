"""How much a step hurries: the prompt tokens wanted between N⁻ and N⁺ (control.md section 3.4).

Owns the choice between short steps, which the streams feel, and efficient ones, which the queue
feels. Must not know what a step may hold or who is seated in it.
"""

from __future__ import annotations

import math

import numpy as np

from controller.policy.alternating import fewest_steps_tokens, jumps
from controller.policy.budget import (
    LatencyCurve,
    choose_tokens,
    demanded_tokens,
    knee_tokens,
)
from controller.policy.ordering import PrefillQueue
from controller.policy.pacing import Pacing
from controller.policy.settings import PolicyConfig
from costmodel.features import FloatArray

# A budget whose step takes so much longer at most is as good as the smaller one: a floor is free.
_NEARLY_FREE = 0.02


def first_aims_s(queue: PrefillQueue, config: PolicyConfig) -> FloatArray:
    """Return when first tokens are aimed at while nobody is in a hurry, in seconds after arrival:
    `patience` of the way to the paced deadline, `patience_s` at most.
    """
    allowed_s = config.patience * (queue.deadline_at - queue.arrived_at)
    aims_s: FloatArray = np.minimum(allowed_s, config.patience_s)
    return aims_s


def unhurried_tokens(
    curve: LatencyCurve,
    work: FloatArray,
    left_s: FloatArray,
    aim_s: FloatArray,
    pacing: Pacing,
    config: PolicyConfig,
) -> int | None:
    """Return the budget of a step in no hurry; None if somebody gains from every token.

    `work` (n,) are the tokens left of everybody in serving order, `left_s` (n,) the seconds to
    their first-token deadlines, +inf without one, `aim_s` (n,) those to the instants at which their
    first tokens are aimed.

    Beside paced streams prompts that all have deadlines are in no hurry: they shall be done when
    they are aimed at, in steps that reach `stream_knee_share` of the best rate. So a light load
    makes short steps, and what a burst needs is demanded at once. What a floor gives away is taken.
    On a machine that jumps, short steps spare the streams nothing: there they are few.
    """
    if not pacing.is_paced or not left_s.size or not (left_s < math.inf).all():
        return None
    early = demanded_tokens(curve, work, aim_s)
    if jumps(curve):
        steered_s = curve.steered_s(pacing.upper_share)
        most = max(1.0, math.floor(np.interp(pacing.limit_s, steered_s, curve.tokens)))
        return max(early, fewest_steps_tokens(curve, int(work.sum()), most))
    return nearly_free_tokens(curve, max(early, knee_tokens(curve, config.stream_knee_share)))


def wanted_tokens(
    unhurried: int | None,
    curve: LatencyCurve,
    work: FloatArray,
    left_s: FloatArray,
    lower: int,
    upper: int,
    config: PolicyConfig,
    *,
    is_paced: bool,
) -> int:
    """Return the budget that is wanted, at least N⁻ (`lower`) and at most N⁺ (`upper`):
    `unhurried_tokens` if there are such.

    Otherwise `knee_share` of the best rate is wanted, and within `drain_steps` steps the backlog:
    of those without a deadline beside paced streams, of everybody where nobody gains from short
    steps.
    """
    if unhurried is not None:
        return min(upper, max(lower, unhurried))
    backlog = work[left_s == math.inf] if is_paced else work
    knee = knee_tokens(curve, config.knee_share)
    return choose_tokens(lower, upper, knee, int(backlog.sum()), config.drain_steps)


def nearly_free_tokens(curve: LatencyCurve, num_tokens: int) -> int:
    """Return the most tokens on the curve whose step takes hardly longer than one with
    `num_tokens`.
    """
    mean_s = float(np.interp(num_tokens, curve.tokens, curve.mean_s))
    last = int(curve.mean_s.searchsorted(mean_s * (1.0 + _NEARLY_FREE), side="right")) - 1
    return max(num_tokens, int(curve.tokens[last]))


def unhurried_s(
    curve: LatencyCurve, num_tokens: int, work: FloatArray, done_s: FloatArray, aim_s: FloatArray
) -> FloatArray:
    """Return when each of the ordered `work` (n,) is done in steps of `num_tokens`, seconds from
    now: not before `done_s`, when it could be, nor later than both that and its aim.
    """
    step_s = float(np.interp(num_tokens, curve.tokens, curve.mean_s))
    paced_s = np.ceil(work.cumsum() / max(num_tokens, 1)) * step_s
    found: FloatArray = np.maximum(done_s, np.minimum(paced_s, aim_s))
    return found
