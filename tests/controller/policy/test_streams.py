"""How many streams may join: the pace of those who run, and of those who come."""

from __future__ import annotations

import math

import pytest

from controller.policy.lengths import OutputLengths
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.slo import Slo
from controller.policy.streams import Joiner, StreamRoom, paced_target_s
from engine.config import EngineConfig
from engine.request import FinishReason, Request
from engine.step import AdmissionAction
from tests.controller.policy.doubles import (
    LinearCostModel,
    Simulation,
    decode,
    table_of,
    view_of,
    waiting,
)

# 0.1 s and 0.01 s per decode.
MODEL = LinearCostModel((0.001, 0.01, 0.0, 0.0, 0.0), 0.1, margin=0.0)
CONFIG = PolicyConfig(pace=1.0, upper_pace=1.0, exploration=0.0)


def room(running: list[Request], newcomers: list[Request], most: int = 64) -> StreamRoom:
    return StreamRoom.of(table_of(running), newcomers, most, CONFIG, MODEL)


def test_the_paced_promise_of_a_request() -> None:
    assert paced_target_s(waiting("a", slo=Slo(tpot_s=0.2)), 0.5) == 0.1
    assert paced_target_s(waiting("a", slo=Slo(ttft_s=1.0)), 0.5) == math.inf
    assert paced_target_s(waiting("a"), 0.5) == math.inf


def test_streams_join_until_the_tightest_pace_is_reached() -> None:
    streams = [decode("s", slo=Slo(tpot_s=0.14))]
    queue = [waiting(f"{i}") for i in range(9)]
    door = room(streams, queue)
    # One runs at 0.11 s; three more make 0.14 s.
    assert [door.join(Joiner(math.inf)) for _ in queue] == [True] * 3 + [False] * 6
    door.leave(32.0, 0)
    assert door.join(Joiner(math.inf))


def test_a_newcomer_whose_own_pace_would_break_waits_while_looser_ones_join() -> None:
    queue = [waiting(f"{i}") for i in range(9)]
    door = room([decode("s")], queue)
    assert door.join(Joiner(0.13))
    assert not door.join(Joiner(0.12))
    assert door.join(Joiner(0.5))
    assert not door.join(Joiner(0.5)), "the first newcomer's 0.13 s binds the others too"


def test_a_promise_that_is_lost_already_protects_nobody() -> None:
    door = room([decode("late", slo=Slo(tpot_s=0.05))], [waiting("a"), waiting("b")])
    assert door.join(Joiner(math.inf))
    assert door.join(Joiner(math.inf))


def test_the_first_of_an_empty_engine_always_joins() -> None:
    door = room([], [waiting("a"), waiting("b")])
    assert door.join(Joiner(0.01))
    assert not door.join(Joiner(math.inf))


def test_no_more_join_than_were_predicted() -> None:
    door = room([], [waiting(f"{i}") for i in range(9)], most=2)
    assert [door.join(Joiner(math.inf)) for _ in range(3)] == [True, True, False]


def test_a_copy_is_independent() -> None:
    door = room([decode("s")], [waiting("a")])
    assert door.copy().join(Joiner(math.inf))
    assert door.join(Joiner(math.inf))


def test_joining_one_by_one_or_all_at_once_is_the_same() -> None:
    streams, queue = [decode("s", slo=Slo(tpot_s=0.14))], [waiting(f"{i}") for i in range(5)]
    for targets in ([math.inf] * 3, [0.14] * 3, [0.13, 0.15, 0.15], [math.inf] * 4, [0.15] * 9, []):
        one_by_one = room(streams, queue)
        can_join = False not in [one_by_one.join(Joiner(target_s)) for target_s in targets]
        assert room(streams, queue).can_all_join(list(map(Joiner, targets))) == can_join
    assert room([], queue).can_all_join([Joiner(0.01)])
    assert not room([], queue).can_all_join([Joiner(0.01), Joiner(math.inf)])


def test_who_joins_counts_with_its_own_context_not_with_that_of_another() -> None:
    # 50 ms and 1 µs a token: the first newcomer's 100,000 do not count until it joins.
    model = LinearCostModel((0.0, 0.0, 1e-6, 0.0, 0.0), 0.05, margin=0.0)
    queue = [waiting("long", 100_000), waiting("short", 100)]
    streams = [decode("s", slo=Slo(tpot_s=0.1), num_prompt=10)]
    door = StreamRoom.of(table_of(streams), queue, 64, CONFIG, model)
    assert not door.join(Joiner(math.inf, 100_000.0))
    assert door.join(Joiner(math.inf, 100.0))


@pytest.mark.parametrize(("num_gone", "may_join"), [(10.0, False), (60_000.0, True)])
def test_who_leaves_takes_its_context_along(num_gone: float, may_join: bool) -> None:
    model = LinearCostModel((0.0, 0.0, 1e-6, 0.0, 0.0), 0.05, margin=0.0)
    streams = [
        decode("long", slo=Slo(tpot_s=0.12), num_prompt=60_000),
        decode("s", slo=Slo(tpot_s=0.12), num_prompt=10),
    ]
    door = StreamRoom.of(table_of(streams), [waiting("new", 50_000)], 64, CONFIG, model)
    door.leave(num_gone, 0)
    # 0.05 s and 0.05 of its own, beside the 60 ms of the long one or without.
    assert door.join(Joiner(math.inf, 50_000.0)) == may_join


def test_the_plan_says_that_pace_kept_somebody_out() -> None:
    streams = [decode("s", slo=Slo(tpot_s=0.115))]
    planner = SloPlanner(CONFIG, MODEL, OutputLengths(default=16))
    step = planner.plan(view_of(running=streams, waiting=[waiting("p", 100)]))
    assert step.num_prefill_tokens == 0
    assert [a.action for a in step.admissions] == [AdmissionAction.WAIT]
    assert step.decision is not None
    assert step.decision.binding_constraint == "decode_slack"


@pytest.mark.parametrize(("num_requests", "least"), [(16, 16), (32, 28)])
def test_a_burst_is_admitted_as_far_as_its_pace_allows(num_requests: int, least: int) -> None:
    # All prompts fit one step; decoding all of them at once would keep no promise at all.
    model = LinearCostModel()
    planner = SloPlanner(PolicyConfig(), model, OutputLengths(default=64))
    sim = Simulation(planner, model, EngineConfig(num_blocks=4096))
    slo = Slo(ttft_s=60.0, tpot_s=0.15)
    burst = [waiting(f"r{i}", 32, slo=slo, max_tokens=64) for i in range(num_requests)]
    sim.run(burst)
    attained = [r for r in burst if r.promise.judge().attained]  # type: ignore[attr-defined]
    assert len(attained) >= least
    served = [r for r in burst if r.finish_reason is FinishReason.LENGTH]
    assert len(attained) == len(served), "whoever is served is served as promised"
