"""Who is served first."""

from __future__ import annotations

import math

import numpy as np
import pytest

from controller.policy.facts import class_name, live_promise
from controller.policy.ordering import PrefillQueue, first_due_at, oldest_due, relegated_last
from controller.policy.promise import Promise
from controller.policy.settings import PolicyConfig
from controller.policy.slo import Slo
from engine.request import Request, RequestPhase
from engine.step import Admission, AdmissionAction
from tests.controller.policy.doubles import (
    decode,
    facts_of,
    queue_of,
    running,
    slo_class,
    waiting,
)

CONFIG = PolicyConfig(pace=0.5)


def ordered(*requests: Request) -> PrefillQueue:
    return queue_of(requests, CONFIG)


def ids(queue: PrefillQueue, *relegated: str) -> list[str]:
    is_relegated = np.array([r.request_id in relegated for r in queue.requests])
    return [r.request_id for r in queue.take(relegated_last(is_relegated)).requests]


def test_earliest_deadline_first_and_best_effort_by_age() -> None:
    queue = ordered(
        waiting("loose", at=0.0, slo=Slo(ttft_s=30.0)),
        waiting("none", at=1.0),
        waiting("tight", at=2.0, slo=Slo(ttft_s=1.0)),
        waiting("old", at=-20.0),
    )
    assert queue.due_at.tolist() == [2.5, 10.0, 15.0, 31.0]
    assert ids(queue) == ["tight", "old", "loose", "none"]
    assert ids(queue, "tight") == ["old", "loose", "none", "tight"]
    assert ids(ordered()) == []


def test_priority_comes_first_and_ties_go_by_arrival() -> None:
    queue = ordered(
        waiting("late", at=1.0, slo=Slo(ttft_s=1.0)),
        waiting("early", at=0.5, slo=Slo(ttft_s=2.0)),
        waiting("first", at=9.0, slo=Slo(ttft_s=9.0), priority=-1),
    )
    assert ids(queue) == ["first", "early", "late"]
    tie = ordered(
        waiting("late", at=1.0, slo=Slo(ttft_s=1.0)), waiting("early", at=0.5, slo=Slo(ttft_s=2.0))
    )
    assert ids(tie) == ["early", "late"]


def blended(blend: float, *requests: Request) -> PrefillQueue:
    """The queue where a prompt token takes a millisecond."""
    config = PolicyConfig(pace=1.0, order_blend=blend)
    expected = np.full(len(requests), 10.0)
    return PrefillQueue.of(requests, facts_of(requests), config, 1.0, expected, 0.1, 0.001)


def test_blended_order_lets_short_prompts_pass_long_ones_that_are_due_a_little_earlier() -> None:
    requests = [
        running(waiting("begun", 3000, slo=Slo(ttft_s=1.9)), 2900, 0),
        waiting("long", 2000, slo=Slo(ttft_s=1.0)),
        waiting("short", 100, slo=Slo(ttft_s=2.0)),
        waiting("none", 20),
        waiting("first", 4000, slo=Slo(ttft_s=9.0), priority=-1),
    ]
    assert ids(blended(0.0, *requests)) == ["first", "long", "begun", "short", "none"]
    # 2 s of work count as 0.2 s, or as 2 s: what is left of a prompt, not what it was.
    assert ids(blended(0.1, *requests)) == ["first", "long", "begun", "short", "none"]
    queue = blended(1.0, *requests)
    assert ids(queue) == ["first", "begun", "short", "long", "none"]
    assert queue.due_at.tolist() == pytest.approx([13.0, 2.0, 2.1, 3.0, 30.02])
    # What is promised is what it was.
    assert queue.deadline_at.tolist() == pytest.approx([9.0, 1.9, 2.0, 1.0, math.inf])


def test_a_stream_in_the_middle_is_due_by_its_token_whatever_is_left_of_it() -> None:
    stream = decode("cut", slo=Slo(tpot_s=0.5), num_prompt=4000, last_at=1.0)
    stream.phase = RequestPhase.PREEMPTED
    stream.num_computed_tokens = 0
    queue = blended(8.0, stream, waiting("short", 10, slo=Slo(ttft_s=1.8)))
    assert ids(queue) == ["cut", "short"]
    assert queue.due_at[0] == pytest.approx(1.5)


def test_what_a_row_says() -> None:
    stream = decode("cut", slo=Slo(ttft_s=1.0, tpot_s=0.4), last_at=7.0)
    stream.phase = RequestPhase.PREEMPTED
    started = running(waiting("begun", 100, slo=Slo(ttft_s=1.0)), 48, 0)
    queue = ordered(stream, started, waiting("tpot", slo=Slo(tpot_s=0.2)))
    assert ids(queue) == ["begun", "cut", "tpot"]
    assert queue.due_at.tolist() == pytest.approx([0.5, 7.2, 30.0])
    assert queue.deadline_at.tolist() == [0.5, math.inf, math.inf]
    assert queue.weight.tolist() == [1.0, math.inf, 0.0]
    assert queue.period_s.tolist() == pytest.approx([0.5, 0.2, 0.1])
    assert queue.is_started.tolist() == [True, True, False]
    assert (queue.remaining[0], queue.past[0]) == (52, 48)
    assert queue.remaining[1] == 1
    taken = queue.take(np.array([1, 0]))
    assert [r.request_id for r in taken.requests] == ["cut", "begun"]
    assert taken.past.tolist() == [32, 48]
    assert len(taken) == 2


def test_an_end_to_end_target_leaves_time_for_the_answer() -> None:
    facts = facts_of(
        [
            waiting("a", slo=Slo(tpot_s=0.2, e2e_s=10.0)),
            waiting("b", slo=Slo(ttft_s=1.0, e2e_s=10.0)),
            waiting("c", slo=Slo(tpot_s=0.2)),
        ]
    )

    def due_at(num_expected: float, step_s: float) -> list[float]:
        return list(first_due_at(facts, 1.0, np.full(3, num_expected), step_s))

    # Ten more tokens at 0.1 s, what a step takes now; p = 0.2 is only the slowest that is allowed.
    assert due_at(10.0, 0.1) == pytest.approx([9.0, 1.0, math.inf])
    assert due_at(10.0, 0.5)[0] == pytest.approx(8.0)
    assert due_at(60.0, 0.5)[0] == pytest.approx(1.0)


def test_degraded_requests_and_strangers_have_no_live_promise() -> None:
    told, marked = waiting("a", slo=Slo(ttft_s=1.0)), waiting("b", slo=Slo(ttft_s=1.0))
    assert live_promise(told) is told.promise
    told.admission = Admission("a", AdmissionAction.WAIT, "overloaded", is_degraded=True)
    assert isinstance(marked.promise, Promise)
    marked.promise.is_degraded = True
    assert [live_promise(r) for r in (told, marked, waiting("c"))] == [None] * 3
    assert class_name(waiting("c")) == ""
    assert class_name(waiting("d", slo=Slo(), of=slo_class("code"))) == "code"


def test_the_oldest_without_a_live_deadline_is_due_by_age() -> None:
    queue = ordered(
        waiting("kept", at=-99.0, slo=Slo(ttft_s=900.0)),
        waiting("young", at=10.0),
        waiting("older", at=0.0),
        waiting("lost", at=-1.0, slo=Slo(ttft_s=1.0)),
    )
    assert ids(queue) == ["lost", "older", "young", "kept"]
    nobody = np.zeros(4, dtype=np.bool_)
    lost = np.array([True, False, False, False])
    assert oldest_due(queue, nobody, 29.9, 30.0) is None
    assert oldest_due(queue, nobody, 30.0, 30.0) == 1
    assert oldest_due(queue, lost, 30.0, 30.0) == 0
