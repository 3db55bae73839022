"""`SloPlanner`: the control law as one pure function from a view to a plan (control.md).

Owns the order of the decisions; each decision has its own module. Must not read a clock, remember a
step or change what it sees: the same view gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from controller.policy.admission import screen
from controller.policy.alternating import jumps
from controller.policy.budget import (
    DecodeLoad,
    LatencyCurve,
    balance_tokens,
    explored_tokens,
    latency_curve,
    most_tokens_within,
    probed_tokens,
    safe_number,
    settle_tokens,
    step_seconds,
)
from controller.policy.capacity import Intake, split_running
from controller.policy.demand import Demand, Expected
from controller.policy.facts import ClassNames, FactReader, RunningTable, live_promise
from controller.policy.haste import wanted_tokens
from controller.policy.judging import Judged, judge_queue
from controller.policy.kv import BlockLedger
from controller.policy.lengths import OutputLengths
from controller.policy.next_end import next_end
from controller.policy.pacing import Pacing, pace_decodes
from controller.policy.preemption import choose_methods, hold_back, make_room
from controller.policy.returns import spread
from controller.policy.seating import Seated, seat
from controller.policy.settings import PolicyConfig
from controller.policy.streams import StreamRoom
from costmodel.base import CostModel
from costmodel.features import FloatArray
from engine.ports import EngineView, RequestView
from engine.step import Admission, StepDecision, StepPlan, StepWork, WorkKind

__all__ = ["Budget", "PolicyConfig", "SloPlanner"]


# A step holds a share of work per stream: made without the call into Python that a named tuple's
# own constructor is.
_work: Callable[[tuple[str, WorkKind, int, int]], StepWork] = partial(tuple.__new__, StepWork)


class Budget(NamedTuple):
    """The chosen prompt tokens N between N⁻ and N⁺, and the constraint that set it."""

    num_tokens: int
    lower: int
    upper: int
    binding: str


class Fit(NamedTuple):
    """The prompt tokens that fit beside the decodes: by the upper bound, a probe's by the mean."""

    num_tokens: int
    is_probe: bool


class SloPlanner:
    """Keeps every stream under its pace and uses the slack for the prompts whose deadlines can be
    met.

    `output_lengths` and `demand` are fed by the runtime; without the latter nobody is expected to
    come. `model_version` is asked once per step for the decision
    record; by default the cost model's own quality report answers. `swap_block_s` is what moving
    one KV block to host memory, or back, takes in seconds; None never swaps.
    """

    policy_name = "slo"

    def __init__(
        self,
        config: PolicyConfig,
        cost_model: CostModel,
        output_lengths: OutputLengths,
        model_version: Callable[[], int] | None = None,
        swap_block_s: float | None = None,
        demand: Demand | None = None,
    ) -> None:
        self._demand = demand
        self._config = config
        self._cost_model = cost_model
        self._lengths = output_lengths
        self._names = ClassNames()
        self._running_facts = FactReader(self._names)
        self._wanting_facts = FactReader(self._names)
        self._swap_block_s = swap_block_s
        self._model_version = model_version or (lambda: cost_model.quality().version)

    def plan(self, view: EngineView) -> StepPlan:
        """Return the next step: decodes first, then prompt chunks within the slack that the decodes
        leave.
        """
        config = self._config
        view = hold_back(view)
        ledger = BlockLedger.of(view)
        decodes, prefills = split_running(view.running)
        victims = make_room(decodes, prefills, ledger, self._victim_key(view.now))
        if victims:
            gone = {request.request_id for request in victims}
            decodes = [request for request in decodes if request.request_id not in gone]
            prefills = [request for request in prefills if request.request_id not in gone]
        everybody = [*decodes, *prefills] if prefills else decodes
        running = RunningTable(everybody, len(decodes), self._running_facts.read(everybody))
        pacing = self._pace(view, running)
        decode = WorkKind.DECODE
        work = [
            _work((request.request_id, decode, 1, request.num_computed_tokens))
            for request in decodes
        ]
        waiting, admissions = screen(
            view, config.max_judged, config.max_waiting_tokens, self._drain_s
        )
        wanting = [*prefills, *view.preempted, *waiting]
        seated: Seated | None = None
        budget, token_s = Budget(0, 0, 0, "idle"), 0.0
        if wanting:
            most_tokens = self._most_tokens(view)
            room = max(0, most_tokens - len(decodes))
            load = running.load
            facts = self._wanting_facts.read(wanting)
            expected = None if self._demand is None else self._demand.expected(view.now)
            intake = self._intake(view, ledger, running, waiting, facts, expected, most_tokens)
            num_expected = self._names.each(self._lengths.expected, facts)
            judged = judge_queue(
                view,
                wanting,
                facts,
                num_expected,
                load,
                pacing,
                room,
                intake,
                config,
                self._cost_model,
                expected,
            )
            fit = self._fit(view, judged, load, pacing)
            seated = seat(view, judged, ledger, intake, running, fit.num_tokens, room, config)
            budget = self._choose(view, judged, seated, load, pacing, fit, room)
            starting = [
                StepWork(request.request_id, _kind(request), num, request.num_computed_tokens)
                for request, num in zip(
                    seated.requests, seated.load.chunks(budget.num_tokens), strict=False
                )
            ]
            work.extend(starting)
            admissions.extend(judged.admissions(wanting, seated.indices[: len(starting)]))
            token_s = judged.token_s
        if any(verdict.retry_after_s is not None for verdict in admissions):
            admissions = self._spread(view, admissions, token_s)
        return StepPlan(
            work=tuple(work),
            admissions=tuple(admissions),
            preemptions=choose_methods(view, victims, self._drain_s, self._swap_block_s),
            decision=self._decision(running, seated, pacing, budget),
        )

    def _pace(self, view: EngineView, running: RunningTable) -> Pacing:
        """Return until when the step may last."""
        num_expected = self._names.each(self._lengths.expected, running.facts)
        num_least = None
        if view.waiting or view.preempted or len(running) > running.num_decodes:
            # What streams have in hand is asked for prompts' sake only.
            num_least = self._names.each(self._lengths.short, running.facts)
        return pace_decodes(
            view.now, running, num_expected, self._config, self._cost_model, num_least=num_least
        )

    def _fit(self, view: EngineView, judged: Judged, decodes: DecodeLoad, pacing: Pacing) -> Fit:
        """N⁺ over the judged head; where it is 0, now and then what the mean allows."""
        within = self._within(judged, decodes, pacing)
        if within or judged.own_tokens or view.step_no % self._config.probe_period:
            return Fit(within, False)
        probed = probed_tokens(judged.curve, pacing.limit_s, view.block_size)
        return Fit(probed, probed > 0)

    def _within(self, judged: Judged, decodes: DecodeLoad, pacing: Pacing) -> int:
        """N⁺ over the head of the queue."""
        own_tokens = min(judged.own_tokens, judged.head.num_tokens)
        model, head, curve = self._cost_model, judged.head, judged.curve
        if own_tokens == 0:
            return most_tokens_within(
                model, decodes, head, curve, pacing.limit_s, pacing.upper_share
            )
        # The mean and the upper bound end while the streams' own means keep their pace.
        _, step_s = step_seconds(model, decodes, head, own_tokens)
        saving = pacing.banks.saving(step_s, pacing.decode_s)
        return own_tokens if step_s <= min(pacing.gap_left_s, saving.limit_s()) else 0

    def _drain_s(self, num_tokens: int) -> float:
        """Predict seconds for `num_tokens` prompt tokens at the marginal cost of a busy step."""
        return num_tokens * self._cost_model.marginals().prefill_token_s

    def _spread(
        self, view: EngineView, admissions: list[Admission], token_s: float
    ) -> list[Admission]:
        """Tell those who are refused to come back one after another."""
        if token_s <= 0.0:
            token_s = safe_number(self._cost_model.marginals().prefill_token_s)
        returns = None if self._demand is None else self._demand.returns
        num_tokens = {request.request_id: request.num_prompt_tokens for request in view.waiting}
        return spread(admissions, num_tokens, view.now, token_s, returns)

    def _intake(
        self,
        view: EngineView,
        ledger: BlockLedger,
        running: RunningTable,
        waiting: list[RequestView],
        facts: FloatArray,
        expected: Expected | None,
        most_tokens: int,
    ) -> Intake:
        """Return the room for newcomers, the last of those whose `facts` are given."""
        config, max_running = self._config, min(view.max_num_seqs, most_tokens)
        if config.max_running is not None:
            max_running = min(max_running, config.max_running)
        newcomers = [*view.preempted, *waiting]
        room = None
        if newcomers:
            seats = max_running - len(running)
            room = StreamRoom.of(running, newcomers, seats, config, self._cost_model)
            if expected is not None:
                room.make_room(
                    expected,
                    running,
                    facts[:, -len(newcomers) :],
                    self._names,
                    self._lengths.typical,
                    config,
                    self._cost_model,
                )
        return Intake(
            view,
            ledger,
            running,
            self._names,
            max_running,
            config.kv_reserve,
            self._lengths,
            room,
            config.pace,
        )

    def _most_tokens(self, view: EngineView) -> int:
        cap = self._config.token_budget
        return view.max_num_batched_tokens if cap is None else min(view.max_num_batched_tokens, cap)

    def _victim_key(self, now: float) -> Callable[[RequestView], tuple[float, ...]]:
        """Who gives way first: no promise, lowest weight, most slack, least work lost."""

        def key(request: RequestView) -> tuple[float, ...]:
            promise = live_promise(request)
            if promise is None:
                return (0.0, 0.0, 0.0, request.num_computed_tokens)
            last_at, tpot_s = request.last_token_at, promise.slo.tpot_s
            if last_at is None:
                slack_s = promise.first_deadline_at - now
            else:
                slack_s = math.inf if tpot_s is None else last_at + tpot_s - now
            return (1.0, promise.weight, -slack_s, request.num_computed_tokens)

        return key

    def _choose(
        self,
        view: EngineView,
        judged: Judged,
        seated: Seated,
        decodes: DecodeLoad,
        pacing: Pacing,
        fit: Fit,
        room: int,
    ) -> Budget:
        """Choose N between N⁻ and N⁺ over the seated work, and name what bound it."""
        lower = judged.lower_tokens
        most = min(room, seated.load.num_tokens)
        if most == 0:
            is_held_up = fit.num_tokens > 0 and room > 0
            if is_held_up and seated.is_short_of_blocks:
                return Budget(0, lower, 0, "kv_blocks")
            if room > 0 and (fit.num_tokens == 0 or seated.is_outpaced):
                return self._held_by_streams(lower, pacing)
            return Budget(0, lower, 0, "token_budget")
        head, curve = seated.load, judged.curve
        if not head.begins(judged.head):
            curve = latency_curve(self._cost_model, decodes, head, curve.tokens)
            fit = self._fit(view, judged._replace(head=head, curve=curve), decodes, pacing)
        upper = 0 if fit.is_probe and seated.is_turn else min(most, fit.num_tokens)
        if upper == 0:
            # Nothing fits. Without streams to protect a block is computed all the same; with
            # streams only who is due by age gets one, in its turn: a whole one, not a probe.
            if decodes.num_requests > 0 and not seated.is_turn:
                return self._held_by_streams(lower, pacing)
            quota = min(most, view.block_size, int(head.amounts[0]))
            return Budget(quota, lower, 0, "min_quota")
        budget = self._choose_within(view, judged, seated, curve, pacing, upper, room)
        return budget._replace(binding="explore") if fit.is_probe else budget

    def _choose_within(
        self,
        view: EngineView,
        judged: Judged,
        seated: Seated,
        curve: LatencyCurve,
        pacing: Pacing,
        upper: int,
        room: int,
    ) -> Budget:
        """Choose N where N⁺ is `upper`, which is not 0."""
        config, lower, head = self._config, judged.lower_tokens, seated.load
        if judged.own_tokens:
            # What was banked for is taken as a whole.
            return Budget(upper, lower, upper, "decode_slack")
        remaining, left_s = judged.work(view.now)
        wanted = wanted_tokens(
            judged.unhurried,
            curve,
            remaining,
            left_s,
            lower,
            upper,
            config,
            is_paced=pacing.is_paced,
        )
        # Only the whole backlog can be looked ahead of: who is left out will want the next step.
        is_all = head.num_tokens == int(remaining.sum())
        shared = wanted
        if is_all and not jumps(curve):
            shared = max(lower, balance_tokens(wanted, head))
        num_tokens = settle_tokens(
            min(wanted, shared), lower, upper, head, view.block_size, config.split_threshold
        )
        explored = explored_tokens(view.step_no, config.exploration, lower, upper)
        if explored is not None:
            num_tokens = explored
        if not pacing.is_paced:
            # No stream bounds the step: it may not grow at the cost of those in it.
            due_s = judged.left_s(view.now)[seated.places]
            weight = judged.queue.weight[seated.places]
            end = next_end(curve, head.amounts, due_s, weight, num_tokens)
            if end < num_tokens:
                return Budget(end, lower, upper, "ttft_demand")
        if explored is not None:
            return Budget(explored, lower, upper, "explore")
        if max(wanted, num_tokens) < upper:
            binding = "ttft_demand" if wanted == lower else "idle"
        elif upper == room:
            binding = "token_budget"
        elif upper == head.num_tokens:
            binding = "kv_blocks" if seated.is_short_of_blocks else "idle"
        else:
            binding = "gap_limit" if pacing.is_gap_limited else "decode_slack"
        return Budget(num_tokens, lower, upper, binding)

    def _held_by_streams(self, lower: int, pacing: Pacing) -> Budget:
        """No prompt token, for a stream's sake."""
        return Budget(0, lower, 0, "gap_limit" if pacing.is_gap_limited else "decode_slack")

    def _decision(
        self, running: RunningTable, seated: Seated | None, pacing: Pacing, budget: Budget
    ) -> StepDecision:
        mean_s: float | None = None
        upper_s: float | None = None
        if seated is not None and budget.num_tokens:
            mean_s, upper_s = step_seconds(
                self._cost_model, running.load, seated.load, budget.num_tokens
            )
        elif running.num_decodes:
            mean_s, upper_s = pacing.decode_s, pacing.decode_upper_s
        return StepDecision(
            policy=self.policy_name,
            token_budget=running.num_decodes + budget.num_tokens,
            lower_bound_tokens=budget.lower,
            upper_bound_tokens=budget.upper,
            binding_constraint=budget.binding,
            tightest_request_id=pacing.tightest_id,
            slack_s=pacing.slack_s,
            predicted_mean_s=mean_s,
            predicted_upper_s=upper_s,
            model_version=self._model_version(),
        )


def _kind(request: RequestView) -> WorkKind:
    """A preempted stream whose KV stands but for the newest token resumes by a decode."""
    return WorkKind.DECODE if request.is_decoding else WorkKind.PREFILL
