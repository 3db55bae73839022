"""The SLO planner's decisions on hand-made views."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from controller.policy.lengths import OutputLengths
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.promise import Promise
from controller.policy.slo import OnInfeasible, Slo
from engine.ports import EngineView
from engine.request import Request, RequestPhase
from engine.step import AdmissionAction, StepDecision, StepPlan, WorkKind
from tests.controller.policy.checking import CheckedPlanner
from tests.controller.policy.doubles import (
    LinearCostModel,
    Simulation,
    decode,
    running,
    slo_class,
    view_of,
    waiting,
)

STILL = PolicyConfig(exploration=0.0)
# 0.1 + 0.001·N + 0.01 per decode, without a margin.
MODEL = LinearCostModel((0.001, 0.01, 0.0, 0.0, 0.0), 0.1, margin=0.0)
PLAIN = replace(STILL, pace=1.0, upper_pace=1.0)


def plan(view: EngineView, config: PolicyConfig = PLAIN) -> StepPlan:
    return CheckedPlanner(SloPlanner(config, MODEL, OutputLengths(default=16))).plan(view)


def why(step: StepPlan) -> StepDecision:
    assert step.decision is not None
    return step.decision


def test_an_idle_engine_plans_nothing() -> None:
    step = plan(view_of())
    assert (step.work, step.admissions, step.preemptions) == ((), (), ())
    assert why(step).predicted_mean_s is None
    assert why(step).binding_constraint == "idle"
    assert why(step).model_version == 7


def test_decodes_come_first_and_the_prompt_takes_the_slack() -> None:
    step = plan(view_of(running=[decode("s", slo=Slo(tpot_s=0.51))], waiting=[waiting("p", 4000)]))
    assert [(w.request_id, w.kind) for w in step.work] == [
        ("s", WorkKind.DECODE),
        ("p", WorkKind.PREFILL),
    ]
    # 0.1 + 0.01 + 0.001·N = 0.51, less at most the rest of a block.
    assert 395 <= step.num_prefill_tokens <= 400
    decision = why(step)
    assert decision.binding_constraint == "decode_slack"
    assert decision.tightest_request_id == "s"
    assert decision.slack_s == pytest.approx(0.51)
    assert decision.predicted_upper_s == pytest.approx(0.11 + 0.001 * step.num_prefill_tokens)
    assert decision.token_budget == step.num_prefill_tokens + 1
    assert [(a.request_id, a.action) for a in step.admissions] == [("p", AdmissionAction.ADMIT)]


def test_without_targets_the_gap_limit_binds() -> None:
    config = replace(PLAIN, gap_limit_s=0.4)
    step = plan(view_of(running=[decode("s")], waiting=[waiting("p", 4000)]), config)
    assert 280 <= step.num_prefill_tokens <= 290
    assert why(step).binding_constraint == "gap_limit"


def test_a_late_stream_gets_a_step_of_its_own() -> None:
    late = view_of(
        now=9.0,
        running=[decode("s", slo=Slo(tpot_s=0.5), last_at=8.0)],
        waiting=[waiting("p", 400, at=9.0)],
    )
    step = plan(late)
    assert step.num_prefill_tokens == 0
    assert why(step).binding_constraint == "decode_slack"
    assert why(step).slack_s == pytest.approx(-0.5)
    gap = plan(replace(late, running=[decode("s", last_at=8.0)]))
    assert (gap.num_prefill_tokens, why(gap).binding_constraint) == (0, "gap_limit")


def test_whoever_is_due_by_age_gets_a_block_in_its_turn() -> None:
    def step(step_no: int) -> StepPlan:
        return plan(
            view_of(
                now=40.0,
                step_no=step_no,
                running=[decode("s", slo=Slo(tpot_s=0.11), last_at=40.0)],
                waiting=[waiting("young", 100, at=39.0), waiting("old", 100, at=0.0)],
            )
        )

    assert step(7).num_prefill_tokens == 0
    turn = step(8)
    assert [(w.request_id, w.num_tokens) for w in turn.work[1:]] == [("old", 16)]
    assert why(turn).binding_constraint == "min_quota"
    assert why(turn).upper_bound_tokens == 0


def test_in_its_turn_the_oldest_goes_first_and_otherwise_its_seat_is_kept() -> None:
    def view(step_no: int) -> EngineView:
        return view_of(
            now=40.0,
            step_no=step_no,
            max_num_seqs=2,
            running=[decode("s", last_at=40.0)],
            waiting=[waiting("old", 100, at=0.0), waiting("new", 50, at=40.0, slo=Slo(ttft_s=9.0))],
        )

    assert [w.request_id for w in plan(view(7)).work] == ["s"]
    assert [w.request_id for w in plan(view(8)).work] == ["s", "old"]
    # An empty engine keeps no seat free for anybody.
    empty = replace(view(7), running=[], max_num_seqs=1, num_free_blocks=1024)
    assert [w.request_id for w in plan(empty).work] == ["old"]
    # An old prefill has its seat already.
    begun = running(waiting("old", 100, at=0.0), 16, 0)
    both = replace(view(7), running=[begun], waiting=[waiting("n", 50, at=40.0)])
    assert [w.request_id for w in plan(both).work] == ["old", "n"]


def test_without_streams_a_block_is_computed_whatever_the_model_says() -> None:
    slow = replace(PLAIN, gap_limit_s=1e-6)
    model = LinearCostModel((10.0, 0.0, 0.0, 0.0, 0.0), 0.0, margin=0.0)
    view = view_of(waiting=[waiting("p", 100)])
    step = SloPlanner(slow, model, OutputLengths()).plan(view)
    assert step.num_prefill_tokens == 16
    assert why(step).binding_constraint == "min_quota"


def test_a_demanding_deadline_raises_the_budget_above_the_knee() -> None:
    config = replace(PLAIN, knee_share=0.1, drain_steps=math.inf, split_threshold=0)
    calm = plan(view_of(waiting=[waiting("p", 2000, slo=Slo(ttft_s=900.0))]), config)
    hurry = plan(view_of(waiting=[waiting("p", 2000, slo=Slo(ttft_s=3.0))]), config)
    assert calm.num_prefill_tokens < 200
    assert why(calm).binding_constraint == "idle"
    assert hurry.num_prefill_tokens > 200
    assert why(hurry).binding_constraint == "ttft_demand"
    assert why(hurry).lower_bound_tokens <= hurry.num_prefill_tokens


def test_all_the_work_or_the_token_budget_or_the_blocks_may_bind() -> None:
    small = plan(view_of(waiting=[waiting("p", 20)]))
    assert (small.num_prefill_tokens, why(small).binding_constraint) == (20, "idle")
    capped = plan(view_of(waiting=[waiting("p", 200)]), replace(PLAIN, token_budget=64))
    assert (capped.num_prefill_tokens, why(capped).binding_constraint) == (64, "token_budget")
    short = plan(view_of(waiting=[waiting("p", 40), waiting("q", 40)], num_blocks=4))
    assert (short.num_prefill_tokens, why(short).binding_constraint) == (40, "kv_blocks")
    blocked = plan(
        view_of(running=[decode("s", num_output=2)], waiting=[waiting("q", 40)], num_blocks=4)
    )
    assert (blocked.num_prefill_tokens, why(blocked).binding_constraint) == (0, "kv_blocks")
    seatless = plan(view_of(running=[decode("s")], waiting=[waiting("q", 40)], max_num_seqs=1))
    assert why(seatless).binding_constraint == "token_budget"


def test_the_planner_may_run_fewer_than_the_engine_could() -> None:
    prompts = [waiting(f"w{i}", 40) for i in range(5)]
    state = view_of(running=[decode("s")], waiting=prompts, max_num_seqs=64)
    assert len(plan(state).work) == 6
    capped = plan(state, PolicyConfig(exploration=0.0, max_running=3))
    assert len(capped.work) == 3
    assert len(plan(replace(state, max_num_seqs=2), PolicyConfig(max_running=3)).work) == 2
    # Who runs already goes on, though nobody may join.
    full = view_of(running=[decode(f"s{i}") for i in range(4)], waiting=prompts)
    assert len(plan(full, PolicyConfig(max_running=2)).work) == 4


def test_exploration_stays_within_the_bounds() -> None:
    view = view_of(running=[decode("s", slo=Slo(tpot_s=0.5))], waiting=[waiting("p", 4000)])
    steps = [plan(replace(view, step_no=n), replace(PLAIN, exploration=1.0)) for n in range(1, 20)]
    assert {why(step).binding_constraint for step in steps} == {"explore"}
    assert all(0 < s.num_prefill_tokens <= why(s).upper_bound_tokens for s in steps)
    assert len({step.num_prefill_tokens for step in steps}) > 5


def test_overload_sheds_by_class_and_keeps_the_rest_on_time() -> None:
    requests = [
        waiting(f"{on.value}{i}", 600, slo=Slo(ttft_s=1.2), of=slo_class(on_infeasible=on))
        for on in OnInfeasible
        for i in range(2)
    ]
    step = plan(view_of(waiting=requests))
    verdicts = {a.request_id: a for a in step.admissions}
    assert len(verdicts) == 6
    shed = {i for i, a in verdicts.items() if a.action is AdmissionAction.REJECT}
    assert shed
    assert all(i.startswith("reject") for i in shed)
    assert all(verdicts[i].reason == "overloaded" for i in shed)
    assert all((verdicts[i].retry_after_s or 0) > 0 for i in shed)
    assert {i for i, a in verdicts.items() if a.is_degraded} <= {"degrade0", "degrade1"}
    assert any(a.is_degraded for a in verdicts.values())


def test_who_would_wait_too_long_for_a_seat_is_told_at_once() -> None:
    streams = [decode(f"s{i}", slo=Slo(tpot_s=0.5)) for i in range(2)]
    # Eight tokens are typical: a seat is free after seven more steps of 0.12 s and the prompts that
    # are computed meanwhile, and it is the patient one's.
    hasty, patient = (waiting(f"{t}", 20, slo=Slo(ttft_s=t)) for t in (0.5, 60.0))
    step = plan(view_of(running=streams, waiting=[hasty, patient], max_num_seqs=2))
    verdicts = {a.request_id: a for a in step.admissions}
    assert verdicts["0.5"].reason == "overloaded"
    assert 0.84 + 0.12 < (verdicts["0.5"].predicted_ttft_s or 0) < 1.1
    assert verdicts["60.0"].action is AdmissionAction.WAIT


def test_a_target_below_one_decode_is_refused_on_arrival_only() -> None:
    request = waiting("p", 20, slo=Slo(tpot_s=0.01))
    step = plan(view_of(waiting=[request]))
    assert [(a.action, a.reason) for a in step.admissions] == [
        (AdmissionAction.REJECT, "tpot_unreachable")
    ]
    assert step.work == ()
    request.admission = replace(step.admissions[0], action=AdmissionAction.WAIT)
    assert [a.action for a in plan(view_of(waiting=[request])).admissions] == [
        AdmissionAction.ADMIT
    ]


def test_an_empty_engine_now_and_then_tries_what_the_model_calls_unreachable() -> None:
    def action(step_no: int, slo: Slo, **view: Any) -> AdmissionAction:
        request = waiting("p", 20, slo=slo)
        step = plan(view_of(waiting=[request], step_no=step_no, **view))
        return step.admissions[-1].action

    near, absurd = Slo(tpot_s=0.05), Slo(tpot_s=0.001)
    assert [n for n in range(1, 33) if action(n, near) is AdmissionAction.ADMIT] == [8, 16, 24, 32]
    assert action(8, absurd) is AdmissionAction.REJECT
    assert action(8, Slo(ttft_s=0.05)) is AdmissionAction.ADMIT
    assert action(8, Slo(ttft_s=0.001)) is AdmissionAction.REJECT
    busy = [decode("s", slo=Slo(tpot_s=0.5))]
    assert action(8, near, running=busy) is AdmissionAction.REJECT


@pytest.mark.parametrize("ttft_s", [0.5, 0.8, 1.0, 1.05, 1.1])
def test_an_idle_server_never_says_come_back_later(ttft_s: float) -> None:
    # 1,500 tokens in chunks that keep the gap limit of 1 s: late here means late always.
    step = plan(view_of(waiting=[waiting("p", 1500, slo=Slo(ttft_s=ttft_s))]))
    (verdict,) = step.admissions
    assert verdict.reason in ("ttft_unreachable", "admitted")
    assert (verdict.reason == "admitted") == ((verdict.predicted_ttft_s or 0.0) <= ttft_s)
    assert verdict.retry_after_s is None


def test_the_least_worthy_gives_way_when_blocks_run_out() -> None:
    def full(name: str, slo: Slo | None, weight: float = 1.0) -> Request:
        return decode(name, slo=slo, of=slo_class(weight=weight))

    tight, loose = Slo(tpot_s=0.5), Slo(tpot_s=5.0)
    begun = running(waiting("begun", 100, slo=Slo(ttft_s=9.0)), 32, 0)
    free = full("free", None)
    heavy = full("heavy", loose, 4.0)
    many = [full("tight", tight), begun, full("loose", loose), heavy, full("any", Slo(ttft_s=1.0))]

    def victims(*requests: Request) -> tuple[str, ...]:
        victims = plan(view_of(running=requests, num_free=0)).preemptions
        return tuple(preemption.request_id for preemption in victims)

    assert victims(free, *many) == ("free", "any")
    assert victims(*many) == ("any", "begun")
    assert victims(many[0], many[2], heavy) == ("loose",)


def test_a_preempted_request_resumes_before_anybody_new() -> None:
    cut = decode("cut", slo=Slo(tpot_s=0.5), num_prompt=100, num_output=5)
    cut.phase, cut.num_computed_tokens, cut.block_table = RequestPhase.PREEMPTED, 0, []
    held = decode("held", num_output=2, max_tokens=200)
    crowd = view_of(running=[held], preempted=[cut], waiting=[waiting("new", 16)], num_blocks=10)
    assert [w.request_id for w in plan(crowd).work] == ["held"]
    roomy = replace(crowd, num_free_blocks=60, num_total_blocks=63)
    step = plan(roomy)
    assert [w.request_id for w in step.work] == ["held", "cut", "new"]
    assert step.work[1].num_tokens == 105
    assert [a.request_id for a in step.admissions] == ["new"]


def test_the_model_version_may_come_from_elsewhere() -> None:
    planner = SloPlanner(PLAIN, MODEL, OutputLengths(), model_version=lambda: 42)
    assert why(planner.plan(view_of())).model_version == 42


def test_what_is_seated_instead_of_the_head_of_the_queue_is_predicted_for_itself() -> None:
    # A token after 1,000 others takes a second; the cheap prompt in front finds no blocks.
    model = LinearCostModel((0.001, 0.01, 0.0, 0.001, 0.0), 0.1, margin=0.0)
    dear = running(waiting("dear", 1100, at=1.0), 1000, 0)
    view = view_of(
        now=2.0,
        running=[decode("s", slo=Slo(tpot_s=0.5), last_at=2.0), dear],
        waiting=[waiting("cheap", 100, at=0.0)],
        num_free=2,
    )
    step = CheckedPlanner(SloPlanner(PLAIN, model, OutputLengths())).plan(view)
    assert [w.request_id for w in step.work] == ["s"]
    assert why(step).binding_constraint == "decode_slack"


def test_prompts_take_their_time_until_a_backlog_has_formed() -> None:
    def tokens(num_prompts: int, **changes: Any) -> int:
        # Each prompt is 0.2 s of tokens, aimed at 0.76 s after its arrival.
        prompts = [
            waiting(f"p{i}", 200, slo=Slo(ttft_s=0.95), max_tokens=1) for i in range(num_prompts)
        ]
        view = view_of(running=[decode("s", slo=Slo(tpot_s=0.6))], waiting=prompts)
        return plan(view, replace(PLAIN, stream_knee_share=0.1, **changes)).num_prefill_tokens

    # One prompt is little to do: a step of its demand. Two are more than two fifths of the time.
    assert tokens(1) < 100
    assert tokens(2) > 300
    assert tokens(2, patience_backlog=math.inf) < 300
    assert tokens(1, patience_backlog=0.1) == 200


def test_who_comes_back_when_it_was_told_to_is_served_in_time() -> None:
    model = LinearCostModel((0.001, 0.002, 0.0, 0.0, 0.0), 0.01, margin=0.0)
    slo = Slo(ttft_s=1.0, tpot_s=0.2)

    def crowd(back_at: float | None = None) -> Simulation:
        """Three times as many as can be served in time, and one of them that comes back."""
        simulation = Simulation(SloPlanner(PolicyConfig(), model, OutputLengths()), model)
        arrivals = [waiting(f"r{i:02d}", 300, slo=slo, max_tokens=5) for i in range(12)]
        if back_at is not None:
            arrivals.append(waiting("back", 300, at=back_at, slo=slo, max_tokens=5))
        simulation.run(arrivals)
        return simulation

    told = [
        a.retry_after_s
        for r in crowd().reports
        for a in r.plan.admissions
        if a.action is AdmissionAction.REJECT
    ]
    assert len(told) == 9
    assert all(delay_s is not None and delay_s > 0.0 for delay_s in told)

    def num_kept(back_at: float) -> int:
        promises = [request.promise for request in crowd(back_at).requests.values()]
        return sum(isinstance(p, Promise) and p.judge().attained is True for p in promises)

    delay_s = told[0] or 0.0
    assert num_kept(delay_s) == 4
    # Earlier somebody pays for it: it was told no more than it takes.
    assert num_kept(0.5 * delay_s) == 3
