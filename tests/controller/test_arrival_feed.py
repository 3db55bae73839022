"""Arrivals as the planner's expectations hear of them."""

from __future__ import annotations

from typing import Any

import pytest

from controller.policy.demand import Demand, Expected
from controller.policy.promise import Promise
from controller.policy.slo import Slo, SloClass
from controller.runtime.arrival_feed import ArrivalFeed
from engine.request import Request
from engine.step import Admission, AdmissionAction, StepPlan, StepReport

CHAT = SloClass("chat", weight=5.0)


def request(name: str, no: int, slo: Slo | None = None) -> Request:
    promise = Promise(slo or Slo(ttft_s=1.0), CHAT, float(no))
    return Request(name, (1,) * 10 * no, 5, float(no), promise=promise, arrival_no=no)


def tell(feed: ArrivalFeed, *verdicts: tuple[Request, Admission]) -> None:
    values: dict[str, Any] = {
        "step_no": 1, "started_at": 1.0, "duration_s": 0.5, "planner_s": 0.0, "execute_s": 0.5,
        "plan": StepPlan(admissions=tuple(admission for _, admission in verdicts)),
        "is_executed": True, "num_running": 1, "num_waiting": 0, "num_preempted": 0,
        "num_blocks_used": 3, "num_blocks_total": 8,
    }  # fmt: skip
    feed.on_step(StepReport(**values), {each.request_id: each for each, _ in verdicts})


def verdict(name: str, action: AdmissionAction, **changes: Any) -> Admission:
    return Admission(name, action, "queued", **changes)


def expected_of(demand: Demand) -> Expected:
    found = demand.expected(10.0)
    assert found is not None
    return found


def test_everybody_is_counted_once_whatever_they_hear() -> None:
    demand = Demand()
    feed = ArrivalFeed(demand)
    a, b = request("a", 1), request("b", 3)
    tell(feed, (a, verdict("a", AdmissionAction.WAIT)))
    tell(feed, (a, verdict("a", AdmissionAction.ADMIT)), (b, verdict("b", AdmissionAction.WAIT)))
    found = expected_of(demand)
    assert found.rate[0] == pytest.approx(2 / 30)
    assert found.num_prompt[0] == 20.0
    assert found.weight[0] == 5.0


@pytest.mark.parametrize(
    "last",
    [
        Admission("b", AdmissionAction.REJECT, "overloaded"),
        Admission("b", AdmissionAction.WAIT, "overloaded", is_degraded=True),
    ],
)
def test_who_is_turned_away_or_degraded_is_not_served(last: Admission) -> None:
    demand = Demand()
    feed = ArrivalFeed(demand)
    a, b = request("a", 1), request("b", 3)
    tell(feed, (a, verdict("a", AdmissionAction.WAIT)), (b, verdict("b", AdmissionAction.WAIT)))
    promise = b.promise
    assert isinstance(promise, Promise)
    promise.is_degraded = last.is_degraded
    tell(feed, (b, last))
    found = expected_of(demand)
    assert found.share_served[0] == pytest.approx(0.25)
    assert found.weight[0] == 5.0, "the class keeps its weight"


def test_best_effort_is_expected_of_nobody() -> None:
    demand = Demand()
    tell(ArrivalFeed(demand), (request("a", 1, Slo()), verdict("a", AdmissionAction.WAIT)))
    assert demand.expected(1.0) is None


@pytest.mark.parametrize("reason", ["context_length", "kv_never_fits", "ttft_unreachable"])
def test_who_can_never_be_served_is_nobodys_burden(reason: str) -> None:
    demand = Demand()
    feed = ArrivalFeed(demand)
    a, b = request("a", 1), request("b", 9)
    tell(feed, (a, verdict("a", AdmissionAction.WAIT)))
    tell(feed, (b, Admission("b", AdmissionAction.REJECT, reason)))
    assert expected_of(demand).num_prompt[0] == 10.0
    # But who was expected to be served until then is not any more.
    tell(feed, (a, Admission("a", AdmissionAction.REJECT, reason)))
    assert expected_of(demand).share_served[0] == 0.0


def test_the_order_of_verdicts_does_not_matter() -> None:
    demand = Demand()
    feed = ArrivalFeed(demand)
    crowd = [request(f"r{no}", no) for no in range(1, 201)]
    late, early = crowd[100:], crowd[:100]
    for each in crowd:
        each.arrived_at = 100.0 * each.arrival_no
    # Refusals come first in a plan, and those arrived last.
    verdicts = [
        (each, Admission(each.request_id, AdmissionAction.REJECT, "overloaded")) for each in late
    ]
    verdicts += [(each, verdict(each.request_id, AdmissionAction.WAIT)) for each in early]
    tell(feed, *verdicts)
    assert expected_of(demand).share_served[0] == 0.0
    assert expected_of(demand).num_prompt[0] == pytest.approx(10 * sum(range(137, 201)) / 64)
