"""When those who are refused are told to come back: one after another, where there is room."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.policy.returns import Returns, spread
from engine.step import Admission, AdmissionAction


def refused(name: str, retry_after_s: float | None) -> Admission:
    return Admission(
        name, AdmissionAction.REJECT, "overloaded", "busy", 3.0, retry_after_s=retry_after_s
    )


def told_s(verdicts: list[Admission]) -> list[float | None]:
    return [verdict.retry_after_s for verdict in verdicts]


def test_those_refused_together_come_back_one_after_another() -> None:
    verdicts = [refused(name, 1.0) for name in "abc"]
    spread_out = spread(verdicts, {"a": 100, "b": 200, "c": 100}, 0.01, [])
    assert told_s(spread_out) == [1.0, 2.0, 4.0]
    # Nothing else of what they are told changes.
    assert [(v.request_id, v.reason, v.message, v.predicted_ttft_s) for v in spread_out] == [
        (name, "overloaded", "busy", 3.0) for name in "abc"
    ]


def test_a_gap_before_the_others_is_taken_by_who_fits_it() -> None:
    spans = [(2.0, 3.0), (4.0, 9.0)]
    small, large, early = refused("s", 1.5), refused("l", 1.5), refused("e", 0.5)
    tokens = {"s": 50, "l": 150, "e": 150}
    assert told_s(spread([small, large, early], tokens, 0.01, spans)) == [1.5, 9.0, 10.5]
    assert told_s(spread([early], tokens, 0.01, spans)) == [0.5]
    assert told_s(spread([small], {"s": 100}, 0.01, spans)) == [3.0]


def test_who_need_not_come_back_is_told_nothing() -> None:
    admitted = Admission("x", AdmissionAction.ADMIT, "admitted")
    assert spread([refused("n", None), admitted], {}, 0.01, []) == [refused("n", None), admitted]


def test_nobody_is_sent_away_for_ever() -> None:
    for wish, told in ((1.0, 60.0), (90.0, 90.0)):
        (verdict,) = spread([refused("a", wish)], {"a": 100}, 0.01, [(0.0, 1e6)])
        assert verdict.retry_after_s == told


def test_what_was_told_is_remembered_until_it_is_over() -> None:
    returns = Returns()
    returns.book(12.0, 100)
    returns.book(11.0, 100)
    assert returns.spans(10.0, 0.5) == [(1.0, 51.0), (2.0, 52.0)]
    assert returns.spans(61.5, 0.5) == [(-49.5, 0.5)]
    assert returns.spans(63.0, 0.5) == []
    for k in range(1000):
        returns.book(100.0 + k, 10)
    assert len(returns.spans(0.0, 0.1)) == 512


@given(
    st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(1, 1000)), min_size=1, max_size=12),
    st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.01, 5.0)), max_size=6),
)
def test_nobody_comes_early_or_meets_another(
    wishes: list[tuple[float, int]], booked: list[tuple[float, float]]
) -> None:
    spans = sorted((start, start + length) for start, length in booked)
    verdicts = [refused(f"r{i}", wish) for i, (wish, _) in enumerate(wishes)]
    tokens = {f"r{i}": num for i, (_, num) in enumerate(wishes)}
    told = told_s(spread(verdicts, tokens, 0.001, spans))
    mine = []
    for (wish, num), at in zip(wishes, told, strict=True):
        assert at is not None
        assert at >= wish
        assert all(at >= end or at + num * 0.001 <= start for start, end in spans)
        mine.append((at, at + num * 0.001))
    for one, other in itertools.pairwise(sorted(mine)):
        assert one[1] <= other[0] or one[1] == pytest.approx(other[0])
