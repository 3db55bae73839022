"""Heavier promises go first where that makes no lighter one late."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from controller.policy.lengths import OutputLengths
from controller.policy.planner import SloPlanner
from controller.policy.precedence import MOST_MOVED, heavier_first
from controller.policy.settings import PolicyConfig
from controller.policy.slo import Slo
from engine.step import WorkKind
from tests.controller.policy.checking import CheckedPlanner
from tests.controller.policy.doubles import (
    LinearCostModel,
    decode,
    slo_class,
    view_of,
    waiting,
)


def served(
    work: list[float],
    left: list[float],
    weight: list[float],
    priority: list[float] | None = None,
    movable: list[bool] | None = None,
) -> list[int]:
    """The order of service, checked: whoever was on time still is, and is told when."""
    work_s, left_s = np.array(work), np.array(left)
    done_s = work_s.cumsum()
    assert (done_s <= left_s).all()
    moved = heavier_first(
        work_s,
        left_s - done_s,
        np.array(weight),
        np.array(priority or [0.0] * len(work)),
        np.array(movable or [True] * len(work)),
    )
    if moved is None:
        return [*range(len(work))]
    order, later_s = moved
    assert sorted(order.tolist()) == [*range(len(work))]
    new_done_s = np.empty(len(work))
    new_done_s[order] = work_s[order].cumsum()
    assert (new_done_s <= left_s + 1e-9).all()
    assert new_done_s - done_s == pytest.approx(later_s)
    return [int(place) for place in order]


def test_equals_keep_the_order_of_deadlines() -> None:
    assert served([1, 1, 1], [9, 9, 9], [1, 1, 1]) == [0, 1, 2]
    assert served([1, 1, 1], [9, 9, 9], [4, 2, 1]) == [0, 1, 2]


def test_a_heavier_one_passes_whoever_has_the_time() -> None:
    assert served([1, 1, 2], [9, 9, 9], [1, 1, 5]) == [2, 0, 1]
    # The first one has not: 2 s more would make it late.
    assert served([1, 1, 2], [2.5, 9, 9], [1, 1, 5]) == [0, 2, 1]
    # Nobody is jumped over to pass somebody before.
    assert served([1, 1, 2], [9, 2.5, 9], [1, 1, 5]) == [0, 1, 2]


def test_time_that_one_has_taken_is_not_there_for_the_next() -> None:
    assert served([1, 2, 2], [4, 9, 9], [1, 5, 5]) == [1, 0, 2]
    assert served([1, 2, 2], [5, 9, 9], [1, 5, 5]) == [1, 2, 0]


def test_the_heaviest_goes_before_the_heavier_ones() -> None:
    assert served([1, 1, 1], [9, 9, 9], [1, 5, 9]) == [2, 1, 0]


def test_best_effort_lets_promises_by() -> None:
    assert served([3, 1], [math.inf, 9], [0, 1]) == [1, 0]


def test_a_priority_stands_above_every_weight() -> None:
    assert served([1, 1], [9, 9], [1, 5], [0, 1]) == [0, 1]
    assert served([1, 1], [9, 9], [1, 5], [1, 1]) == [1, 0]


def test_who_brings_a_pace_along_stays_and_lets_others_by() -> None:
    assert served([1, 1], [9, 9], [1, 5], movable=[True, False]) == [0, 1]
    assert served([1, 1, 1], [9, 9, 9], [1, 5, 9], movable=[True, False, True]) == [2, 0, 1]


def test_only_the_first_places_of_a_long_queue_are_looked_at() -> None:
    near, far = MOST_MOVED - 1, MOST_MOVED
    weight = [1.0] * (far + 2)
    weight[far] = 9.0
    assert served([1.0] * (far + 2), [999.0] * (far + 2), weight) == [*range(far + 2)]
    weight[near] = 9.0
    order = served([1.0] * (far + 2), [999.0] * (far + 2), weight)
    assert order == [near, *range(near), far, far + 1]


def test_random_queues_stay_on_time_and_no_heavier_one_is_later() -> None:
    rng = np.random.default_rng(5)
    num_moved = 0
    for _ in range(400):
        num = int(rng.integers(1, 15))
        work = rng.exponential(1.0, num)
        left = work.cumsum() + rng.exponential(2.0, num)
        weight = rng.choice([0.0, 1.0, 4.0, 30.0], num)
        order = served(work.tolist(), left.tolist(), weight.tolist())
        num_moved += order != [*range(num)]
        place = {who: at for at, who in enumerate(order)}
        for early in range(num):
            for late in range(early + 1, num):
                assert weight[late] > weight[early] or place[late] > place[early]
    assert num_moved > 100


# 0.1 + 0.001·N + 0.01 per decode, without a margin.
MODEL = LinearCostModel((0.001, 0.01, 0.0, 0.0, 0.0), 0.1, margin=0.0)
CONFIG = PolicyConfig(exploration=0.0, pace=1.0, upper_pace=1.0, patience_backlog=math.inf)


def planned(weight: float, urgent_s: float, **view: Any) -> tuple[list[str], dict[str, float]]:
    """Who computes, and what who waits is told, with one due at `urgent_s` before one of `weight`
    that is due a little later.
    """
    light = waiting("light", 600, slo=Slo(ttft_s=urgent_s), of=slo_class("light"))
    heavy = waiting("heavy", 600, slo=Slo(ttft_s=5.0), of=slo_class("heavy", weight=weight))
    planner = CheckedPlanner(SloPlanner(CONFIG, MODEL, OutputLengths(default=16)))
    plan = planner.plan(view_of(waiting=[light, heavy], max_num_batched_tokens=600, **view))
    told = {
        each.request_id: each.predicted_ttft_s
        for each in plan.admissions
        if each.predicted_ttft_s is not None
    }
    return [work.request_id for work in plan.work if work.kind is WorkKind.PREFILL], told


def test_a_step_is_given_to_the_heavier_one_and_predictions_say_so() -> None:
    order, told = planned(1.0, 4.0)
    assert order == ["light"]
    assert told == pytest.approx({"light": 0.7, "heavy": 1.4})
    order, told = planned(2.0, 4.0)
    assert order == ["heavy"]
    assert told == pytest.approx({"light": 1.4, "heavy": 0.7})
    # 1.4 s would be too late for the light one.
    assert planned(2.0, 1.2)[0] == ["light"]


def test_while_prompts_take_their_time_deadlines_alone_order_them() -> None:
    streams = [decode("s", slo=Slo(tpot_s=2.0))]
    assert planned(2.0, 4.0, running=streams)[0] == ["light"]
    # With few seats nobody takes time.
    assert planned(2.0, 4.0, running=streams, max_num_seqs=4)[0] == ["heavy"]


def test_where_seats_or_blocks_are_short_deadlines_alone_order_who_gets_them() -> None:
    # The light one's deadline passes before another seat comes free.
    streams = [decode(f"s{i}", slo=Slo(tpot_s=2.0), max_tokens=400) for i in range(3)]
    order, told = planned(2.0, 2.0, running=streams, max_num_seqs=4)
    assert order == ["light"]
    assert told["light"] < 2.0
    # Blocks for one of them only.
    order, told = planned(2.0, 2.0, running=streams[:1], num_blocks=60)
    assert order == ["light"]
    assert all(ttft_s > 0.0 for ttft_s in told.values())


def test_a_heavier_one_whose_stream_would_slow_the_lighter_prompt_waits_its_turn() -> None:
    def first(tpot_s: float | None) -> str:
        light = waiting("light", 3000, slo=Slo(ttft_s=5.0), of=slo_class("light"))
        heavy = waiting(
            "heavy", 100, slo=Slo(ttft_s=10.0, tpot_s=tpot_s), of=slo_class("heavy", weight=5.0)
        )
        planner = CheckedPlanner(SloPlanner(CONFIG, MODEL, OutputLengths(default=16)))
        plan = planner.plan(view_of(waiting=[light, heavy], max_num_batched_tokens=600))
        return plan.work[0].request_id

    assert first(0.15) == "light"
    assert first(None) == "heavy"
