"""How many more streams the token promises allow: a step of decodes alone must keep every pace.

Owns that one count. Must not spend seats or blocks, or look at a prompt's deadline.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from controller.policy.budget import made_safe
from controller.policy.facts import TPOT_S, RunningTable, least, live_promise
from controller.policy.settings import PolicyConfig
from costmodel.base import CostModel
from costmodel.features import NUM_FEATURES, FloatArray
from engine.ports import RequestView


def paced_target_s(request: RequestView, pace: float) -> float:
    """The paced time per token that the request is promised; +inf without a TPOT promise."""
    promise = live_promise(request)
    if promise is None or promise.slo.tpot_s is None:
        return math.inf
    return pace * promise.slo.tpot_s


class StreamRoom:
    """Streams that may join while the mean of a decode-only step keeps the tightest promise.

    Without this bound a burst is admitted as a whole, for its prompts are cheap, and then nobody
    keeps a pace. `step_s[k]` is that mean with k more streams; `period_s` the tightest paced
    promise among those who run. A stream that cannot keep its promise any more protects nobody.
    """

    __slots__ = ("_num_joined", "_num_running", "_period_s", "_step_s")

    def __init__(self, step_s: Sequence[float], period_s: float, num_running: int) -> None:
        self._step_s = step_s
        self._period_s = period_s
        self._num_running = num_running
        self._num_joined = 0

    @classmethod
    def of(
        cls,
        running: RunningTable,
        newcomers: Sequence[RequestView],
        most: int,
        config: PolicyConfig,
        cost_model: CostModel,
    ) -> StreamRoom:
        """Predict steps with up to `most` of the `newcomers`, in that order, beside `running`."""
        num_running = len(running)
        known = [request.num_known_tokens for request in newcomers[: max(0, most)]]
        rows = np.zeros((len(known) + 1, NUM_FEATURES))
        rows[:, 1] = range(num_running, num_running + len(known) + 1)
        rows[:, 2] = list(itertools.accumulate(known, initial=float(running.num_known.sum())))
        step_s = np.maximum.accumulate(made_safe(cost_model.predict(rows).mean_s)).tolist()
        targets = config.pace * running.facts[TPOT_S]
        targets = targets[targets >= step_s[0]]
        period_s = least(targets) if targets.size else math.inf
        return cls(step_s, period_s, num_running)

    def copy(self) -> StreamRoom:
        """Return an independent count, to try things out."""
        twin = StreamRoom(self._step_s, self._period_s, self._num_running)
        twin._num_joined = self._num_joined
        return twin

    def can_all_join(self, targets_s: FloatArray) -> bool:
        """Whether streams with these paced promises (n,) may join one after another."""
        first = self._num_joined + 1
        if first + targets_s.size > len(self._step_s):
            return False
        period_s = np.minimum(np.minimum.accumulate(targets_s), self._period_s)
        can_join = np.array(self._step_s[first : first + targets_s.size]) <= period_s
        if self._num_running + self._num_joined <= 0:
            can_join[:1] = True
        return bool(can_join.all())

    def join(self, target_s: float) -> bool:
        """Let one stream with the paced promise `target_s` join; False if a promise would break.

        The first stream of an empty engine always may: nobody is faster than alone.
        """
        is_first = self._num_running + self._num_joined <= 0
        period_s = min(self._period_s, target_s)
        index = max(0, self._num_joined + 1)
        if not is_first and (index >= len(self._step_s) or self._step_s[index] > period_s):
            return False
        self._num_joined += 1
        self._period_s = period_s
        return True

    def leave(self) -> None:
        """Count one stream less: somebody is expected to have ended."""
        self._num_joined -= 1
