"""Bounds on waiting, overtaking and skipped decodes, over the whole loop on virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.policy.demand import Demand
from controller.policy.lengths import OutputLengths
from controller.policy.overtaking import Elders
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.promise import Promise
from controller.policy.slo import OnInfeasible, Slo
from engine.config import EngineConfig
from engine.ports import EngineView, Planner, RequestView
from engine.request import FinishReason, Request, RequestPhase
from engine.step import AdmissionAction, StepPlan
from tests.controller.policy.doubles import (
    GPU_FLOOR_S,
    GPU_WEIGHTS,
    JumpingModel,
    LinearCostModel,
    Simulation,
    facts_of,
    queue_of,
    slo_class,
    waiting,
)

BOUNDS = settings(derandomize=True, deadline=None, max_examples=20)
MODEL = LinearCostModel(GPU_WEIGHTS, GPU_FLOOR_S)
# On the second one prompts have steps of their own.
models = st.sampled_from([MODEL, JumpingModel()])

crowds = st.lists(
    st.tuples(
        st.floats(0.0, 2.0),
        st.integers(1, 2000),
        st.integers(1, 40),
        st.sampled_from([None, 0.05, 0.5, 3.0, 60.0]),
        st.sampled_from([None, 0.02, 0.2]),
        st.sampled_from(["chat", "code"]),
        st.sampled_from(list(OnInfeasible)),
    ),
    min_size=10,
    max_size=40,
)
Crowd = list[tuple[float, int, int, float | None, float | None, str, OnInfeasible]]


class Watched:
    """Plans, and hands every view and plan to whoever watches."""

    def __init__(self, planner: Planner, watch: Callable[[EngineView, StepPlan], None]) -> None:
        self._planner = planner
        self._watch = watch

    def plan(self, view: EngineView) -> StepPlan:
        plan = self._planner.plan(view)
        self._watch(view, plan)
        return plan


def run(
    crowd: Crowd,
    config: PolicyConfig,
    watch: Callable[[EngineView, StepPlan], None],
    num_blocks: int = 4096,
    model: LinearCostModel = MODEL,
    demand: Demand | None = None,
) -> list[Request]:
    requests = [
        waiting(
            f"r{i}",
            num_prompt,
            at=at,
            slo=Slo(ttft_s=ttft_s, tpot_s=tpot_s),
            of=slo_class(name, on_infeasible=on_infeasible),
            max_tokens=max_tokens,
        )
        for i, (at, num_prompt, max_tokens, ttft_s, tpot_s, name, on_infeasible) in enumerate(crowd)
    ]
    demand = Demand() if demand is None else demand
    planner = SloPlanner(config, model, OutputLengths(default=20), demand=demand)
    engine = EngineConfig(num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=512)
    Simulation(Watched(planner, watch), model, engine, demand=demand).run(requests)
    return requests


@BOUNDS
@given(
    crowd=crowds,
    max_overtaken=st.sampled_from([1, 3, 8]),
    num_blocks=st.sampled_from([256, 4096]),
    order_blend=st.sampled_from([0.0, 16.0]),
    model=models,
)
def test_nobody_is_overtaken_more_often_than_allowed(
    crowd: Crowd, max_overtaken: int, num_blocks: int, order_blend: float, model: LinearCostModel
) -> None:
    overtaken: Counter[str] = Counter()

    def watch(view: EngineView, plan: StepPlan) -> None:
        started = {work.request_id for work in plan.work}
        refused = {a.request_id for a in plan.admissions if a.action is AdmissionAction.REJECT}
        starting = [r for r in view.waiting if r.request_id in started]
        for request in view.waiting:
            if request.request_id not in started | refused:
                overtaken[request.request_id] += sum(
                    other.arrival_no > request.arrival_no
                    and same_class(other, request)
                    and is_lost(other, view.now) == is_lost(request, view.now)
                    for other in starting
                )

    config = PolicyConfig(max_overtaken=max_overtaken, order_blend=order_blend)
    run(crowd, config, watch, num_blocks, model)
    assert max(overtaken.values(), default=0) <= max_overtaken


def promise_of(request: RequestView) -> Promise:
    assert isinstance(request.promise, Promise)
    return request.promise


def is_lost(request: RequestView, now: float) -> bool:
    promise = promise_of(request)
    return promise.is_degraded or promise.first_deadline_at <= now


def same_class(a: RequestView, b: RequestView) -> bool:
    return promise_of(a).slo_class.name == promise_of(b).slo_class.name


@BOUNDS
@given(
    crowd=crowds,
    turn_period=st.sampled_from([1, 4, 8]),
    order_blend=st.sampled_from([0.0, 16.0]),
    model=models,
)
def test_with_a_free_seat_whoever_is_due_waits_for_one_turn_at_most(
    crowd: Crowd, turn_period: int, order_blend: float, model: LinearCostModel
) -> None:
    config = PolicyConfig(
        max_wait_s=0.3, turn_period=turn_period, max_overtaken=None, order_blend=order_blend
    )
    waits: Counter[str] = Counter()
    worst = 0

    def watch(view: EngineView, plan: StepPlan) -> None:
        nonlocal worst
        due = [
            r
            for r in (*view.running, *view.waiting)
            if not r.is_decoding
            and promise_of(r).slo.ttft_s is None
            and r.arrived_at <= view.now - config.max_wait_s
        ]
        started = {work.request_id for work in plan.work}
        if not plan.work or len(view.running) >= view.max_num_seqs or not due:
            waits.clear()
            return
        # A prompt that has begun may be the oldest: then it has the turn.
        oldest = min(due, key=lambda request: request.arrived_at)
        if oldest.phase is RequestPhase.WAITING and oldest.request_id not in started:
            waits[oldest.request_id] += 1
            worst = max(worst, waits[oldest.request_id])

    # Nobody is relegated or degraded: due is who asks for no first token.
    run([(*item[:6], OnInfeasible.REJECT) for item in crowd], config, watch, model=model)
    assert worst < turn_period


@BOUNDS
@given(crowd=crowds, num_blocks=st.sampled_from([130, 4096]), model=models)
def test_no_decode_is_ever_skipped(crowd: Crowd, num_blocks: int, model: LinearCostModel) -> None:
    def watch(view: EngineView, plan: StepPlan) -> None:
        served = {work.request_id for work in plan.work}
        served |= {preemption.request_id for preemption in plan.preemptions}
        assert all(r.request_id in served for r in view.running if r.is_decoding)

    requests = run(crowd, PolicyConfig(), watch, num_blocks, model)
    assert all(request.is_finished for request in requests)


@BOUNDS
@given(crowd=crowds, model=models)
def test_a_queued_promise_is_served_or_shed_before_it_is_too_old(
    crowd: Crowd, model: LinearCostModel
) -> None:
    config = PolicyConfig(max_age_factor=2.0, min_max_age_s=0.5)

    def watch(view: EngineView, plan: StepPlan) -> None:
        heard = {a.request_id for a in plan.admissions}
        for request in view.waiting:
            slo = promise_of(request).slo
            is_queued = promise_of(request).slo_class.on_infeasible is OnInfeasible.QUEUE
            if slo.ttft_s is not None and is_queued:
                bound_s = max(2.0 * slo.ttft_s, 0.5)
                assert view.now - request.arrived_at < bound_s or request.request_id in heard

    for request in run(crowd, config, watch, model=model):
        if request.finish_reason is FinishReason.REJECTED:
            assert request.admission is not None
            assert request.admission.reason


def test_who_must_start_first() -> None:
    crowd = [waiting(f"{i}", at=float(-i), slo=Slo(ttft_s=9.0)) for i in range(6)]
    crowd.append(waiting("other", at=-9.0, slo=Slo(ttft_s=9.0), of=slo_class("code")))
    for number, request in enumerate(crowd):
        request.arrival_no = number
    queue = queue_of(crowd, PolicyConfig())
    # Earliest deadline first: the others, then 5, 4, ..., 0.
    assert facts_of(crowd).shape[1] == len(queue)
    places = {r.request_id: place for place, r in enumerate(queue.requests)}
    elders = Elders(queue, np.arange(7), 3, 0.0)
    assert elders.first_before(places["other"]) == places["other"]
    assert elders.first_before(places["3"]) == places["3"]
    assert elders.first_before(places["5"]) == places["0"]
    # What is lost is not in the way of what can be kept, only of what is lost, too.
    later = Elders(queue, np.arange(7), 3, 8.5)
    assert later.first_before(places["5"]) == places["1"]
    kept = Elders(queue, np.arange(7), 3, 3.5)
    assert kept.first_before(places["4"]) == places["0"]
    half = Elders(queue, np.arange(7), 3, 4.5)
    assert half.first_before(places["5"]) == places["5"]
    elders.start(places["0"])
    assert elders.first_before(places["5"]) == places["1"]
    elders.start(places["1"])
    assert elders.first_before(places["5"]) == places["5"]
    unbound = Elders(queue, np.arange(7), None, 0.0)
    assert unbound.first_before(places["5"]) == places["5"]


@BOUNDS
@given(crowd=crowds, model=models)
def test_a_planner_that_has_run_for_long_plans_like_a_new_one(
    crowd: Crowd, model: LinearCostModel
) -> None:
    config, demand = PolicyConfig(max_overtaken=2, max_wait_s=0.5), Demand()

    def watch(view: EngineView, plan: StepPlan) -> None:
        new = SloPlanner(config, model, OutputLengths(default=20), demand=demand)
        assert new.plan(view) == plan

    run(crowd, config, watch, 256, model, demand)
