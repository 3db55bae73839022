"""Where a step ends for the sake of the first tokens in it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.policy.budget import DecodeLoad, LatencyCurve, candidate_tokens, latency_curve
from controller.policy.budget import PrefillLoad as Load
from controller.policy.lengths import OutputLengths
from controller.policy.next_end import next_end
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.slo import Slo
from tests.controller.policy.checking import CheckedPlanner
from tests.controller.policy.doubles import LinearCostModel, view_of, waiting

# 10 ms a step and 1 ms a token.
MODEL = LinearCostModel((0.001, 0.0, 0.0, 0.0, 0.0), 0.01, margin=0.0)


def curve_of(most: int) -> LatencyCurve:
    load = Load(np.array([8192.0]), np.zeros(1))
    return latency_curve(MODEL, DecodeLoad(0, 0), load, candidate_tokens(most))


def end_of(
    work: list[float],
    left_s: list[float],
    weight: list[float] | None = None,
    num_tokens: int = 4096,
) -> int:
    weights = np.array(weight or [1.0] * len(work))
    num_tokens = min(num_tokens, int(sum(work)))
    return next_end(curve_of(4096), np.array(work), np.array(left_s), weights, num_tokens)


def test_the_first_is_not_held_up_by_those_behind_it() -> None:
    assert end_of([300, 300], [0.35, 0.7]) == 300
    # Nor by a part of the next one.
    assert end_of([300, 300], [0.35, 0.7], num_tokens=400) == 300


def test_two_share_a_step_where_the_second_would_be_late_alone() -> None:
    # Two steps take 0.62 s, one of both 0.61 s.
    assert end_of([300, 300], [0.65, 0.615]) == 600


def test_of_equal_ends_the_last_is_taken() -> None:
    assert end_of([300, 300, 300], [1.0, 1.0, 1.0]) == 900
    assert end_of([300, 300, 300], [1.0, 1.0, 1.0], num_tokens=500) == 500
    assert end_of([300, 300, 300], [0.65, 1.0, 1.0]) == 600


def test_who_is_late_whatever_happens_holds_nobody_up() -> None:
    assert end_of([300, 300, 300], [0.2, 0.65, 1.0]) == 600
    assert end_of([300, 300, 300], [0.2, 0.65, 0.93]) == 600
    assert end_of([300, 300], [0.2, 0.615]) == 600


def test_the_heavier_promise_is_kept() -> None:
    # Either the first alone, or both at the end of one step.
    assert end_of([300, 290], [0.35, 0.602], [10.0, 1.0]) == 300
    assert end_of([300, 290], [0.35, 0.602], [1.0, 10.0]) == 590
    assert end_of([300, 290], [0.35, 0.602], [1.0, math.inf]) == 590


@pytest.mark.parametrize(
    ("work", "left_s", "weight", "num_tokens"),
    [
        # Nothing can be kept, nothing is promised, it weighs nothing.
        ([300, 300], [0.1, 0.1], [1.0, 1.0], 600),
        ([300, 300], [math.inf, math.inf], [1.0, 1.0], 600),
        ([300, 300], [0.35, 0.7], [0.0, 0.0], 600),
        # Nobody ends before the step does, or there is nobody else.
        ([3000, 300], [9.0, 9.0], [1.0, 1.0], 2000),
        ([300], [0.1], [1.0], 200),
        ([300, 300], [0.35, 0.7], [1.0, 1.0], 300),
    ],
)
def test_where_no_end_keeps_more_the_step_stays_what_it_is(
    work: list[float], left_s: list[float], weight: list[float], num_tokens: int
) -> None:
    assert end_of(work, left_s, weight, num_tokens) == num_tokens


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 900), st.floats(0.0, 4.0), st.floats(0.1, 10.0)),
        min_size=1,
        max_size=6,
    ),
    st.floats(0.1, 1.0),
)
def test_no_other_end_keeps_more(prompts: list[tuple[int, float, float]], share: float) -> None:
    work, left_s, weight = (np.array([float(p[k]) for p in prompts]) for k in range(3))
    curve = curve_of(4096)
    token_s = float((curve.upper_s[1:] / curve.tokens[1:]).min())
    totals = work.cumsum()

    def kept(end: float) -> float:
        """Weight on time, one by one."""
        step_s = float(np.interp(end, curve.tokens, curve.upper_s))
        on_time = 0.0
        for k in range(work.size):
            done_s, rest = step_s, float(totals[k]) - end
            if rest > 0.0:
                done_s += max(float(np.interp(rest, curve.tokens, curve.upper_s)), rest * token_s)
            on_time += float(weight[k]) if done_s <= left_s[k] else 0.0
        return on_time

    num_tokens = min(4096, round(share * float(totals[-1])))
    ends = [*totals[totals < num_tokens].tolist(), num_tokens]
    found = next_end(curve, work, left_s, weight, num_tokens)
    assert found in ends
    most = max(kept(end) for end in ends)
    assert kept(found) == pytest.approx(most)
    assert all(kept(end) < most - 1e-9 for end in ends if end > found)


@pytest.mark.parametrize(("late_s", "num_tokens"), [(0.9, 100), (0.75, 600), (3.0, 100)])
def test_a_step_that_no_stream_bounds_ends_where_most_are_kept(
    late_s: float, num_tokens: int
) -> None:
    # 0.1 s and 1 ms a token: 100 tokens are done in 0.2 s, both prompts in one step in 0.7 s, one
    # after the other in 0.2 and 0.8 s. In the first case no constant budget does that, in the last
    # one of 100 tokens does; the knee lies far beyond all of it, and so may what is explored.
    model = LinearCostModel((0.001, 0.01, 0.0, 0.0, 0.0), 0.1, margin=0.0)
    config = PolicyConfig(pace=1.0, upper_pace=1.0, exploration=0.5)
    planner = CheckedPlanner(SloPlanner(config, model, OutputLengths(default=16)))
    first = waiting("a", 100, slo=Slo(ttft_s=0.25), max_tokens=1)
    last = waiting("b", 500, slo=Slo(ttft_s=late_s), max_tokens=1)
    for step_no in range(1, 100):
        view = view_of(waiting=[first, last], step_no=step_no)
        step = planner.plan(view)
        decision = step.decision
        assert decision is not None
        if decision.binding_constraint == "explore":
            assert late_s == 3.0
            assert (decision.predicted_upper_s or 0.0) <= 0.25
            continue
        assert step.num_prefill_tokens == num_tokens
        assert (decision.binding_constraint == "ttft_demand") == (num_tokens == 100)
