"""What those are told who are given up: when their turn, a seat and blocks come."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.policy.lengths import OutputLengths
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.slo import OnInfeasible, Slo
from engine.ports import EngineView
from engine.request import Request
from engine.step import AdmissionAction, StepPlan
from tests.controller.policy.checking import CheckedPlanner
from tests.controller.policy.doubles import (
    LinearCostModel,
    decode,
    slo_class,
    view_of,
    waiting,
)

PLAIN = PolicyConfig(exploration=0.0, pace=1.0, upper_pace=1.0)
# 0.1 + 0.001·N + 0.01 per decode, without a margin.
MODEL = LinearCostModel((0.001, 0.01, 0.0, 0.0, 0.0), 0.1, margin=0.0)
# 10 ms a step and 0.1 ms a token.
QUICK = LinearCostModel((0.0001, 0.0, 0.0, 0.0, 0.0), 0.01, margin=0.0)


def plan(view: EngineView, config: PolicyConfig = PLAIN, num_expected: int = 16) -> StepPlan:
    model = MODEL if config is PLAIN else QUICK
    lengths = OutputLengths(default=num_expected)
    return CheckedPlanner(SloPlanner(config, model, lengths)).plan(view)


@pytest.mark.parametrize("action", list(OnInfeasible))
@pytest.mark.parametrize("ttft_s", [0.05, 0.5])
def test_who_is_given_up_is_told_of_the_wait_for_a_seat(
    ttft_s: float, action: OnInfeasible
) -> None:
    # Nobody else is to be served: a seat comes free after seven more steps of 0.12 s, whether the
    # prompt could be on time without that wait (0.5 s) or not at all (0.05 s).
    streams = [decode(f"s{i}", slo=Slo(tpot_s=0.5)) for i in range(2)]
    hasty = waiting("hasty", 20, slo=Slo(ttft_s=ttft_s), of=slo_class(on_infeasible=action))
    (verdict,) = plan(view_of(running=streams, waiting=[hasty], max_num_seqs=2)).admissions
    told = verdict.predicted_ttft_s or 0.0
    assert 0.84 + 0.12 <= told < 1.1
    # Who would be on time if somebody left now is not refused for a guess of when they will.
    is_refused = verdict.action is AdmissionAction.REJECT
    assert is_refused == (ttft_s == 0.05 and action is OnInfeasible.REJECT)


def test_who_is_given_up_waits_for_a_seat_after_those_who_are_kept() -> None:
    streams = [decode(f"s{i}", slo=Slo(tpot_s=0.5)) for i in range(2)]
    hasty = waiting("hasty", 20, slo=Slo(ttft_s=0.5))
    patient = waiting("patient", 20, slo=Slo(ttft_s=60.0))

    def told_s(*others: Request) -> float:
        step = plan(view_of(running=streams, waiting=[*others, hasty], max_num_seqs=2))
        return next(a.predicted_ttft_s or 0.0 for a in step.admissions if a.request_id == "hasty")

    # The patient one takes the first seat, and its prompt comes first.
    assert told_s(patient) >= told_s() + 0.02


def test_a_large_one_is_not_told_the_wait_of_a_small_one_beside_it() -> None:
    # Eight streams fill a pool of 40 blocks and end one after another: 10 blocks are free at once,
    # 32 once nearly all have ended. Neither can be on time.
    streams = [decode(f"s{i}", num_prompt=48, num_output=1 + i, max_tokens=12) for i in range(8)]
    small, large = (
        waiting(name, num, slo=Slo(ttft_s=0.07), max_tokens=1)
        for name, num in (("small", 150), ("large", 500))
    )

    def told_s(*requests: Request) -> float:
        view = view_of(running=streams, waiting=requests, num_blocks=40)
        step = plan(view, replace(PLAIN, kv_reserve=0.0), num_expected=12)
        return next(a.predicted_ttft_s or 0.0 for a in step.admissions if a.request_id == "large")

    assert told_s(large) > 1.0
    assert told_s(small, large) > 0.7 * told_s(large)
