"""Settings and the length tracker: every argument is checked and named."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from controller.policy.lengths import OutputLengths
from controller.policy.settings import PolicyConfig

BAD: list[tuple[str, Any]] = [
    *[
        (name, value)
        for name in ("pace", "knee_share", "stream_knee_share", "patience")
        for value in (0.0, 1.5, math.nan, "x")
    ],
    *[
        (name, value)
        for name in ("bank", "exploration", "length_neutrality", "kv_reserve")
        for value in (-0.1, 1.5, math.nan, True)
    ],
    *[
        (name, value)
        for name in (
            "upper_pace",
            "patience_s",
            "gap_limit_s",
            "max_wait_s",
            "max_age_factor",
            "min_max_age_s",
            "started_factor",
        )
        for value in (0.0, -1.0, math.inf, math.nan)
    ],
    ("drain_steps", 0.0),
    *[("patience_backlog", value) for value in (0.0, -1.0, math.nan, True)],
    ("upper_pace", 0.9),
    *[("margin_quantile", value) for value in (0.49, 0.995, math.nan, True, "x")],
    *[("order_blend", value) for value in (-1.0, math.inf, math.nan, True)],
    *[("max_running", value) for value in (0, 1.5, True)],
    *[(name, value) for name in ("token_budget", "max_waiting_tokens") for value in (0, 1.5, True)],
    ("split_threshold", -1),
    ("turn_period", 0),
    ("max_judged", 0),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_setting_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        PolicyConfig(**{name: value})


def test_the_defaults_are_those_of_the_law() -> None:
    config = PolicyConfig(drain_steps=math.inf, token_budget=1)
    assert (config.pace, config.bank) == (0.95, 0.0)
    assert config.upper_share == pytest.approx(0.95 / config.upper_pace)
    assert (config.order_blend, config.margin_quantile, config.max_running) == (0.0, 0.9, None)


def test_expected_outputs_are_a_quantile_of_the_recent_ones() -> None:
    lengths = OutputLengths(quantile=0.5, window=3, default=99)
    assert (lengths.expected("chat"), lengths.typical("chat")) == (99, 50)
    for num_tokens in (1000, 10, 20, 30):
        lengths.observe("chat", num_tokens)
    lengths.observe("chat", 0)
    assert lengths.expected("chat") == 20
    assert lengths.typical("chat") == 20
    assert lengths.expected("code") == 99


def test_a_short_answer_is_the_tenth_percentile_of_the_recent_ones() -> None:
    lengths = OutputLengths(window=20)
    assert lengths.short("chat") == 1
    for num_tokens in (500, *range(40, 20, -1)):
        lengths.observe("chat", num_tokens)
    # Of 21 to 40 two are shorter.
    assert lengths.short("chat") == 23
    assert lengths.short("code") == 1


@pytest.mark.parametrize(
    ("name", "value"), [("quantile", 0.0), ("quantile", 1.1), ("window", 0), ("default", 0)]
)
def test_length_arguments_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        OutputLengths(**{name: value})


def test_what_answers_have_left_is_what_others_had_left_at_that_point() -> None:
    lengths = OutputLengths(default=21)
    none_known = lengths.remaining("chat", np.array([0.0, 8.0, 30.0]), np.full(3, 0.5))
    assert none_known.tolist() == [11.0, 3.0, 0.0]
    for num_tokens in (10, 20, 30, 400):
        lengths.observe("chat", num_tokens)
    left = lengths.remaining("chat", np.array([0.0, 10.0, 25.0, 500.0]), np.full(4, 0.5))
    # The upper ones of those that were longer: of four, three, two and none.
    assert left.tolist() == [30.0, 20.0, 375.0, 0.0]
    shares = np.array([0.0, 0.3, 0.99])
    assert lengths.remaining("chat", np.zeros(3), shares).tolist() == [10.0, 20.0, 400.0]
