"""Who is served first: the prefill queue in deadline order (control.md section 4).

Owns the order and the instants that it is made of. Must not count blocks, predict a step or refuse
anybody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from controller.policy.settings import PolicyConfig
from controller.policy.slo import Promise
from costmodel.features import FloatArray
from engine.ports import RequestView
from engine.request import RequestPhase

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.intp]


def live_promise(request: RequestView) -> Promise | None:
    """The promise that the request is served under; None for best effort, degraded requests
    included.
    """
    promise = request.promise
    if not isinstance(promise, Promise) or promise.is_degraded or promise.slo.is_best_effort:
        return None
    admission = request.admission
    return None if admission is not None and admission.is_degraded else promise


def class_name(request: RequestView) -> str:
    """Name of the request's SLO class; empty for a request without a promise object."""
    promise = request.promise
    return promise.slo_class.name if isinstance(promise, Promise) else ""


def token_period_s(promise: Promise | None, pace: float, gap_limit_s: float) -> float:
    """The paced time between two tokens of a stream: pace times p, or the gap limit if less."""
    if promise is None or promise.slo.tpot_s is None:
        return pace * gap_limit_s
    return pace * min(promise.slo.tpot_s, gap_limit_s)


def first_due_at(
    request: RequestView, promise: Promise, pace: float, num_expected: int, step_s: float
) -> float:
    """The paced instant for the first token: a + pace·T, and early enough for an end-to-end target.

    The latter leaves time for `num_expected` further tokens at `step_s` seconds each, or at p if
    that is less.
    """
    slo = promise.slo
    due_at = math.inf if slo.ttft_s is None else promise.arrived_at + pace * slo.ttft_s
    if slo.e2e_s is not None:
        # p is the slowest that is allowed, not what is expected.
        token_s = step_s if slo.tpot_s is None else min(slo.tpot_s, step_s)
        rest_s = min(request.max_tokens, num_expected) * token_s
        due_at = min(due_at, promise.arrived_at + pace * max(slo.e2e_s - rest_s, 0.1 * slo.e2e_s))
    return due_at


class PrefillQueue:
    """Requests whose known tokens are not all computed, with what ordering and admission need.

    Columns of shape (n,): `remaining` and `past` are tokens to compute and computed. `due_at` is
    the key of the deadline order. `deadline_at` is the paced first-token deadline, +inf where there
    is none to miss (best effort, or a first token already out). `period_s` is the paced token
    period once the request decodes. `weight` is the class weight where there is a deadline to miss,
    infinite for a stream in the middle, else 0. `is_started` marks requests that hold or have held
    KV.
    """

    __slots__ = (
        "arrived_at",
        "deadline_at",
        "due_at",
        "is_started",
        "past",
        "period_s",
        "priority",
        "remaining",
        "requests",
        "table",
        "weight",
    )

    def __init__(self, requests: Sequence[RequestView], table: FloatArray) -> None:
        self.requests = requests
        self.table = table
        self.remaining, self.past, self.priority, self.due_at, self.deadline_at = table[:5]
        self.period_s, self.weight, self.arrived_at = table[5:8]
        self.is_started: BoolArray = table[8] > 0.0

    @classmethod
    def of(
        cls,
        requests: Sequence[RequestView],
        config: PolicyConfig,
        gap_limit_s: float,
        num_expected: Sequence[int],
        step_s: float,
    ) -> PrefillQueue:
        """Read the requests once.

        `num_expected` (n,) are expected output tokens, `step_s` a decode step's seconds.
        """
        rows = [
            _row(request, config, gap_limit_s, expected, step_s)
            for request, expected in zip(requests, num_expected, strict=True)
        ]
        return cls(requests, np.array(rows, dtype=np.float64).reshape(len(rows), 9).T)

    def __len__(self) -> int:
        return len(self.requests)

    def order(self, is_relegated: BoolArray) -> IntArray:
        """Return the serving order as indices.

        Relegated last; then priority, lower first; earliest `due_at`; ties by arrival, then by
        position, so that the order is total.
        """
        return np.lexsort((self.arrived_at, self.due_at, self.priority, is_relegated))

    def take(self, index: IntArray) -> PrefillQueue:
        """Return the queue of the rows `index`, in that order."""
        return PrefillQueue([self.requests[i] for i in index.tolist()], self.table[:, index])


def _row(
    request: RequestView,
    config: PolicyConfig,
    gap_limit_s: float,
    num_expected: int,
    step_s: float,
) -> tuple[float, ...]:
    promise = live_promise(request)
    arrived_at = request.arrived_at
    period_s = token_period_s(promise, config.pace, gap_limit_s)
    priority = request.promise.priority if isinstance(request.promise, Promise) else 0
    deadline_at, weight = math.inf, 0.0
    last_token_at = request.last_token_at
    if last_token_at is not None:
        # Preempted in mid-stream: its next token is what is due, and its TTFT is history.
        due_at, weight = last_token_at + period_s, math.inf
    else:
        due_at = arrived_at + config.max_wait_s
        if promise is not None:
            deadline_at = first_due_at(request, promise, config.pace, num_expected, step_s)
            if math.isfinite(deadline_at):
                due_at, weight = deadline_at, promise.weight
    is_started = request.phase is not RequestPhase.WAITING
    return (
        request.num_remaining_tokens,
        request.num_computed_tokens,
        priority,
        due_at,
        deadline_at,
        period_s,
        weight,
        arrived_at,
        is_started,
    )


def oldest_due(
    queue: PrefillQueue, is_relegated: BoolArray, now: float, max_wait_s: float
) -> int | None:
    """Return the index of the oldest request that nothing but its age speaks for; None if nobody is
    due.

    Due is who has no live deadline (best effort or relegated) and arrived `max_wait_s` or longer
    ago.
    """
    is_due = (is_relegated | np.isinf(queue.deadline_at)) & (queue.arrived_at <= now - max_wait_s)
    if not is_due.any():
        return None
    return int(np.where(is_due, queue.arrived_at, np.inf).argmin())
