"""Heavier promises first, where that makes no lighter one late (control.md section 4).

Owns that one change of the order of deadlines. Must not choose who is on time.
"""

from __future__ import annotations

import numpy as np

from controller.policy.facts import IntArray
from controller.policy.ordering import BoolArray
from costmodel.features import FloatArray

# Places of a queue that are looked at: nobody behind them is computed soon.
MOST_MOVED = 64


def heavier_first(
    work_s: FloatArray,
    spare_s: FloatArray,
    weight: FloatArray,
    priority: FloatArray,
    is_movable: BoolArray,
) -> tuple[IntArray, FloatArray] | None:
    """Return the order in which requests of a queue that are all on time are served, as places (n,)
    of the given one, and how many seconds later than in that each is done (negative: earlier);
    None where nothing changes.

    `work_s` are seconds of work in the given order, `spare_s` how long before its deadline each is
    done, +inf without one. Deadlines decide who can be on time, and predictions err: so whoever
    weighs more is moved ahead of those who weigh less, one after another, while each of them is
    still on time behind it. `priority` stands above: nobody passes a more urgent one. Only
    `is_movable` ones move, and only among the first `MOST_MOVED`.
    """
    num = min(weight.size, MOST_MOVED)
    if not (is_movable[1:num] & (weight[1:num] > np.minimum.accumulate(weight[:num])[:-1])).any():
        return None
    order: list[int] = []
    spare, work = spare_s[:num].tolist(), work_s[:num].tolist()
    weights, priorities = weight[:num].tolist(), priority[:num].tolist()
    movable = is_movable[:num].tolist()
    later_s = np.zeros(weight.size)
    is_moved = False
    for place in range(num):
        at = len(order)
        while at and movable[place]:
            before = order[at - 1]
            if (
                weights[before] >= weights[place]
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
    return np.concatenate((np.array(order, dtype=np.intp), np.arange(num, weight.size))), later_s
