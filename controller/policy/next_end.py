"""Where a step had better end, for the sake of the first tokens in it (control.md 3.4).

Owns the comparison of the next step's ends. Must not know a request or choose whom to serve.
"""

from __future__ import annotations

import numpy as np

from controller.policy.budget import LatencyCurve
from costmodel.features import FloatArray

# No promise counts for more: sums stay finite where a class is worth everything.
_MOST_WEIGHT = 1e9


def next_end(
    curve: LatencyCurve,
    work: FloatArray,
    time_left_s: FloatArray,
    weight: FloatArray,
    num_tokens: int,
) -> int:
    """Return `num_tokens`, or the end of a prompt before it if a step that ends there keeps more
    promises. The arrays are of shape (n,), in the order of service.

    Every prompt of a step has its first token at the step's end: one that is computed along makes
    those before it late. So not every budget that the streams allow is as good, though work done is
    work done. For an end at N tokens those within have their tokens after the upper latency of N,
    those behind it after as much and one more step with their work beyond it, or at the best rate
    on the curve where that is too much for a step. Promises count by `weight`; of equal ends the
    last is taken: who has its first token streams, and leaves prompts less of every step.
    """
    is_due = np.isfinite(time_left_s)
    if work.size < 2 or not is_due.any():
        return num_tokens
    totals, left_s = work.cumsum(), time_left_s[is_due]
    ends = np.append(totals[totals < num_tokens], num_tokens)
    if ends.size == 1:
        return num_tokens
    step_s = np.interp(ends, curve.tokens, curve.upper_s)
    token_s = (curve.upper_s[1:] / curve.tokens[1:]).min()
    beyond = np.maximum(totals[is_due] - ends[:, None], 0.0)
    beyond_s = np.maximum(np.interp(beyond, curve.tokens, curve.upper_s), beyond * token_s)
    beyond_s[beyond == 0.0] = 0.0
    worth = np.minimum(weight[is_due], _MOST_WEIGHT)
    kept = np.where(step_s[:, None] + beyond_s <= left_s, worth, 0.0).sum(axis=1)
    return int(ends[kept.size - 1 - int(kept[::-1].argmax())])
