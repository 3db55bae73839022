"""A long prompt among short ones that keep coming: what is told, what it may cost the others."""

from __future__ import annotations

import pytest

from controller.policy.demand import Demand
from controller.policy.lengths import OutputLengths
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.promise import Promise
from controller.policy.slo import Slo
from engine.config import EngineConfig
from engine.request import Request
from engine.step import Admission, AdmissionAction
from tests.controller.policy.doubles import (
    LinearCostModel,
    Simulation,
    slo_class,
    view_of,
    waiting,
)

# 10 ms a step, 0.1 ms a token and 5 ns per token that it reads of its past: 60,000 tokens alone
# take 6 s, and 9 s for their attention.
MODEL = LinearCostModel((1e-4, 1e-4, 5e-8, 5e-9, 0.0), 0.01, margin=0.0)
CONFIG = PolicyConfig(exploration=0.0)
CHAT, BATCH = slo_class("chat"), slo_class("batch")
SHORT, LONG = Slo(ttft_s=1.0, tpot_s=0.1), Slo(ttft_s=20.0, tpot_s=1.0)


def chats(num: int, every_s: float, num_prompt: int = 1000) -> list[Request]:
    return [
        waiting(f"c{i}", num_prompt, at=i * every_s, slo=SHORT, of=CHAT, max_tokens=8)
        for i in range(num)
    ]


def told(demand: Demand | None, num_prompt: int = 60_000) -> Admission:
    request = waiting("b", num_prompt, at=60.0, slo=LONG, of=BATCH)
    view = view_of(now=60.0, waiting=[request], num_blocks=10_000, max_model_len=131_072)
    step = SloPlanner(CONFIG, MODEL, OutputLengths(default=8), demand=demand).plan(view)
    return step.admissions[0]


def most_of_the_machine() -> Demand:
    demand = Demand()
    for no in range(1, 401):
        demand.observe("chat", f"c{no}", no, 7.9 + no * 0.13, 1000, SHORT, 1.0)
    return demand


def test_alone_it_is_told_what_its_own_attention_takes() -> None:
    verdict = told(None)
    assert verdict.action is AdmissionAction.ADMIT
    # 15 s of tokens, and ten milliseconds a step.
    assert verdict.predicted_ttft_s == pytest.approx(15.1, rel=0.02)


def test_those_who_come_while_it_waits_are_counted() -> None:
    # Chats take more than three quarters of the machine, and count half: not done in 19 s.
    verdict = told(most_of_the_machine())
    assert verdict.action is AdmissionAction.REJECT
    assert verdict.predicted_ttft_s is not None
    assert verdict.predicted_ttft_s > 20.0
    assert verdict.retry_after_s is not None


def test_one_that_is_done_before_them_is_not_told_so() -> None:
    assert told(most_of_the_machine(), 2000) == told(None, 2000)


@pytest.mark.parametrize("num_prompt", [60_000, 90_000])
def test_nobody_who_streams_short_answers_pays_for_a_prompt_that_cannot_be_kept(
    num_prompt: int,
) -> None:
    demand = Demand()
    planner = SloPlanner(CONFIG, MODEL, OutputLengths(default=8), demand=demand)
    engine = EngineConfig(num_blocks=40_000, max_model_len=131_072, max_num_batched_tokens=8192)
    crowd = chats(400, 0.13)
    whale = waiting("b", num_prompt, at=30.0, slo=LONG, of=BATCH, max_tokens=8)
    Simulation(planner, MODEL, engine, demand=demand).run([*crowd, whale])
    missed = [r.request_id for r in crowd if _is_missed(r)]
    assert missed == []
    assert whale.admission is not None
    assert whale.admission.action is AdmissionAction.REJECT
    assert whale.first_scheduled_at is None, "it was refused before it cost anybody anything"


def _is_missed(request: Request) -> bool:
    promise = request.promise
    assert isinstance(promise, Promise)
    return not promise.judge().attained
