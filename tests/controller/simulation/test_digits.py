"""Numbers as text: three digits, no silly ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.simulation.digits import (
    MISSING,
    millis,
    plain,
    share,
    share_range,
    short,
    whole_millis,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (0.17734, "0.177"), (0.99961, "1.00"), (1.25, "1.25"), (9.996, "10.0"),
        (16.64, "16.6"), (99.96, "100"), (154.2, "154"), (8363.7, "8,364"), (0.00123, "0.00123"),
        (-2.5, "-2.50"), (None, MISSING), (math.inf, MISSING), (math.nan, MISSING),
    ],
)  # fmt: skip
def test_three_digits(value: float | None, text: str) -> None:
    assert plain(value) == text


@given(st.floats(1e-3, 1e6))
def test_what_is_shown_is_within_half_a_percent(value: float) -> None:
    assert float(plain(value).replace(",", "")) == pytest.approx(value, rel=0.0051)


def test_seconds_become_milliseconds() -> None:
    assert millis(0.0467) == "46.7"
    assert millis(None) == MISSING


def test_seconds_end_at_milliseconds() -> None:
    shown = [whole_millis(value) for value in (0.0, 0.0004, 0.05204, 0.0996, 0.17734, 16.64, None)]
    assert shown == ["0", "<0.001", "0.052", "0.100", "0.177", "16.6", MISSING]


def test_all_and_none_are_said_of_all_and_none_only() -> None:
    assert [share(value) for value in (0.0, 1.0, 0.9999, 0.0001, 0.5, None)] == [
        "0%", "100%", "99.9%", "0.1%", "50.0%", MISSING,
    ]  # fmt: skip
    assert share_range(0.957, 0.98) == "95.7–98.0%"
    assert share_range(1.0, 1.0) == "100%"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (980, "980"), (1499, "1.5k"), (9_960, "10k"), (85_400, "85k"), (2_100_000, "2.1M")],
)
def test_counts_are_short(value: float, text: str) -> None:
    assert short(value) == text
