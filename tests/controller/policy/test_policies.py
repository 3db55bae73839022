"""Policies by name, and the baselines whose budget follows a cost model."""

from __future__ import annotations

import math
from typing import Any

import pytest

from controller.policy.baselines import StaticPlanner
from controller.policy.baselines_dynamic import SlackGreedyPlanner, SmallestFeasiblePlanner
from controller.policy.lengths import OutputLengths
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.policies import POLICY_NAMES, budget_of, fixed_budget, make_planner
from controller.policy.promise import Promise
from controller.policy.slo import OnInfeasible, Slo
from engine.ports import EngineView
from engine.step import AdmissionAction, StepDecision, StepPlan
from tests.controller.policy.checking import CheckedPlanner
from tests.controller.policy.doubles import (
    LinearCostModel,
    decode,
    running,
    slo_class,
    view_of,
    waiting,
)

# 0.1 + 0.001·N + 0.01 per decode.
MODEL = LinearCostModel((0.001, 0.01, 0.0, 0.0, 0.0), 0.1, margin=0.0)


def plan(name: str, view: EngineView) -> StepPlan:
    return CheckedPlanner(make_planner(name, MODEL, OutputLengths(default=16))).plan(view)


def why(step: StepPlan) -> StepDecision:
    assert step.decision is not None
    return step.decision


def sizes(step: StepPlan) -> dict[str, int]:
    return {work.request_id: work.num_tokens for work in step.work}


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_name_plans_under_its_own_name(name: str) -> None:
    step = plan(name.replace("-N", "-64"), view_of(waiting=[waiting("a", 10)]))
    assert sizes(step) == {"a": 10}
    assert why(step).policy.startswith(name.removesuffix("-N") if name != "whole" else "fcfs-whole")


@pytest.mark.parametrize("name", ["", "fcfs", "fcfs-0", "fcfs-x", "edf-shed", "slo-5", "edf-12 "])
def test_a_name_that_nobody_knows_is_refused_with_those_that_exist(name: str) -> None:
    with pytest.raises(ValueError, match="slack-greedy"):
        make_planner(name, MODEL, OutputLengths())


def test_budgets_are_read_off_names() -> None:
    assert budget_of("edf-shed-384") == ("edf-shed", 384)
    assert fixed_budget("fcfs-512") == 512
    assert [fixed_budget(name) for name in ("slo", "whole", "slack-greedy")] == [None] * 3
    for name in ("edf-N", "fcfs", "magic"):
        with pytest.raises(ValueError, match=f"fcfs-N, .*got '{name}'"):
            fixed_budget(name)


def test_settings_reach_the_planners_that_have_any() -> None:
    config = PolicyConfig(token_budget=32, exploration=0.0)
    view = view_of(waiting=[waiting("a", 400)])
    slo = make_planner("slo", MODEL, OutputLengths(), config, model_version=lambda: 3)
    assert isinstance(slo, SloPlanner)
    assert (sizes(slo.plan(view)), why(slo.plan(view)).model_version) == ({"a": 32}, 3)
    edf = make_planner("edf-7", MODEL, OutputLengths(), config)
    assert isinstance(edf, StaticPlanner)
    assert sizes(edf.plan(view)) == {"a": 7}


def stream(last_at: float, **targets: Any) -> EngineView:
    return view_of(
        now=10.0,
        running=[decode("s", slo=Slo(**targets), last_at=last_at)],
        waiting=[waiting("p", 4000, at=10.0)],
    )


def test_slack_greedy_spends_all_that_a_stream_has_banked() -> None:
    # D₁ = 0 + 10.2 and D₂ = 10.7 leave 0.7 s, times 1.2: 0.11 + 0.001·N = 0.84.
    view = stream(9.9, ttft_s=10.2, tpot_s=0.5)
    assert 720 <= sizes(plan("slack-greedy", view))["p"] <= 730
    # The mean since the first token, a tenth of a second ago, leaves 0.4 s.
    even = SlackGreedyPlanner(MODEL, is_even=True)
    assert 360 <= sizes(even.plan(view))["p"] <= 370
    assert sizes(even.plan(stream(9.9, ttft_s=10.2)))["p"] == 4000
    assert sizes(plan("slack-greedy", stream(9.0, tpot_s=0.5))) == {"s": 1}
    assert sizes(plan("slack-greedy", stream(9.0)))["p"] == 4000


def test_slack_greedy_blends_deadlines_with_the_shortest_and_relegates_the_lost() -> None:
    view = view_of(
        running=[running(waiting("begun", 600, slo=Slo(ttft_s=3.0)), 100, 0)],
        waiting=[
            waiting("short", 100, slo=Slo(ttft_s=4.0)),
            waiting("long", 1000, slo=Slo(ttft_s=2.0)),
            waiting("lost", 1000, slo=Slo(ttft_s=0.9)),
        ],
        max_num_batched_tokens=5000,
    )
    # Keys 3 + 4, 4 + 0.8, 2 + 8; the last one needs a second.
    assert list(sizes(plan("slack-greedy", view))) == ["short", "begun", "long", "lost"]
    by_deadline = SlackGreedyPlanner(MODEL, alpha_s=0.0).plan(view)
    assert list(sizes(by_deadline)) == ["long", "begun", "short", "lost"]


def test_smallest_feasible_takes_no_more_than_deadlines_demand() -> None:
    def tokens(slo: Slo | None, at: float = 0.0) -> int:
        prompt = waiting("p", 2000, slo=slo, at=at)
        view = view_of(running=[decode("s", slo=Slo(tpot_s=0.9))], waiting=[prompt])
        step = plan("smallest-feasible", view)
        assert why(step).upper_bound_tokens == pytest.approx(790, abs=5)
        return sizes(step)["p"]

    assert tokens(None) == 64
    assert tokens(Slo(ttft_s=900.0)) == 64
    # Eight steps of 250 tokens take 8 · 0.36 s; the candidates are not that fine.
    assert tokens(Slo(ttft_s=3.0)) == pytest.approx(250, abs=20)
    assert tokens(Slo(ttft_s=1.0)) == pytest.approx(790, abs=5)
    assert tokens(Slo(ttft_s=1.0), at=-5.0) == pytest.approx(790, abs=5)


def test_smallest_feasible_banks_nothing() -> None:
    late, early = (stream(at, ttft_s=30.0, tpot_s=0.15) for at in (5.0, 10.0))
    assert sizes(plan("smallest-feasible", late)) == sizes(plan("smallest-feasible", early))
    assert 35 <= sizes(plan("smallest-feasible", late))["p"] <= 40


def test_the_numbers_of_the_baselines_are_checked() -> None:
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="slack_factor"):
            SlackGreedyPlanner(MODEL, slack_factor=bad)
    for bad in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="alpha_s"):
            SlackGreedyPlanner(MODEL, alpha_s=bad)
    with pytest.raises(ValueError, match="min_tokens"):
        SmallestFeasiblePlanner(MODEL, min_tokens=0)


def test_a_fixed_budget_with_our_admission_sheds_and_ignores_paces() -> None:
    requests = [
        waiting(f"r{i}", 600, slo=Slo(ttft_s=1.2), of=slo_class(on_infeasible=OnInfeasible.REJECT))
        for i in range(4)
    ]
    tight = decode("s", slo=Slo(tpot_s=0.2))
    step = plan("edf-shed-512", view_of(running=[tight], waiting=requests))
    assert sum(sizes(step).values()) == 512
    assert why(step).binding_constraint == "token_budget"
    refused = [a for a in step.admissions if a.action is AdmissionAction.REJECT]
    assert refused
    assert {a.reason for a in refused} == {"overloaded"}
    assert all(isinstance(r.promise, Promise) for r in requests)


def test_a_fixed_budget_with_our_admission_says_what_bound_it() -> None:
    idle = plan("edf-shed-512", view_of(waiting=[waiting("a", 40)]))
    assert (sizes(idle), why(idle).binding_constraint) == ({"a": 40}, "idle")
    short = view_of(waiting=[waiting("a", 40), waiting("b", 40)], num_blocks=4)
    assert why(plan("edf-shed-512", short)).binding_constraint == "kv_blocks"
