"""`StaticPlanner`: a fixed token budget at the same hole, the baseline that the control law is
measured against.

Owns first-come-first-served (or deadline order) with a fixed budget, or none at all. Must not
predict anything: it knows no cost model.
"""

from __future__ import annotations

import math

from controller.policy.admission import ADMITTED, QUEUED, screen
from controller.policy.capacity import make_room, split_running
from controller.policy.kv import BlockLedger
from controller.policy.ordering import live_promise
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


class StaticPlanner:
    """Decodes first, then prompts in order up to `token_budget` tokens per step, decodes included.

    `token_budget` None computes whole prompts: no prompt is ever split, as servers did before
    chunked prefill. `is_edf` serves prompts by first-token deadline instead of arrival. Admission
    refuses only what can never be served, or finds the queue full. When blocks run out the latest
    arrival gives way. ValueError names the argument.
    """

    def __init__(self, token_budget: int | None, *, is_edf: bool = False) -> None:
        if token_budget is not None and token_budget < 1:
            raise ValueError(f"token_budget must be at least 1, got {token_budget}")
        self._token_budget = token_budget
        self._order_key = _deadline_key if is_edf else _arrival_key
        self._name = ("edf" if is_edf else "fcfs") + (
            "-whole" if token_budget is None else "-static"
        )

    def plan(self, view: EngineView) -> StepPlan:
        """Return the next step."""
        ledger = BlockLedger.of(view)
        decodes, prefills = split_running(view.running)
        victims = make_room(decodes, prefills, ledger, _latest_first)
        gone = {request.request_id for request in victims}
        work = [
            StepWork(request.request_id, WorkKind.DECODE, 1, request.num_computed_tokens)
            for request in decodes
            if request.request_id not in gone
        ]
        prefills = [request for request in prefills if request.request_id not in gone]
        num_decodes = len(work)
        waiting, admissions = screen(view, len(view.waiting) + 1, None)
        budget = view.max_num_batched_tokens
        if self._token_budget is not None:
            budget = min(budget, self._token_budget)
        room = max(0, budget - num_decodes)
        seats = min(view.max_num_seqs, budget) - num_decodes - len(prefills)
        work.extend(self._chunks(prefills, view, waiting, ledger, room, seats))
        started = {item.request_id for item in work}
        for request in waiting:
            if request.request_id in started:
                admissions.append(_admit(request, AdmissionAction.ADMIT, ADMITTED))
            elif request.admission is None:
                admissions.append(_admit(request, AdmissionAction.WAIT, QUEUED))
        num_prefill = sum(item.num_tokens for item in work) - num_decodes
        return StepPlan(
            work=tuple(work),
            admissions=tuple(admissions),
            preemptions=tuple(Preemption(request.request_id) for request in victims),
            decision=StepDecision(
                policy=self._name,
                token_budget=budget,
                lower_bound_tokens=num_prefill,
                upper_bound_tokens=room,
                binding_constraint="token_budget" if num_prefill == room > 0 else "idle",
            ),
        )

    def _chunks(
        self,
        prefills: list[RequestView],
        view: EngineView,
        waiting: list[RequestView],
        ledger: BlockLedger,
        room: int,
        seats: int,
    ) -> list[StepWork]:
        """Fill `room` tokens in order: started prompts, then preempted ones, then new ones, as
        seats and blocks allow.
        """
        work: list[StepWork] = []
        is_whole = self._token_budget is None
        newcomers = sorted(waiting, key=self._order_key)
        for request in (*sorted(prefills, key=self._order_key), *view.preempted, *newcomers):
            is_new = request.phase is not RequestPhase.RUNNING
            if room < 1 or (is_new and seats < 1):
                break
            num_tokens = min(request.num_remaining_tokens, room)
            if is_new or is_whole:
                # A prompt comes in when all of it fits: half a prompt without blocks for the rest
                # would sit on memory that decodes need.
                fits = ledger.needed(request, request.num_remaining_tokens) <= ledger.num_free
                # A prompt above the engine's own bound cannot be whole; alone in the step it is
                # cut.
                is_cut = is_whole and num_tokens < request.num_remaining_tokens and bool(work)
                if not fits or is_cut:
                    break
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


def WholePromptPlanner() -> StaticPlanner:  # noqa: N802
    """Return the planner that never splits a prompt (the "whole prompt" row of the spike)."""
    return StaticPlanner(None)


def _arrival_key(request: RequestView) -> tuple[float, ...]:
    return (request.arrived_at,)


def _deadline_key(request: RequestView) -> tuple[float, ...]:
    promise = live_promise(request)
    deadline_at = math.inf if promise is None else promise.first_deadline_at
    return (deadline_at, request.arrived_at)


def _latest_first(request: RequestView) -> tuple[float, ...]:
    return (-request.arrived_at,)


def _admit(request: RequestView, action: AdmissionAction, reason: str) -> Admission:
    return Admission(request.request_id, action, reason)
