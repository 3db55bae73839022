"""Token times to numbers, on series made by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.bench.series import (
    RequestSeries,
    TokenRead,
    all_streaming_at,
    gaps,
    largest_gap,
    normal_gap_s,
    tokens_per_second,
)


def series(*times: float, name: str = "short-0", sent_at: float = 0.0) -> RequestSeries:
    return RequestSeries(name, sent_at, tuple(TokenRead(at, 1) for at in times))


def test_the_gap_that_spans_the_arrival_is_the_largest() -> None:
    arrival_at = 0.45
    stream = series(0.1, 0.2, 0.3, 0.4, 4.6, 4.7, 4.8)
    gap = largest_gap([stream])
    assert gap is not None
    assert gap.duration_s == pytest.approx(4.2)
    assert gap.spans(arrival_at)
    # What is left if that gap is dropped, from either side, looks like a perfect server.
    before = [g for g in gaps(stream) if g.end_at <= arrival_at]
    after = [g for g in gaps(stream) if g.start_at >= arrival_at]
    assert max(g.duration_s for g in before + after) == pytest.approx(0.1)


def test_a_gap_in_the_warm_up_counts_too() -> None:
    gap = largest_gap([series(0.1, 0.9, 1.0, 1.1), series(0.9, 1.0, 1.1, 1.2, name="short-1")])
    assert gap is not None
    assert (gap.name, gap.start_at, gap.end_at) == ("short-0", 0.1, 0.9)


def test_the_largest_gap_is_over_all_streams() -> None:
    gap = largest_gap([series(0.0, 0.1), series(0.0, 0.5, name="short-1"), series()])
    assert gap is not None
    assert gap.name == "short-1"


def test_tokens_of_one_read_have_one_time() -> None:
    stream = RequestSeries(
        "short-0", 0.0, (TokenRead(1.0, 1), TokenRead(2.0, 3), TokenRead(3.0, 1))
    )
    assert [gap.duration_s for gap in gaps(stream)] == [1.0, 1.0]
    assert stream.num_output_tokens == 5
    assert stream.num_merged_reads == 1


def test_the_normal_gap_is_that_of_the_steady_state() -> None:
    early = series(0.1, 1.1, 1.2, 1.3, 1.4, 9.0, 20.0)
    late = series(1.1, 1.2, 1.3, 1.4, 9.0, 20.0, name="short-1")
    assert all_streaming_at([early, late]) == 1.1
    assert normal_gap_s([early, late], until=1.45) == pytest.approx(0.1)


def test_without_a_steady_state_there_is_no_normal_gap() -> None:
    assert normal_gap_s([series(0.1, 0.2), series(name="short-1")], until=1.0) is None
    assert normal_gap_s([series(0.1, 0.2)], until=0.15) is None
    assert normal_gap_s([], until=1.0) is None


def test_ttft_counts_from_arrival() -> None:
    assert series(3.5, 4.0, sent_at=1.5).ttft_s == 2.0
    assert series().ttft_s is None


def test_speed_is_output_over_first_arrival_to_last_token() -> None:
    streams = [series(1.0, 2.0, sent_at=0.5), series(3.0, 4.5, sent_at=2.5)]
    assert tokens_per_second(streams) == pytest.approx(4 / 4.0)
    assert tokens_per_second([series()]) is None
    assert tokens_per_second([series(0.0, sent_at=0.0)]) is None


@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=30))
def test_gaps_add_up_to_the_stream(steps: list[float]) -> None:
    times = [0.0]
    for step in steps:
        times.append(times[-1] + step)
    stream = series(*times)
    found = gaps(stream)
    assert len(found) == len(steps)
    assert sum(gap.duration_s for gap in found) == pytest.approx(times[-1])
    largest = largest_gap([stream])
    assert largest is not None
    assert largest.duration_s == pytest.approx(max(steps))
