"""Whom to serve in time, and whom not: predicted first tokens and the on-time set (control.md 3.5
and 5).

Owns pure functions over the ordered queue. Must not turn anybody away: verdicts are made elsewhere.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from controller.policy.budget import LatencyCurve, made_safe
from controller.policy.ordering import BoolArray, PrefillQueue
from controller.policy.settings import PolicyConfig
from costmodel.base import CostModel
from costmodel.features import NUM_FEATURES, FloatArray
from engine.ports import RequestView


def drain_s(
    curve: LatencyCurve,
    queue: PrefillQueue,
    decode_period_s: float,
    quota_rate: float,
    upper_share: float,
) -> tuple[FloatArray, FloatArray]:
    """Predict when the ordered queue is done at the rate that the decodes allow.

    Returns seconds of work per request (n,) and seconds from now until each is done (n,). The rate
    beside request k is that of the largest budget whose steered latency keeps the period of the
    running decodes (`decode_period_s`) and of all requests before k, which will be decoding by
    then; `quota_rate` tokens per second where not even one token fits.
    """
    period_s = np.minimum.accumulate(np.concatenate(([decode_period_s], queue.period_s[:-1])))
    budget = np.interp(period_s, curve.steered_s(upper_share), curve.tokens)
    step_s = np.interp(budget, curve.tokens, curve.mean_s)
    is_open = budget >= 1.0
    token_s = np.where(is_open, step_s / np.maximum(budget, 1.0), 1.0 / quota_rate)
    work_s = queue.remaining * token_s
    # The last step of request k is rarely full, and a step costs more than its share of tokens.
    rest = np.where(is_open, np.cumsum(queue.remaining) % np.maximum(budget, 1.0), 0.0)
    rest_s = np.interp(rest, curve.tokens, curve.mean_s) - rest * token_s
    return work_s, np.cumsum(work_s) + np.where(rest > 0.0, np.maximum(rest_s, 0.0), 0.0)


def late_set(
    work_s: FloatArray,
    time_left_s: FloatArray,
    weight: FloatArray,
    is_started: BoolArray,
    config: PolicyConfig,
) -> BoolArray:
    """Choose whom not to serve in time (Moore–Hodgson with weights), for work in deadline order;
    all of shape (n,).

    Walk the order; at the first request that would be late drop the largest remaining work per
    weight among those so far, until it is on time. `weight` 0 (nothing to miss) is dropped before
    any promise, infinite weight never; started work counts `started_factor` times its weight.
    Returns the dropped ones, those included that cannot be on time even if served at once.
    """
    if (np.cumsum(work_s) <= time_left_s).all():
        return np.zeros(work_s.size, dtype=np.bool_)
    # Hopeless even if served at once: nobody else is dropped for its sake.
    is_dropped = work_s > time_left_s
    worth = np.where(is_started, config.started_factor, 1.0) * weight
    size = np.maximum(work_s, 1e-12) ** (1.0 - config.length_neutrality)
    cost = np.divide(size, worth, out=np.full(work_s.size, math.inf), where=worth > 0.0)
    heap: list[tuple[float, int]] = []
    busy_s = 0.0
    for k, (work, left) in enumerate(zip(work_s.tolist(), time_left_s.tolist(), strict=True)):
        if is_dropped[k]:
            continue
        busy_s += work
        heapq.heappush(heap, (-float(cost[k]), -k))
        while busy_s > left and heap:
            dropped = -heapq.heappop(heap)[1]
            is_dropped[dropped] = True
            busy_s -= work_s[dropped]
            if dropped == k:
                break
    return is_dropped


class Alone(NamedTuple):
    """What requests would see on an idle server: seconds to the first token, and per decode step;
    shape (n,).
    """

    first_token_s: FloatArray
    decode_s: FloatArray


def predict_alone(
    cost_model: CostModel, requests: Sequence[RequestView], most_tokens: int
) -> Alone:
    """Predict the mean for each request alone, its prompt in the largest chunks (`most_tokens`)
    that a step may hold.
    """
    prompt = np.array([request.num_prompt_tokens for request in requests], dtype=np.float64)
    num_full, rest = np.divmod(prompt, most_tokens)
    rows = np.zeros((3, prompt.size, NUM_FEATURES))
    chunk = np.minimum(prompt, most_tokens)
    # All full chunks at their average past, (0 + ... + (k - 1)) / k chunks.
    rows[0, :, 0], rows[0, :, 3] = chunk, chunk * chunk * np.maximum(num_full - 1.0, 0.0) / 2.0
    rows[0, :, 4] = chunk * chunk
    rows[1, :, 0], rows[1, :, 3], rows[1, :, 4] = rest, rest * num_full * most_tokens, rest * rest
    rows[2, :, 1], rows[2, :, 2] = 1.0, prompt + 1.0
    mean_s = made_safe(cost_model.predict(rows.reshape(-1, NUM_FEATURES)).mean_s)
    full_s, rest_s, decode_s = mean_s.reshape(3, prompt.size)
    first_token_s = np.where(num_full > 0.0, num_full * full_s, 0.0)
    return Alone(first_token_s + np.where(rest > 0.0, rest_s, 0.0), decode_s)
