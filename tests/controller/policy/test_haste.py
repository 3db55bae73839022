"""How many prompt tokens a step wants between N⁻ and N⁺, and for whose sake."""

from __future__ import annotations

import math

import numpy as np
import pytest

from controller.policy.budget import DecodeLoad, LatencyCurve, PrefillLoad, candidate_tokens
from controller.policy.budget import latency_curve as predicted
from controller.policy.haste import nearly_free_tokens, wanted_tokens
from controller.policy.settings import PolicyConfig
from tests.controller.policy.doubles import LinearCostModel

CONFIG = PolicyConfig(patience=0.5, patience_s=4.0, stream_knee_share=0.1, knee_share=0.9)
UPPER = 2048


def line() -> LatencyCurve:
    """10 ms and 100 µs per prompt token."""
    model = LinearCostModel((1e-4, 0.0, 0.0, 0.0, 0.0), 0.01, margin=0.0)
    load = PrefillLoad(np.array([8192.0]), np.zeros(1))
    return predicted(model, DecodeLoad(4, 100), load, candidate_tokens(8192))


def wanted(
    work: list[float],
    left_s: list[float],
    *,
    lower: int = 0,
    upper: int = UPPER,
    is_paced: bool = True,
) -> int:
    return wanted_tokens(
        line(), np.array(work), np.array(left_s), lower, upper, CONFIG, is_paced=is_paced
    )


def test_deadlines_are_met_within_a_share_of_the_time_left_in_short_steps() -> None:
    # 1,000 tokens in 0.5 s of the one second left: 0.1 s of work and 0.4 s of fixed parts.
    num = wanted([1000.0], [1.0])
    assert 20 <= num <= 40
    # Twice the time halves the hurry, up to `patience_s`.
    assert wanted([1000.0], [2.0]) < num
    assert wanted([4000.0], [8.0]) == wanted([4000.0], [60.0])
    # As the time runs out, more is wanted.
    assert wanted([1000.0], [0.4]) > num
    assert wanted([1000.0], [0.1]) == UPPER


def test_every_deadline_of_the_queue_counts_with_the_work_before_it() -> None:
    alone = wanted([500.0, 4000.0], [2.0, 8.0])
    assert wanted([500.0, 4000.0], [2.0, 2.0]) > alone


def test_small_steps_end_where_they_cost_too_much_of_the_rate() -> None:
    # A tenth of the best rate is reached by some 11 tokens.
    assert 8 <= wanted([10.0], [3600.0]) <= 16


def test_who_has_no_deadline_is_served_at_the_best_rate() -> None:
    # Nine tenths of the rate need some 800 tokens; the backlog asks for an eighth of itself.
    assert wanted([1000.0, 400.0], [60.0, math.inf]) == 1024
    assert wanted([1000.0, 12_000.0], [60.0, math.inf]) == 1500
    assert wanted([1000.0, 80_000.0], [60.0, math.inf]) == UPPER


def test_without_paced_streams_nobody_gains_from_short_steps() -> None:
    assert wanted([1000.0], [60.0], is_paced=False) == 1024
    assert wanted([12_000.0], [60.0], is_paced=False) == 1500


@pytest.mark.parametrize("is_paced", [True, False])
def test_the_demand_of_the_deadlines_is_a_floor_and_the_limit_a_ceiling(is_paced: bool) -> None:
    assert wanted([1000.0], [60.0], lower=700, is_paced=is_paced) >= 700
    assert wanted([1000.0], [60.0], lower=5000, is_paced=is_paced) == UPPER
    assert wanted([1000.0], [60.0], upper=3, is_paced=is_paced) == 3


def test_what_a_floor_gives_away_is_taken() -> None:
    tokens = candidate_tokens(1024)
    mean_s = np.maximum(0.05, 1e-4 * tokens)
    floor = LatencyCurve(tokens, mean_s, mean_s)
    # Up to 510 tokens cost no more than 2 % beyond the floor.
    assert nearly_free_tokens(floor, 10, 1024) == 362
    assert nearly_free_tokens(floor, 10, 300) == 300
    assert nearly_free_tokens(floor, 900, 1024) == 900
