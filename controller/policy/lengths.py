"""`OutputLengths`: how long answers of a class have been lately, for the planner's view of KV
growth.

Owns a bounded window of finished outputs per class. Fed by the runtime when a request ends; a
planner only reads it. Must not hold requests or read a clock.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# Share of the answers of a class that are shorter than a short one.
_SHORT = 0.1


class OutputLengths:
    """A quantile of recent output lengths per class, in tokens.

    `quantile` in (0, 1] is the share of answers that should be no longer than the expectation;
    `window` answers are remembered per class; `default` tokens are expected of a class nobody has
    seen finish. ValueError names the argument.
    """

    def __init__(self, quantile: float = 0.8, window: int = 256, default: int = 256) -> None:
        if not 0.0 < quantile <= 1.0:
            raise ValueError(f"quantile must be in (0, 1], got {quantile}")
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        if default < 1:
            raise ValueError(f"default must be at least 1, got {default}")
        self._quantile = quantile
        self._window = window
        self._default = default
        self._recent: dict[str, deque[int]] = {}
        # The planner asks at every step, an answer ends rarely: the sort belongs to `observe`.
        self._expected: dict[str, int] = {}
        self._typical: dict[str, int] = {}
        self._short: dict[str, int] = {}
        self._ranked: dict[str, FloatArray] = {}

    def observe(self, class_name: str, num_tokens: int) -> None:
        """Remember that an answer of the class ended after `num_tokens` output tokens (those below
        1 teach nothing).
        """
        if num_tokens < 1:
            return
        recent = self._recent.setdefault(class_name, deque(maxlen=self._window))
        recent.append(num_tokens)
        ranked = sorted(recent)
        self._expected[class_name] = ranked[math.ceil(self._quantile * len(ranked)) - 1]
        self._short[class_name] = ranked[int(_SHORT * len(ranked))]
        self._typical[class_name] = ranked[(len(ranked) - 1) // 2]
        self._ranked[class_name] = np.array(ranked, dtype=np.float64)

    def expected(self, class_name: str) -> int:
        """Return the quantile of recent output lengths of the class in tokens, the default where
        none is known.
        """
        return self._expected.get(class_name, self._default)

    def typical(self, class_name: str) -> int:
        """Return the median of recent output lengths of the class in tokens, half the default where
        none is known.
        """
        return self._typical.get(class_name, (self._default + 1) // 2)

    def short(self, class_name: str) -> int:
        """Return the tenth percentile of recent output lengths of the class in tokens, 1 where none
        is known.
        """
        return self._short.get(class_name, 1)

    def remaining(self, class_name: str, num_output: FloatArray, share: FloatArray) -> FloatArray:
        """Return how many tokens more answers of the class had after `num_output` (n,) of them, as
        the `share` quantile, in [0, 1), of those that were longer; 0 where none was.

        Long answers are those that stay: what is left is not what is typical less what is done.
        """
        ranked = self._ranked.get(class_name)
        if ranked is None:
            return np.maximum(self.typical(class_name) - num_output, 0.0)
        first = ranked.searchsorted(num_output, side="right")
        place = first + (share * (ranked.size - first)).astype(np.intp)
        left: FloatArray = ranked[np.minimum(place, ranked.size - 1)] - num_output
        return np.maximum(left, 0.0)
