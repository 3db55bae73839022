"""How many prompt tokens a step wants between N⁻ and N⁺, and for whose sake."""

from __future__ import annotations

import math

import numpy as np
import pytest

from controller.policy.budget import DecodeLoad, LatencyCurve, PrefillLoad, candidate_tokens
from controller.policy.budget import latency_curve as predicted
from controller.policy.haste import (
    nearly_free_tokens,
    unhurried_s,
    unhurried_tokens,
    wanted_tokens,
)
from controller.policy.pacing import Pacing
from controller.policy.settings import PolicyConfig
from tests.controller.policy.doubles import LinearCostModel

CONFIG = PolicyConfig(stream_knee_share=0.1, knee_share=0.9)
UPPER = 2048


def line() -> LatencyCurve:
    """10 ms and 100 µs per prompt token."""
    model = LinearCostModel((1e-4, 0.0, 0.0, 0.0, 0.0), 0.01, margin=0.0)
    load = PrefillLoad(np.array([8192.0]), np.zeros(1))
    return predicted(model, DecodeLoad(4, 100), load, candidate_tokens(8192))


def unpaced() -> Pacing:
    """No stream has a token promise."""
    return Pacing(1.0, 1.0, 1.0, 1.0, 0.01, 0.01, 0.01, None, None, True)


def paced(limit_s: float = 0.1) -> Pacing:
    """A stream is due in `limit_s`."""
    return unpaced()._replace(limit_s=limit_s, upper_limit_s=limit_s, tightest_id="d")


def wanted(
    work: list[float],
    aim_s: list[float],
    *,
    lower: int = 0,
    upper: int = UPPER,
    is_paced: bool = True,
) -> int:
    """Deadlines are a second after what first tokens are aimed at."""
    curve, left_s = line(), np.array(aim_s) + 1.0
    unhurried = unhurried_tokens(
        curve, np.array(work), left_s, np.array(aim_s), paced() if is_paced else unpaced(), CONFIG
    )
    return wanted_tokens(
        unhurried, curve, np.array(work), left_s, lower, upper, CONFIG, is_paced=is_paced
    )


def test_first_tokens_come_when_they_are_aimed_at_in_short_steps() -> None:
    # 1,000 tokens in half a second: 0.1 s of work and 0.4 s of fixed parts.
    num = wanted([1000.0], [0.5])
    assert 20 <= num <= 40
    # Twice the time halves the hurry.
    assert wanted([1000.0], [1.0]) < num
    # As the time runs out more is wanted, and all that fits once it has.
    assert wanted([1000.0], [0.2]) > num
    assert wanted([1000.0], [0.05]) == UPPER
    assert wanted([1000.0], [-0.5]) == UPPER


def test_every_aim_of_the_queue_counts_with_the_work_before_it() -> None:
    alone = wanted([500.0, 4000.0], [1.0, 4.0])
    assert wanted([500.0, 4000.0], [1.0, 1.0]) > alone


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
    assert nearly_free_tokens(floor, 10) == 362
    assert nearly_free_tokens(floor, 900) == 900


def test_what_is_told_is_when_short_steps_get_there_if_that_is_before_the_aim() -> None:
    work, could_s = np.array([100.0, 300.0, 600.0]), np.array([0.02, 0.05, 0.9])
    # 64 tokens in 16.4 ms: 2, 7 and 16 steps.
    told_s = unhurried_s(line(), 64, work, could_s, np.array([1.0, 0.08, 1.0]))
    assert told_s.tolist() == pytest.approx([0.0328, 0.08, 0.9])


def test_on_a_machine_that_jumps_steps_are_few() -> None:
    tokens = candidate_tokens(8192)
    mean_s = 0.03 + 0.04 * (tokens > 0.0) + 1e-4 * np.maximum(tokens - 512.0, 0.0)
    jump = LatencyCurve(tokens, mean_s, mean_s)

    def unhurried(work: float, aim_s: float, limit_s: float) -> int | None:
        times_s = np.array([aim_s])
        return unhurried_tokens(jump, np.array([work]), times_s, times_s, paced(limit_s), CONFIG)

    # Two steps, of the same size, although the aim allows many small ones.
    assert unhurried(1000.0, 30.0, 0.2) == 500
    # As many as fit beside the streams: 80 ms hold 612 tokens.
    assert unhurried(700.0, 30.0, 0.2) == 700
    assert unhurried(700.0, 30.0, 0.0801) == 350
    # Nothing does: what the aim demands is left, three tokens a step.
    assert unhurried(1000.0, 30.0, 0.07 - 1e-9) == 3
    # What the aim demands comes first.
    assert unhurried(8000.0, 1.6, 2.0) is not None
    assert (unhurried(8000.0, 1.6, 2.0) or 0) > 512
