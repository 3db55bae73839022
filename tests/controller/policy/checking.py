"""`CheckedPlanner`: wraps a planner and asserts at every step what must hold of every plan."""

from __future__ import annotations

from collections import Counter

from controller.policy.demand import Demand
from controller.policy.lengths import OutputLengths
from controller.policy.preemption import MAX_PREEMPTIONS
from engine.ports import EngineView, Planner, RequestView
from engine.request import RequestPhase
from engine.step import AdmissionAction, PreemptionMethod, StepPlan, WorkKind


def snapshot(view: EngineView) -> list[tuple[object, ...]]:
    """Everything of the view's requests that a planner could have changed."""
    return [
        (
            r.request_id,
            r.phase,
            r.num_computed_tokens,
            r.num_output_tokens,
            tuple(r.block_table),
            tuple(r.host_block_table),
            r.num_preemptions,
            r.admission,
            r.admitted_at,
            r.first_token_at,
            r.last_token_at,
            repr(r.promise),
        )
        for group in (view.waiting, view.running, view.preempted)
        for r in group
    ]


def memory_of(demand: Demand | None, lengths: OutputLengths | None) -> list[object]:
    """Everything that was fed about arrivals, returns and answers, which a planner only reads.

    Returns too: what is told in a plan is booked by the runtime once the step is done. Left out is
    what `Demand` derives when it is asked (`_usual` and the like): keeping that changes no answer.
    """
    found: list[object] = []
    if demand is not None:
        found += [demand._since, tuple(demand._known), dict(demand.returns._tokens)]
        for name, of in demand._classes.items():
            arrivals = [
                (a.request_id, a.no, a.at, a.num_prompt, a.ttft_s, a.tpot_s, a.is_served)
                for a in of.recent
            ]
            found.append((name, of.weight, of.forgotten_no, arrivals))
    if lengths is not None:
        ranked = {name: each.tolist() for name, each in lengths._ranked.items()}
        found += [{name: tuple(each) for name, each in lengths._recent.items()}, ranked]
        found += [dict(each) for each in (lengths._expected, lengths._typical, lengths._short)]
    return found


def check_plan(view: EngineView, plan: StepPlan, token_budget: int | None = None) -> None:
    """Assert budgets, seats, blocks, phases, who gives way, and that every decode is served."""
    everybody: dict[str, RequestView] = {
        r.request_id: r for group in (view.waiting, view.running, view.preempted) for r in group
    }
    gone = {preemption.request_id for preemption in plan.preemptions}
    assert len(gone) == len(plan.preemptions)
    assert all(everybody[i].phase is RequestPhase.RUNNING for i in gone)
    assert all(everybody[i].num_preemptions < MAX_PREEMPTIONS for i in gone)
    ids = [w.request_id for w in plan.work]
    assert len(set(ids)) == len(ids)
    assert not gone & set(ids)
    num_tokens = plan.num_prefill_tokens + plan.num_decode_tokens
    assert num_tokens <= view.max_num_batched_tokens
    if token_budget is not None:
        assert num_tokens <= max(token_budget, plan.num_decode_tokens)
    admitted = {a.request_id for a in plan.admissions if a.action is AdmissionAction.ADMIT}
    assert admitted <= set(ids)
    assert len({a.request_id for a in plan.admissions}) == len(plan.admissions)
    for told in plan.admissions:
        # A first token that is still to come is not predicted for the past.
        age_s = view.now - everybody[told.request_id].arrived_at
        if told.action is not AdmissionAction.REJECT and told.predicted_ttft_s is not None:
            assert told.predicted_ttft_s >= age_s - 1e-6
    shifts: Counter[int] = Counter()
    free = view.num_free_blocks
    for i in gone:
        for block in everybody[i].block_table:
            shifts[block] -= 1
            free += view.num_holders(block) + shifts[block] == 0
    running = {r.request_id for r in view.running} - gone
    for work in plan.work:
        request = everybody[work.request_id]
        assert 0 < work.num_tokens <= request.num_remaining_tokens
        assert work.num_computed_tokens == request.num_computed_tokens
        free -= max(0, -(-work.num_context_tokens // view.block_size) - len(request.block_table))
        if request.phase is not RequestPhase.RUNNING:
            for block in request.block_table:
                free -= view.num_holders(block) + shifts[block] == 0
                shifts[block] += 1
        if request.phase is RequestPhase.WAITING:
            was_admitted = request.admission is not None and (
                request.admission.action is AdmissionAction.ADMIT
            )
            assert was_admitted or work.request_id in admitted
        if work.kind is WorkKind.DECODE:
            assert request.is_decoding
            assert work.num_tokens == 1
    assert free >= 0
    assert len(running | set(ids)) <= view.max_num_seqs
    decodes = {r.request_id for r in view.running if r.is_decoding} - gone
    works = {w.request_id for w in plan.work if w.kind is WorkKind.DECODE}
    assert decodes == {i for i in works if everybody[i].phase is RequestPhase.RUNNING}
    swapped = [p for p in plan.preemptions if p.method is PreemptionMethod.SWAP]
    num_swapped = sum(len(everybody[p.request_id].block_table) for p in swapped)
    assert num_swapped <= view.num_free_host_blocks
    assert plan.decision is not None
    judged = {a.request_id for a in plan.admissions}
    assert all(r.admission is not None or r.request_id in judged for r in view.waiting)


class CheckedPlanner:
    """Plans twice and asserts that nothing changed, that both plans agree, and `check_plan`.

    `demand` and `lengths` are those that the planner reads: they must not change either.
    """

    def __init__(
        self,
        planner: Planner,
        token_budget: int | None = None,
        demand: Demand | None = None,
        lengths: OutputLengths | None = None,
    ) -> None:
        self._planner = planner
        self._token_budget = token_budget
        self._demand = demand
        self._lengths = lengths

    def plan(self, view: EngineView) -> StepPlan:
        before, known = snapshot(view), memory_of(self._demand, self._lengths)
        plan = self._planner.plan(view)
        assert self._planner.plan(view) == plan
        assert snapshot(view) == before
        assert memory_of(self._demand, self._lengths) == known
        check_plan(view, plan, self._token_budget)
        return plan
