"""How many prompt tokens a step may and must compute: N⁺, N⁻ and the choice between them
(control.md section 3).

Owns pure functions over arrays; every prediction is one call for all candidates. Must not know a
request, a block or a clock.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from costmodel.base import CostModel
from costmodel.features import NUM_FEATURES, FloatArray

# Candidates grow by about √2, so that 26 of them span 1 to 8192 tokens; N⁺ is refined afterwards.
_GROWTH = 2.0**0.5
# Linear candidates inside a bracket of that grid.
_REFINED = 9
# Candidates around a guess inside such a bracket.
_STEPS = np.floor(2.0 ** np.arange(0.0, 12.0, 1.0))
_AROUND = np.concatenate((-_STEPS[::-1], [0.0], _STEPS))
# An infeasible latency: larger than any limit, yet finite, so that arithmetic stays finite.
WORST_S = 1e9


class DecodeLoad(NamedTuple):
    """The decodes of a step: how many, and the KV tokens that they read (new tokens included)."""

    num_requests: int
    context_tokens: int


class PrefillLoad:
    """Prompt work in the order in which it is served: tokens left to compute, and tokens computed
    before, shape (n,).

    `ends` are the running sums of `amounts`.
    """

    __slots__ = ("_before", "amounts", "ends", "past")

    def __init__(self, amounts: FloatArray, past: FloatArray) -> None:
        self.amounts = amounts
        self.past = past
        self.ends: FloatArray = amounts.cumsum()
        self._before: FloatArray | None = None

    @property
    def num_tokens(self) -> int:
        """All tokens of the work."""
        return int(self.ends[-1]) if self.ends.size else 0

    def head(self, num_tokens: int) -> PrefillLoad:
        """Return the pieces that a budget of `num_tokens` can reach."""
        num_pieces = int(self.ends.searchsorted(num_tokens)) + 1
        if num_pieces >= self.amounts.size:
            return self
        return PrefillLoad(self.amounts[:num_pieces], self.past[:num_pieces])

    def begins(self, other: PrefillLoad) -> bool:
        """Whether `other` begins with this work, its last piece cut perhaps."""
        num = self.amounts.size
        if num > other.amounts.size:
            return False
        # Few pieces: lists are compared faster than arrays.
        amounts, others = self.amounts.tolist(), other.amounts[:num].tolist()
        is_alike: bool = amounts[:-1] == others[:-1] and amounts[-1] <= others[-1]
        return is_alike and self.past.tolist() == other.past[:num].tolist()

    def chunks(self, num_tokens: int) -> list[int]:
        """Return what a budget gives to the pieces, first come, first filled; those that get
        nothing are left out.
        """
        chunks = []
        for amount in self.amounts.tolist():
            if num_tokens < 1:
                break
            chunks.append(min(num_tokens, int(amount)))
            num_tokens -= chunks[-1]
        return chunks

    def features(self, num_tokens: int, decodes: DecodeLoad) -> FloatArray:
        """Return what `fill_features` says of one budget, beside the decodes; shape (1,
        NUM_FEATURES).
        """
        chunks = self.chunks(num_tokens)
        past_tokens = squared = num_whole = 0
        for chunk, past, amount in zip(chunks, self.past, self.amounts, strict=False):
            past_tokens += chunk * int(past)
            squared += chunk * chunk
            num_whole += int(chunk == amount)
        row = [num_tokens, *decodes, past_tokens, squared, len(chunks), num_whole]
        return np.array([row], dtype=np.float64)

    def fill_features(self, num_tokens: FloatArray, rows: FloatArray) -> None:
        """Write what budgets of `num_tokens` (c,) compute, first come, first filled, into the
        columns of `rows` (c, NUM_FEATURES) that say how the tokens are spread.
        """
        if self._before is None:
            self._before = self._sum_before()
        num_whole = self.ends.searchsorted(num_tokens, side="right")
        num_before, sum_past, sum_squared, past = self._before.take(num_whole, axis=1)
        # Beyond the last piece nothing is left to compute.
        chunk = np.minimum(num_tokens, self.ends[-1])
        chunk -= num_before
        past *= chunk
        np.add(sum_past, past, out=rows[:, 3])
        np.add(sum_squared, chunk * chunk, out=rows[:, 4])
        np.add(num_whole, chunk > 0.0, out=rows[:, 5])
        rows[:, 6] = num_whole

    def _sum_before(self) -> FloatArray:
        """Tokens, Σ chunk·past and Σ chunk² of the pieces before the k-th, and its past, k = 0 ..
        n; shape (4, n + 1).
        """
        before = np.zeros((4, self.amounts.size + 1))
        before[0, 1:] = self.ends
        np.multiply(self.amounts, self.past, out=before[1, 1:])
        np.multiply(self.amounts, self.amounts, out=before[2, 1:])
        np.add.accumulate(before[1:3], axis=1, out=before[1:3])
        before[3, :-1] = self.past
        return before


class LatencyCurve(NamedTuple):
    """Predicted seconds of steps with `tokens` prompt tokens beside the decodes, shape (c,), tokens
    rising from 0.

    `mean_s` and `upper_s` never fall along the curve, are finite and at most `WORST_S`.
    """

    tokens: FloatArray
    mean_s: FloatArray
    upper_s: FloatArray

    def steered_s(self, upper_share: float) -> FloatArray:
        """What is held against a paced limit: the mean, or `upper_share` of the upper bound if
        more.
        """
        return np.maximum(self.mean_s, upper_share * self.upper_s)


@lru_cache(maxsize=256)
def candidate_tokens(most_tokens: int) -> FloatArray:
    """Return 0, 1, 2, ... growing by √2, and `most_tokens`; strictly rising integers as floats.

    The array is shared between calls and read-only.
    """
    num_powers = 0 if most_tokens < 1 else math.ceil(math.log(most_tokens, _GROWTH)) + 1
    powers = np.floor(_GROWTH ** np.arange(num_powers))
    tokens = np.unique(np.concatenate(([0.0], np.minimum(powers, most_tokens))))
    tokens.flags.writeable = False
    return tokens


def latency_curve(
    cost_model: CostModel, decodes: DecodeLoad, load: PrefillLoad, num_tokens: FloatArray
) -> LatencyCurve:
    """Predict the steps that compute `num_tokens` (c,) prompt tokens of the ordered work, all in
    one call.

    Σ chunk·past and Σ chunk² follow how each budget is spread over the work. What a model answers
    is made safe here: not a number counts as `WORST_S`, and more work is never cheaper.
    """
    # A feature after the other in memory: that is how they are filled and read.
    columns = np.zeros((NUM_FEATURES, num_tokens.size))
    columns[0] = num_tokens
    columns[1] = decodes.num_requests
    columns[2] = decodes.context_tokens
    features = columns.T
    if load.amounts.size:
        load.fill_features(num_tokens, features)
    mean_s, upper_s = cost_model.predict(features)
    mean_s = made_safe(mean_s)
    np.maximum.accumulate(mean_s, out=mean_s)
    upper_s = made_safe(upper_s)
    np.maximum.accumulate(upper_s, out=upper_s)
    return LatencyCurve(num_tokens, mean_s, np.maximum(mean_s, upper_s, out=upper_s))


def made_safe(latency_s: FloatArray) -> FloatArray:
    """Return what a model answered within [0, `WORST_S`]; not a number becomes the worst."""
    # fmin and fmax prefer a number to NaN.
    safe_s: FloatArray = np.fmin(latency_s, WORST_S)
    return np.fmax(safe_s, 0.0, out=safe_s)


def safe_number(latency_s: float) -> float:
    """`made_safe` of one number."""
    if 0.0 <= latency_s <= WORST_S:
        return latency_s
    return 0.0 if latency_s < 0.0 else WORST_S


def step_seconds(
    cost_model: CostModel, decodes: DecodeLoad, load: PrefillLoad, num_tokens: int
) -> tuple[float, float]:
    """Return mean and upper seconds of the step that computes so many prompt tokens of the work."""
    mean_s, upper_s = cost_model.predict(load.features(num_tokens, decodes))
    mean = safe_number(float(mean_s[0]))
    return mean, max(mean, safe_number(float(upper_s[0])))


def most_tokens_within(
    cost_model: CostModel,
    decodes: DecodeLoad,
    load: PrefillLoad,
    curve: LatencyCurve,
    limit_s: float,
    upper_share: float,
) -> int:
    """N⁺: the most prompt tokens whose steered latency is at most `limit_s`; 0 if not one fits.

    One more call asks around the point that a straight line between the bracket's ends gives, ever
    less finely away from it: exact where the model is straight, and never above the limit.
    """
    tokens, steered_s = curve.tokens, curve.steered_s(upper_share)
    fits = int(steered_s.searchsorted(limit_s, side="right")) - 1
    if fits < 0:
        return 0
    if fits + 1 >= tokens.size or tokens[fits + 1] - tokens[fits] < 2.0:
        return int(tokens[fits])
    low, high = float(tokens[fits]), float(tokens[fits + 1])
    low_s, high_s = float(steered_s[fits]), float(steered_s[fits + 1])
    guess = math.floor(low + (high - low) * (limit_s - low_s) / (high_s - low_s))
    inner = np.minimum(np.maximum(guess + _AROUND, low), high)
    inside_s = latency_curve(cost_model, decodes, load, inner).steered_s(upper_share)
    # The bracket's lower end keeps its verdict, whatever the model says of the inside.
    found = int(inside_s.searchsorted(limit_s, side="right")) - 1
    return int(low if found < 0 else min(inner[found], high - 1.0))


def probed_tokens(curve: LatencyCurve, limit_s: float, most_tokens: int) -> int:
    """The prompt tokens, at most `most_tokens`, whose MEAN is at most `limit_s`; 0 if not one fits.

    For a step now and then where the upper bound lets nothing through: a margin that a change of
    speed has widened shrinks only by steps of the kind that it forbids.
    """
    fits = int(curve.mean_s.searchsorted(limit_s, side="right")) - 1
    return 0 if fits < 0 else min(most_tokens, int(curve.tokens[fits]))


def demanded_tokens(curve: LatencyCurve, work: FloatArray, time_left_s: FloatArray) -> int:
    """N⁻: the smallest budget with which, for every k, the first k pieces of `work` (n,) are done
    within `time_left_s[k]`.

    Done means ⌈W_k / N⌉ steps of the upper latency; infinite times demand nothing. If no budget
    suffices the curve's largest is returned, plus one, so that it shows as a conflict.
    """
    if work.size == 1:
        return _demanded_by_one(curve, float(work[0]), float(time_left_s[0]))
    is_due = np.isfinite(time_left_s)
    if not is_due.any():
        return 0
    totals, left_s = work.cumsum()[is_due], time_left_s[is_due]
    first = _first_sufficient(curve.tokens[1:], curve.upper_s[1:], totals, left_s)
    if first is None:
        return int(curve.tokens[-1]) + 1
    low, high = curve.tokens[first], curve.tokens[first + 1]
    inner = np.arange(low, high + 1.0, math.ceil((high - low) / _REFINED))[1:]
    step_s = np.interp(inner, curve.tokens, curve.upper_s)
    refined = _first_sufficient(inner, step_s, totals, left_s)
    return int(high if refined is None else inner[refined])


def _first_sufficient(
    budgets: FloatArray, step_s: FloatArray, totals: FloatArray, left_s: FloatArray
) -> int | None:
    """Index of the first budget whose ⌈total / budget⌉ steps of `step_s` end in time, for every
    total.
    """
    suffices = (np.ceil(totals / budgets[:, None]) * step_s[:, None] <= left_s).all(axis=1)
    return int(suffices.argmax()) if suffices.any() else None


def _demanded_by_one(curve: LatencyCurve, total: float, left_s: float) -> int:
    """`demanded_tokens` of a single prompt, the usual case: a few numbers are looked through faster
    than arrays.
    """
    if not math.isfinite(left_s):
        return 0
    tokens, upper_s = curve.tokens.tolist(), curve.upper_s.tolist()
    first = 1
    while first < len(tokens) and math.ceil(total / tokens[first]) * upper_s[first] > left_s:
        first += 1
    if first == len(tokens):
        return int(tokens[-1]) + 1
    low, high = int(tokens[first - 1]), int(tokens[first])
    low_s, high_s = upper_s[first - 1], upper_s[first]
    slope_s = (high_s - low_s) / (high - low)
    stride = math.ceil((high - low) / _REFINED)
    for num in range(low + stride, high, stride):
        if math.ceil(total / num) * (slope_s * (num - low) + low_s) <= left_s:
            return num
    return high


def knee_tokens(curve: LatencyCurve, share: float) -> int:
    """Return the smallest budget on the curve whose tokens per second reach `share` of the best on
    the curve; 0 if it is empty.
    """
    if curve.tokens.size < 2:
        return 0
    rate = curve.tokens[1:] / np.maximum(curve.mean_s[1:], 1e-12)
    return int(curve.tokens[1 + int((rate >= share * rate[rate.argmax()]).argmax())])


def choose_tokens(lower: int, upper: int, knee: int, backlog: int, drain_steps: float) -> int:
    """Return N: the smallest budget that meets N⁻, reaches the knee and drains the backlog, never
    above N⁺.

    All counts are prompt tokens. With little queued that is short steps; as the backlog grows N
    moves to N⁺.
    """
    return min(upper, max(lower, knee, math.ceil(backlog / drain_steps)))


def balance_tokens(num_tokens: int, load: PrefillLoad) -> int:
    """Look at the next step, too: where two steps finish the work, share it between them.

    A step of `num_tokens` and then one with the rest takes at least as long as two equal ones (a
    step's latency is convex in its tokens: a floor, then a slope), and the streams see the longer
    gap. What would be done after the first step still is. All of the work beyond two steps is left
    to throughput: `num_tokens`.
    """
    total = load.num_tokens
    if not num_tokens < total <= 2 * num_tokens:
        return num_tokens
    num_done = int(load.ends.searchsorted(num_tokens, side="right"))
    done = int(load.ends[num_done - 1]) if num_done else 0
    return max(done, -(-total // 2))


def settle_tokens(
    num_tokens: int,
    lower: int,
    upper: int,
    load: PrefillLoad,
    block_size: int,
    split_threshold: int,
) -> int:
    """Move N to where a chunk had better end, within [0, `upper`] (control.md 3.7).

    A chunk that leaves only a crumb of its prompt takes it along; a fresh prompt of at most
    `split_threshold` tokens is computed whole, or left for the next step if something else is
    computed and N⁻ (`lower`) allows; other ends fall on a block boundary where that costs less than
    1/32 of the step.
    """
    ends = load.ends
    piece = int(ends.searchsorted(num_tokens, side="left"))
    if piece >= ends.size or num_tokens == ends[piece]:
        return num_tokens
    end = int(ends[piece])
    amount = int(load.amounts[piece])
    chunk = num_tokens - (end - amount)
    is_short = amount <= split_threshold and load.past[piece] == 0
    if end <= upper and (is_short or end - num_tokens <= max(block_size, chunk // 4)):
        return end
    if is_short and chunk < num_tokens and end - amount >= lower:
        return end - amount
    excess = int(load.past[piece] + chunk) % block_size
    if excess < chunk and excess * 32 < num_tokens and num_tokens - excess >= lower:
        return num_tokens - excess
    return num_tokens


def explored_tokens(step_no: int, share: float, lower: int, upper: int) -> int | None:
    """Return a budget within [N⁻, N⁺] to try in this step, None in all but `share` of the steps.

    Control makes the data collinear, so the model must now and then see something else; only where
    slack is ample (N⁻ < N⁺). Chosen by a hash of the step's number (Knuth's multiplicative one), so
    that the same view gives the same plan.
    """
    hashed = step_no * 2654435761 % 2**32
    if lower >= upper or hashed >= share * 2**32:
        return None
    fraction = (hashed * 40503 % 2**16) / 2**16
    return max(1, lower + int(fraction * (upper - lower)))
