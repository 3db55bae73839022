"""When the running streams' next tokens are due (control.md section 1): the time that a step may
take.

Owns pacing of decodes. Must not choose a budget or know a prompt.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from controller.policy.alternating import NO_BANKS, Banks
from controller.policy.budget import safe_number
from controller.policy.facts import (
    E2E_S,
    MAX_TOKENS,
    PROMISED_AT,
    TPOT_S,
    IntArray,
    RunningTable,
    greatest,
    least,
)
from controller.policy.settings import PolicyConfig
from costmodel.base import CostModel
from costmodel.features import NUM_FEATURES, FloatArray

# Share of a decode-only step below which a target is given up; above it a prediction may be wrong.
_HOPELESS = 0.8
# A stream may be behind its paced mean, in steps that prompts have for themselves, by what the pace
# keeps back of so many gaps: an answer that has as many keeps its target all the same.
_MOST_BEHIND = 16.0


class Pacing(NamedTuple):
    """What the decodes allow.

    `limit_s` is the time until the first stream is due, for the mean of a step, `upper_limit_s`
    that for its upper bound, `period_s` the shortest period among the
    streams (both the gap limit without decodes). `decode_s` and `decode_upper_s` are the mean and
    the upper bound of a step without prefill, `empty_s` the mean of one without decodes too.
    `tightest_id` and `slack_s` name the tightest stream that has a target; `is_gap_limited` says
    that a gap limit, not a target, set `limit_s`. `gap_left_s` is the time until the mean
    of a step meets the gap limit, `banks` what the streams with targets have in hand.
    """

    limit_s: float
    upper_limit_s: float
    period_s: float
    gap_limit_s: float
    decode_s: float
    decode_upper_s: float
    empty_s: float
    tightest_id: str | None
    slack_s: float | None
    is_gap_limited: bool
    holds_periods: bool = True
    gap_left_s: float = math.inf
    banks: Banks = NO_BANKS

    @property
    def is_paced(self) -> bool:
        """Whether a running stream has a token promise that can be kept."""
        return self.tightest_id is not None

    @property
    def upper_share(self) -> float:
        """What of an upper bound is held against `limit_s`, so that it fits `upper_limit_s`."""
        return self.limit_s / self.upper_limit_s if self.limit_s > 0.0 else 1.0


def pace_decodes(
    now: float,
    decodes: RunningTable,
    num_expected: FloatArray,
    config: PolicyConfig,
    cost_model: CostModel,
    *,
    num_least: FloatArray | None = None,
) -> Pacing:
    """Return when the decodes of a step (the first of the table) are due; `num_expected` (n,) are
    the output tokens that are expected of them, `num_least` (n,) those that hardly any will end
    before: without them `banks` counts no reserve.

    A stream whose TPOT target is well below the mean of a step without any prefill (`_HOPELESS`)
    is hopeless: holding the prompts back would not save it, so only the gap limit speaks for it.
    Where a decode-only step itself comes near the gap limit the limit is twice that step, so that
    prompts can progress at all.

    `bank` lets a stream spend what it has in hand of its mean: the next token may come up to that
    share of the way to first + n·pace·p. Not of the way to Dₙ: TPOT counts from the first token,
    however early it was, so what an early one has left of T buys no later token any time.
    """
    num = decodes.num_decodes
    rows = np.zeros((2, NUM_FEATURES))
    rows[1, 1], rows[1, 2] = decodes.load
    alone = cost_model.predict(rows)
    empty_s, decode_s = map(safe_number, alone.mean_s.tolist())
    decode_s = max(empty_s, decode_s)
    decode_upper_s = max(decode_s, safe_number(float(alone.upper_s[1])))
    gap_limit_s = max(config.gap_limit_s, 2.0 * decode_s)
    # The gap limit is paced like a target: the upper bound may reach it, the mean may not.
    pace = config.pace
    period_s = pace * gap_limit_s
    earliest_at = upper_at = now + gap_limit_s
    paced_at, banks, tightest_id = math.inf, NO_BANKS, None
    if num:
        requests = decodes.requests
        # A decode has emitted a token; a view that knows no instant of it counts from now.
        last_at = _instants([request.last_token_at for request in requests[:num]], now)
        earliest_at = min(earliest_at, least(last_at) + gap_limit_s)
        target_s = stream_targets_s(decodes, last_at, num_expected)
        live = ((target_s >= _HOPELESS * decode_s) & (target_s < math.inf)).nonzero()[0]
        if live.size:
            places: IntArray | slice = live
            if live.size == num:
                # As most often; and then nothing need be copied.
                streams, places = requests[:num], slice(num)
            else:
                streams = [requests[i] for i in live.tolist()]
            last_at = last_at[places]
            # Just below a decode step is within the noise of a prediction: not a cliff.
            target_s = np.maximum(target_s[places], decode_s)
            paced_s = pace * target_s
            period_s = min(period_s, least(paced_s))
            next_at = last_at + paced_s
            first_at = _instants([request.first_token_at for request in streams], last_at)
            num_output = decodes.num_output[places]
            tpot_s = decodes.facts[TPOT_S, places]
            is_even = tpot_s <= target_s
            # Due where the mean since the first token would leave its pace. What an end-to-end
            # target leaves is shared anew at every token: only what the pace keeps back is in hand.
            due_at = np.where(is_even, first_at + num_output * (pace * tpot_s), next_at)
            if not is_even.all():
                left_s = np.where(is_even, 0.0, _last_due_at(decodes)[places] - last_at)
                due_at += (1.0 - pace) * np.maximum(left_s, 0.0)
            in_hand_s = due_at - now
            if num_least is not None:
                # Its own reserve brings a stream back that is behind by no more than what so many
                # of its gaps keep back: one less than there will be tokens, but one for each that
                # there is.
                num_tokens = np.minimum(num_least[:num][places], decodes.facts[MAX_TOKENS, places])
                num_gaps = np.minimum(np.maximum(num_tokens - 1.0, num_output), _MOST_BEHIND)
                in_hand_s += np.where(is_even, (1.0 - pace) * num_gaps * target_s, 0.0)
            banks = Banks(in_hand_s, paced_s)
            if config.bank > 0.0:
                saved_s = np.where(is_even, np.maximum(due_at - next_at, 0.0), 0.0)
                next_at += config.bank * saved_s
            even_at = first_at + num_output * target_s
            worst_at = worst_due_at(even_at, last_at, target_s, config.upper_pace)
            upper_at = min(upper_at, least(np.maximum(worst_at, next_at)))
            tightest = int(next_at.argmin())
            paced_at = float(next_at[tightest])
            tightest_id = streams[tightest].request_id
    gap_at = earliest_at - (1.0 - pace) * gap_limit_s
    upper_at = min(upper_at, earliest_at)
    return Pacing(
        limit_s=min(gap_at, paced_at) - now,
        upper_limit_s=upper_at - now,
        period_s=period_s,
        gap_limit_s=gap_limit_s,
        decode_s=decode_s,
        decode_upper_s=decode_upper_s,
        empty_s=empty_s,
        tightest_id=tightest_id,
        slack_s=None if tightest_id is None else paced_at - now,
        is_gap_limited=gap_at < paced_at,
        gap_left_s=gap_at - now,
        banks=banks,
    )


def worst_due_at(
    even_at: FloatArray, last_at: FloatArray, target_s: FloatArray, upper_pace: float
) -> FloatArray:
    """Until when the upper bound of a step may keep each stream waiting, shape (n,).

    A stream's promise is its mean from the first token on, (last - first)/(n - 1) ≤ p. One that is
    ahead of it does not lose it by one gap: the bound may reach the instant at which the mean is p
    again (`even_at`), at most `upper_pace`·p after the last token. One that is not ahead must have
    p at worst.
    """
    return np.maximum(last_at + target_s, np.minimum(even_at, last_at + upper_pace * target_s))


def _last_due_at(decodes: RunningTable) -> FloatArray:
    """When the last token of each running stream is due by its end-to-end target."""
    facts = decodes.facts[:, : decodes.num_decodes]
    due_at: FloatArray = facts[PROMISED_AT] + facts[E2E_S]
    return due_at


def stream_targets_s(
    decodes: RunningTable, last_at: FloatArray, num_expected: FloatArray
) -> FloatArray:
    """The time per token that the promise asks of each running stream: p, or less where the
    end-to-end target needs it; +inf without either.

    The time left until a + E is shared among the tokens that are expected to come; a lost
    end-to-end target asks nothing.
    """
    num = decodes.num_decodes
    facts = decodes.facts[:, :num]
    target_s: FloatArray = facts[TPOT_S]
    if least(facts[E2E_S]) < math.inf:
        num_total = np.minimum(facts[MAX_TOKENS], num_expected[:num])
        num_left = np.maximum(num_total - decodes.num_output[:num], 1.0)
        left_s = _last_due_at(decodes) - last_at
        target_s = np.where(left_s > 0.0, np.minimum(target_s, left_s / num_left), target_s)
    return target_s


def _instants(instants: list[float | None], otherwise: float | FloatArray) -> FloatArray:
    """Return the instants as an array, those that are not known replaced."""
    # None becomes not a number.
    known = np.array(instants, dtype=np.float64)
    is_all_known = not math.isnan(greatest(known))
    return known if is_all_known else np.where(np.isnan(known), otherwise, known)
