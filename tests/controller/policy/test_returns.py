"""When those who are refused are told to come back: one after another, where there is room."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.policy.lengths import OutputLengths
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.returns import Returns, spread
from controller.policy.slo import Slo
from costmodel.base import MarginalCosts
from engine.step import Admission, AdmissionAction
from tests.controller.policy.checking import CheckedPlanner
from tests.controller.policy.doubles import LinearCostModel, view_of, waiting

SLOT_S, MARGIN = 0.25, 1.1
# Prompts of so many tokens take a tenth less than a second.
SECOND = 1000
TOKEN_S = 0.001 / MARGIN


def refused(name: str, retry_after_s: float | None) -> Admission:
    return Admission(
        name, AdmissionAction.REJECT, "overloaded", "busy", 3.0, retry_after_s=retry_after_s
    )


def told_s(
    wishes: list[tuple[float, int]], returns: Returns | None = None, now: float = 0.0
) -> list[float]:
    """What each of the requests (seconds that it would be told alone, prompt tokens) is told."""
    verdicts = [refused(f"r{i}", wish) for i, (wish, _) in enumerate(wishes)]
    tokens = {f"r{i}": num for i, (_, num) in enumerate(wishes)}
    told = spread(verdicts, tokens, now, TOKEN_S, returns)
    return [verdict.retry_after_s or 0.0 for verdict in told]


def test_those_refused_together_come_back_one_after_another() -> None:
    verdicts = [refused(name, 1.0) for name in "abc"]
    found = spread(verdicts, {"a": SECOND, "b": 2 * SECOND, "c": SECOND}, 0.0, TOKEN_S)
    assert [verdict.retry_after_s for verdict in found] == pytest.approx([1.0, 2.0, 4.0])
    # Nothing else of what they are told changes.
    assert [(v.request_id, v.action, v.reason, v.message, v.predicted_ttft_s) for v in found] == [
        (name, AdmissionAction.REJECT, "overloaded", "busy", 3.0) for name in "abc"
    ]


@pytest.mark.parametrize("now", [0.0, 100.1, 100.24])
def test_what_was_told_before_is_kept_free(now: float) -> None:
    returns = Returns()
    returns.book(now, now + 2.0, SECOND)
    returns.book(now, now + 4.0, 2 * SECOND)
    # Up to a slot earlier or later: bookings are known to a slot.
    slot = pytest.approx
    assert told_s([(2.0, SECOND)], returns, now)[0] == slot(3.0, abs=2 * SLOT_S)
    assert told_s([(2.0, 3 * SECOND)], returns, now)[0] == slot(6.0, abs=2 * SLOT_S)
    assert told_s([(0.5, SECOND)], returns, now) == [0.5]
    # Looking changes nothing.
    assert told_s([(0.5, SECOND)], returns, now) == [0.5]


def test_what_is_over_is_forgotten() -> None:
    returns = Returns()
    returns.book(0.0, 10.0, 5 * SECOND)
    assert told_s([(0.0, SECOND)], returns, 10.0)[0] >= 5.0
    assert told_s([(0.0, SECOND)], returns, 10.3) == [0.0]
    for k in range(5000):
        returns.book(k * SLOT_S, k * SLOT_S + 5.0, 1)
    assert len(returns._tokens) < 1000


def test_who_need_not_come_back_is_told_nothing() -> None:
    admitted = Admission("x", AdmissionAction.ADMIT, "admitted")
    verdicts = [refused("n", None), admitted]
    assert spread(verdicts, {}, 0.0, TOKEN_S) == verdicts


def test_nobody_is_sent_away_for_longer_than_a_minute_by_others() -> None:
    returns = Returns()
    returns.book(0.0, 0.0, 100 * SECOND)
    told = told_s([(1.0, SECOND)] * 1000, returns)
    assert 1.0 <= min(told) < 5.0
    assert 55.0 < max(told) <= 60.0
    # Not all at one instant either.
    assert max(told.count(each) for each in told) < 5
    assert told_s([(90.0, SECOND)], returns) == [90.0]
    # A booking beyond the minute is none of it.
    far = Returns()
    far.book(0.0, 90.0, 100 * SECOND)
    assert told_s([(1.0, SECOND)], far) == [1.0]


class LostModel(LinearCostModel):
    """Does not know what a token costs."""

    def __init__(self, token_s: float) -> None:
        super().__init__()
        self._token_s = token_s

    def marginals(self) -> MarginalCosts:
        return replace(super().marginals(), prefill_token_s=self._token_s)


@pytest.mark.parametrize("token_s", [math.nan, math.inf, -math.inf, 1e300, 0.0])
def test_a_model_that_is_lost_spoils_no_plan(token_s: float) -> None:
    planner = CheckedPlanner(SloPlanner(PolicyConfig(), LostModel(token_s), OutputLengths()))
    requests = [waiting(f"r{i}", 100, slo=Slo(ttft_s=5.0)) for i in range(5)]
    told = planner.plan(view_of(waiting=requests, max_waiting=2)).admissions
    refusals = [verdict for verdict in told if verdict.reason == "queue_full"]
    assert len(refusals) == 3
    for verdict in refusals:
        assert verdict.retry_after_s is None or 0.0 <= verdict.retry_after_s < 1e9


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(1, 1500)), min_size=1, max_size=12),
    st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(1, 3000)), max_size=6),
    st.floats(0.0, 1e6),
)
def test_nobody_comes_early_and_there_is_room_for_all(
    wishes: list[tuple[float, int]], booked: list[tuple[float, int]], now: float
) -> None:
    returns = Returns()
    for after_s, num in booked:
        returns.book(now, now + after_s, num)
    told = told_s(wishes, returns, now)
    assert all(at >= wish for at, (wish, _) in zip(told, wishes, strict=True))
    assert told == told_s(wishes, returns, now)
    # Whoever computes them in the order in which they come is never far behind.
    free_at = 0.0
    work = [(at, num) for at, (_, num) in zip(told, wishes, strict=True)] + booked
    behind_before = 0.0
    for at, num in sorted(booked):
        free_at = max(free_at, at) + num * 0.001
        behind_before = max(behind_before, free_at - at)
    free_at = 0.0
    for at, num in sorted(work):
        free_at = max(free_at, at) + num * 0.001
        assert free_at - at <= behind_before + num * 0.001 + 2.0 + 6 * SLOT_S
