"""When the running streams' next tokens are due (control.md section 1): the time that a step may
take.

Owns pacing of decodes. Must not choose a budget or know a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from controller.policy.budget import DecodeLoad, PrefillLoad, latency_curve
from controller.policy.lengths import OutputLengths
from controller.policy.ordering import class_name, live_promise
from controller.policy.settings import PolicyConfig
from controller.policy.slo import Promise
from costmodel.base import CostModel
from engine.ports import RequestView

NO_PREFILL = PrefillLoad(np.empty(0), np.empty(0))
ZERO_TOKENS = np.zeros(1)
# Share of a decode-only step below which a target is given up; above it a prediction may be wrong.
_HOPELESS = 0.8


class Pacing(NamedTuple):
    """What the decodes allow.

    `limit_s` is the time until the first stream is due, for the mean of a step, `upper_limit_s`
    that for its upper bound, `period_s` the shortest period among the
    streams (both the gap limit without decodes). `decode_s` is the mean of a step without prefill.
    `tightest_id` and `slack_s` name the tightest stream that has a target; `is_gap_limited` says
    that a gap limit, not a target, set `limit_s`. `holds_periods` is False for a planner that lets
    nobody's pace bound its steps.
    """

    limit_s: float
    upper_limit_s: float
    period_s: float
    gap_limit_s: float
    decode_s: float
    tightest_id: str | None
    slack_s: float | None
    is_gap_limited: bool
    holds_periods: bool = True

    @property
    def upper_share(self) -> float:
        """What of an upper bound is held against `limit_s`, so that it fits `upper_limit_s`."""
        return self.limit_s / self.upper_limit_s if self.limit_s > 0.0 else 1.0


def pace_decodes(
    now: float,
    decodes: Sequence[RequestView],
    load: DecodeLoad,
    config: PolicyConfig,
    cost_model: CostModel,
    lengths: OutputLengths,
) -> Pacing:
    """Return when the decodes are due.

    A stream whose TPOT target is well below the mean of a step without any prefill (`_HOPELESS`)
    is hopeless: holding the prompts back would not save it, so only the gap limit speaks for it.
    Where a decode-only
    step itself comes near the gap limit the limit is twice that step, so that prompts can progress
    at all.
    """
    decode_s = float(latency_curve(cost_model, load, NO_PREFILL, ZERO_TOKENS).mean_s[0])
    gap_limit_s = max(config.gap_limit_s, 2.0 * decode_s)
    # The gap limit is paced like a target: the upper bound may reach it, the mean may not.
    pace, bank, upper_pace = config.pace, config.bank, config.upper_pace
    period_s = pace * gap_limit_s
    earliest_at = upper_at = now + gap_limit_s
    paced_at, tightest_id = math.inf, None
    for request in decodes:
        # A decode has emitted a token; a view that knows no instant of it counts from now.
        last_at = now if request.last_token_at is None else request.last_token_at
        if last_at + gap_limit_s < earliest_at:
            earliest_at = last_at + gap_limit_s
        promise = live_promise(request)
        if promise is None:
            continue
        target_s = stream_target_s(request, promise, last_at, lengths)
        if target_s < _HOPELESS * decode_s or target_s == math.inf:
            continue
        # Just below a decode step is within the noise of a prediction: not a cliff.
        target_s = max(target_s, decode_s)
        paced_s = pace * target_s
        if paced_s < period_s:
            period_s = paced_s
        next_at = last_at + paced_s
        if bank > 0.0 and promise.base_at is not None:
            deadline_at = promise.token_deadline_at(request.num_output_tokens + 1)
            if deadline_at < math.inf:
                next_at += bank * max(0.0, deadline_at - next_at)
        # Nothing of a loose stream can be the tightest: the worst case lies beyond the due instant.
        if last_at + target_s < upper_at or next_at < paced_at:
            worst_at = worst_due_at(request, last_at, target_s, upper_pace)
            upper_at = min(upper_at, max(worst_at, next_at))
        if next_at < paced_at:
            paced_at, tightest_id = next_at, request.request_id
    gap_at = earliest_at - (1.0 - pace) * gap_limit_s
    upper_at = min(upper_at, earliest_at)
    return Pacing(
        limit_s=min(gap_at, paced_at) - now,
        upper_limit_s=upper_at - now,
        period_s=period_s,
        gap_limit_s=gap_limit_s,
        decode_s=decode_s,
        tightest_id=tightest_id,
        slack_s=None if tightest_id is None else paced_at - now,
        is_gap_limited=gap_at < paced_at,
    )


def worst_due_at(
    request: RequestView, last_token_at: float, target_s: float, upper_pace: float
) -> float:
    """Until when the upper bound of a step may keep the stream waiting.

    A stream's promise is its mean from the first token on, (last - first)/(n - 1) ≤ p. One that is
    ahead of it does not lose it by one gap: the bound may reach the instant at which the mean is p
    again, at most `upper_pace`·p after the last token. One that is not ahead must have p at worst.
    """
    first_at = last_token_at if request.first_token_at is None else request.first_token_at
    even_at = first_at + request.num_output_tokens * target_s
    return max(last_token_at + target_s, min(even_at, last_token_at + upper_pace * target_s))


def stream_target_s(
    request: RequestView, promise: Promise, last_token_at: float, lengths: OutputLengths
) -> float:
    """The time per token that the promise asks of a running stream: p, or less where the end-to-end
    target needs it.

    The time left until a + E is shared among the tokens that are expected to come; a lost
    end-to-end target asks nothing.
    """
    target_s = math.inf if promise.slo.tpot_s is None else promise.slo.tpot_s
    if promise.slo.e2e_s is not None:
        num_expected = min(request.max_tokens, lengths.expected(class_name(request)))
        num_left = max(1, num_expected - request.num_output_tokens)
        left_s = promise.last_deadline_at - last_token_at
        if left_s > 0.0:
            target_s = min(target_s, left_s / num_left)
    return target_s
