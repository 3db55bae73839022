"""What a planner needs to know of many requests at once, as columns that are read once per request.

Owns that reading, and a memory of it: columns are kept from step to step, keyed by the request and
the verdict it stands under, which is all that they depend on. So a queue that hardly changes costs
hardly anything, and the same view still gives the same plan. Must not hold what a step changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from controller.policy.budget import DecodeLoad
from controller.policy.promise import Promise
from controller.policy.slo import OnInfeasible
from costmodel.features import FloatArray
from engine.ports import RequestView
from engine.step import Admission

IntArray = npt.NDArray[np.intp]

# Rows of a table of facts, shape (NUM_FACTS, n). Targets are seconds, +inf without a live promise;
# `WEIGHT` is 0 then. `CLASS` is an index of `ClassNames`; `IS_QUEUED` says that the class queues
# what cannot be met, `IS_DEGRADED` that there was a promise.
(
    ARRIVED_AT,
    NUM_PROMPT,
    MAX_TOKENS,
    PRIORITY,
    PROMISED_AT,
    TTFT_S,
    TPOT_S,
    E2E_S,
    WEIGHT,
    CLASS,
    IS_QUEUED,
    ARRIVAL_NO,
    IS_DEGRADED,
) = range(13)
NUM_FACTS = 13


def least(values: FloatArray) -> float:
    """Return the smallest of some numbers, all known: `min` of an array costs thrice as much."""
    return float(values[values.argmin()])


def greatest(values: FloatArray) -> float:
    """Return the largest of some numbers; not a number if one of them is not."""
    return float(values[values.argmax()])


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


class ClassNames:
    """Names of SLO classes as small numbers, in the order in which they were first seen."""

    __slots__ = ("_index",)

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def index(self, name: str) -> int:
        """Return the number of a class."""
        return self._index.setdefault(name, len(self._index))

    def each(self, number_of: Callable[[str], int], facts: FloatArray) -> FloatArray:
        """Return `number_of(class)` for every column of `facts`, shape (n,)."""
        names = [*self._index]
        if len(names) == 1:
            return np.full(facts.shape[1], float(number_of(names[0])))
        numbers = np.array([number_of(name) for name in names], dtype=np.float64)
        picked: FloatArray = numbers[facts[CLASS].astype(np.intp)]
        return picked

    def each_of(
        self,
        numbers_of: Callable[..., FloatArray],
        facts: FloatArray,
        *values: FloatArray,
    ) -> FloatArray:
        """Return `numbers_of(class, *values)` for every column of `facts`, shape (n,)."""
        if len(self._index) == 1:
            return numbers_of(*self._index, *values)
        numbers = np.empty(facts.shape[1])
        for name, index in self._index.items():
            is_member = facts[CLASS] == index
            if is_member.any():
                numbers[is_member] = numbers_of(name, *(value[is_member] for value in values))
        return numbers


class FactReader:
    """Reads facts of a list of requests, those of the last list from memory."""

    __slots__ = ("_facts", "_names", "_requests", "_verdicts")

    def __init__(self, names: ClassNames) -> None:
        self._names = names
        self._requests: list[RequestView] = []
        self._verdicts: list[Admission | None] = []
        self._facts: FloatArray = np.empty((NUM_FACTS, 0))

    def read(self, requests: list[RequestView]) -> FloatArray:
        """Return the facts, shape (NUM_FACTS, n); shared between calls, not to be changed.

        A promise is degraded together with its request's verdict, never without one.
        """
        verdicts = [request.admission for request in requests]
        if requests == self._requests and verdicts == self._verdicts:
            return self._facts
        rows = {request: row for row, request in enumerate(self._requests)}
        index, unread = [], []
        for i, (request, verdict) in enumerate(zip(requests, verdicts, strict=True)):
            row = rows.get(request)
            if row is None or self._verdicts[row] is not verdict:
                unread.append(i)
                row = 0
            index.append(row)
        if len(unread) == len(requests):
            facts = np.empty((NUM_FACTS, len(requests)))
        else:
            facts = self._facts[:, index]
        if unread:
            facts[:, unread] = np.array([self._read(requests[i]) for i in unread]).T
        facts.flags.writeable = False
        self._requests, self._verdicts, self._facts = requests, verdicts, facts
        return facts

    def _read(self, request: RequestView) -> tuple[float, ...]:
        promise, live = request.promise, live_promise(request)
        promised_at, priority, is_degraded = request.arrived_at, 0, False
        if isinstance(promise, Promise):
            promised_at, priority = promise.arrived_at, promise.priority
            is_degraded = live is None and not promise.slo.is_best_effort
        ttft_s = tpot_s = e2e_s = math.inf
        weight, is_queued = 0.0, False
        is_degraded = (
            isinstance(promise, Promise) and live is None and not promise.slo.is_best_effort
        )
        if live is not None:
            slo = live.slo
            ttft_s = math.inf if slo.ttft_s is None else slo.ttft_s
            tpot_s = math.inf if slo.tpot_s is None else slo.tpot_s
            e2e_s = math.inf if slo.e2e_s is None else slo.e2e_s
            weight = live.weight
            is_queued = live.slo_class.on_infeasible is OnInfeasible.QUEUE
        return (
            request.arrived_at,
            request.num_prompt_tokens,
            request.max_tokens,
            priority,
            promised_at,
            ttft_s,
            tpot_s,
            e2e_s,
            weight,
            self._names.index(class_name(request)),
            is_queued,
            request.arrival_no,
            is_degraded,
        )


class RunningTable:
    """The running requests of a step as columns, shape (n,): the first `num_decodes` decode, the
    others compute prompts.

    `load` is what the decodes cost a step.
    """

    __slots__ = ("facts", "load", "num_computed", "num_decodes", "num_output", "requests")

    def __init__(
        self, requests: Sequence[RequestView], num_decodes: int, facts: FloatArray
    ) -> None:
        self.requests = requests
        self.num_decodes = num_decodes
        self.facts = facts
        num_computed = [request.num_computed_tokens for request in requests]
        self.num_computed: FloatArray = np.array(num_computed, dtype=np.float64)
        # What decodes has computed all known tokens but the newest.
        self.num_output: FloatArray = self.num_computed + 1.0 - facts[NUM_PROMPT]
        for i in range(num_decodes, len(requests)):
            self.num_output[i] = requests[i].num_output_tokens
        self.load = DecodeLoad(num_decodes, sum(num_computed[:num_decodes]) + num_decodes)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_known(self) -> FloatArray:
        """Known tokens, prompt and output."""
        known: FloatArray = self.facts[NUM_PROMPT] + self.num_output
        return known

    @property
    def num_held(self) -> FloatArray:
        """Blocks in each table."""
        return np.array([len(request.block_table) for request in self.requests], dtype=np.float64)
