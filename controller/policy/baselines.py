"""`StaticPlanner`: a fixed token budget at the same hole, the baseline that the control law is
measured against.

Owns what all baselines do alike (decodes first, then prompts in order as far as tokens, seats and
blocks go) and first-come-first-served or deadline order with a fixed budget, or none at all. Must
not predict anything: it knows no cost model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from controller.policy.admission import ADMITTED, QUEUED, screen
from controller.policy.capacity import split_running
from controller.policy.facts import live_promise
from controller.policy.kv import BlockLedger
from controller.policy.preemption import hold_back, make_room
from engine.ports import EngineView, RequestView
from engine.request import RequestPhase
from engine.step import (
    Admission,
    AdmissionAction,
    Preemption,
    StepDecision,
    StepPlan,
    StepWork,
    WorkKind,
)


class PromptBudget(NamedTuple):
    """What a baseline decides about a step's prompts.

    `order` is the serving order, `num_tokens` how many prompt tokens may be computed; `lower` and
    `upper` are N⁻ and N⁺ where the baseline knows them.
    """

    order: Sequence[RequestView]
    num_tokens: int
    lower: int | None = None
    upper: int | None = None


class BaselinePlanner(ABC):
    """Decodes first, then prompts in an order and up to a number of tokens that a subclass chooses
    (`_choose`).

    Admission refuses only what can never be served, or finds the queue full. When blocks run out
    the latest arrival gives way. `token_budget` caps the step, decodes included; `is_whole` splits
    no prompt. ValueError names the argument.
    """

    def __init__(self, name: str, token_budget: int | None, *, is_whole: bool = False) -> None:
        if token_budget is not None and token_budget < 1:
            raise ValueError(f"token_budget must be at least 1, got {token_budget}")
        self._name = name
        self._token_budget = token_budget
        self._is_whole = is_whole

    def plan(self, view: EngineView) -> StepPlan:
        """Return the next step."""
        view = hold_back(view)
        ledger = BlockLedger.of(view)
        decodes, prefills = split_running(view.running)
        victims = make_room(decodes, prefills, ledger, _latest_first)
        if victims:
            gone = {request.request_id for request in victims}
            decodes = [request for request in decodes if request.request_id not in gone]
            prefills = [request for request in prefills if request.request_id not in gone]
        work = [
            StepWork(request.request_id, WorkKind.DECODE, 1, request.num_computed_tokens)
            for request in decodes
        ]
        waiting, admissions = screen(view, len(view.waiting) + 1, None)
        budget = view.max_num_batched_tokens
        if self._token_budget is not None:
            budget = min(budget, self._token_budget)
        room = max(0, budget - len(decodes))
        seats = min(view.max_num_seqs, budget) - len(decodes) - len(prefills)
        choice = PromptBudget((), 0)
        if prefills or view.preempted or waiting:
            choice = self._choose(view, decodes, prefills, waiting, room)
            room = min(room, choice.num_tokens)
            work.extend(self._chunks(choice.order, ledger, room, seats))
        started = {item.request_id for item in work}
        for request in waiting:
            if request.request_id in started:
                admissions.append(_admit(request, AdmissionAction.ADMIT, ADMITTED))
            elif request.admission is None:
                admissions.append(_admit(request, AdmissionAction.WAIT, QUEUED))
        num_prefill = sum(item.num_tokens for item in work) - len(decodes)
        return StepPlan(
            work=tuple(work),
            admissions=tuple(admissions),
            preemptions=tuple(Preemption(request.request_id) for request in victims),
            decision=StepDecision(
                policy=self._name,
                token_budget=budget,
                lower_bound_tokens=num_prefill if choice.lower is None else choice.lower,
                upper_bound_tokens=room if choice.upper is None else choice.upper,
                binding_constraint="token_budget" if num_prefill == room > 0 else "idle",
            ),
        )

    @abstractmethod
    def _choose(
        self,
        view: EngineView,
        decodes: Sequence[RequestView],
        prefills: Sequence[RequestView],
        waiting: Sequence[RequestView],
        room: int,
    ) -> PromptBudget:
        """Order the prompts and say how many of at most `room` tokens may be computed."""
        ...

    def _chunks(
        self, order: Sequence[RequestView], ledger: BlockLedger, room: int, seats: int
    ) -> list[StepWork]:
        """Fill `room` tokens in order, as seats and blocks allow.

        Whoever finds no room lets nobody new in before it.
        """
        work: list[StepWork] = []
        is_closed = False
        for request in order:
            if room < 1:
                break
            is_new = request.phase is not RequestPhase.RUNNING
            if is_new and (is_closed or seats < 1):
                continue
            num_tokens = min(request.num_remaining_tokens, room)
            if is_new or self._is_whole:
                # A prompt comes in when all of it fits: half a prompt without blocks for the rest
                # would sit on memory that decodes need.
                fits = ledger.needed(request, request.num_remaining_tokens) <= ledger.num_free
                # A prompt above the engine's own bound cannot be whole; alone in the step it is
                # cut.
                is_cut = self._is_whole and num_tokens < request.num_remaining_tokens and bool(work)
                if not fits or is_cut:
                    is_closed = True
                    continue
            num_tokens = min(num_tokens, ledger.most_tokens(request))
            if num_tokens < 1:
                continue
            ledger.take(request, num_tokens)
            room -= num_tokens
            seats -= is_new
            work.append(
                StepWork(
                    request.request_id, WorkKind.PREFILL, num_tokens, request.num_computed_tokens
                )
            )
        return work


class StaticPlanner(BaselinePlanner):
    """Prompts in order up to `token_budget` tokens per step, decodes included.

    `token_budget` None computes whole prompts: no prompt is ever split, as servers did before
    chunked prefill. `is_edf` serves prompts by first-token deadline instead of arrival. Started
    prompts go on before preempted ones, and those before new ones; with `is_merged` a new prompt
    passes a started one by the same order, behind preempted ones. ValueError names the argument.
    """

    def __init__(
        self, token_budget: int | None, *, is_edf: bool = False, is_merged: bool = False
    ) -> None:
        name = ("edf" if is_edf else "fcfs") + ("-whole" if token_budget is None else "-static")
        super().__init__(name, token_budget, is_whole=token_budget is None)
        self._order_key = deadline_key if is_edf else _arrival_key
        self._is_merged = is_merged

    def _choose(
        self,
        view: EngineView,
        decodes: Sequence[RequestView],
        prefills: Sequence[RequestView],
        waiting: Sequence[RequestView],
        room: int,
    ) -> PromptBudget:
        key = self._order_key
        if self._is_merged:
            return PromptBudget((*view.preempted, *sorted((*prefills, *waiting), key=key)), room)
        order = (*sorted(prefills, key=key), *view.preempted, *sorted(waiting, key=key))
        return PromptBudget(order, room)


def _arrival_key(request: RequestView) -> tuple[float, ...]:
    return (request.arrived_at,)


def deadline_key(request: RequestView) -> tuple[float, ...]:
    """Sort by first-token deadline; who has none comes last, ties by arrival."""
    promise = live_promise(request)
    deadline_at = math.inf if promise is None else promise.first_deadline_at
    return (deadline_at, request.arrived_at)


def _latest_first(request: RequestView) -> tuple[float, ...]:
    return (-request.arrived_at,)


def _admit(request: RequestView, action: AdmissionAction, reason: str) -> Admission:
    return Admission(request.request_id, action, reason)
