"""Baselines whose budget follows a cost model: slack-greedy and smallest-feasible (control.md
section 8).

Owns two ways to choose a chunk that others have published. Must not refuse anybody for a deadline:
neither of them does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from controller.policy.baselines import BaselinePlanner, PromptBudget, deadline_key
from controller.policy.budget import (
    DecodeLoad,
    LatencyCurve,
    PrefillLoad,
    candidate_tokens,
    demanded_tokens,
    latency_curve,
    most_tokens_within,
)
from controller.policy.facts import live_promise
from costmodel.base import CostModel
from engine.ports import EngineView, RequestView


class SlackGreedyPlanner(BaselinePlanner):
    """The largest chunk whose mean fits `slack_factor` times the decodes' slack; prompts by
    deadline blended with shortest remaining.

    Slack is what a stream has banked: the deadline Dₙ of its next token less now, as published. A
    stream whose first token came before T keeps every Dₙ that way and misses p, which is judged
    from the first token: with `is_even` slack is counted from there. A prompt's key is its
    first-token deadline plus `alpha_s` seconds per remaining token; one that would miss its
    deadline if it were served next is relegated behind the others. That is once and for all without
    a memory: who is late if served next is later still if not. ValueError names the argument.
    """

    def __init__(
        self,
        cost_model: CostModel,
        slack_factor: float = 1.2,
        alpha_s: float = 0.008,
        *,
        is_even: bool = False,
    ) -> None:
        if not (math.isfinite(slack_factor) and slack_factor > 0.0):
            raise ValueError(f"slack_factor must be a positive number, got {slack_factor}")
        if not (math.isfinite(alpha_s) and alpha_s >= 0.0):
            raise ValueError(f"alpha_s must be a number of at least 0, got {alpha_s}")
        super().__init__("slack-greedy", None)
        self._cost_model = cost_model
        self._slack_factor = slack_factor
        self._alpha_s = alpha_s
        self._is_even = is_even

    def _choose(
        self,
        view: EngineView,
        decodes: Sequence[RequestView],
        prefills: Sequence[RequestView],
        waiting: Sequence[RequestView],
        room: int,
    ) -> PromptBudget:
        token_s = self._cost_model.marginals().prefill_token_s

        def key(request: RequestView) -> tuple[float, ...]:
            deadline_at, arrived_at = deadline_key(request)
            remaining = request.num_remaining_tokens
            is_relegated = view.now + remaining * token_s > deadline_at
            return (is_relegated, deadline_at + self._alpha_s * remaining, remaining, arrived_at)

        order = (*view.preempted, *sorted((*prefills, *waiting), key=key))
        slacks = (_banked_slack_s(request, view.now, is_even=self._is_even) for request in decodes)
        slack_s = min(slacks, default=math.inf)
        load, curve = _predict(self._cost_model, decodes, order, room)
        upper = most_tokens_within(
            self._cost_model, _decode_load(decodes), load, curve, self._slack_factor * slack_s, 0.0
        )
        return PromptBudget(order, upper, upper=upper)


class SmallestFeasiblePlanner(BaselinePlanner):
    """The smallest chunk that meets the rate that the first-token deadlines demand, within the
    tightest TPOT; prompts by deadline.

    No slack is banked: a step's mean is held against the tightest target of the decodes, whenever
    their last tokens were. A prompt that is late already demands all that fits. At least
    `min_tokens` prompt tokens are computed where they fit. ValueError names the argument.
    """

    def __init__(self, cost_model: CostModel, min_tokens: int = 64) -> None:
        if min_tokens < 1:
            raise ValueError(f"min_tokens must be at least 1, got {min_tokens}")
        super().__init__("smallest-feasible", None)
        self._cost_model = cost_model
        self._min_tokens = min_tokens

    def _choose(
        self,
        view: EngineView,
        decodes: Sequence[RequestView],
        prefills: Sequence[RequestView],
        waiting: Sequence[RequestView],
        room: int,
    ) -> PromptBudget:
        order = (*view.preempted, *sorted((*prefills, *waiting), key=deadline_key))
        targets = (_token_target_s(request) for request in decodes)
        load, curve = _predict(self._cost_model, decodes, order, room)
        limit_s = min(targets, default=math.inf)
        upper = most_tokens_within(
            self._cost_model, _decode_load(decodes), load, curve, limit_s, 0.0
        )
        left_s = np.array([deadline_key(request)[0] - view.now for request in order])
        lower = demanded_tokens(curve, load.amounts, left_s)
        return PromptBudget(order, min(upper, max(lower, self._min_tokens)), lower, upper)


def _banked_slack_s(request: RequestView, now: float, *, is_even: bool) -> float:
    promise = live_promise(request)
    if promise is None:
        return math.inf
    due_at = promise.token_deadline_at(request.num_output_tokens + 1)
    first_at, tpot_s = promise.first_token_at, promise.slo.tpot_s
    if is_even and tpot_s is not None and first_at is not None:
        due_at = min(due_at, first_at + request.num_output_tokens * tpot_s)
    return due_at - now


def _token_target_s(request: RequestView) -> float:
    promise = live_promise(request)
    return math.inf if promise is None or promise.slo.tpot_s is None else promise.slo.tpot_s


def _decode_load(decodes: Sequence[RequestView]) -> DecodeLoad:
    return DecodeLoad(len(decodes), sum(r.num_computed_tokens for r in decodes) + len(decodes))


def _predict(
    cost_model: CostModel, decodes: Sequence[RequestView], order: Sequence[RequestView], room: int
) -> tuple[PrefillLoad, LatencyCurve]:
    """Return the ordered work and the steps that compute 0 to `room` tokens of it."""
    load = PrefillLoad(
        np.array([request.num_remaining_tokens for request in order], dtype=np.float64),
        np.array([request.num_computed_tokens for request in order], dtype=np.float64),
    )
    curve = latency_curve(
        cost_model, _decode_load(decodes), load.head(room), candidate_tokens(room)
    )
    return load, curve
