"""Fixed budgets at the same hole."""

from __future__ import annotations

import pytest

from controller.policy.baselines import StaticPlanner
from controller.policy.slo import Slo
from engine.ports import EngineView, Planner
from engine.step import Preemption, StepPlan
from tests.controller.policy.checking import CheckedPlanner
from tests.controller.policy.doubles import decode, running, view_of, waiting


def plan(planner: Planner, view: EngineView) -> StepPlan:
    return CheckedPlanner(planner).plan(view)


def sizes(step: StepPlan) -> list[tuple[str, int]]:
    return [(work.request_id, work.num_tokens) for work in step.work]


def test_decodes_first_then_prompts_up_to_the_budget() -> None:
    view = view_of(
        running=[decode(f"s{i}") for i in range(7)],
        waiting=[waiting("a", 100), waiting("b", 100), waiting("c", 10)],
    )
    step = plan(StaticPlanner(128), view)
    assert sizes(step)[7:] == [("a", 100), ("b", 21)]
    assert step.decision is not None
    assert step.decision.binding_constraint == "token_budget"
    assert step.decision.policy == "fcfs-static"
    assert [(a.request_id, a.action.value) for a in step.admissions] == [
        ("a", "admit"),
        ("b", "admit"),
        ("c", "wait"),
    ]


def test_started_prompts_go_on_before_new_ones() -> None:
    begun = running(waiting("begun", 100, at=5.0), 64, 0)
    step = plan(StaticPlanner(40), view_of(running=[begun], waiting=[waiting("new", 100)]))
    assert sizes(step) == [("begun", 36), ("new", 4)]


def test_a_started_prompt_can_be_passed_where_all_are_in_one_order() -> None:
    begun = running(waiting("begun", 100, slo=Slo(ttft_s=9.0)), 64, 0)
    view = view_of(running=[begun], waiting=[waiting("new", 100, slo=Slo(ttft_s=1.0))])
    assert sizes(plan(StaticPlanner(40, is_edf=True), view)) == [("begun", 36), ("new", 4)]
    assert sizes(plan(StaticPlanner(40, is_edf=True, is_merged=True), view)) == [("new", 40)]


def test_deadline_order_is_the_other_baseline() -> None:
    requests = [waiting("loose", 30), waiting("tight", 30, slo=Slo(ttft_s=1.0))]
    step = plan(StaticPlanner(40, is_edf=True), view_of(waiting=requests))
    assert sizes(step) == [("tight", 30), ("loose", 10)]
    assert step.decision is not None
    assert step.decision.policy == "edf-static"


def test_a_whole_prompt_is_never_split_unless_the_engine_must() -> None:
    view = view_of(
        running=[decode("s")],
        waiting=[waiting("a", 60), waiting("b", 60)],
        max_num_batched_tokens=100,
    )
    assert sizes(plan(StaticPlanner(None), view)) == [("s", 1), ("a", 60)]
    alone = view_of(waiting=[waiting("long", 150)], max_num_batched_tokens=100)
    step = plan(StaticPlanner(None), alone)
    assert sizes(step) == [("long", 100)]
    rest = view_of(running=[running(waiting("long", 150), 100, 0)], max_num_batched_tokens=100)
    assert sizes(plan(StaticPlanner(None), rest)) == [("long", 50)]


def test_blocks_and_seats_bound_the_newcomers() -> None:
    tight = view_of(waiting=[waiting("a", 100), waiting("b", 10)], num_blocks=7)
    assert sizes(plan(StaticPlanner(512), tight)) == [("a", 100)]
    seats = view_of(waiting=[waiting("a", 10), waiting("b", 10)], max_num_seqs=1)
    assert sizes(plan(StaticPlanner(512), seats)) == [("a", 10)]


def test_a_started_prompt_without_blocks_lets_the_next_one_on() -> None:
    stuck, free = running(waiting("a", 100), 32, 0), running(waiting("b", 40, at=1.0), 20, 0)
    step = plan(StaticPlanner(64), view_of(running=[stuck, free], num_free=0))
    assert sizes(step) == [("b", 12)]


def test_the_latest_gives_way() -> None:
    streams = [decode("old", at=0.0), decode("new", at=1.0)]
    step = plan(StaticPlanner(64), view_of(running=streams, num_free=0))
    assert step.preemptions == (Preemption("new"),)
    assert sizes(step) == [("old", 1)]


def test_hard_limits_are_the_only_refusals() -> None:
    told = waiting("told", 20)
    view = view_of(waiting=[waiting("big", 5000), told], is_draining=False)
    step = plan(StaticPlanner(8), view)
    assert [(a.request_id, a.reason) for a in step.admissions] == [
        ("big", "context_length"),
        ("told", "admitted"),
    ]


def test_the_budget_is_checked() -> None:
    with pytest.raises(ValueError, match="token_budget"):
        StaticPlanner(0)
