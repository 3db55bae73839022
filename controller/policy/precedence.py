"""Heavier promises first, where that makes no lighter one late (control.md section 4).

Owns that one change of the order of deadlines. Must not choose who is on time.
"""

from __future__ import annotations

import numpy as np

from controller.policy.facts import IntArray
from costmodel.features import FloatArray


def heavier_first(
    work_s: FloatArray, spare_s: FloatArray, weight: FloatArray, priority: FloatArray
) -> tuple[IntArray, FloatArray] | None:
    """Return the order in which requests of a queue that are all on time are served, as places (n,)
    of the given one, and how many seconds later than in that each is done (negative: earlier);
    None where nothing changes.

    `work_s` are seconds of work in the given order, `spare_s` how long before its deadline each is
    done, +inf without one. Deadlines decide who can be on time, and predictions err: so whoever
    weighs more is moved ahead of those who weigh less, one after another, while each of them is
    still on time behind it. `priority` stands above: nobody passes a more urgent one.
    """
    falls = weight[1:] > weight[:-1]
    if not falls.any():
        return None
    order: list[int] = []
    spare, work, weights, priorities = (
        spare_s.tolist(),
        work_s.tolist(),
        weight.tolist(),
        priority.tolist(),
    )
    later_s = [0.0] * len(work)
    is_moved = False
    for place, weight_here in enumerate(weights):
        at = len(order)
        while at:
            before = order[at - 1]
            if (
                weights[before] >= weight_here
                or spare[before] < work[place]
                or priorities[before] < priorities[place]
            ):
                break
            at -= 1
        for passed in order[at:]:
            spare[passed] -= work[place]
            later_s[passed] += work[place]
            later_s[place] -= work[passed]
        is_moved = is_moved or at < len(order)
        order.insert(at, place)
    if not is_moved:
        return None
    return np.array(order, dtype=np.intp), np.array(later_s)
