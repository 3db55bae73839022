"""Who is served first."""

from __future__ import annotations

import math

import numpy as np
import pytest

from controller.policy.ordering import (
    PrefillQueue,
    class_name,
    first_due_at,
    live_promise,
    oldest_due,
    token_period_s,
)
from controller.policy.settings import PolicyConfig
from controller.policy.slo import Promise, Slo
from engine.request import Request
from engine.step import Admission, AdmissionAction
from tests.controller.policy.doubles import decode, running, slo_class, waiting

CONFIG = PolicyConfig(pace=0.5)


def queue_of(*requests: Request) -> PrefillQueue:
    return PrefillQueue.of(requests, CONFIG, 1.0, [10] * len(requests), 0.1)


def order(queue: PrefillQueue, *relegated: str) -> list[str]:
    is_relegated = np.array([r.request_id in relegated for r in queue.requests])
    return [queue.requests[i].request_id for i in queue.order(is_relegated)]


def test_earliest_deadline_first_and_best_effort_by_age() -> None:
    queue = queue_of(
        waiting("loose", at=0.0, slo=Slo(ttft_s=30.0)),
        waiting("none", at=1.0),
        waiting("tight", at=2.0, slo=Slo(ttft_s=1.0)),
        waiting("old", at=-20.0),
    )
    assert queue.due_at.tolist() == [15.0, 31.0, 2.5, 10.0]
    assert order(queue) == ["tight", "old", "loose", "none"]
    assert order(queue, "tight") == ["old", "loose", "none", "tight"]


def test_priority_comes_first_and_ties_go_by_arrival() -> None:
    queue = queue_of(
        waiting("late", at=1.0, slo=Slo(ttft_s=1.0)),
        waiting("early", at=0.5, slo=Slo(ttft_s=2.0)),
        waiting("first", at=9.0, slo=Slo(ttft_s=9.0), priority=-1),
    )
    assert order(queue) == ["first", "early", "late"]


def test_what_a_row_says() -> None:
    stream = decode("cut", slo=Slo(ttft_s=1.0, tpot_s=0.4), last_at=7.0)
    started = running(waiting("begun", 100, slo=Slo(ttft_s=1.0)), 48, 0)
    queue = queue_of(stream, started, waiting("tpot", slo=Slo(tpot_s=0.2)))
    assert queue.due_at[0] == pytest.approx(7.2)
    assert queue.deadline_at.tolist() == [math.inf, 0.5, math.inf]
    assert queue.weight.tolist() == [math.inf, 1.0, 0.0]
    assert queue.period_s.tolist() == pytest.approx([0.2, 0.5, 0.1])
    assert queue.is_started.tolist() == [True, True, False]
    assert (queue.remaining[1], queue.past[1]) == (52, 48)
    taken = queue.take(np.array([1, 0]))
    assert [r.request_id for r in taken.requests] == ["begun", "cut"]
    assert taken.past.tolist() == [48, 32]
    assert len(taken) == 2


def test_an_end_to_end_target_leaves_time_for_the_answer() -> None:
    with_pace = waiting("a", slo=Slo(tpot_s=0.2, e2e_s=10.0))
    without = waiting("b", slo=Slo(ttft_s=1.0, e2e_s=10.0))
    assert isinstance(with_pace.promise, Promise)
    assert isinstance(without.promise, Promise)
    # Ten more tokens at 0.1 s, what a step takes now; p = 0.2 is only the slowest that is allowed.
    assert first_due_at(with_pace, with_pace.promise, 1.0, 10, 0.1) == pytest.approx(9.0)
    assert first_due_at(with_pace, with_pace.promise, 1.0, 10, 0.5) == pytest.approx(8.0)
    assert first_due_at(without, without.promise, 1.0, 10, 0.1) == pytest.approx(1.0)
    assert first_due_at(with_pace, with_pace.promise, 1.0, 60, 0.5) == pytest.approx(1.0)


def test_degraded_requests_and_strangers_have_no_live_promise() -> None:
    told, marked = waiting("a", slo=Slo(ttft_s=1.0)), waiting("b", slo=Slo(ttft_s=1.0))
    assert live_promise(told) is told.promise
    told.admission = Admission("a", AdmissionAction.WAIT, "overloaded", is_degraded=True)
    assert isinstance(marked.promise, Promise)
    marked.promise.is_degraded = True
    assert [live_promise(r) for r in (told, marked, waiting("c"))] == [None] * 3
    assert class_name(waiting("c")) == ""
    assert class_name(waiting("d", slo=Slo(), of=slo_class("code"))) == "code"
    assert token_period_s(None, 0.5, 2.0) == 1.0


def test_the_oldest_without_a_live_deadline_is_due_by_age() -> None:
    queue = queue_of(
        waiting("kept", at=-99.0, slo=Slo(ttft_s=900.0)),
        waiting("young", at=10.0),
        waiting("older", at=0.0),
        waiting("lost", at=-1.0, slo=Slo(ttft_s=1.0)),
    )
    nobody = np.zeros(4, dtype=np.bool_)
    lost = np.array([False, False, False, True])
    assert oldest_due(queue, nobody, 29.9, 30.0) is None
    assert oldest_due(queue, nobody, 30.0, 30.0) == 2
    assert oldest_due(queue, lost, 30.0, 30.0) == 3
