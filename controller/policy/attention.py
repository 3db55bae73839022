"""What prompt tokens cost behind their own past: attention reads all that came before.

Owns that cost, relative to the work at the head of the queue, for which a step's latency is
predicted. Must not order the queue or predict when anybody is done.
"""

from __future__ import annotations

import math

import numpy as np

from controller.policy.budget import DecodeLoad, LatencyCurve, PrefillLoad, made_safe
from controller.policy.facts import greatest
from controller.policy.steady import SteadyCurve
from costmodel.base import CostModel
from costmodel.features import NUM_FEATURES, FloatArray

# The past is looked at where it makes a step of so many tokens so much longer.
_PROBED_TOKENS = 256.0
_LEAST_SHARE = 0.02
# Pasts that are asked for lie so far apart; between them the cost is a straight line.
_FIRST_PAST = 2048.0
_APART = 4.0


class OwnPast:
    """Seconds per prompt token by how much of its prompt stands before it.

    The curve of a step is predicted for the prompts at the head of the queue. A token behind 50,000
    others of its own prompt may cost ten times as much as one of a short prompt, and a queue of
    both is neither as long nor as short as the head says.
    """

    __slots__ = (
        "_cost_model",
        "_decodes",
        "_found",
        "_head",
        "_known",
        "_steady",
        "_upper_share",
    )

    def __init__(
        self,
        cost_model: CostModel,
        decodes: DecodeLoad,
        head: PrefillLoad,
        steady: SteadyCurve,
        upper_share: float,
    ) -> None:
        self._cost_model = cost_model
        self._decodes = decodes
        self._head = head
        self._steady = steady
        self._upper_share = upper_share
        self._known: dict[float, bool] = {}
        self._found: dict[float, list[SteadyCurve]] = {}

    def matters(self, past: FloatArray) -> bool:
        """Whether pasts (n,) in tokens are long enough to make a difference."""
        longest = greatest(past)
        known = self._known.get(longest)
        if known is None:
            rows = np.zeros((2, NUM_FEATURES))
            rows[:, 0], rows[:, 5] = _PROBED_TOKENS, 1.0
            rows[:, 1], rows[:, 2] = self._decodes
            rows[:, 4] = _PROBED_TOKENS * _PROBED_TOKENS
            rows[1, 3] = _PROBED_TOKENS * longest
            short_s, long_s = made_safe(self._cost_model.predict(rows).mean_s).tolist()
            known = self._known[longest] = long_s - short_s > _LEAST_SHARE * short_s
        return known

    def token_s(self, past: FloatArray, period_s: float, longest_s: float) -> FloatArray | None:
        """Return the seconds per prompt token at each mean past (n,), at the best rate that keeps
        the streams' period and no step longer than `longest_s`; None where not even tokens without
        a past have a rate.
        """
        pasts = [0.0]
        top = max(1.0, greatest(past))
        each = _FIRST_PAST
        while each < top:
            pasts.append(each)
            each *= _APART
        pasts.append(top)
        costs: list[float] = []
        for before, steady in zip(pasts, self._curves(pasts), strict=True):
            rate_s, num_tokens, _ = steady.rate(period_s, longest_s)
            if num_tokens >= 1.0:
                costs.append(rate_s)
            elif not costs:
                return None
            else:
                # No step has room for one: as if it grew with the past.
                costs.append(costs[-1] * max(1.0, before / max(pasts[len(costs) - 1], _FIRST_PAST)))
        found: FloatArray = np.interp(past, pasts, costs)
        return found

    def _curves(self, pasts: list[float]) -> list[SteadyCurve]:
        """Return the curve of the step with its tokens behind each of the pasts, rising."""
        top = pasts[-1]
        if top not in self._found:
            tokens, num = self._steady.curve.tokens, len(pasts)
            rows = np.zeros((num, tokens.size, NUM_FEATURES))
            rows[0, :, 0] = tokens
            rows[0, :, 1], rows[0, :, 2] = self._decodes
            self._head.fill_features(tokens, rows[0])
            rows[1:] = rows[0]
            rows[:, :, 3] = tokens * np.array(pasts)[:, None]
            found = self._cost_model.predict(rows.reshape(-1, NUM_FEATURES))
            mean_s = np.maximum.accumulate(made_safe(found.mean_s).reshape(num, -1), axis=1)
            upper_s = np.maximum.accumulate(made_safe(found.upper_s).reshape(num, -1), axis=1)
            np.maximum(mean_s, upper_s, out=upper_s)
            steered_s = np.maximum(mean_s, self._upper_share * upper_s)
            self._found[top] = [
                SteadyCurve(LatencyCurve(tokens, mean, upper), steered)
                for mean, upper, steered in zip(mean_s, upper_s, steered_s, strict=True)
            ]
        return self._found[top]

    def weighed(
        self,
        remaining: FloatArray,
        past: FloatArray,
        before_s: FloatArray,
        stretches: list[tuple[int, int]],
        longest_s: float,
    ) -> FloatArray:
        """Return `remaining` (n,) in tokens of the head's cost: as many as take as long at the rate
        that the curve says. `past` (n,) are the tokens computed, `before_s` (n,) the streams'
        periods, the same over each of the `stretches`.
        """
        mean_past = past + remaining / 2.0
        if not self.matters(mean_past):
            return remaining
        weighed = remaining.copy()
        for start, stop in stretches:
            period_s = float(before_s[start])
            usual_s, num_tokens, _ = self._steady.rate(period_s, longest_s)
            own_s = self.token_s(mean_past[start:stop], period_s, longest_s)
            if num_tokens >= 1.0 and own_s is not None and 0.0 < usual_s < math.inf:
                weighed[start:stop] *= own_s / usual_s
        return weighed
