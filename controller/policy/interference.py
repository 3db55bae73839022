"""Who has not come yet and will be served before somebody who waits: later arrivals that are due
earlier.

Owns that forecast for prompts. Must not know a request, a step or a clock.
"""

from __future__ import annotations

import numpy as np

from controller.policy.demand import Expected
from controller.policy.facts import least
from controller.policy.ordering import BoolArray
from costmodel.features import FloatArray

# Whoever is refused for the sake of arrivals that then do not come is lost for nothing: those who
# are expected count half as much as those who are there, and as far as such were served. A prompt
# so many times as long as theirs is worth less than they are even if some do not come, and those
# who were refused may have been refused for its like: it counts them in full.
_WEIGHT_OF_EXPECTED = 0.5
_SHORTER = 4.0


def overtaken_s(
    expected: Expected,
    token_s: FloatArray,
    pace: float,
    done_s: FloatArray,
    left_s: FloatArray,
    num_tokens: FloatArray,
    weight: FloatArray,
    is_passable: BoolArray,
) -> FloatArray:
    """Return when each of the ordered requests is done, (n,) seconds from now, if arrivals go on as
    expected: not before `done_s` (n,), which is without them.

    `token_s` (c,) are the seconds per prompt token of each class, `left_s` (n,) those to the paced
    deadlines, `num_tokens` (n,) and `weight` (n,) theirs. Of class j, which takes the share s_j of
    the machine, those pass a request with L seconds left that come while it waits and within
    L - pace·T_j: they are due before it. So it is done at the least
    f = done + Σ s_j min(f, L - pace·T_j), as in the response time of a task under tasks of higher
    priority. Only classes whose tokens per weight are
    no more than its own count: the others are dropped for its sake, not it for theirs. A share is
    halved, and only what was served of it counts, unless the prompts are four times shorter. Who is
    not `is_passable` (n,) goes first whenever it is due.
    """
    ttft_s = pace * expected.ttft_s
    is_open = is_passable & (left_s < np.inf) & (done_s > least(ttft_s)) & (done_s < left_s)
    who = is_open.nonzero()[0]
    if not who.size:
        return done_s
    # The latest targets first: those are the classes with the least time to pass somebody.
    order = (-ttft_s).argsort(kind="stable")
    order = order[ttft_s[order] < np.inf]
    share = (expected.rate * expected.num_prompt * token_s)[order]
    likely = _WEIGHT_OF_EXPECTED * share * expected.share_served[order]
    class_tokens = expected.num_prompt[order]
    class_cost = class_tokens / expected.weight[order]
    own_tokens = num_tokens[who, None]
    is_cheaper = class_cost <= own_tokens / np.maximum(weight[who, None], 1e-9)
    shares = np.where(is_cheaper, likely, 0.0)
    shares = np.where(is_cheaper & (_SHORTER * class_tokens <= own_tokens), share, shares)
    windows_s = np.maximum(left_s[who, None] - ttft_s[order], 0.0)
    # Piecewise straight in f: beyond a window its class has passed as a whole, before it goes on.
    passed_s = done_s[who].copy()
    going_on = shares.sum(axis=1)
    found_s = np.full(who.size, np.inf)
    for j in range(order.size):
        slower = np.where(going_on < 1.0, 1.0 - going_on, np.nan)
        until_s = passed_s / slower
        found_s = np.where(until_s <= windows_s[:, j], np.minimum(found_s, until_s), found_s)
        passed_s += shares[:, j] * windows_s[:, j]
        going_on -= shares[:, j]
    later_s = done_s.copy()
    later_s[who] = np.minimum(found_s, passed_s)
    return later_s
