"""When those would be served who are given up: behind everybody who is kept.

Owns the predictions that refusals and waiting requests without a promise are told. Must not decide
who is given up.
"""

from __future__ import annotations

import numpy as np

from controller.policy.capacity import Intake
from controller.policy.facts import IS_QUEUED, IntArray
from controller.policy.ordering import BoolArray, PrefillQueue
from costmodel.features import FloatArray

# Of those who are refused in one step, so many are looked at one by one.
_MOST_ALONE = 8


def given_up_s(
    queue: PrefillQueue,
    is_late: BoolArray,
    work_s: FloatArray,
    done_s: FloatArray,
    passed_s: FloatArray,
    rest_s: FloatArray,
    intake: Intake,
    step_s: float,
    is_kept_out: BoolArray,
) -> tuple[FloatArray, FloatArray]:
    """Return `done_s`, seconds until the first tokens of the ordered queue, with those of the late
    ones put right, and how much of that is for want of a seat or blocks; all of shape (n,).

    Work comes after that of all who are kept, and of those late ones before it whose class queues:
    the others are refused, or stand alone behind them. So do seats and blocks. `passed_s` is what
    those who are expected take meanwhile, `rest_s` what everybody needs beyond work: a last step
    that is not full, a step that streams bank for.
    """
    is_queued = is_late & (queue.facts_at(np.arange(len(queue)))[IS_QUEUED] > 0.0)
    behind_s = np.where(is_queued, work_s, 0.0).cumsum() + np.where(is_queued, 0.0, work_s)
    kept_s = float(done_s[~is_late].max(initial=0.0))
    late_s = kept_s + behind_s
    longer_s = np.zeros(len(queue))
    waits_s = _waits_s(queue, is_late, is_queued, intake, step_s, is_kept_out)
    if waits_s is not None:
        start_s = waits_s + work_s + np.maximum(rest_s, 0.0)
        np.maximum(start_s - late_s, 0.0, where=is_late, out=longer_s)
    return np.where(is_late, late_s + longer_s + passed_s, done_s), longer_s


def _waits_s(
    queue: PrefillQueue,
    is_late: BoolArray,
    is_queued: BoolArray,
    intake: Intake,
    step_s: float,
    is_kept_out: BoolArray,
) -> FloatArray | None:
    """Return how long each of the late ones waits for a seat and blocks, 0 for the others; None if
    nobody has to.

    None of those who are refused waits for another one: each stands alone behind the rest, but for
    those beyond the first `_MOST_ALONE`, who would wait longer than they are worth the look.
    """
    # In the order of service: False comes before True.
    order: IntArray = np.lexsort((is_late & ~is_queued, is_late))
    delays_s = intake.start_delays_s(queue, order, step_s, is_kept_out)
    if delays_s is None:
        return None
    waits_s = np.zeros(len(queue))
    waits_s[order] = delays_s
    num_out = int((is_late & ~is_queued).sum())
    staying, out = order[: order.size - num_out], order[order.size - num_out :]
    # The first of them stands alone as it is.
    for place in out[1 : _MOST_ALONE + 1]:
        alone_s = intake.start_delays_s(queue, np.append(staying, place), step_s, is_kept_out)
        waits_s[place] = 0.0 if alone_s is None else alone_s[-1]
    waits_s[~is_late] = 0.0
    return waits_s
