"""Whom to serve in time, and whom not: predicted first tokens and the on-time set (control.md 3.5
and 5).

Owns pure functions over the ordered queue. Must not turn anybody away: verdicts are made elsewhere.
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import NamedTuple

import numpy as np

from controller.policy.alternating import sustained_rate
from controller.policy.attention import OwnPast
from controller.policy.budget import made_safe
from controller.policy.facts import IntArray, greatest, least
from controller.policy.ordering import BoolArray, PrefillQueue
from controller.policy.settings import PolicyConfig
from controller.policy.steady import SteadyCurve
from costmodel.base import CostModel
from costmodel.features import NUM_FEATURES, FloatArray

# Chunks that are smaller gain nothing on an idle server: every step costs its floor.
_LEAST_CHUNK = 128
# Whoever is worth so many times as much as another one is served in time even if everything takes
# longer by `_INSURANCE` than predicted, at the other one's cost.
_INSURED_RATIO = 4.0
_INSURANCE = 0.1
_MOST_INSURED = 64


class Outlook(NamedTuple):
    """How the rate for prompts is expected to change as running streams end.

    `ends_s` (m,) are seconds until each of them ends, rising; `periods_s` (m + 1,) the shortest
    paced period among those that are left before the first end, after it, and so on; `relief_s` is
    what a step costs less per stream that has ended.
    """

    ends_s: FloatArray
    periods_s: FloatArray
    relief_s: float

    @classmethod
    def still(cls, period_s: float) -> Outlook:
        """Nobody ends: the rate stays what it is now."""
        return cls(np.empty(0), np.array([period_s]), 0.0)


def drain_s(
    steady: SteadyCurve,
    queue: PrefillQueue,
    outlook: Outlook,
    quota_rate: float,
    longest_s: float = math.inf,
    own_past: OwnPast | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Predict when the ordered queue is done at the rate that the decodes allow.

    Returns seconds of work per request (n,) and seconds from now until each is done (n,). The rate
    beside request k is the best one that keeps the period of the running decodes and of all
    requests before k, which will be decoding by then (`alternating.py`); `quota_rate` tokens per
    second where there is none; no step is longer than
    `longest_s`. Each stream that ends leaves its share of the step, and its claim to
    a period, to the prompts. `own_past` knows what tokens cost behind their own past; without it
    they all cost what those at the head of the queue do.
    """
    if not outlook.ends_s.size:
        period_s = float(outlook.periods_s[0])
        return _drain_still(steady, queue, period_s, quota_rate, longest_s, own_past)
    curve, steered_s = steady.curve, steady.steered_s
    num_ended = np.arange(outlook.ends_s.size + 1)
    starts_s = np.zeros(num_ended.size)
    starts_s[1:] = outlook.ends_s
    before_s, stretches = _stretches(queue, greatest(outlook.periods_s))
    amount = queue.remaining
    if own_past is not None:
        nearest_s = np.minimum(before_s, float(outlook.periods_s[0]))
        amount = own_past.weighed(amount, queue.past, nearest_s, stretches, longest_s)
    total = amount.cumsum()
    work_s, done_s = np.empty(total.size), np.empty(total.size)
    free_s = 0.0
    for start, stop in stretches:
        periods_s: FloatArray = np.minimum(outlook.periods_s, before_s[start])
        saved_s: FloatArray = np.multiply(num_ended, outlook.relief_s, dtype=np.float64)
        rate = sustained_rate(curve, steered_s, periods_s, saved_s, longest_s)
        budget = rate.tokens
        is_open = budget >= 1.0
        token_s = np.maximum(np.where(is_open, rate.token_s, 1.0 / quota_rate), 1e-12)
        # Tokens that can be computed before each change of the rate, once those before are done.
        from_s = np.maximum(starts_s, free_s)
        reached = np.zeros(from_s.size)
        ((from_s[1:] - from_s[:-1]) / token_s[:-1]).cumsum(out=reached[1:])
        wanted = total[start:stop] - (total[start - 1] if start else 0.0)
        stage = reached.searchsorted(wanted, side="left") - 1
        rate_s = token_s[stage]
        work_s[start:stop] = amount[start:stop] * rate_s
        beyond = wanted - reached[stage]
        end_s = from_s[stage] + beyond * rate_s
        # The last step of request k is rarely full, and a step costs more than its share of tokens.
        rest = np.where(is_open[stage], beyond % np.maximum(budget[stage], 1.0), 0.0)
        rest_s = np.interp(rest, curve.tokens, curve.mean_s) - saved_s[stage] - rest * rate_s
        done_s[start:stop] = end_s + np.where(rest >= 1.0, np.maximum(rest_s, 0.0), 0.0)
        free_s = float(end_s[-1])
    return work_s, done_s


def _drain_still(
    steady: SteadyCurve,
    queue: PrefillQueue,
    period_s: float,
    quota_rate: float,
    longest_s: float,
    own_past: OwnPast | None,
) -> tuple[FloatArray, FloatArray]:
    """`drain_s` where nobody ends: one rate per stretch, which most steps of a light load ask."""
    before_s, stretches = _stretches(queue, period_s)
    amount = queue.remaining
    if own_past is not None:
        amount = own_past.weighed(amount, queue.past, before_s, stretches, longest_s)
    total = amount.cumsum()
    work_s, done_s = np.empty(total.size), np.empty(total.size)
    free_s = 0.0
    curve = steady.curve
    for start, stop in stretches:
        token_s, budget, _ = steady.rate(float(before_s[start]), longest_s)
        is_open = budget >= 1.0
        token_s = max(token_s if is_open else 1.0 / quota_rate, 1e-12)
        wanted = total[start:stop] - (total[start - 1] if start else 0.0)
        np.multiply(amount[start:stop], token_s, out=work_s[start:stop])
        end_s = free_s + wanted * token_s
        free_s = float(end_s[-1])
        if is_open:
            # The last step of a request is rarely full, and costs more than its share of tokens.
            rest = wanted % budget
            rest_s = np.interp(rest, curve.tokens, curve.mean_s) - rest * token_s
            end_s += np.where(rest >= 1.0, np.maximum(rest_s, 0.0), 0.0)
        done_s[start:stop] = end_s
    return work_s, done_s


def _stretches(queue: PrefillQueue, first_s: float) -> tuple[FloatArray, list[tuple[int, int]]]:
    """Return the shortest period among those before each of the queue (the running streams' alone,
    `first_s`, for the first one), shape (n,), and the stretches over which it is the same: it falls
    along the queue, so there are few.
    """
    before_s = np.empty(len(queue))
    before_s[0] = first_s
    if before_s.size == 1:
        return before_s, [(0, 1)]
    before_s[1:] = queue.period_s[:-1]
    np.minimum.accumulate(before_s, out=before_s)
    falls = (before_s[1:] < before_s[:-1]).nonzero()[0] + 1
    return before_s, list(itertools.pairwise([0, *falls.tolist(), before_s.size]))


def late_set(
    work_s: FloatArray,
    time_left_s: FloatArray,
    weight: FloatArray,
    is_started: BoolArray,
    config: PolicyConfig,
) -> BoolArray:
    """Choose whom not to serve in time (Moore–Hodgson with weights), for work in the order in which
    it would be computed; all of shape (n,).

    Walk the order; at the first request that would be late drop the largest remaining work per
    weight among those so far, until it is on time. `weight` 0 (nothing to miss) is dropped before
    any promise, infinite weight never; started work counts `started_factor` times its weight.
    Returns the dropped ones, those included that cannot be on time even if served at once. Nobody
    who is left is late, whatever the order is; they are the most in the order of deadlines.
    """
    worth = np.where(is_started, config.started_factor, 1.0) * weight
    insured_s = _insured_s(worth, weight, time_left_s)
    if (work_s.cumsum() <= insured_s).all():
        return np.zeros(work_s.size, dtype=np.bool_)
    # Hopeless even if served at once: nobody else is dropped for its sake.
    is_dropped = work_s > time_left_s
    size = np.maximum(work_s, 1e-12) ** (1.0 - config.length_neutrality)
    cost = np.divide(size, worth, out=np.full(work_s.size, math.inf), where=worth > 0.0)
    rest = (~is_dropped).nonzero()[0]
    busy_s = work_s[rest].cumsum()
    late = busy_s > insured_s[rest]
    if not late.any():
        return is_dropped
    # Up to the first late one nobody is dropped.
    first = int(late.argmax())
    costs, works, lefts = (-cost[rest]).tolist(), work_s[rest].tolist(), time_left_s[rest].tolist()
    insured, worths, weights = insured_s[rest].tolist(), worth[rest].tolist(), weight[rest].tolist()
    heap = [(costs[k], -k) for k in range(first)]
    heapq.heapify(heap)
    busy = float(busy_s[first - 1]) if first else 0.0
    dropped: list[int] = []
    for k in range(first, rest.size):
        busy += works[k]
        heapq.heappush(heap, (costs[k], -k))
        while busy > lefts[k] and heap:
            out = -heapq.heappop(heap)[1]
            dropped.append(out)
            busy -= works[out]
            if out == k:
                break
        else:
            if busy > insured[k]:
                light = [(c, i) for c, i in heap if _INSURED_RATIO * worths[-i] <= weights[k]]
                paying = _least_sufficient(light, works, busy - insured[k])
                if paying:
                    heap = [item for item in heap if item not in paying]
                    heapq.heapify(heap)
                    dropped.extend(-i for _, i in paying)
                    busy -= sum(works[-i] for _, i in paying)
    is_dropped[rest[dropped]] = True
    return is_dropped


def _insured_s(worth: FloatArray, weight: FloatArray, time_left_s: FloatArray) -> FloatArray:
    """Return by when each of the ordered requests is to be done so that an error of the prediction
    costs it nothing: earlier than its deadline where its class weighs much more than somebody
    before it is worth. Only the first ones are insured: the others have their turn to be.
    """
    if _INSURED_RATIO * least(worth) > greatest(weight):
        return time_left_s
    is_insured = _INSURED_RATIO * np.minimum.accumulate(worth) <= weight
    is_insured[_MOST_INSURED:] = False
    return np.where(is_insured, time_left_s / (1.0 + _INSURANCE), time_left_s)


def _least_sufficient(
    light: list[tuple[float, int]], works: list[float], needed_s: float
) -> set[tuple[float, int]]:
    """Return those of the (negative cost, negative place) pairs whose work adds up to `needed_s`,
    the costliest first; none where all of it does not suffice.
    """
    paying: set[tuple[float, int]] = set()
    for item in sorted(light):
        if needed_s <= 0.0:
            break
        paying.add(item)
        needed_s -= works[-item[1]]
    return paying if needed_s <= 0.0 else set()


def late_starters(
    queue: PrefillQueue,
    possible: IntArray,
    delays_s: FloatArray,
    work_s: FloatArray,
    done_s: FloatArray,
    time_left_s: FloatArray,
    config: PolicyConfig,
) -> BoolArray:
    """Choose whom not to serve in time where some can only start later (`delays_s`, for the places
    `possible`; the others are lost).

    Prompts are then computed in the order of their starts: whoever waits for blocks keeps nobody
    waiting who has them. `done_s` (n,) is changed to when each of the possible ones is done.
    """
    is_late = np.ones(work_s.size, dtype=np.bool_)
    by_start = delays_s.argsort(kind="stable")
    order, start_s = possible[by_start], delays_s[by_start]
    work, left_s = work_s[order], time_left_s[order]
    busy_s = work.cumsum()
    # One after another, each from its start on; and as much later as the rate's changes make it.
    idle_s = np.maximum.accumulate(start_s - (busy_s - work))
    shift_s = np.maximum((done_s - work_s.cumsum())[order], 0.0)
    end_s = busy_s + np.maximum(idle_s, 0.0) + shift_s
    # Too late even if nobody else were served: nobody is dropped for its sake.
    alone_s = start_s + work
    work_left_s = np.where(alone_s > left_s, -1.0, left_s - (end_s - busy_s))
    dropped = late_set(work, work_left_s, queue.weight[order], queue.is_started[order], config)
    done_s[order] = np.maximum(end_s - np.where(dropped, work, 0.0).cumsum(), alone_s)
    is_late[order] = dropped
    return is_late


def predict_alone(cost_model: CostModel, num_prompt: FloatArray, most_tokens: int) -> FloatArray:
    """Predict the seconds to the first token of each request on an idle server, its prompt (n
    tokens each) in the chunks that are quickest: the largest that a step may hold (`most_tokens`),
    or a quarter, or a sixteenth of that; shape (n,).

    A model that has seen small chunks only may say far too much of a large one, and who is told
    that no server could do it must not be told so for that alone.
    """
    smaller = (most_tokens // 4, most_tokens // 16)
    sizes = [most_tokens, *(size for size in smaller if size >= _LEAST_CHUNK)]
    rows = np.zeros((2, len(sizes), num_prompt.size, NUM_FEATURES))
    size = np.array(sizes, dtype=np.float64)[:, None]
    num_full, rest = np.divmod(num_prompt, size)
    chunk = np.minimum(num_prompt, size)
    # All full chunks at their average past, (0 + ... + (k - 1)) / k chunks.
    rows[0, :, :, 0] = chunk
    rows[0, :, :, 3] = chunk * chunk * np.maximum(num_full - 1.0, 0.0) / 2.0
    rows[0, :, :, 4] = chunk * chunk
    rows[1, :, :, 0], rows[1, :, :, 3] = rest, rest * num_full * size
    rows[1, :, :, 4] = rest * rest
    mean_s = made_safe(cost_model.predict(rows.reshape(-1, NUM_FEATURES)).mean_s)
    full_s, rest_s = mean_s.reshape(2, len(sizes), num_prompt.size)
    first_token_s = np.where(num_full > 0.0, num_full * full_s, 0.0)
    quickest_s: FloatArray = (first_token_s + np.where(rest > 0.0, rest_s, 0.0)).min(axis=0)
    return quickest_s


def predict_decode_alone(cost_model: CostModel, num_prompt: FloatArray) -> FloatArray:
    """Predict the seconds of one decode step of each request on an idle server, shape (n,)."""
    rows = np.zeros((num_prompt.size, NUM_FEATURES))
    rows[:, 1], rows[:, 2] = 1.0, num_prompt + 1.0
    return made_safe(cost_model.predict(rows).mean_s)
