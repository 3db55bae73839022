"""`SloPlanner`: the control law as one pure function from a view to a plan (control.md).

Owns the order of the decisions; each decision has its own module. Must not read a clock, remember a
step or change what it sees: the same view gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from controller.policy.admission import screen
from controller.policy.budget import (
    DecodeLoad,
    PrefillLoad,
    choose_tokens,
    explored_tokens,
    knee_tokens,
    latency_curve,
    most_tokens_within,
    settle_tokens,
    spread,
)
from controller.policy.capacity import Intake, make_room, split_running
from controller.policy.judging import Judged, judge_queue
from controller.policy.kv import BlockLedger
from controller.policy.lengths import OutputLengths
from controller.policy.ordering import live_promise, oldest_due
from controller.policy.pacing import NO_PREFILL, Pacing, pace_decodes
from controller.policy.preemption import choose_methods
from controller.policy.settings import PolicyConfig
from controller.policy.streams import StreamRoom
from costmodel.base import CostModel
from engine.ports import EngineView, RequestView
from engine.request import RequestPhase
from engine.step import StepDecision, StepPlan, StepWork, WorkKind

__all__ = ["Budget", "PolicyConfig", "Seated", "SloPlanner"]

_SEAT_RANK = {RequestPhase.RUNNING: 0, RequestPhase.PREEMPTED: 1, RequestPhase.WAITING: 2}


class Seated(NamedTuple):
    """Who may compute prompt tokens in this step, in serving order, and how many at most.

    `is_turn` says that the first one has its turn by age; `is_head` that the step is served from
    the queue's head, nobody left out; `is_short_of_blocks` that KV kept somebody out;
    `is_outpaced` that the pace of the streams did.
    """

    requests: list[RequestView]
    load: PrefillLoad
    is_turn: bool
    is_head: bool
    is_short_of_blocks: bool
    is_outpaced: bool


class Budget(NamedTuple):
    """The chosen prompt tokens N between N⁻ and N⁺, and the constraint that set it."""

    num_tokens: int
    lower: int
    upper: int
    binding: str


class SloPlanner:
    """Keeps every stream under its pace and uses the slack for the prompts whose deadlines can be
    met.

    `output_lengths` is fed by the runtime. `model_version` is asked once per step for the decision
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
    ) -> None:
        self._config = config
        self._cost_model = cost_model
        self._lengths = output_lengths
        self._swap_block_s = swap_block_s
        self._model_version = model_version or (lambda: cost_model.quality().version)

    def plan(self, view: EngineView) -> StepPlan:
        """Return the next step: decodes first, then prompt chunks within the slack that the decodes
        leave.
        """
        config = self._config
        ledger = BlockLedger.of(view)
        decodes, prefills = split_running(view.running)
        victims = make_room(decodes, prefills, ledger, self._victim_key(view.now))
        if victims:
            gone = {request.request_id for request in victims}
            decodes = [request for request in decodes if request.request_id not in gone]
            prefills = [request for request in prefills if request.request_id not in gone]
        load = DecodeLoad(len(decodes), sum(r.num_computed_tokens for r in decodes) + len(decodes))
        pacing = self._pace(view.now, decodes, load)
        work = [
            StepWork(request.request_id, WorkKind.DECODE, 1, request.num_computed_tokens)
            for request in decodes
        ]
        waiting, admissions = screen(
            view, config.max_judged, config.max_waiting_tokens, self._drain_s
        )
        wanting = [*prefills, *view.preempted, *waiting]
        chunks = NO_PREFILL
        budget = Budget(0, 0, 0, "idle")
        if wanting:
            most_tokens = self._most_tokens(view)
            room = max(0, most_tokens - len(decodes))
            intake = self._intake(view, ledger, [*decodes, *prefills], waiting, most_tokens)
            judged = judge_queue(
                view, wanting, load, pacing, room, intake, config, self._cost_model, self._lengths
            )
            seated = self._seat(view, judged, ledger, intake, room)
            budget = self._choose(view, judged, seated, load, pacing, room)
            amounts = spread(np.array([float(budget.num_tokens)]), seated.load)[0]
            chunks = PrefillLoad(amounts, seated.load.past)
            prefill_work = [
                StepWork(request.request_id, _kind(request), num, request.num_computed_tokens)
                for request, num in zip(seated.requests, amounts.astype(int).tolist(), strict=True)
                if num > 0
            ]
            work.extend(prefill_work)
            admissions.extend(judged.admissions({item.request_id for item in prefill_work}))
        return StepPlan(
            work=tuple(work),
            admissions=tuple(admissions),
            preemptions=choose_methods(view, victims, self._drain_s, self._swap_block_s),
            decision=self._decision(load, chunks, pacing, budget),
        )

    def _pace(self, now: float, decodes: Sequence[RequestView], load: DecodeLoad) -> Pacing:
        """Return until when the step may last."""
        return pace_decodes(now, decodes, load, self._config, self._cost_model, self._lengths)

    def _drain_s(self, num_tokens: int) -> float:
        """Predict seconds for `num_tokens` prompt tokens at the marginal cost of a busy step."""
        return num_tokens * self._cost_model.marginals().prefill_token_s

    def _intake(
        self,
        view: EngineView,
        ledger: BlockLedger,
        running: list[RequestView],
        waiting: list[RequestView],
        most_tokens: int,
    ) -> Intake:
        config, max_running = self._config, min(view.max_num_seqs, most_tokens)
        newcomers = [*view.preempted, *waiting]
        room = None
        if newcomers:
            seats = max_running - len(running)
            room = StreamRoom.of(running, newcomers, seats, config, self._cost_model)
        return Intake(
            view, ledger, running, max_running, config.kv_reserve, self._lengths, room, config.pace
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

    def _seat(
        self,
        view: EngineView,
        judged: Judged,
        ledger: BlockLedger,
        intake: Intake,
        room: int,
    ) -> Seated:
        """Reserve seats and blocks: for running prefills first, then preempted ones, then new ones.

        Each group in serving order; a preempted request that cannot resume lets nobody new in
        before it. In every `turn_period`-th step the oldest due request is served first; in the
        others its seat and blocks are set aside, so that neither a stream of promises nor one of
        small prompts keeps it out for ever.
        """
        config, queue = self._config, judged.queue
        order = list(range(len(queue)))
        due = oldest_due(queue, judged.is_relegated, view.now, config.max_wait_s)
        # An empty engine has nobody to be fair to, and only steps that do something are counted.
        is_turn = due is not None and (view.step_no % config.turn_period == 0 or not view.running)
        if due is not None and is_turn:
            order.insert(0, order.pop(due))
        elif due is not None and queue.requests[due].phase is not RequestPhase.RUNNING:
            intake.set_aside(queue.requests[due])
        amounts = np.zeros(len(queue))
        is_resuming = False
        for i in sorted(order, key=lambda i: _SEAT_RANK[queue.requests[i].phase]):
            request = queue.requests[i]
            amount = min(room, request.num_remaining_tokens)
            if request.phase is RequestPhase.RUNNING:
                amount = min(amount, ledger.most_tokens(request))
                ledger.take(request, amount)
            elif intake.is_full:
                break
            elif is_resuming or not intake.admit(request, has_turn=is_turn and i == due):
                is_resuming = is_resuming or request.phase is RequestPhase.PREEMPTED
                continue
            amounts[i] = amount
        index = np.array(order, dtype=np.intp)
        index = index[amounts[index] > 0.0]
        reach = int(np.searchsorted(np.cumsum(amounts[index]), room)) + 1
        is_head = bool((index[:reach] == np.arange(min(reach, index.size))).all())
        return Seated(
            requests=[queue.requests[i] for i in index],
            load=PrefillLoad(amounts[index], queue.past[index]),
            is_turn=is_turn and index.size > 0 and index[0] == due,
            is_head=is_head
            and bool((amounts[:reach] >= np.minimum(queue.remaining[:reach], room)).all()),
            is_short_of_blocks=intake.is_short,
            is_outpaced=intake.is_outpaced,
        )

    def _choose(
        self,
        view: EngineView,
        judged: Judged,
        seated: Seated,
        decodes: DecodeLoad,
        pacing: Pacing,
        room: int,
    ) -> Budget:
        """Choose N between N⁻ and N⁺ over the seated work, and name what bound it."""
        config, lower = self._config, judged.lower_tokens
        most = min(room, seated.load.num_tokens)
        if most == 0:
            if room > 0 and seated.is_short_of_blocks:
                return Budget(0, lower, 0, "kv_blocks")
            is_outpaced = room > 0 and seated.is_outpaced
            return Budget(0, lower, 0, "decode_slack" if is_outpaced else "token_budget")
        head = seated.load.head(room)
        curve = judged.curve
        if not (judged.is_curve_exact and seated.is_head):
            curve = latency_curve(self._cost_model, decodes, head, curve.tokens)
        within = most_tokens_within(
            self._cost_model, decodes, head, curve, pacing.limit_s, pacing.upper_share
        )
        upper = min(most, within)
        if upper == 0:
            # Nothing fits. Without streams to protect a block is computed all the same; with
            # streams only who is due by age gets one, in its turn.
            if decodes.num_requests > 0 and not seated.is_turn:
                return Budget(0, lower, 0, "gap_limit" if pacing.is_gap_limited else "decode_slack")
            quota = min(most, view.block_size, int(head.amounts[0]))
            return Budget(quota, lower, 0, "min_quota")
        backlog = int(judged.queue.remaining.sum())
        knee = knee_tokens(curve, config.knee_share)
        wanted = choose_tokens(lower, upper, knee, backlog, config.drain_steps)
        num_tokens = settle_tokens(
            wanted, lower, upper, head, view.block_size, config.split_threshold
        )
        explored = explored_tokens(view.step_no, config.exploration, lower, upper)
        if explored is not None:
            return Budget(explored, lower, upper, "explore")
        if max(wanted, num_tokens) < upper:
            binding = "ttft_demand" if wanted == lower else "idle"
        elif upper == room:
            binding = "token_budget"
        elif upper == seated.load.num_tokens:
            binding = "kv_blocks" if seated.is_short_of_blocks else "idle"
        else:
            binding = "gap_limit" if pacing.is_gap_limited else "decode_slack"
        return Budget(num_tokens, lower, upper, binding)

    def _decision(
        self, decodes: DecodeLoad, chunks: PrefillLoad, pacing: Pacing, budget: Budget
    ) -> StepDecision:
        mean_s = upper_s = None
        if decodes.num_requests + budget.num_tokens > 0:
            total = np.array([float(budget.num_tokens)])
            estimate = latency_curve(self._cost_model, decodes, chunks, total)
            mean_s, upper_s = float(estimate.mean_s[0]), float(estimate.upper_s[0])
        return StepDecision(
            policy=self.policy_name,
            token_budget=decodes.num_requests + budget.num_tokens,
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
