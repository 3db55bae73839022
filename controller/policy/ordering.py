"""Who is served first: the prefill queue in deadline order (control.md section 4).

Owns the order and the instants that it is made of. Must not count blocks, predict a step or refuse
anybody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from controller.policy.facts import (
    ARRIVED_AT,
    E2E_S,
    MAX_TOKENS,
    NUM_PROMPT,
    PRIORITY,
    PROMISED_AT,
    TPOT_S,
    TTFT_S,
    WEIGHT,
    IntArray,
    greatest,
    least,
)
from controller.policy.settings import PolicyConfig
from costmodel.features import FloatArray
from engine.ports import RequestView
from engine.request import RequestPhase

BoolArray = npt.NDArray[np.bool_]

# The order of a single request.
_ALONE = np.zeros(1, dtype=np.intp)


def first_due_at(
    facts: FloatArray, pace: float, num_expected: FloatArray, step_s: float
) -> FloatArray:
    """The paced instants for the first tokens: a + pace·T, and early enough for an end-to-end
    target; +inf without either.

    The latter leaves time for the expected further tokens at `step_s` seconds each, or at p if that
    is less. Shape (n,).
    """
    due_at: FloatArray = facts[PROMISED_AT] + pace * facts[TTFT_S]
    e2e_s = facts[E2E_S]
    if e2e_s.size and least(e2e_s) < math.inf:
        # p is the slowest that is allowed, not what is expected.
        token_s = np.minimum(facts[TPOT_S], step_s)
        rest_s = np.minimum(facts[MAX_TOKENS], num_expected) * token_s
        last_s = np.maximum(e2e_s - rest_s, 0.1 * e2e_s)
        due_at = np.minimum(due_at, facts[PROMISED_AT] + pace * last_s)
    return due_at


class PrefillQueue:
    """Requests whose known tokens are not all computed, with what ordering and admission need.

    Columns of shape (n,), in serving order: `remaining` and `past` are tokens to compute and
    computed. `due_at` is the key of the serving order. `deadline_at` is the paced first-token
    deadline, +inf where there is none to miss (best effort, or a first token already out).
    `period_s` is the paced token period once the request decodes. `weight` is the class weight
    where there is a deadline to miss, infinite for a stream in the middle, else 0. `is_started`
    marks requests that hold or have held KV. `index` says where each one stands in the list that it
    was read from.
    """

    __slots__ = (
        "_facts",
        "_requests",
        "arrived_at",
        "deadline_at",
        "due_at",
        "index",
        "is_started",
        "past",
        "period_s",
        "remaining",
        "table",
        "weight",
    )

    def __init__(
        self,
        requests: Sequence[RequestView],
        facts: FloatArray,
        index: IntArray,
        table: FloatArray,
    ) -> None:
        self._requests = requests
        self._facts = facts
        self.index = index
        self.table = table
        self.remaining, self.past, self.due_at, self.deadline_at = table[:4]
        self.period_s, self.weight, self.arrived_at = table[4:7]
        self.is_started: BoolArray = table[7] > 0.0

    @classmethod
    def of(
        cls,
        requests: Sequence[RequestView],
        facts: FloatArray,
        config: PolicyConfig,
        gap_limit_s: float,
        num_expected: FloatArray,
        step_s: float,
        token_s: float = 0.0,
    ) -> PrefillQueue:
        """Order the requests, those that are not waiting first in the list, by when they are due.

        Priority first, lower first; then earliest `due_at`, the paced deadline and `order_blend`
        times the work that is left; ties by arrival, then by position.
        `facts` are theirs, `num_expected` (n,) expected output tokens, `step_s` a decode step's
        seconds, `token_s` a prompt token's.
        """
        num = len(requests)
        table = np.empty((8, num))
        remaining, past, due_at, deadline_at, period_s, weight, arrived_at, is_started = table
        past[:] = [request.num_computed_tokens for request in requests]
        np.subtract(facts[NUM_PROMPT], past, out=remaining)
        np.multiply(np.minimum(facts[TPOT_S], gap_limit_s), config.pace, out=period_s)
        arrived_at[:] = facts[ARRIVED_AT]
        deadline_at[:] = first_due_at(facts, config.pace, num_expected, step_s)
        due_at[:], weight[:] = deadline_at, facts[WEIGHT]
        if num and not greatest(deadline_at) < math.inf:
            is_dead = ~(deadline_at < math.inf)
            due_at[is_dead] = arrived_at[is_dead] + config.max_wait_s
            weight[is_dead] = 0.0
        is_started[:] = 0.0
        for i, request in enumerate(requests):
            if request.phase is RequestPhase.WAITING:
                break
            is_started[i] = 1.0
            remaining[i] = request.num_remaining_tokens
            last_token_at = request.last_token_at
            if last_token_at is not None:
                # Preempted in mid-stream: its next token is what is due, and its TTFT is history.
                due_at[i], deadline_at[i] = last_token_at + period_s[i], math.inf
                weight[i] = math.inf
        if config.order_blend > 0.0:
            # A stream in the middle waits for no prompt's sake.
            work_s = np.where(weight < math.inf, remaining * token_s, 0.0)
            due_at += config.order_blend * work_s
        if num == 1:
            return cls(requests, facts, _ALONE, table)
        priority = facts[PRIORITY]
        index = due_at.argsort(kind="stable")
        ordered = due_at[index]
        if num and (least(priority) < greatest(priority) or (ordered[1:] == ordered[:-1]).any()):
            index = np.lexsort((arrived_at, due_at, priority))
        return cls(requests, facts, index, table[:, index])

    def __len__(self) -> int:
        return int(self.index.size)

    @property
    def requests(self) -> list[RequestView]:
        """Everybody in serving order."""
        return [self._requests[i] for i in self.index.tolist()]

    def at(self, position: int) -> RequestView:
        """Return the request at that place of the serving order."""
        request: RequestView = self._requests[int(self.index[position])]
        return request

    @property
    def facts(self) -> FloatArray:
        """Facts of everybody in the list that the queue was read from, in the list's order."""
        return self._facts

    def facts_at(self, places: IntArray) -> FloatArray:
        """Return the facts of the requests at those places, shape (NUM_FACTS, k)."""
        return self._facts[:, self.index[places]]

    def take(self, positions: IntArray) -> PrefillQueue:
        """Return the queue of those places, in that order."""
        return PrefillQueue(
            self._requests, self._facts, self.index[positions], self.table[:, positions]
        )


def relegated_last(is_relegated: BoolArray) -> IntArray:
    """Return the places of an ordered queue with the relegated ones moved behind the others."""
    return np.argsort(is_relegated, kind="stable")


def oldest_due(
    queue: PrefillQueue, is_relegated: BoolArray, now: float, max_wait_s: float
) -> int | None:
    """Return the place of the oldest request that nothing but its age speaks for; None if nobody is
    due.

    Due is who has no live deadline (best effort or relegated) and arrived `max_wait_s` or longer
    ago.
    """
    if not len(queue) or least(queue.arrived_at) > now - max_wait_s:
        return None
    is_due = (is_relegated | np.isinf(queue.deadline_at)) & (queue.arrived_at <= now - max_wait_s)
    if not is_due.any():
        return None
    return int(np.where(is_due, queue.arrived_at, np.inf).argmin())
